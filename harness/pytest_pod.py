"""pytest for pod programs: tests that run once a schedule, and pods of real processes.

A test that asks for ``pod`` is a scenario. It builds nodes and tasks; then they run, under one
schedule after another, until one fails or all are done::

    @pytest.mark.explore(schedules=500, scheduler="mixed", seed=3)
    def test_message(pod):
        got = []
        pod.run(0, send)
        pod.run(1, receive, got)
        pod.at_end(lambda mem: got == [7])

The whole test function is called again for every schedule. Other fixtures are made once, so what
tasks share is made in the test itself. A failure shows the report, saves the schedule (under
``--pod-schedules``, or in pytest's cache) and prints the command that replays it.

``live_pod`` makes pods of real processes (``LivePod``) that end with the test.

pytest loads this file in every run of a project that has cxlbench installed: it imports nothing of
weight until a fixture is used.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cxlbench.emu.pod_explorer import SavedSchedule
    from cxlbench.emu.pod_processes import LivePod
    from cxlbench.emu.pod_scenario import Pod

OPTIONS = ("schedules", "first", "scheduler", "seed", "max_steps", "ignore", "bound", "disturb")
"""What the mark takes; all are those of ``pod_explorer.explore``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("cxlbench", "explored pods (cxlbench)")
    group.addoption(
        "--pod-replay",
        metavar="FILE",
        help="run tests with a pod under this saved schedule only",
    )
    group.addoption(
        "--pod-schedules",
        metavar="FOLDER",
        help="where failing schedules are saved (default: pytest's cache)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line(
        "markers",
        "explore(schedules=1000, scheduler='mixed', seed=1, ...): run a test with a pod under so "
        "many schedules; scheduler: random, pct, mixed or dfs",
    )


class PodOfTheTest:
    """Stands for the pod until a schedule begins."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"pod.{name}: a pod exists while the test function runs; it is a new one in every "
            "schedule, so fixtures cannot use it"
        )


@pytest.fixture
def pod() -> PodOfTheTest:
    """Explore: the test is a scenario, run under many schedules (see the mark ``explore``)."""
    return PodOfTheTest()


@pytest.fixture
def live_pod() -> Iterator[Callable[..., LivePod]]:
    """Make pods of real processes; the options are those of ``PodShape`` and ``LivePod``.

    ``profile`` names a shared memory: its caches, arrival law and costs (``pod_profile``).
    """
    from cxlbench.emu.pod_layout import PodShape
    from cxlbench.emu.pod_processes import LivePod

    with ExitStack() as made:

        def make(
            region_bytes: int = 1 << 20,
            *,
            folder: Path | None = None,
            region: Path | None = None,
            numa_node: int | None = None,
            profile: str | None = None,
            **shape: Any,
        ) -> LivePod:
            wanted = PodShape(region_bytes, **shape)
            if profile is not None:
                from cxlbench.harness.pod_profile import load_shared_memory, on_profile

                wanted = on_profile(wanted, load_shared_memory(profile))
            pod = LivePod(wanted, folder=folder, region=region, numa_node=numa_node)
            return made.enter_context(pod)

        yield make


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a test with a pod once a schedule."""
    marked = pyfuncitem.get_closest_marker("explore")
    if not isinstance(pyfuncitem.funcargs.get("pod"), PodOfTheTest):
        if marked is not None:
            pytest.fail("a test marked 'explore' must have the argument 'pod'", pytrace=False)
        return None
    options = _options(marked)
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    if "pod" not in arguments:
        pytest.fail("only the test function itself can use 'pod', no fixture", pytrace=False)
    function = pyfuncitem.obj

    def scenario(pod: Pod) -> None:
        function(**arguments | {"pod": pod})

    scenario.__module__ = function.__module__
    scenario.__qualname__ = pyfuncitem.nodeid
    saved_path = pyfuncitem.config.getoption("--pod-replay")
    if saved_path:
        _replay(scenario, Path(saved_path))
    else:
        _explore(pyfuncitem, scenario, options)
    return True


def _explore(item: pytest.Function, scenario: Callable[[Pod], None], options: Any) -> None:
    from cxlbench.emu.pod_explorer import explore
    from cxlbench.emu.pod_failure import NotReproducedError, PodUsageError

    problem = ""
    try:
        found = explore(scenario, **options)
    except (PodUsageError, NotReproducedError) as error:
        problem = str(error)
    if problem:  # out of the handler, so that nothing is said of the error behind it
        pytest.fail(problem, pytrace=False)
    if found.report is None or found.schedule is None:
        return
    try:
        how = _command(item, _save(item, found.schedule))
    except OSError as error:
        how = f"none, the schedule cannot be saved: {error.filename}: {error.strerror}"
    told = f"schedule {found.schedule.index} of {options['scheduler']}, seed {options['seed']}"
    pytest.fail(f"{told}\n{found.report.text(how)}", pytrace=False)


def _replay(scenario: Callable[[Pod], None], path: Path) -> None:
    from cxlbench.emu.pod_explorer import ScheduleFileError, replay
    from cxlbench.emu.pod_failure import NotReproducedError

    try:
        told = replay(path, target=scenario).text()
    except NotReproducedError:
        return
    except OSError as error:
        told = f"--pod-replay: {path}: {error.strerror}"
    except ScheduleFileError as error:
        told = f"--pod-replay: {error}"
    pytest.fail(told, pytrace=False)


def _options(marked: pytest.Mark | None) -> dict[str, Any]:
    given = {} if marked is None else dict(marked.kwargs)
    unknown = [name for name in given if name not in OPTIONS]
    unknown += [repr(value) for value in ([] if marked is None else marked.args)]
    if unknown:
        pytest.fail(
            f"the mark 'explore' takes {', '.join(OPTIONS)}, by name; it got {', '.join(unknown)}",
            pytrace=False,
        )
    return {"scheduler": "mixed", "seed": 1} | given


def _save(item: pytest.Function, schedule: SavedSchedule) -> Path:
    name = re.sub(r"[^\w.-]+", "_", item.nodeid)[-150:]
    given = item.config.getoption("--pod-schedules")
    if given:
        folder = Path(given)
        folder.mkdir(parents=True, exist_ok=True)
    elif hasattr(item.config, "cache") and item.config.cache is not None:
        folder = item.config.cache.mkdir("cxlbench-pod")
    else:
        folder = Path(tempfile.mkdtemp(prefix="cxlbench-pod-"))
    path = folder / f"{name}.pod.json"
    schedule.save(path)
    return path


def _command(item: pytest.Function, path: Path) -> str:
    """Return what replays the failure, run from where pytest was started."""
    here = item.config.invocation_params.dir
    test = _relative(item.path, here) + item.nodeid[item.nodeid.find("::") :]
    words = ["python", "-m", "pytest", test, "--pod-replay", _relative(path, here)]
    return " ".join(shlex.quote(word) for word in words)


def _relative(path: Path, folder: Path) -> str:
    """Return the path as seen from a folder, if it lies below."""
    text = os.path.relpath(path, folder)
    return str(path) if text.startswith(os.pardir) else text

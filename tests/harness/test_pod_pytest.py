"""The pytest plugin for pods, as a user's own project sees it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cxlbench.emu import pod_explorer
from tests.harness.pod_users import RIGHT, WRONG

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
EXPLORER = pod_explorer
"""Imported here: what only a test in the test imported would be imported again afterwards."""
PLUGIN = ("-p", "no:cxlbench-pod", "-p", "cxlbench.harness.pytest_pod")

TEST = """
import pytest
from cxlbench.emu.pod_ops import clflush, load, pause, store
import {module}

@pytest.mark.explore(schedules=200, seed=5)
def test_message(pod):
    {module}.scenario(pod)
"""


def outcomes(pytester, text, *words):
    pytester.makepyfile(text)
    return pytester.runpytest_inprocess(*PLUGIN, *words)


@pytest.fixture
def message(pytester):
    """Make a module and a test of it; each test of ours has its own names."""

    def make(text, name):
        pytester.makepyfile(**{name: text, f"test_{name}": TEST.format(module=name)})

    return make


def test_a_right_program_passes(pytester, message):
    message(RIGHT, "right_message")
    pytester.runpytest_inprocess(*PLUGIN).assert_outcomes(passed=1)


def test_a_failure_prints_the_report_and_a_command_that_replays_it(pytester, message):
    message(WRONG, "wrong_message")
    result = pytester.runpytest_inprocess(*PLUGIN)
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "schedule 0 of mixed, seed 5" in text
    assert "causality violation: never flushed" in text
    assert "wrong_message.py:15 in receive" in text
    assert "wrong_message.py:4 in send" in text
    command = re.search(r"^replay: (.*)$", text, re.MULTILINE)[1]
    python, *words = shlex.split(command)
    assert python == "python"
    again = subprocess.run(
        [sys.executable, words[0], words[1], *PLUGIN, *words[2:]],
        cwd=pytester.path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert again.returncode == 1
    assert "causality violation: never flushed" in again.stdout
    assert "schedule 0" not in again.stdout


def test_a_repaired_program_passes_its_replay(pytester, message):
    message(WRONG, "mended_message")
    pytester.runpytest_inprocess(*PLUGIN, "--pod-schedules", "saved").assert_outcomes(failed=1)
    (saved,) = (pytester.path / "saved").iterdir()
    sys.modules.pop("mended_message", None)
    message(RIGHT, "mended_message")
    pytester.runpytest_inprocess(*PLUGIN, "--pod-replay", str(saved)).assert_outcomes(passed=1)


def test_without_a_cache_schedules_are_saved_all_the_same(pytester, message):
    message(WRONG, "cacheless_message")
    result = pytester.runpytest_inprocess(*PLUGIN, "-p", "no:cacheprovider")
    path = shlex.split(re.search(r"^replay: (.*)$", result.stdout.str(), re.MULTILINE)[1])[-1]
    assert Path(path).is_file()
    shutil.rmtree(Path(path).parent)


def test_a_schedule_that_cannot_be_saved_does_not_hide_the_report(pytester, message):
    message(WRONG, "unsaved_message")
    (pytester.path / "file").write_text("in the way")
    result = pytester.runpytest_inprocess(*PLUGIN, "--pod-schedules", "file/below")
    result.assert_outcomes(failed=1)
    assert "causality violation: never flushed" in result.stdout.str()
    result.stdout.fnmatch_lines(["replay: none, the schedule cannot be saved: file/below: *"])


def test_a_schedule_that_is_not_there_is_one_line(pytester, message):
    message(RIGHT, "absent_message")
    result = pytester.runpytest_inprocess(*PLUGIN, "--pod-replay", "absent.json")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["--pod-replay: absent.json: No such file or directory"])
    result.stdout.no_fnmatch_line("*During handling*")


def test_the_function_is_called_once_a_schedule(pytester):
    result = outcomes(
        pytester,
        """
        import pytest
        from cxlbench.emu.pod_ops import store
        calls = []

        @pytest.mark.explore(schedules=7)
        def test_it(pod):
            calls.append(1)
            pod.run(0, lambda mem: store(mem, 0, 1))

        def test_count():
            assert len(calls) == 8  # and a first one, that shows how long a run is
        """,
    )
    result.assert_outcomes(passed=2)


def test_other_fixtures_and_parameters_are_handed_over(pytester):
    result = outcomes(
        pytester,
        """
        import pytest
        from cxlbench.emu.pod_ops import load

        @pytest.fixture
        def limit():
            return 3

        @pytest.mark.explore(schedules=5)
        class TestIt:
            @pytest.mark.parametrize("n", [1, 2])
            def test_it(self, limit, pod, n, tmp_path):
                assert tmp_path.is_dir()
                for node in range(n):
                    pod.run(node, self.step, limit)

            def step(self, mem, limit):
                assert load(mem, 0) < limit
        """,
    )
    result.assert_outcomes(passed=2)


def test_a_pod_without_the_mark_is_explored_too(pytester):
    result = outcomes(
        pytester,
        """
        from cxlbench.emu.pod_ops import store

        def test_race(pod):
            pod.run(0, lambda mem: store(mem, 0, 1))
            pod.run(1, lambda mem: store(mem, 0, 2))
        """,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*write-write race*"])


def test_an_assertion_while_building_is_the_tests_own_failure(pytester):
    result = outcomes(
        pytester,
        """
        def test_it(pod):
            assert 1 == 2, "no pod was hurt"
        """,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*no pod was hurt*"])


@pytest.mark.parametrize(
    ("mark", "told"),
    [
        ("(schedule=5)", "takes schedules"),
        ("(5)", "by name; it got 5"),
        ("(scheduler='luck')", "choose one of random"),
        ("(schedules=0)", "must be at least 1"),
    ],
)
def test_a_mark_that_cannot_be_is_refused(pytester, mark, told):
    result = outcomes(
        pytester,
        f"""
        import pytest

        @pytest.mark.explore{mark}
        def test_it(pod):
            pod.run(0, lambda mem: None)
        """,
    )
    result.assert_outcomes(failed=1)
    assert told in result.stdout.str()
    result.stdout.no_fnmatch_line("*During handling*")


def test_a_mark_without_a_pod_is_refused(pytester):
    result = outcomes(
        pytester,
        """
        import pytest

        @pytest.mark.explore(schedules=5)
        def test_it():
            pass
        """,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*must have the argument 'pod'*"])


def test_a_fixture_that_uses_the_pod_is_told_why_it_cannot(pytester):
    result = outcomes(
        pytester,
        """
        import pytest

        @pytest.fixture
        def two_nodes(pod):
            pod.run(0, lambda mem: None)

        def test_it(two_nodes):
            pass
        """,
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*fixtures cannot use it*"])


def test_a_file_to_replay_that_is_none_is_told(pytester, message):
    message(RIGHT, "unreplayed_message")
    result = pytester.runpytest_inprocess(*PLUGIN, "--pod-replay", "absent.json")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*--pod-replay: *absent.json*"])


def test_a_users_fixture_called_pod_is_left_alone(pytester):
    result = outcomes(
        pytester,
        """
        import pytest

        @pytest.fixture
        def pod():
            return "of whales"

        def test_it(pod):
            assert pod == "of whales"
        """,
    )
    result.assert_outcomes(passed=1)


def test_live_pods_end_with_the_test(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(
        """
        pods = []

        def test_it(live_pod):
            pods.append(live_pod(1 << 14, nodes=2, mode="mapped"))
            ours, theirs = pods[0].mapped(0).map(), pods[0].mapped(1).map()
            ours[0:2] = b"hi"
            ours.flush(0, 2)
            assert theirs[0:2] == bytes(2)
            theirs.flush(0, 2)
            assert theirs[0:2] == b"hi"
            ours.close()
            theirs.close()

        def test_after():
            import pytest
            from cxlbench.emu.pod_mappings import PodClosedError
            with pytest.raises(PodClosedError):
                pods[0].mapped(0)
        """
    )
    pytester.runpytest_subprocess(*PLUGIN, timeout=60).assert_outcomes(passed=2)


def test_the_plugin_imports_nothing_heavy_until_it_is_used():
    code = (
        "import sys, cxlbench.harness.pytest_pod\n"
        "print([m for m in ('numpy', 'numba', 'greenlet', 'msgspec') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"

"""The pytest plugin in a project of a user's own, with the wheel installed and no checkout."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from cxlbench.emu import pod_compile
from tests.harness.pod_users import RIGHT, WRONG

ROOT = Path(__file__).parents[2]
HARNESS = "harness.message:scenario"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The project's wheel."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling makes the wheel, and is not installed: pip install hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(tmp_path_factory, wheel):
    """An environment with the wheel in it; only dependencies are shared with ours."""
    home = tmp_path_factory.mktemp("installed") / "env"
    venv.create(home, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = home / "lib" / version / "site-packages"
    with zipfile.ZipFile(wheel) as packed:  # pure Python: installing is unpacking
        packed.extractall(site)
    # The path alone: what is installed there as editable is not found through it.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin" / "python"


def test_the_wheel_holds_every_file_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        (metadata,) = [name for name in names if name.endswith("entry_points.txt")]
        entries = packed.read(metadata).decode()
    assert "cxlbench-pod = cxlbench.harness.pytest_pod" in entries
    for folder in ("emu", "devices", "kv", "hymcache", "tract", "harness"):
        ours = {f"cxlbench/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}
        assert ours <= names
    assert "cxlbench/devices/profiles/niagara-2.0.toml" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"cxlbench"}


@pytest.fixture
def project(tmp_path):
    """A project whose folders are called as ours are."""
    files = {
        "harness/__init__.py": "",
        "harness/message.py": WRONG,
        "emu.py": "raise RuntimeError('not yours')\n",
        "tract/__init__.py": "ours = True\n",
        "tests/__init__.py": "",
        "tests/conftest.py": "from harness import message\n",
        "tests/test_message.py": """
import pytest
import cxlbench
import tract
from harness import message

@pytest.mark.explore(schedules=100)
def test_message(pod):
    message.scenario(pod)

def test_whose_are_whose(cxl_hm):
    assert tract.ours
    assert "site-packages" in cxlbench.__file__
""",
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--strict-markers -W error'\n",
    }
    for name, text in files.items():
        path = tmp_path / "theirs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "theirs"


def run_alone(python, folder, *words):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
    kernels = str(pod_compile.kernel_folder().parent)
    return subprocess.run(
        [python, "-m", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=clean | {pod_compile.CACHE_VARIABLE: kernels},
    )


def replayed(installed, project, printed):
    """Run the command that a failure printed, as a reader would."""
    python, *words = shlex.split(re.search(r"^replay: (.*)$", printed, re.MULTILINE)[1])
    assert python == "python"
    return run_alone(installed, project, *words[1:])


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_it_works_in_a_project_with_folders_of_the_same_names(installed, project, workers):
    ran = run_alone(installed, project, "pytest", "-q", *workers)
    assert re.search(r"1 failed, \d+ passed", ran.stdout), ran.stdout + ran.stderr
    assert "causality violation: never flushed" in ran.stdout
    assert "message.py:15 in receive" in ran.stdout
    again = replayed(installed, project, ran.stdout)
    assert "1 failed" in again.stdout, again.stdout + again.stderr
    assert "causality violation: never flushed" in again.stdout
    (project / "harness" / "message.py").write_text(RIGHT)
    assert re.search(r"1 passed", replayed(installed, project, ran.stdout).stdout)
    after = run_alone(installed, project, "pytest", "-q", *workers).stdout
    assert "failed" not in after
    assert "passed" in after


def test_every_worker_of_xdist_prints_what_replays_its_own_failure(installed, project):
    text = (project / "tests" / "test_message.py").read_text()
    marked = text.replace(
        "def test_message(pod):",
        "def test_message(pod, turn):",
    ).replace(
        "@pytest.mark.explore(schedules=100)",
        "@pytest.mark.explore(schedules=100)\n"
        '@pytest.mark.parametrize("turn", ["one of", "two/of", "[3]"])',
    )
    (project / "tests" / "test_message.py").write_text(marked)
    ran = run_alone(installed, project, "pytest", "-q", "-n", "2")
    commands = re.findall(r"^replay: (.*)$", ran.stdout, re.MULTILINE)
    assert len(set(commands)) == 3, ran.stdout + ran.stderr
    for command in commands:
        again = run_alone(installed, project, *shlex.split(command)[2:])
        assert "1 failed in" in again.stdout, again.stdout + again.stderr


def test_pods_of_real_processes_run_in_the_project_too(installed, project):
    (project / "tests" / "test_message.py").write_text(
        """
from harness import live


def test_it(live_pod):
    pod = live_pod(4096, nodes=2, profile="niagara-2.0")
    (one,) = pod.start(0, "harness.live:send", processes=1)
    assert one.result() == 7
    assert pod.memory(1).load(0) == 7
"""
    )
    (project / "harness" / "live.py").write_text(
        """
def send(live):
    live.memory.store(0, 7)
    live.memory.clflush(0)
    return live.memory.load(0)
"""
    )
    ran = run_alone(installed, project, "pytest", "-q")
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr


def test_the_commands_work_on_the_projects_own_folders(installed, project):
    ran = run_alone(installed, project, "cxlbench.harness.cli", "pod", "explore", HARNESS)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "causality violation: never flushed" in ran.stdout
    command = re.search(r"^replay: cxlbench (.*)$", ran.stdout, re.MULTILINE)[1]
    again = run_alone(installed, project, "cxlbench.harness.cli", *shlex.split(command))
    assert again.returncode == 1
    assert "causality violation: never flushed" in again.stdout

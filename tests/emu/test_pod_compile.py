"""Compiled programs on disk: found again, and never old code after a change anywhere."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

from cxlbench.emu import pod_compile
from cxlbench.emu.pod_compile import KERNEL_MODULES, compiled_once, prepare, source_stamp

EMU = Path(pod_compile.__file__).parent


def test_every_module_that_implements_operations_is_part_of_the_folders_name():
    compiled = re.compile(r"@overload|@kernel|@intrinsic|register_jitable\b|compiled_once\(")
    needed = {
        path.stem
        for path in EMU.glob("*.py")
        if compiled.search(path.read_text()) and path.stem != "pod_compile"
    }
    constants = {
        name
        for stem in needed
        for name in re.findall(
            r"from cxlbench\.emu\.(\w+) import", (EMU / f"{stem}.py").read_text()
        )
    }
    assert needed | constants - {"pod_compile"} <= set(KERNEL_MODULES)


def run(folder, code):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=folder,
        env={"CXLBENCH_KERNEL_CACHE": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


PROGRAM = """
from cxlbench.emu.pod_compile import compiled_once
import helper

def answer(x):
    return helper.add(x)

compiled = compiled_once(answer)
"""
HELPER = """
from numba.extending import register_jitable
from constants import STEP

@register_jitable
def add(x):
    return x + {step}
"""
ASK = "import program; print(program.compiled(1), bool(program.compiled.stats.cache_hits))"


def test_a_program_is_found_again_until_a_function_that_it_calls_changes(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "constants.py").write_text("STEP = 1\n")
    (tmp_path / "helper.py").write_text(HELPER.format(step=1))
    assert run(tmp_path, ASK) == ["2", "False"]
    assert run(tmp_path, ASK) == ["2", "True"]
    (tmp_path / "helper.py").write_text(HELPER.format(step=2))
    assert run(tmp_path, ASK) == ["3", "False"]


def test_a_stamp_covers_functions_reached_by_name_by_module_and_through_others():
    def direct(x):
        return source_stamp(x)

    reached = set(pod_compile._reached(direct))
    assert source_stamp in {item for item in reached if callable(item)}


def test_preparing_says_whether_it_was_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv(pod_compile.CACHE_VARIABLE, str(tmp_path))
    pod_compile.kernel_folder.cache_clear()
    try:
        found = [prepare(compiled_once(_double), 1) for _ in range(2)]
        assert found == [False, True]
        assert pod_compile.kernel_folder().parent == tmp_path
    finally:
        pod_compile.kernel_folder.cache_clear()


def _double(x):
    return 2 * x


def test_an_unwritable_cache_falls_back_to_a_temporary_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(pod_compile.CACHE_VARIABLE, str(tmp_path / "file"))
    pod_compile.kernel_folder.cache_clear()
    try:
        folder = pod_compile.kernel_folder()
        assert folder.is_dir()
        folder.rmdir()
    finally:
        pod_compile.kernel_folder.cache_clear()

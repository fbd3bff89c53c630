"""However a command of the pod ends, nobody of it is left, and nothing in shared memory."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cxlbench.emu import pod_compile

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="watching strangers die needs pidfd"
)
ENDS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130, signal.SIGTERM: 143}


def in_shared_memory():  # but for semaphores, which other programs come and go with
    return {path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}


def children(process_id):
    """Return the ids of all that descend from a process."""
    found = []
    for path in Path(f"/proc/{process_id}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for word in path.read_text().split():
                found += [int(word), *children(int(word))]
    return found


class Command:
    """A command in a process of its own, which is ended once it has so many descendants."""

    def __init__(self, *words, descendants, code=None):
        text = code or "from cxlbench.harness.cli import main; main()"
        environment = {pod_compile.CACHE_VARIABLE: str(pod_compile.kernel_folder().parent)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", text, *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self.watches = []
        while len(there := children(self.process.pid)) < descendants:
            assert self.process.poll() is None, self.process.stderr.read()
            select.select([], [], [], 0.01)
        for one in there:
            with contextlib.suppress(ProcessLookupError):
                self.watches.append(os.pidfd_open(one))

    def end(self, number, *, all_of_it=False):
        """Send the signal; return the exit code and what was said, once all are gone.

        To ``all_of_it``: as a terminal does, to the command and all that descend from it.
        """
        if all_of_it:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        code = self.process.wait(30)
        for watch in self.watches:
            poll = select.poll()
            poll.register(watch, select.POLLIN)
            assert poll.poll(20_000), "a process outlived the command"
            os.close(watch)
        with self.process.stderr as stream:
            return code, stream.read().decode()


STRESS = ("pod", "stress", "--nodes", "2", "--workers", "1", "--kills", "100")


@pytest.mark.parametrize("number", ENDS, ids=lambda number: number.name)
def test_a_stress_that_is_ended_leaves_nothing(tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)
    before = in_shared_memory()
    command = Command(*STRESS, descendants=5)  # the forking one, two managers, two workers
    code, said = command.end(number)
    assert code == ENDS[number]
    assert "Traceback" not in said
    assert in_shared_memory() <= before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("descendants", [1, 5], ids=["while it starts", "when all are there"])
def test_ctrl_c_at_a_stress_says_one_line(tmp_path, monkeypatch, descendants):
    monkeypatch.chdir(tmp_path)
    command = Command(*STRESS, descendants=descendants)
    code, said = command.end(signal.SIGINT, all_of_it=True)
    assert (code, said.splitlines()[-1]) == (130, "interrupted; temporary files are removed")
    assert "Traceback" not in said


@pytest.mark.parametrize("number", ENDS, ids=lambda number: number.name)
def test_a_campaign_that_is_ended_leaves_no_workers(tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)
    command = Command("pod", "campaign", "--processes", "2", descendants=2)
    code, said = command.end(number)
    assert code == ENDS[number]
    assert "Traceback" not in said or number == signal.SIGKILL


@pytest.mark.parametrize("workers", [1, 2], ids=["while they start", "when they are there"])
def test_ctrl_c_at_a_campaign_says_one_line(tmp_path, monkeypatch, workers):
    monkeypatch.chdir(tmp_path)
    command = Command("pod", "campaign", "--processes", "2", descendants=workers + 1)
    assert command.end(signal.SIGINT, all_of_it=True) == (
        130,
        "interrupted; temporary files are removed\n",
    )


COMPILING = """
from cxlbench.emu.pod_node_process import NodeForker
forker = NodeForker(prepare=["tests.emu.live_programs:prepare_for_ever"])
assert not forker.prepared(timeout_s=0.1)
forker.prepared()
"""


def test_who_compiles_for_a_host_ends_with_it(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    code, _ = Command(descendants=1, code=COMPILING).end(signal.SIGKILL)
    assert code == -signal.SIGKILL

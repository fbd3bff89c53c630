"""What ends in order is not cut short by a second Ctrl-C, which is heard afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxlbench.harness.endings import ENDING_SIGNALS, heard_later

COMMAND = [sys.executable, "-m", "cxlbench.harness.cli"]


class HeardError(Exception):
    """A signal, as the tests' handler tells of it."""


@pytest.fixture(autouse=True)
def told() -> Iterator[None]:
    """Let each of the signals raise ``HeardError``."""

    def raise_it(number: int, frame: object) -> None:
        raise HeardError(number)

    before = {number: signal.signal(number, raise_it) for number in ENDING_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_a_signal_is_heard_once_the_work_is_done(number: int) -> None:
    done = []

    def work() -> None:
        with heard_later():
            for _ in range(3):
                os.kill(os.getpid(), number)
            done.append(True)

    with pytest.raises(HeardError):
        work()
    assert done


def test_without_a_signal_nothing_is_heard_and_handlers_are_as_before() -> None:
    before = [signal.getsignal(number) for number in ENDING_SIGNALS]
    with heard_later():
        pass
    assert [signal.getsignal(number) for number in ENDING_SIGNALS] == before


def test_an_error_of_the_work_is_told_and_not_the_signal() -> None:
    def work() -> None:
        with heard_later():
            os.kill(os.getpid(), signal.SIGTERM)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with heard_later():
        os.kill(os.getpid(), signal.SIGHUP)


def test_another_thread_works_without_it() -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with heard_later():
                pass
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == []


@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_a_deployment_that_is_told_twice_to_end_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [*COMMAND, "up", "--scale", "1024", "--capacity", "16GiB", "--run-dir", "run"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(number)
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
            if (tmp_path / "run").exists():  # until it has cleaned up
                process.send_signal(number)
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert list(tmp_path.iterdir()) == []

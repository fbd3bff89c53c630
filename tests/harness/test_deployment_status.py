"""Asking the processes of a deployment, and whatever else may answer in their place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from cxlbench.emu import wire
from cxlbench.emu.unix_paths import Door
from cxlbench.harness.deployment import DeploymentSpec
from cxlbench.harness.deployment_status import directory, read_status


@contextmanager
def strangers(spec: DeploymentSpec, answer: list[bytes]) -> Iterator[None]:
    """Serve at the endpoints of Master and of node 0, with one answer to everything."""
    end = threading.Event()

    def serve(endpoint: str) -> None:
        with (
            Door(endpoint) as door,
            zmq.Context() as context,
            context.socket(zmq.ROUTER) as socket,
        ):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(door.endpoint)
            while not end.is_set():
                if socket.poll(10):
                    socket.send_multipart([socket.recv_multipart()[0], *answer])

    threads = [
        threading.Thread(target=serve, args=(spec.endpoint(role),)) for role in ("master", "node")
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join()


def header(kind: int) -> bytes:
    return wire.encode((1, kind, 1, 0.0))


ANSWERS: dict[str, tuple[list[bytes], str]] = {
    "no frame": ([b"\xff\x00", b"x"], "something else serves there"),
    "one part": ([b"x"], "something else serves there"),
    "no answer": ([header(wire.ANSWER), b"\xc1"], "something else serves there"),
    "another answer": ([header(wire.ANSWER), wire.encode({"a": 1})], "something else serves there"),
    "no reason": ([header(wire.REFUSED), b"\xc1"], "something else serves there"),
    "a refusal": ([header(wire.REFUSED), wire.encode("not you")], "refused: not you"),
    "a failure": ([header(wire.FAILED), wire.encode("boom")], "failed: boom"),
}


@pytest.mark.parametrize(("answer", "trouble"), list(ANSWERS.values()), ids=list(ANSWERS))
def test_what_else_serves_there_is_said_of_each_part(
    tmp_path: Path, answer: list[bytes], trouble: str
) -> None:
    spec = DeploymentSpec(run_dir=tmp_path)
    with strangers(spec, answer):
        status = read_status(spec, timeout_s=10)
        assert [part.trouble for part in status.parts] == [trouble, trouble]
        assert not status.anything
        assert directory(spec, timeout_s=0.5) == {}


def test_endpoints_that_cannot_be_reached_are_told_and_cost_the_others_nothing(
    tmp_path: Path,
) -> None:
    spec = DeploymentSpec(run_dir=tmp_path / ("none-" * 40))
    status = read_status(spec, timeout_s=10)
    assert {part.trouble for part in status.parts} == {
        "cannot be reached: No such file or directory"
    }

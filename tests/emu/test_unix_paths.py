"""Unix sockets at paths that are longer than the system takes."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec
import pytest

from cxlbench.emu import unix_paths
from cxlbench.emu.clock import WallClock
from cxlbench.emu.unix_paths import MAX_PATH_BYTES, Door, fits, takes_any_length
from cxlbench.emu.wire import MessageSet, WireClient
from cxlbench.emu.wire_server import WireServer


class Ask(msgspec.Struct, tag="ask", array_like=True):
    number: int


MESSAGES = MessageSet(1, Ask)
NUMBER = msgspec.msgpack.Decoder(int)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    folder = tmp_path / ("long-" * 30) / ("longer-" * 20)
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:7000", "ipc:///tmp/short.sock"])
def test_what_sockets_take_stays_what_it_is(endpoint: str) -> None:
    with Door(endpoint) as door:
        assert door.endpoint == endpoint


def test_the_limit_is_in_bytes_not_in_characters() -> None:
    assert fits("ipc://" + "x" * MAX_PATH_BYTES)
    assert not fits("ipc://" + "x" * (MAX_PATH_BYTES - 1) + "é")


def test_a_long_path_is_refused_where_there_is_no_way_to_it(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_paths, "SHORTCUT", tmp_path / "none")
    with pytest.raises(OSError, match="at most 103 B") as refusal:
        Door(f"ipc://{deep}/s")
    assert refusal.value.errno == errno.ENAMETOOLONG


@pytest.mark.skipif(not takes_any_length(), reason="this system has no /proc/self/fd")
def test_who_serves_at_a_long_path_is_reached_there_again_and_again_and_leaves_nothing(
    deep: Path,
) -> None:
    socket_file = deep / "service.sock"
    endpoint = f"ipc://{socket_file}"
    before = descriptors()

    def serve(clock: WallClock, epoch: int) -> WireServer[Ask]:
        return WireServer(
            clock,
            endpoint,
            MESSAGES,
            name="server",
            epoch=epoch,
            on_call=lambda peer, body: body.number + epoch,
            on_post=lambda peer, body: None,
            on_gone=lambda peer: None,
        )

    async def work() -> None:
        server = serve(clock, 1)
        assert server.endpoint == endpoint
        assert socket_file.is_socket()
        with pytest.raises(OSError, match="another process serves there"):
            serve(clock, 2)
        client = WireClient(clock, endpoint, sends=MESSAGES, name="client", timeout_s=10)
        assert await client.call(Ask(1), NUMBER) == 2
        await server.close()
        assert not socket_file.exists()
        server = serve(clock, 2)
        assert await client.call(Ask(1), NUMBER) == 3
        await client.close()
        await server.close()

    with WallClock(shared=True) as clock:
        clock.run(work())
    assert list(deep.iterdir()) == []
    assert descriptors() == before


def test_a_long_path_whose_folder_is_not_there_is_refused_and_holds_nothing(tmp_path: Path) -> None:
    before = descriptors()
    endpoint = f"ipc://{tmp_path}/{'none-' * 30}/s"
    with WallClock(shared=True) as clock, pytest.raises(FileNotFoundError):
        WireClient(clock, endpoint, sends=MESSAGES, name="client")
    assert descriptors() == before

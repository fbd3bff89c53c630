"""Connections of a wire: who is there, who has left, and who serves now."""

from __future__ import annotations

import msgspec
import pytest

from cxlbench.emu.clock import WallClock
from cxlbench.emu.wire import MessageSet, WireClient
from cxlbench.emu.wire_server import WireServer


class Ask(msgspec.Struct, tag="ask", array_like=True):
    number: int


MESSAGES = MessageSet(1, Ask)
NUMBER = msgspec.msgpack.Decoder(int)


@pytest.fixture
def clock():
    with WallClock(shared=True) as clock:
        yield clock


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/s.sock"


def serve(clock, endpoint, *, epoch=1, gone=None):
    return WireServer(
        clock,
        endpoint,
        MESSAGES,
        name="server",
        epoch=epoch,
        on_call=lambda peer, body: body.number + 1,
        on_post=lambda peer, body: None,
        on_gone=lambda peer: gone.append(peer.name) if gone is not None else None,
    )


async def until(clock, true, *, within_s=5.0):
    end_s = clock.real() + within_s
    while not true():
        assert clock.real() < end_s
        await clock.sleep(0.01)


def test_a_client_that_closes_is_forgotten_though_its_process_lives_on(clock, endpoint):
    gone: list[str] = []

    async def run():
        server = serve(clock, endpoint, gone=gone)
        client = WireClient(clock, endpoint, sends=MESSAGES, name="visitor")
        assert await client.call(Ask(1), NUMBER) == 2
        assert len(server.peers) == 1
        await client.close()
        await until(clock, lambda: not server.peers)
        await server.close()

    clock.run(run())
    assert gone == ["visitor"]


def test_a_client_that_sends_nothing_notices_that_the_server_was_started_anew(clock, endpoint):
    epochs: list[int] = []

    async def run():
        server = serve(clock, endpoint, epoch=1)
        client = WireClient(
            clock,
            endpoint,
            sends=MESSAGES,
            name="idle",
            on_epoch=lambda welcome: epochs.append(welcome.epoch),
        )
        await until(clock, lambda: epochs == [1])
        await server.close()
        server = serve(clock, endpoint, epoch=2)
        await until(clock, lambda: epochs == [1, 2])
        assert len(server.peers) == 1
        assert await client.call(Ask(5), NUMBER) == 6
        await client.close()
        await server.close()

    clock.run(run())


def test_a_call_that_waits_while_the_server_is_started_anew_is_made_again(clock, endpoint):
    async def run():
        client = WireClient(clock, endpoint, sends=MESSAGES, name="early", timeout_s=5.0)
        waiting = clock.spawn(client.call(Ask(7), NUMBER))
        await clock.sleep(0.05)
        server = serve(clock, endpoint)
        assert await waiting == 8
        await client.close()
        await server.close()

    clock.run(run())

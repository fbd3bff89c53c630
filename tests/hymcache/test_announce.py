"""A node is told of only when Master knows all that it has, and Master learns all of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cxlbench.emu.clock import WallClock
from cxlbench.emu.wire_server import Peer
from cxlbench.hymcache import messages as m
from cxlbench.hymcache import node_server
from cxlbench.hymcache.kv_manager import Grant
from cxlbench.hymcache.members import NAMES_AT_MOST, Members
from cxlbench.hymcache.node_server import NodeServer
from cxlbench.kv.results import KeyResult
from tests.hymcache.rig import chain
from tests.hymcache.test_servers import BLOCK, Servers


@pytest.fixture
def clock() -> Iterator[WallClock]:
    with WallClock(shared=True) as made:
        yield made


def publish(servers: Servers, keys: list[bytes]) -> None:
    """Let the node have objects that Master does not know."""
    manager = servers.manager
    for key, grant in zip(keys, manager.reserve(keys, BLOCK), strict=True):
        assert isinstance(grant, Grant)
        manager.devices[0].landed(grant.address)
        assert manager.commit([grant.token]) == [KeyResult.STORED]
        assert manager.publish(key, grant.address, grant.generation)


def announced(servers: Servers) -> m.Announce:
    return m.Announce(0, servers.node.server.endpoint, 2, 1, 500)


def test_master_learns_a_catalog_in_parts_though_it_refuses_some_of_it(
    clock: WallClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused is freed between two parts: the rest must not move out of sight."""
    monkeypatch.setattr(node_server, "CATALOG_PART", 2)
    keys = chain(7)

    async def work() -> None:
        async with Servers(clock, tmp_path) as servers:
            master = servers.master.master
            assert master is not None
            known = [keys[0], keys[1], keys[4]]
            ticket = (1, 1)
            await servers.master.mirrors[0].refresh(BLOCK)
            refusals = master.allocate_at(ticket, known, BLOCK, (0, None)).refusals
            assert refusals == (None,) * 3  # somebody writes them now, and will register them
            publish(servers, list(keys))
            peer = servers.master.mirrors[0].peer
            assert await servers.master._announce(peer, announced(servers)) is True
            wanted = [key for key in keys if key not in known]
            found = master.lookup((1, 2), keys).blocks
            assert [block.key for block in found if block is not None] == wanted
            while len(servers.manager.index) > len(wanted):
                await clock.sleep(1e-3)
            assert sorted(servers.manager.index) == sorted(wanted)  # nothing is on the node unknown
            master.release((1, 2))
            master.abort(ticket)

    clock.run(work())


def test_a_part_of_a_catalog_never_splits_objects_of_one_generation(
    clock: WallClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_server, "CATALOG_PART", 2)
    keys = chain(5)

    async def work() -> None:
        async with Servers(clock, tmp_path) as servers:
            publish(servers, list(keys))
            for stored in list(servers.manager.index.values())[1:4]:
                stored.generation = 7
            seen, first, more = [], 0, True
            while more:
                part = servers.node._catalog(Peer(b"x", "x", os.getpid()), m.AskCatalog(first))
                seen += part.keys
                first, more = part.next, part.more
            assert sorted(seen) == sorted(keys)

    clock.run(work())


def test_nobody_is_told_of_a_node_or_sent_there_before_master_knows_what_it_has(
    clock: WallClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = chain(1)
    seen: list[Any] = []
    tell = node_server._CALLS[m.AskCatalog]

    async def work() -> None:
        async with Servers(clock, tmp_path) as servers:
            master = servers.master
            peer = Peer(b"reader", "reader", os.getpid())
            master.server.peers[b"reader"] = peer

            def tell_later(server: NodeServer, at: Peer, body: Any) -> Any:
                async def answer() -> Any:
                    seen.append(master._directory(peer, m.Directory()))
                    seen.append(master.figures()["nodes"])
                    ask = m.Allocate((5, 5), [key], BLOCK, None, None)
                    seen.append((await master._allocate(peer, ask)).refusals)
                    return tell(server, at, body)

                return answer()

            monkeypatch.setitem(node_server._CALLS, m.AskCatalog, tell_later)
            mirror = master.mirrors[0]
            assert await master._announce(mirror.peer, announced(servers)) is True
            assert seen == [[], 0, [KeyResult.NO_SPACE]]
            assert [entry.node for entry in master._directory(peer, m.Directory())] == [0]
            del master.server.peers[b"reader"]

    clock.run(work())


@pytest.mark.parametrize("endpoint", ["", "nowhere", "tcp://x"])
def test_a_node_whose_endpoint_is_none_is_told_so(
    clock: WallClock, tmp_path: Path, endpoint: str
) -> None:
    async def work() -> None:
        async with Servers(clock, tmp_path) as servers:
            peer = servers.master.server.peers[b"liar"] = Peer(b"liar", "liar", os.getpid())
            answer = await servers.master._announce(peer, m.Announce(9, endpoint, 1, 1, 10))
            assert isinstance(answer, str)
            assert "cannot connect" in answer
            assert list(servers.master.mirrors) == [0]
            del servers.master.server.peers[b"liar"]

    clock.run(work())


def test_a_stream_ends_though_its_client_asked_for_more_time_than_any_lease_lasts(
    clock: WallClock, tmp_path: Path
) -> None:
    keys = chain(2)

    async def work() -> None:
        async with Servers(clock, tmp_path) as servers:
            publish(servers, list(keys))
            servers.node._hold_s = 0.05
            peer = Peer(b"x", "x", os.getpid())
            opened = servers.node._open_stream(peer, m.OpenStream((1, 1), None, 1, keys, 1e12))
            assert opened.objects == 2
            begin_s = clock.real()
            while servers.node.service.at_rest()["streams"]:
                assert clock.real() < begin_s + 5
                await clock.sleep(1e-3)
            servers.node.service.close_stream((1, 1))

    clock.run(work())


def test_a_peer_that_makes_up_names_without_end_is_told_so_and_costs_no_memory() -> None:
    members, peer = Members(), Peer(b"x", "fuzz", os.getpid())
    for number in range(NAMES_AT_MOST):
        assert members.note(peer, (number, 7)) == (number, 7)
    assert members.note(peer, (3, 8)) == (3, 8)
    with pytest.raises(ValueError, match="fuzz uses more than"):
        members.note(peer, (NAMES_AT_MOST, 7))
    members.note(Peer(b"y", "other", os.getpid()), (NAMES_AT_MOST, 7))
    assert members.end(peer) == set(range(NAMES_AT_MOST))
    assert members.end(peer) == set()

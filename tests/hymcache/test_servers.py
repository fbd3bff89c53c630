"""Master's and a node's server against messages that are well formed and mean nothing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest

from cxlbench.devices.cxl_hm import CxlHm
from cxlbench.emu.clock import WallClock
from cxlbench.emu.fabric import Fabric
from cxlbench.emu.fabric_shared_owner import GRANTS, SharedCarrier
from cxlbench.emu.memory import Arena, page_ceil
from cxlbench.emu.shared_memory import SharedSegment
from cxlbench.emu.status import Status
from cxlbench.emu.wire_server import Peer, WireServer
from cxlbench.hymcache import master_server, node_server
from cxlbench.hymcache import messages as m
from cxlbench.hymcache.control import NoCosts
from cxlbench.hymcache.kv_manager import KvManager
from cxlbench.hymcache.master import Master
from cxlbench.hymcache.master_server import MasterServer
from cxlbench.hymcache.node_server import NodeServer
from cxlbench.hymcache.remote import RemoteNode
from cxlbench.kv.results import KeyResult
from tests.hymcache.rig import chain, small_profile

BLOCK = 16 << 10
KEYS = chain(6)
MESSAGES = 4000
SEEDS = range(3)


class Servers:
    """A Master and a node in one process, which know each other by their sockets."""

    def __init__(self, clock: WallClock, folder: Path) -> None:
        self.clock = clock
        self.segments: list[SharedSegment] = []

        def share(nbytes: int) -> Arena:
            segment = SharedSegment(page_ceil(nbytes), name="arena", folder=folder)
            self.segments.append(segment)
            return segment.arena()

        device = CxlHm(clock, small_profile(BLOCK), capacity_bytes=4 << 20, make_arena=share)
        fabric = Fabric(clock, seed=1)
        self.manager = KvManager(clock, fabric, [device], segment_bytes=64 << 10)
        self.grants = SharedSegment(GRANTS * 8, name="grants", folder=folder)
        carrier = SharedCarrier(
            clock,
            fabric,
            arenas=self.segments,
            grants=self.grants,
            arena_of=lambda region: 0,
            read_path=[],
            write_path=[],
            latency_s=0.0,
        )
        where = folder if len(str(folder)) < 90 else Path(f"/tmp/cxl-{os.getpid()}")
        where.mkdir(exist_ok=True)
        self.master = MasterServer(
            clock,
            f"ipc://{where}/m",
            epoch=1,
            make_master=lambda objects: Master(clock, {}, max_objects=objects),
        )
        self.node = NodeServer(
            clock,
            self.manager,
            carrier,
            endpoint=f"ipc://{where}/n",
            master_endpoint=f"ipc://{where}/m",
            epoch=2,
            max_objects=500,
        )

    async def __aenter__(self) -> Servers:
        while not any(mirror.taken_in for mirror in self.master.mirrors.values()):
            await self.clock.sleep(1e-3)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.node.close()
        await self.master.close()
        for segment in (*self.segments, self.grants):
            segment.close()


@pytest.fixture
def clock() -> Iterator[WallClock]:
    with WallClock(shared=True) as made:
        yield made


def invent(kind: Any, draw: random.Random) -> Any:
    """Return any value that a field of this type may have, often one that means something."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        base, meta = arguments
        if base is bytes:
            return draw.choice(KEYS) if draw.random() < 0.8 else draw.randbytes(32)
        if base is float:
            return draw.choice([0.0, 1e12, draw.uniform(0, 1e6)])
        low, high = meta.ge, meta.lt - 1
        usual = [low, low + 1, high, 4096, BLOCK, draw.randint(low, high), draw.randint(0, 40)]
        return min(max(draw.choice(usual), low), high)
    if origin in (types.UnionType, typing.Union):
        return invent(draw.choice(arguments), draw)
    if origin is list:
        return [invent(arguments[0], draw) for _ in range(draw.choice([0, 1, 1, 2, 5]))]
    if origin is tuple:
        return tuple(invent(argument, draw) for argument in arguments)
    if kind is int:
        return draw.choice([0, 1, -1, (1 << 63) - 1, draw.randrange(20), draw.getrandbits(62)])
    if kind is bool:
        return draw.random() < 0.5
    if kind is str:
        return draw.choice(["", "x", "ipc:///nowhere/at/all"])
    assert kind is types.NoneType, kind
    return None


def message(body: type, draw: random.Random) -> Any:
    hints = typing.get_type_hints(body, include_extras=True)
    return body(**{name: invent(hints[name], draw) for name in body.__struct_fields__})


async def bombard(
    servers: Servers, server: WireServer[Any], kinds: m.MessageSet[Any], handlers: Any, seed: int
) -> Peer:
    """Let a server serve thousands of inventions; what it cannot serve must be their own fault."""
    draw = random.Random(seed)
    peer = server.peers[b"fuzz"] = Peer(b"fuzz", "fuzz", os.getpid())
    faults: list[Exception] = []
    note = server._note_failure

    def keep(peer: Peer, body: Any, error: Exception) -> None:
        faults.append(error)
        note(peer, body, error)

    server._note_failure = keep  # type: ignore[method-assign]
    decode = kinds.decoder().decode
    calls, posts = list(handlers._CALLS), list(handlers._POSTS)
    calls = [call for call in calls if call not in (m.AskStatus, m.Announce)]
    for number in range(MESSAGES):
        is_call = draw.random() < 0.6
        body = decode(
            msgspec.msgpack.encode(message(draw.choice(calls if is_call else posts), draw))
        )
        if is_call:
            server._serve(peer, number, body)
        else:
            server._serve_post(peer, body)
        if number % 50 == 0:
            await servers.clock.breathe()
    for error in faults:
        if not isinstance(error, ValueError):
            raise error
    return peer


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_serves_any_message_or_refuses_it_and_forgets_all_of_it(
    clock: WallClock, tmp_path: Path, seed: int
) -> None:
    async def work() -> None:
        async with Servers(clock, tmp_path) as servers:
            server = servers.node.server
            peer = await bombard(servers, server, m.TO_NODE, node_server, seed)
            server._forget(b"fuzz")
            while peer.open_calls:
                await clock.sleep(1e-3)
            await servers.manager.quiesce()
            held = {name: n for name, n in servers.node.service.at_rest().items() if n}
            assert held == {}
            assert servers.node.carrier.granted == 0
            assert not servers.manager._reservations

    clock.run(work())


@pytest.mark.parametrize("seed", SEEDS)
def test_master_serves_any_message_or_refuses_it_and_forgets_all_of_it(
    clock: WallClock, tmp_path: Path, seed: int
) -> None:
    async def work() -> None:
        async with Servers(clock, tmp_path) as servers:
            server = servers.master.server
            peer = await bombard(servers, server, m.TO_MASTER, master_server, seed)
            while peer.open_calls:
                await clock.sleep(1e-3)
            server._forget(b"fuzz")
            assert servers.master.master is not None
            held = {name: n for name, n in servers.master.master.at_rest().items() if n}
            assert held == {}
            assert len(servers.master.master.table) == 0

    clock.run(work())


def test_a_node_that_is_nowhere_is_forgotten_and_told_to_try_again(
    clock: WallClock, tmp_path: Path
) -> None:
    async def work() -> None:
        async with Servers(clock, tmp_path) as servers:
            peer = servers.master.server.peers[b"liar"] = Peer(b"liar", "liar", os.getpid())
            announce = m.Announce(9, f"ipc://{tmp_path}/nowhere", 1, 1, 10)
            servers.master.catalog_timeout_s = 0.05
            assert await servers.master._announce(peer, announce) is False
            assert list(servers.master.mirrors) == [0]
            del servers.master.server.peers[b"liar"]

    clock.run(work())


def test_a_second_node_of_the_same_number_is_refused(clock: WallClock, tmp_path: Path) -> None:
    async def work() -> None:
        async with Servers(clock, tmp_path) as servers:
            peer = servers.master.server.peers[b"twin"] = Peer(b"twin", "twin", os.getpid())
            answer = await servers.master._announce(peer, m.Announce(0, "ipc:///x", 3, 1, 10))
            assert isinstance(answer, str)
            assert "node 0 is there already" in answer
            del servers.master.server.peers[b"twin"]

    clock.run(work())


@pytest.mark.parametrize(
    "body",
    [
        ["lookup", [1, 2], [b"short"], []],
        ["allocate", [1, 2], [KEYS[0]], 0, None, None],
        ["announce", 1 << 20, "x", 1, 1, 1],
    ],
)
def test_what_is_outside_of_its_range_is_no_message(body: list[Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        m.TO_MASTER.decoder().decode(msgspec.msgpack.encode(body))


@pytest.mark.parametrize("until_s", [float("nan"), float("inf"), -1.0])
def test_a_time_that_is_none_is_no_message(until_s: float) -> None:
    body = ["openstream", [1, 2], None, 1, [], until_s]
    with pytest.raises(msgspec.ValidationError):
        m.TO_NODE.decoder().decode(msgspec.msgpack.encode(body))


def test_tokens_of_an_earlier_process_commit_nothing(clock: WallClock, tmp_path: Path) -> None:
    async def work() -> None:
        async with Servers(clock, tmp_path) as servers:
            manager = servers.manager
            later = KvManager(
                clock,
                Fabric(clock, seed=2),
                manager.devices,
                segment_bytes=64 << 10,
                first_token=900,
            )
            (grant,) = later.reserve(KEYS[:1], BLOCK)
            assert not isinstance(grant, KeyResult)
            assert grant.token == 900
            assert later.commit([1]) == [KeyResult.LEASE_EXPIRED]
            later.abort([grant.token])

    clock.run(work())


def test_the_answers_of_a_node_are_what_its_clients_decode(
    clock: WallClock, tmp_path: Path
) -> None:
    async def work() -> None:
        async with Servers(clock, tmp_path) as servers:
            peer = Peer(b"x", "x", os.getpid())
            answers = servers.node._reserve(peer, m.Reserve((1, 1), list(KEYS[:2]), BLOCK, None))
            assert [type(answer) for answer in answers] == [m.GrantAnswer] * 2
            assert len({answer.rkey for answer in answers}) == 2
            assert np.diff([answer.address for answer in answers]).min() >= BLOCK
            servers.node.service.drop_client(1)
            assert not servers.manager._reservations

    clock.run(work())


def test_a_node_may_come_back_before_master_has_seen_the_end_of_its_process(
    clock: WallClock, tmp_path: Path
) -> None:
    """Master was stopped: the death and the new announcement wait for it together."""

    async def work() -> None:
        async with Servers(clock, tmp_path) as servers:
            server = servers.master.server
            process = end_of_process()
            dead = server.peers[b"dead"] = Peer(b"dead", "node 0", process.pid)
            server._watched[b"dead"] = os.pidfd_open(process.pid)
            process.wait()
            mirror = servers.master.mirrors[0]
            again, mirror.peer = mirror.peer, dead
            announce = m.Announce(0, servers.node.server.endpoint, 3, 1, 10)
            assert await servers.master._announce(again, announce) is True
            assert b"dead" not in server.peers
            assert servers.master.mirrors[0].epoch == 3

    clock.run(work())


def end_of_process() -> subprocess.Popen[bytes]:
    """Return a process that has ended and was not waited for yet."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process


def test_a_client_maps_a_nodes_memory_as_soon_as_the_node_tells_where_it_is(
    clock: WallClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node was stopped when it was asked for the first time, and is the same one later."""
    asked: list[int] = []
    tell = node_server._CALLS[m.OpenNode]

    def at_last(server: NodeServer, peer: Peer, body: Any) -> Any:
        asked.append(1)
        if len(asked) < 3:
            raise RuntimeError("not now")
        return tell(server, peer, body)

    monkeypatch.setitem(node_server._CALLS, m.OpenNode, at_last)

    async def work() -> None:
        async with Servers(clock, tmp_path) as servers:
            node = RemoteNode(clock, 0, servers.node.server.endpoint, NoCosts(), name="client")
            await node.attached()
            assert len(asked) == 3
            data = np.zeros(BLOCK, dtype=np.uint8)
            (region,) = servers.manager.regions
            done = await node.queue_pair.read(region.rkey, 0, data)
            assert done.status is not Status.LINK_DOWN
            await node.close()

    clock.run(work())

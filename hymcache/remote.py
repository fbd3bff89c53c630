"""Master and nodes in other processes, as a connector sees them (``services.py`` has the protocol).

A call that gets no answer within ``timeout_s`` raises ``ControlError``, and the connector makes a
miss of it. A node that was started anew answers with another epoch: its memory is mapped again, and
what was handed out before is refused by its rkeys.

Units: bytes, s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from cxlbench.emu.clock import Job, JobSet, WallClock
from cxlbench.emu.fabric_shared import (
    Done,
    GiveUp,
    GrantReply,
    PostRead,
    PostWrite,
    SharedQueuePair,
)
from cxlbench.emu.pipe import Pipe
from cxlbench.emu.status import DeviceError, HostLimitError, Status
from cxlbench.emu.wire import Welcome, WireClient, WireError
from cxlbench.hymcache import messages as m
from cxlbench.hymcache.control import ControlError, SoftwareCosts
from cxlbench.hymcache.kv_manager import Grant
from cxlbench.hymcache.master import AllocateReply, LookupReply, RemoteBlock
from cxlbench.hymcache.node_service import Name, StreamOpened
from cxlbench.kv.results import KeyResult

_LOOKUP = msgspec.msgpack.Decoder(m.LookupAnswer)
_ALLOCATE = msgspec.msgpack.Decoder(m.AllocateAnswer)
_RESULTS = msgspec.msgpack.Decoder(list[KeyResult])
_DIRECTORY = msgspec.msgpack.Decoder(list[m.NodeEntry])
_MEMORY = msgspec.msgpack.Decoder(m.NodeMemory)
_STREAM = msgspec.msgpack.Decoder(m.StreamAnswer)
_STATUS = msgspec.msgpack.Decoder(Status)
_GRANT = msgspec.msgpack.Decoder(GrantReply)
_RESERVED = msgspec.msgpack.Decoder(list[list[int] | str])
ATTACH_EVERY_S = 0.1
FIGURES = msgspec.msgpack.Decoder(dict[str, int | float | str])


class RemoteMaster:
    """Master in another process."""

    def __init__(
        self,
        clock: WallClock,
        endpoint: str,
        costs: SoftwareCosts,
        *,
        member: int,
        name: str,
        timeout_s: float = 1.0,
    ) -> None:
        self.member = member
        self.costs = costs
        self.wire = WireClient(
            clock,
            endpoint,
            sends=m.TO_MASTER,
            name=name,
            half_s=costs.control_round_trip / 2,
            timeout_s=timeout_s,
        )

    async def _call(
        self, body: Any, decoder: msgspec.msgpack.Decoder[Any], serve_s: float = 0.0
    ) -> Any:
        try:
            return await self.wire.call(body, decoder, serve_s=serve_s)
        except WireError as error:
            raise ControlError(str(error)) from error

    async def lookup(
        self, reader: Name, keys: Sequence[bytes], *, used: Sequence[bytes]
    ) -> LookupReply:
        """Return descriptors of the READY keys, under the lease of ``reader``."""
        answer = await self._call(
            m.Lookup(reader, list(keys), list(used)),
            _LOOKUP,
            self.costs.lookup_call + self.costs.lookup_key * len(keys),
        )
        blocks = [
            None if place is None else RemoteBlock.of(key, place)
            for key, place in zip(keys, answer.places, strict=True)
        ]
        return LookupReply(tuple(blocks), answer.until_s)

    async def allocate(
        self,
        ticket: Name,
        keys: Sequence[bytes],
        size_bytes: int,
        *,
        near: tuple[int, int] | None,
        after: bytes | None,
    ) -> AllocateReply:
        """Choose the node for new blocks and mark their keys WRITING under ``ticket``."""
        answer = await self._call(
            m.Allocate(ticket, list(keys), size_bytes, near, after),
            _ALLOCATE,
            self.costs.lookup_call + self.costs.lookup_key * len(keys),
        )
        return AllocateReply(answer.node, answer.device, tuple(answer.refusals), ticket)

    async def register(
        self, ticket: Name, blocks: Sequence[RemoteBlock], *, chain: Sequence[bytes]
    ) -> list[KeyResult]:
        """Make committed blocks READY."""
        body = m.Register(
            ticket, [block.key for block in blocks], [block.place for block in blocks], list(chain)
        )
        results: list[KeyResult] = await self._call(
            body, _RESULTS, self.costs.register * len(blocks)
        )
        return results

    def abort(self, ticket: Name) -> None:
        """Give up what is still WRITING under a ticket."""
        self.wire.post(m.AbortTicket(ticket))

    def release(self, reader: Name) -> None:
        """End a lease."""
        self.wire.post(m.Release(reader))

    def touch(self, chain: Sequence[bytes]) -> None:
        """Note that a chain is in use."""
        self.wire.post(m.Touch(list(chain)))

    def gone(self, node: int, key: bytes, generation: int) -> None:
        """Tell that an object's bytes are not what they must be."""
        self.wire.post(m.Gone(node, key, generation))

    async def delivered(self) -> None:
        """Nothing to wait for: messages arrive in their order, and the server outlives us."""

    async def directory(self) -> list[m.NodeEntry]:
        """Return where the nodes serve that are up."""
        entries: list[m.NodeEntry] = await self._call(m.Directory(), _DIRECTORY)
        return entries

    async def close(self) -> None:
        """Close the connection."""
        await self.wire.close()


class RemoteNode:
    """A node in another process."""

    def __init__(
        self,
        clock: WallClock,
        node: int,
        endpoint: str,
        costs: SoftwareCosts,
        *,
        name: str,
        path: Sequence[Pipe] = (),
        write_path: Sequence[Pipe] = (),
        latency_s: float = 0.0,
        timeout_s: float = 1.0,
        deadline_s: float = 10.0,
    ) -> None:
        self.clock = clock
        self.node = node
        self.costs = costs
        self.deadline_s = deadline_s
        self.queue_pair = SharedQueuePair(
            clock,
            self,
            path=path,
            write_path=write_path,
            latency_s=latency_s,
            read_deadline_s=deadline_s,
        )
        self._jobs = JobSet(clock)
        self._attaching: Job[None] | None = None
        self.wire = WireClient(
            clock,
            endpoint,
            sends=m.TO_NODE,
            name=name,
            half_s=costs.control_round_trip / 2,
            timeout_s=timeout_s,
            on_epoch=self._attach_soon,
        )

    def _attach_soon(self, _: Welcome) -> None:
        self.queue_pair.detach()
        if self._attaching is not None:
            self._attaching.cancel()
        self._attaching = self._jobs.spawn(self._attach())

    async def _attach(self) -> None:
        """Map the node's memory, as soon as it tells where it is."""
        while True:
            with contextlib.suppress(WireError, HostLimitError, OSError):
                memory = await self.wire.call(m.OpenNode(), _MEMORY)
                self.queue_pair.attach(memory.arenas, memory.table)
                return
            # It was stopped, or is dead and its successor will welcome us.
            await self.clock.sleep_until(self.clock.real() + ATTACH_EVERY_S)

    async def attached(self) -> None:
        """Wait until the node's memory is mapped, as far as the node answers at all."""
        with contextlib.suppress(ControlError):
            await self._call(m.AskStatus(), FIGURES)
            if self._attaching is not None:
                await self._attaching.ended()

    async def _call(
        self,
        body: Any,
        decoder: msgspec.msgpack.Decoder[Any],
        serve_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Any:
        try:
            return await self.wire.call(body, decoder, serve_s=serve_s, timeout_s=timeout_s)
        except WireError as error:
            raise ControlError(str(error)) from error

    async def open_stream(
        self,
        name: Name,
        request_id: int,
        keys: Sequence[bytes],
        *,
        until_s: float,
        onto: Name | None = None,
    ) -> StreamOpened:
        """Tell the node what will be read, in this order."""
        body = m.OpenStream(name, onto, request_id, list(keys), until_s)
        answer = await self._call(body, _STREAM, self.costs.prefetch_issue)
        return StreamOpened(answer.start, answer.objects, tuple(answer.rkeys), tuple(answer.staged))

    async def token(self, name: Name, position: int, *, staged: bool) -> None:
        """Wait for a read token; raise ``DeviceError`` if it will not come."""
        try:
            status = await self.wire.call(
                m.Token(name, position), _STATUS, timeout_s=self.deadline_s
            )
        except WireError as error:
            raise DeviceError(Status.LINK_DOWN, str(error)) from error
        if status is not Status.OK:
            raise DeviceError(status, f"node {self.node} gives no token")

    def consumed(self, name: Name, position: int, *, staged: bool) -> None:
        """Give a read token back."""
        cost_s = self.costs.release + (self.costs.prefetch_issue if staged else 0.0)
        self.wire.post(m.Consumed(name, position), serve_s=cost_s)

    def close_stream(self, name: Name) -> None:
        """Give a stream back."""
        self.wire.post(m.CloseStream(name), serve_s=self.costs.release)

    async def reserve(
        self, name: Name, keys: Sequence[bytes], size_bytes: int, *, device: int | None
    ) -> list[Grant | KeyResult]:
        """Ask for leave to write a batch."""
        answers = await self._call(
            m.Reserve(name, list(keys), size_bytes, device),
            _RESERVED,
            self.costs.reserve * len(keys),
        )
        granted: list[Grant | KeyResult] = []
        for key, answer in zip(keys, answers, strict=True):
            if isinstance(answer, str):
                granted.append(KeyResult(answer))
            else:
                token, rkey, address, generation, device_number = answer
                granted.append(Grant(token, key, rkey, address, generation, device_number))
        return granted

    async def commit(self, tokens: Sequence[int]) -> list[KeyResult]:
        """Tell that the bytes are in place."""
        results: list[KeyResult] = await self._call(
            m.Commit(list(tokens)), _RESULTS, self.costs.commit * len(tokens)
        )
        return results

    def abort(self, name: Name) -> None:
        """Give back what a batch still holds."""
        self.wire.post(m.AbortBatch(name))

    async def delivered(self) -> None:
        """Nothing to wait for: messages arrive in their order, and the server outlives us."""

    # -- the data path's messages ---------------------------------------------------------------

    async def post_read(self, post: PostRead) -> GrantReply:
        """Ask for a READ."""
        return await self.wire.call(post, _GRANT, timeout_s=self.deadline_s)

    async def post_write(self, post: PostWrite) -> GrantReply:
        """Ask for a WRITE."""
        return await self.wire.call(post, _GRANT)

    async def landed(self, done: Done) -> Status:
        """Say that a WRITE has landed."""
        return await self.wire.call(done, _STATUS)

    def done(self, done: Done) -> None:
        """Say that an operation is over."""
        self.wire.post(done)

    def give_up(self, given_up: GiveUp) -> None:
        """Say that an answer that did not come will not be used."""
        self.wire.post(given_up)

    async def close(self) -> None:
        """Close the connection and unmap the memory."""
        await self._jobs.cancel()
        await self.wire.close()
        self.queue_pair.detach()

"""What a node does for its clients: KV Manager's calls, with names that the clients choose.

Whatever a node hands out (a stream with its read tokens, a batch of write grants) is asked for
under a name, ``(member, serial)``, that the client made up. So a client that never sees the answer
can give the thing back all the same, and everything of a client that died can be found. Used by
both carriers of control messages: calls inside one process, and sockets between several.

Units: bytes, s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cxlbench.emu.status import DeviceError, Status
from cxlbench.hymcache.kv_manager import Grant, KvManager
from cxlbench.hymcache.prefetch_window import ReadStream
from cxlbench.kv.results import KeyResult

Name: TypeAlias = tuple[int, int]
"""The client's number at Master, and a serial that the client counts up."""


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """What a client is told of a stream: which of its candidates are here, and how to read them."""

    start: int
    """Position of the first of them, behind what the stream had before."""
    objects: int
    rkeys: tuple[int, ...]
    """Per device of the node."""
    staged: tuple[bool, ...]
    """Per device: whether a read token announces that an object has been staged."""


class NodeService:
    """The server's side of one node."""

    def __init__(self, manager: KvManager) -> None:
        self.manager = manager
        self._streams: dict[Name, ReadStream] = {}
        self._batches: dict[Name, list[int]] = {}

    @property
    def node(self) -> int:
        """The node's number."""
        return self.manager.node

    # -- reads ----------------------------------------------------------------------------------

    def open_stream(
        self,
        name: Name,
        request_id: int,
        keys: Sequence[bytes],
        *,
        until_s: float,
        onto: Name | None = None,
    ) -> StreamOpened:
        """Match ``keys`` against the node's index, and start prefetching the hits.

        The stream ``onto``, if it is here and open, goes on with them, within the same windows:
        then both names are of the same stream.
        """
        manager = self.manager
        earlier = None if onto is None else self._streams.get(onto)
        if earlier is not None and earlier.closed:
            earlier = None
        start = 0 if earlier is None else len(earlier)
        if name != onto:
            self.close_stream(name)
        stream = manager.open_stream(request_id, keys, until_s=until_s, onto=earlier)
        self._streams[name] = stream
        return StreamOpened(
            start,
            len(stream) - start,
            tuple(region.rkey for region in manager.regions),
            tuple(manager.prefetcher.stages(n) for n in range(manager.device_count)),
        )

    async def token(self, name: Name, position: int) -> None:
        """Wait for the read token of an object; raise ``DeviceError`` if it will not come."""
        stream = self._streams.get(name)
        if stream is None:
            raise DeviceError(Status.FLUSHED, "the stream is closed")
        if position >= len(stream):
            raise DeviceError(Status.BOUNDS, f"object {position} of a stream of {len(stream)}")
        await stream.ready(position)

    def consumed(self, name: Name, position: int) -> None:
        """Take a read token back."""
        stream = self._streams.get(name)
        if stream is not None and position < len(stream):
            stream.consumed(position)

    def close_stream(self, name: Name) -> None:
        """Give back what a stream holds; unknown ones are no error."""
        stream = self._streams.pop(name, None)
        if stream is not None:
            stream.close()

    # -- writes ---------------------------------------------------------------------------------

    def reserve(
        self, name: Name, keys: Sequence[bytes], size_bytes: int, *, device: int | None
    ) -> list[Grant | KeyResult]:
        """Reserve buffer and extent for each key of a batch, heads first."""
        if device is not None and device >= self.manager.device_count:
            return [KeyResult.ERROR] * len(keys)
        answers = self.manager.reserve(keys, size_bytes, device=device)
        tokens = [answer.token for answer in answers if isinstance(answer, Grant)]
        if tokens:
            self._batches.setdefault(name, []).extend(tokens)
        return answers

    def commit(self, tokens: Sequence[int]) -> list[KeyResult]:
        """Note that all bytes of the objects are in place."""
        return self.manager.commit(tokens)

    def abort(self, name: Name) -> None:
        """Take back what a batch still holds; what is published stays. Ends the batch."""
        self.manager.abort(self._batches.pop(name, ()))

    # -- clients that end -----------------------------------------------------------------------

    def drop_client(self, member: int) -> None:
        """Give back everything that a client held."""
        for name in [name for name in self._streams if name[0] == member]:
            self.close_stream(name)
        for name in [name for name in self._batches if name[0] == member]:
            self.abort(name)

    def at_rest(self) -> dict[str, int]:
        """Count what is held for somebody."""
        return {**self.manager.at_rest(), "write batches": len(self._batches)}

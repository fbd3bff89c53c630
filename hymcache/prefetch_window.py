"""Prefetch windows and read tokens (HyMCache §4.2).

Each request that reads from a node has a *stream* there: its matched objects in the order in which
the worker will read them. Per device, at most a *window* of them is staged ahead of the worker:

    window = min(hits, max(2, 128 MiB // object size))

so 8 objects of 16 MB, 4 of 32 MB, double buffering for larger ones, and fewer when there are fewer
hits. A staged object is announced by its *read token*; the worker gives the token back when it has
consumed the object, the staging is released, and the next one is issued. The device refuses when
its depth or frames are used up; refused streams wait in line, and each release lets them issue one
object at a time in turn (round-robin over requests), so none is starved.

Who holds tokens may be slow to read, or never read. So a worker that waits for an object while none
of its stream's tokens is being read gets leave to read that object unstaged, one at a time: a
demand miss, for which the device keeps frames back. Objects that the worker passes over give their
tokens back.

Everything a stream holds comes back on consumption, close (abort, timeout, disconnect), error, or
when the lease under which it was opened ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from cxlbench.emu.clock import Clock
from cxlbench.emu.fabric import PrefetchRequest
from cxlbench.emu.status import DeviceError, Status
from cxlbench.emu.sync import Signal
from cxlbench.kv.device import MemoryDevice

if TYPE_CHECKING:
    import asyncio

    from cxlbench.hymcache.kv_manager import StoredObject


def prefetch_window(hits: int, size_bytes: int, window_bytes: int) -> int:
    """Return how many objects of ``size_bytes`` a request may have staged on one device."""
    return min(hits, max(2, window_bytes // max(size_bytes, 1)))


class Node(Protocol):
    """What the scheduler needs of the KV Manager that owns it."""

    devices: tuple[MemoryDevice, ...]
    bases: tuple[int, ...]

    def unpin(self, stored: StoredObject) -> None:
        """Take back the pin of a stream."""


class _Lane:
    """One stream's objects on one device, and how far it has got."""

    __slots__ = ("asked", "device", "held", "next", "queued", "reading", "stream", "todo", "window")

    def __init__(self, stream: ReadStream, device: int) -> None:
        self.stream = stream
        self.device = device
        self.todo: list[int] = []
        self.window = 0
        self.next = 0
        self.held = 0
        self.reading = 0
        """Objects that may be read and that the worker asked for."""
        self.asked: deque[int] = deque()
        """Positions that the worker waits for and that may not be read yet."""
        self.queued = False

    @property
    def wants(self) -> bool:
        return self.next < len(self.todo) and self.held < self.window and not self.stream.closed


class ReadStream:
    """One request's objects on one node, in reading order."""

    def __init__(self, scheduler: PrefetchScheduler, request_id: int) -> None:
        self.request_id = request_id
        self.objects: list[StoredObject] = []
        self.closed = False
        self.first_issue_s: float | None = None
        """When the first prefetch of this stream was issued."""
        self.lanes: dict[int, _Lane] = {}
        self._scheduler = scheduler
        self._requests: list[PrefetchRequest | None] = []
        self._staging: list[Signal[bool] | None] = []
        self._asked = bytearray()
        self._done = bytearray()
        self._passed = 0
        self._alarm: asyncio.Handle | None = None

    def __len__(self) -> int:
        """Objects matched."""
        return len(self.objects)

    def append(self, stored: StoredObject, staging: Signal[bool] | None) -> int:
        """Add an object behind the others; return its position."""
        self.objects.append(stored)
        self._requests.append(None)
        self._staging.append(staging)
        self._asked.append(0)
        self._done.append(0)
        return len(self.objects) - 1

    async def ready(self, position: int) -> StoredObject:
        """Wait until the object may be read: staged, or at once where the device has no staging.

        Raises ``DeviceError`` if staging failed or the stream was closed.
        """
        if self.closed:
            raise DeviceError(Status.FLUSHED, "the stream is closed")
        while self._passed < position:
            if not self._asked[self._passed]:
                self.consumed(self._passed)
            self._passed += 1
        again, self._asked[position] = self._asked[position], 1
        signal = self._staging[position]
        if signal is not None:
            if not again:
                self._scheduler.ask(self, position, signal)
            if not await signal.wait():
                raise DeviceError(Status.FLUSHED, "the stream is closed")
            request = self._requests[position]
            if request is not None:
                await self._scheduler.device_of(self, position).chm_prefetch_wait(request)
        return self.objects[position]

    def consumed(self, position: int) -> None:
        """Take the read token of ``position`` back: release its staging, issue the next one."""
        if self._done[position]:
            return
        self._done[position] = 1
        self._scheduler.release(self, position)

    def close(self) -> None:
        """Give everything back. Reads in flight keep their own pins on the device."""
        if self.closed:
            return
        self.closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        self._scheduler.close_stream(self)
        for position in range(len(self.objects)):
            self.consumed(position)
            signal = self._staging[position]
            if signal is not None:
                signal.set(False)
        self._scheduler.forget(self)


class PrefetchScheduler:
    """Issues prefetches for all streams of a node, in turn, within each stream's windows."""

    def __init__(self, clock: Clock, node: Node, *, window_bytes: int, enabled: bool) -> None:
        self.clock = clock
        self.window_bytes = window_bytes
        self.enabled = enabled
        self.issued = 0
        self.unstaged = 0
        """Objects that were read without staging because the device had no room for them."""
        self._node = node
        self._streams: set[ReadStream] = set()
        self._line: list[deque[_Lane]] = [deque() for _ in node.devices]
        self._held = [0 for _ in node.devices]
        for number, device in enumerate(node.devices):
            device.on_frames_free = self._pump_of(number)

    def stages(self, device: int | None = None) -> bool:
        """Whether objects of a device (None: of any) are staged before they are read."""
        devices = self._node.devices if device is None else (self._node.devices[device],)
        return self.enabled and any(d.prefetch_depth for d in devices)

    def device_of(self, stream: ReadStream, position: int) -> MemoryDevice:
        """Return the device that holds an object of a stream."""
        return self._node.devices[stream.objects[position].device]

    def open(
        self, request_id: int, objects: Sequence[StoredObject], *, until_s: float | None = None
    ) -> ReadStream:
        """Open a stream over matched (and pinned) objects and start its windows.

        At ``until_s``, the end of the lease, it is closed, whether or not its reader still lives.
        """
        stream = ReadStream(self, request_id)
        self._streams.add(stream)
        self.extend(stream, objects, until_s=until_s)
        return stream

    def extend(
        self, stream: ReadStream, objects: Sequence[StoredObject], *, until_s: float | None = None
    ) -> None:
        """Let an open stream go on with more objects, within the windows that it has."""
        if until_s is not None:
            if stream._alarm is not None:
                stream._alarm.cancel()
            stream._alarm = self.clock.call_at(until_s, stream.close)
        for stored in objects:
            device = stored.device
            if not self.stages(device):
                stream.append(stored, None)
                continue
            if device not in stream.lanes:
                stream.lanes[device] = _Lane(stream, device)
            stream.lanes[device].todo.append(stream.append(stored, Signal(self.clock)))
        for device, lane in stream.lanes.items():
            size = max(stream.objects[position].size_bytes for position in lane.todo)
            lane.window = prefetch_window(len(lane.todo), size, self.window_bytes)
            self._enqueue(lane)
            self._pump(device)

    def ask(self, stream: ReadStream, position: int, signal: Signal[bool]) -> None:
        """Note that the worker wants to read ``position``, for the first time."""
        lane = stream.lanes[stream.objects[position].device]
        if stream._done[position]:
            signal.set(True)  # it was passed over; its staging is gone
        elif signal.is_set():
            lane.reading += 1
        else:
            lane.asked.append(position)
            self._read_unstaged(lane)

    def _read_unstaged(self, lane: _Lane) -> None:
        """Let the worker go on without staging if nothing that it reads would free any."""
        if lane.asked and not lane.reading and not lane.stream.closed:
            self.unstaged += 1
            self._allow(lane, lane.asked[0])

    def _allow(self, lane: _Lane, position: int) -> None:
        """Announce that ``position`` may be read."""
        signal = lane.stream._staging[position]
        assert signal is not None
        signal.set(True)
        if lane.stream._asked[position]:
            lane.asked.remove(position)
            lane.reading += 1

    def _enqueue(self, lane: _Lane) -> None:
        if lane.wants and not lane.queued:
            lane.queued = True
            self._line[lane.device].append(lane)

    def _pump_of(self, device: int) -> Callable[[], None]:
        return lambda: self._pump(device)

    def _pump(self, device: int) -> None:
        """Let lanes issue one object each, in turn, until the device refuses."""
        line = self._line[device]
        refused = 0
        while len(line) > refused:
            lane = line[0]
            if not lane.wants:
                line.popleft()
                lane.queued = False
                continue
            if self._issue(lane):
                refused = 0
            elif self._held[device]:
                return  # it keeps its place; the next release is for it
            else:
                refused += 1  # no release of ours will make room for it: others may go first
            line.rotate(-1)

    def _issue(self, lane: _Lane) -> bool:
        """Issue the lane's next object; False if the device has no room for it now."""
        stream = lane.stream
        position = lane.todo[lane.next]
        stored = stream.objects[position]
        signal = stream._staging[position]
        assert signal is not None
        if not stream._done[position] and not signal.is_set():
            local = stored.address - self._node.bases[lane.device]
            request = self._node.devices[lane.device].chm_prefetch_object(local, stored.size_bytes)
            if request is None:
                return False
            stream._requests[position] = request
            lane.held += 1
            self._held[lane.device] += 1
            self.issued += 1
            if stream.first_issue_s is None:
                stream.first_issue_s = self.clock.now()
            self._allow(lane, position)
        lane.next += 1
        return True

    def release(self, stream: ReadStream, position: int) -> None:
        """Release one object's staging and pin, and let the line move on."""
        stored = stream.objects[position]
        request = stream._requests[position]
        lane = stream.lanes.get(stored.device)
        if lane is not None and stream._asked[position]:
            if position in lane.asked:
                lane.asked.remove(position)
            else:
                lane.reading -= 1
        if request is not None:
            assert lane is not None
            stream._requests[position] = None
            lane.held -= 1
            self._held[lane.device] -= 1
            self._enqueue(lane)
            self._node.devices[stored.device].chm_prefetch_release(request)
        self._node.unpin(stored)
        if lane is not None:
            if request is not None:
                self._pump(stored.device)
            self._read_unstaged(lane)

    def close_stream(self, stream: ReadStream) -> None:
        """Take a stream out of the line, before its tokens come back."""
        for lane in stream.lanes.values():
            if lane.queued:
                self._line[lane.device].remove(lane)
                lane.queued = False

    def forget(self, stream: ReadStream) -> None:
        """Drop a stream that has given everything back."""
        self._streams.discard(stream)
        for device in stream.lanes:
            self._pump(device)  # what the device refused may have been this stream's

    def at_rest(self) -> dict[str, int]:
        """Count open streams and read tokens that are out."""
        tokens = sum(
            request is not None for stream in self._streams for request in stream._requests
        )
        return {"streams": len(self._streams), "read tokens": tokens}

    def close(self) -> None:
        """Close every stream."""
        for stream in list(self._streams):
            stream.close()

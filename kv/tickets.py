"""The half of a connector that does not depend on the tier: tickets, completions, what is refused.

``TicketDesk`` runs the work behind a ticket and sees to it that the ticket ends with the work,
whatever becomes of that. The ``check_*`` functions refuse the calls that the contract refuses
(``kv/connector.py``), in the same words for every tier. Units: bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from cxlbench.emu.clock import Clock, Job, JobSet
from cxlbench.emu.memory import Buffer
from cxlbench.emu.sync import Signal
from cxlbench.kv.connector import Completion, Ticket, Work
from cxlbench.kv.results import KeyResult


class GpuCopy(Protocol):
    """Copies to and from the GPU, as far as they take time."""

    async def copy(self, nbytes: int) -> None:
        """Wait until ``nbytes`` are copied."""


class OpenRequest(Protocol):
    """What the checks need of a request: whether its lookup has ended."""

    looked_up: bool


Request = TypeVar("Request", bound=OpenRequest)


class TicketDesk:
    """The open tickets of one connector, and the completions that nobody has polled yet."""

    def __init__(self, clock: Clock, jobs: JobSet) -> None:
        self.closed = False
        """Whether no ticket is opened any more."""
        self._clock = clock
        self._jobs = jobs
        self._open: set[Ticket] = set()
        self._ended: deque[Completion] = deque()

    def __len__(self) -> int:
        """Tickets that have not ended."""
        return len(self._open)

    def open(self, request_id: int, work: Work) -> Ticket:
        """Open a ticket. Raises ``RuntimeError`` if the connector is closed."""
        if self.closed:
            raise RuntimeError("the connector is closed")
        ticket = Ticket(request_id, work, Signal(self._clock))
        self._open.add(ticket)
        return ticket

    def run(
        self, ticket: Ticket, results: list[KeyResult], work: Coroutine[Any, Any, None]
    ) -> Job[None]:
        """Run ``work``, which fills ``results``; the ticket ends with it, whatever happens."""

        async def run() -> None:
            try:
                await work
            finally:
                self._end(ticket, results)

        def ended(_: object) -> None:
            work.close()  # a task that is cancelled before its first step never gets there
            self._end(ticket, results)

        job = self._jobs.spawn(run())
        job.add_done_callback(ended)
        return job

    def _end(self, ticket: Ticket, results: Sequence[KeyResult]) -> None:
        if ticket not in self._open:
            return
        self._open.discard(ticket)
        completion = Completion(ticket.request_id, ticket.work, tuple(results))
        self._ended.append(completion)
        ticket.done.set(completion)

    def poll(self) -> list[Completion]:
        """Return the completions since the last call."""
        ended = list(self._ended)
        self._ended.clear()
        return ended


def check_lookup(
    requests: Container[int], request_id: int, keys: Sequence[bytes], matched: int
) -> None:
    """Refuse a second lookup of an open request, and more matched blocks than there are."""
    if request_id in requests:
        raise ValueError(f"request {request_id} is open already; release it first")
    if not 0 <= matched <= len(keys):
        raise ValueError(f"matched must be within 0..{len(keys)}, got {matched}")


def check_load(
    request: Request | None,
    request_id: int,
    keys: Sequence[bytes],
    buffers: Sequence[Buffer],
    check_size: Callable[[int], None],
) -> Request:
    """Return the request; refuse a load without a lookup that has ended, or of wrong sizes."""
    _check_buffers(keys, buffers)
    if request is None:
        raise ValueError(f"request {request_id} has no lookup, or was released")
    if not request.looked_up:
        raise ValueError(f"the lookup of request {request_id} has not ended; wait for it")
    for buffer in buffers:
        check_size(buffer.nbytes)
    return request


def check_store(
    keys: Sequence[bytes], buffers: Sequence[Buffer], check_size: Callable[[int], None]
) -> None:
    """Refuse a store of blocks of several sizes, or of wrong ones."""
    _check_buffers(keys, buffers)
    sizes = {buffer.nbytes for buffer in buffers}
    if len(sizes) > 1:
        raise ValueError(f"the blocks of one store have one size, got {sorted(sizes)}")
    for size in sizes:
        check_size(size)


def _check_buffers(keys: Sequence[bytes], buffers: Sequence[Buffer]) -> None:
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys need as many buffers, got {len(buffers)}")

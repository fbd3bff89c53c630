"""Control messages between the parts of HyMCache, with their cost (calls, inside one process).

A call travels half a round trip, is served for the profiled time, and its answer travels the other
half. A one-way message takes effect when it has been served. Calls are served side by side, without
a queue. Both clocks charge the same. An injected ``control`` fault ends the call in
``ControlError``: before the callee saw it, as far as the caller can tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from cxlbench.emu.clock import Clock
from cxlbench.emu.faults import FaultPlan

T = TypeVar("T")


class ControlError(Exception):
    """A control call could not be made: the other side is down or unreachable."""


class SoftwareCosts(Protocol):
    """What software steps cost, s (a software profile)."""

    @property
    def lookup_call(self) -> float:
        """Fixed part of one batch lookup at Master."""

    @property
    def lookup_key(self) -> float:
        """Part of a batch lookup per key."""

    @property
    def reserve(self) -> float:
        """Reserve one extent and its buffer."""

    @property
    def commit(self) -> float:
        """Commit one object."""

    @property
    def register(self) -> float:
        """Register one object at Master."""

    @property
    def prefetch_issue(self) -> float:
        """Issue one prefetch to the device."""

    @property
    def release(self) -> float:
        """Take back what was handed out: a read token, a stream, a lease."""

    @property
    def control_round_trip(self) -> float:
        """One message and its answer."""


@dataclass(frozen=True, slots=True)
class NoCosts:
    """Free software: for tests of logic, and for measuring the data path alone."""

    lookup_call: float = 0.0
    lookup_key: float = 0.0
    reserve: float = 0.0
    commit: float = 0.0
    register: float = 0.0
    prefetch_issue: float = 0.0
    release: float = 0.0
    control_round_trip: float = 0.0


class ControlPlane:
    """Carries calls between connector, Master and nodes in one process."""

    def __init__(
        self, clock: Clock, costs: SoftwareCosts | None = None, *, faults: FaultPlan | None = None
    ) -> None:
        self.clock = clock
        self.costs: SoftwareCosts = costs or NoCosts()
        self.faults = faults or FaultPlan.none()
        self.half_s = self.costs.control_round_trip / 2
        self.calls = 0
        self._last_s = 0.0
        """When the last of the one-way messages sent so far takes effect."""

    async def call(self, peer: str, serve_s: float, work: Callable[[], T]) -> T:
        """Run ``work`` at ``peer`` and return its answer; ``serve_s`` is what serving costs."""
        self.calls += 1
        fault = self.faults.draw("control", peer)
        if fault is not None:
            if fault.kind == "down":
                await self.clock.sleep(self.costs.control_round_trip)
                raise ControlError(f"{peer} does not answer")
            await self.clock.sleep(fault.delay_s)
        if self.half_s or serve_s:
            await self.clock.sleep(self.half_s + serve_s)
        answer = work()
        if self.half_s:
            await self.clock.sleep(self.half_s)
        return answer

    def post(self, work: Callable[[], object], serve_s: float = 0.0) -> None:
        """Send a one-way message: ``work`` runs half a round trip and ``serve_s`` from now."""
        self.calls += 1
        delay_s = self.half_s + serve_s
        if delay_s:
            due_s = self.clock.now() + delay_s
            self._last_s = max(self._last_s, due_s)
            self.clock.call_at(due_s, work)
        else:
            work()

    async def delivered(self) -> None:
        """Wait until all one-way messages sent so far have taken effect."""
        await self.clock.sleep_until(max(self._last_s, self.clock.now()))

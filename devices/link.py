"""A link between hosts: a network port or a path through a CXL switch, full duplex.

Each direction is a pipe of its own. A message (payload and trailer of one READ or WRITE) occupies
its direction for its bytes and, beside them, for ``message_overhead``. ``latency_s`` and
``outstanding_reads`` are no matter of the wire: queue pairs (``emu/fabric.py``) add the one to each
operation and keep to the other. Units: bytes, s. Left out: the request that a READ sends the other
way, congestion, loss.
"""

from __future__ import annotations

from cxlbench.devices.profile_kinds import LinkProfile
from cxlbench.emu.clock import Clock
from cxlbench.emu.pipe import Pipe, Reservation


class LinkPipe(Pipe):
    """One direction of a link."""

    def __init__(self, clock: Clock, profile: LinkProfile, *, name: str) -> None:
        super().__init__(clock, name, profile.bandwidth)
        self._overhead_s = profile.message_overhead

    def reserve(
        self, nbytes: int, *, priority: int = 0, cost_s: float | None = None
    ) -> Reservation:
        """Book one message of ``nbytes``."""
        cost = nbytes / self.bytes_per_s if cost_s is None else cost_s
        return super().reserve(nbytes, priority=priority, cost_s=cost + self._overhead_s)


class Link:
    """Both directions: ``tx`` leaves the host that the link is named for, ``rx`` comes in."""

    def __init__(self, clock: Clock, profile: LinkProfile, *, name: str) -> None:
        self.tx = LinkPipe(clock, profile, name=f"{name}.tx")
        self.rx = LinkPipe(clock, profile, name=f"{name}.rx")
        self.latency_s = profile.latency
        self.outstanding_reads = profile.outstanding_reads

"""How a prompt's KV gets from the prefill server to the decode server (P→D).

*Over a link*: the prefill server's port and the decode server's port carry all KV of the prompt;
the decode server's is shared by all who send to it. After prefill, or layer by layer: then all but
the last layer is sent while the prompt is computed. ``path`` says which copies there are: straight
between GPUs, through host memory with the copies overlapped, or through host memory one step after
the other.

*Through the tier*: the prefill server publishes its new blocks, the decode server reads all blocks
of the prompt from the tier, and computes what was not there (TraCT: no central server, no network).

Units: bytes, s. Left out: a transfer that starts before the decode server has blocks for it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from cxlbench.devices.copy_engine import CopyEngine
from cxlbench.devices.link import Link
from cxlbench.devices.profile import CopyEngineProfile, LinkProfile
from cxlbench.emu.clock import Clock
from cxlbench.emu.pipe import Pipe, Reservation, finished


class Path(enum.StrEnum):
    """The copies between two GPUs."""

    GPU_DIRECT = "gpu-direct"
    HOST_OVERLAPPED = "host-overlapped"
    HOST_SERIAL = "host-serial"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkHandoverSpec:
    """A P→D network."""

    prefill_link: LinkProfile
    decode_link: LinkProfile
    copy_engine: CopyEngineProfile
    path: Path = Path.GPU_DIRECT
    layerwise: bool = False
    layers: int = 1


class LinkHandover:
    """Ports of all servers, and transfers over them."""

    def __init__(self, clock: Clock, spec: LinkHandoverSpec, *, prefill: int, decode: int) -> None:
        self.clock = clock
        self.spec = spec
        self._out = [Link(clock, spec.prefill_link, name=f"prefill{n}.pd") for n in range(prefill)]
        self._in = [Link(clock, spec.decode_link, name=f"decode{n}.pd") for n in range(decode)]
        self._copies_out = [
            CopyEngine(clock, spec.copy_engine, name=f"prefill{n}.pd-copy") for n in range(prefill)
        ]
        self._copies_in = [
            CopyEngine(clock, spec.copy_engine, name=f"decode{n}.pd-copy") for n in range(decode)
        ]
        self.moved_bytes = 0
        self.ports_out: list[Pipe] = [link.tx for link in self._out]
        self.ports_in: list[Pipe] = [link.rx for link in self._in]
        self.pipes: list[Pipe] = self.ports_out + self.ports_in
        self.pipes += [copy.pipe for copy in self._copies_out + self._copies_in]

    def early_bytes(self, nbytes: int) -> int:
        """Return how much of a prompt's KV may be sent while the prompt is computed."""
        spec = self.spec
        return nbytes - nbytes // spec.layers if spec.layerwise else 0

    async def send(self, source: int, target: int, nbytes: int) -> None:
        """Move ``nbytes`` from a prefill server's GPU to a decode server's."""
        if nbytes <= 0:
            return
        self.moved_bytes += nbytes
        out, inward = self._out[source], self._in[target]
        wire = [(out.tx, nbytes), (inward.rx, nbytes)]
        latency_s = out.latency_s + inward.latency_s
        copies = [self._copies_out[source].pipe, self._copies_in[target].pipe]
        if self.spec.path is Path.GPU_DIRECT:
            await self._move(wire, latency_s)
        elif self.spec.path is Path.HOST_OVERLAPPED:
            both_s = 2 * self.spec.copy_engine.latency
            await self._move([*wire, *((pipe, nbytes) for pipe in copies)], latency_s + both_s)
        else:
            await self._copies_out[source].copy(nbytes)
            await self._move(wire, latency_s)
            await self._copies_in[target].copy(nbytes)

    async def _move(self, through: Sequence[tuple[Pipe, int]], latency_s: float) -> None:
        bookings: list[Reservation] = [pipe.reserve(nbytes) for pipe, nbytes in through]
        await finished(self.clock, *bookings, latency_s=latency_s)

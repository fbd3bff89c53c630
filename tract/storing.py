"""The store path of a worker: reserve heads first, copy, publish the whole chain at once.

As ``prefix_cache.insert_chain`` does, cut where a connector must not block. A reservation is
PENDING: nobody finds it, and it is abandoned if the connector closes before it is complete. What is
published is published at once, so that a chain does not evict its own head.

Units: bytes. Left out: retries of blocks that were refused (a later store is one).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cxlbench.emu.clock import Job, JobSet
from cxlbench.emu.memory import Buffer
from cxlbench.kv.results import KeyResult
from cxlbench.tract import codes, prefix_cache
from cxlbench.tract.copying import Copier, ProgramRunner
from cxlbench.tract.counters import TractCounters
from cxlbench.tract.heap import slim
from cxlbench.tract.layout import Layout
from cxlbench.tract.places import BLOCK_AT, CHECKSUM, CODE, places_for
from cxlbench.tract.reserving import reserve_chain

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

_NOT_ASKED = -1
_RESULTS = {
    _NOT_ASKED: KeyResult.CANCELLED,
    codes.OK: KeyResult.STORED,
    codes.EXISTS: KeyResult.EXISTS,
    codes.NO_SPACE: KeyResult.NO_SPACE,
    codes.TABLE_FULL: KeyResult.NO_SPACE,
    codes.STALE: KeyResult.ERROR,
}


class StorePath:
    """Runs the stores of one connector."""

    def __init__(
        self,
        node: ProgramRunner,
        layout: Layout,
        copier: Copier,
        jobs: JobSet,
        counters: TractCounters,
    ) -> None:
        self.reserved = 0
        """Blocks that are PENDING."""
        self.ending = False
        """Whether stores are to abandon what they have reserved."""
        self._node = node
        self._layout = layout
        self._copier = copier
        self._jobs = jobs
        self._counters = counters

    async def run(
        self, numbers: Words, buffers: Sequence[Buffer], results: list[KeyResult]
    ) -> None:
        """Store a chain of blocks, whose keys are ``numbers``; fills ``results``."""
        if not buffers:
            return
        places = places_for(len(buffers))
        places[:, CODE] = _NOT_ASKED
        reserved = 0
        if not self.ending:
            nbytes = buffers[0].nbytes
            reserved = await self._node.run(reserve_chain, self._layout, numbers, nbytes, places)
        if reserved:
            self.reserved += reserved
            await self._write(buffers, places)
            await self._conclude(places)
            self.reserved -= reserved
        await self._node.run(slim, self._layout)
        results[:] = [_RESULTS[code] for code in places[:, CODE].tolist()]
        counters = self._counters
        counters.stored += results.count(KeyResult.STORED)
        counters.exists += results.count(KeyResult.EXISTS)
        counters.skipped += results.count(KeyResult.NO_SPACE)
        counters.failed += results.count(KeyResult.ERROR)

    async def _write(self, buffers: Sequence[Buffer], places: Words) -> None:
        """Copy what was reserved; ends when all copies that were begun have ended."""
        copies: list[Job[None]] = []
        for buffer, place in zip(buffers, places, strict=True):
            if place[CODE] == codes.OK and not self.ending:
                await self._copier.take(buffer.nbytes)
                copies.append(self._jobs.spawn(self._write_block(buffer, place)))
        for copy in copies:
            await copy

    async def _write_block(self, buffer: Buffer, place: Words) -> None:
        check = await self._copier.write(int(place[BLOCK_AT]), buffer)
        place[CHECKSUM] = check

    async def _conclude(self, places: Words) -> None:
        """Publish what was copied, or give the reservations back."""
        if not self.ending:
            await self._node.run(prefix_cache.publish_chain, self._layout, places)
            return
        mine = places[:, CODE] == codes.OK
        await self._node.run(prefix_cache.abandon_chain, self._layout, places)
        places[mine, CODE] = _NOT_ASKED

"""S3-FIFO as the simulator of its authors has it (libCacheSim's ``S3FIFO.c``).

It differs in three points from the algorithm of the paper, which is ``s3fifo.py``:

- Until the first eviction, what the small queue has no room for goes to the main queue at once.
- A victim comes from the main queue only when that one holds more than its share, or the small
  queue is empty; in the paper, whenever the small queue holds less than its share.
- A ghost is looked up before the victim is chosen, so that the victim cannot push it out; the
  ghost queue remembers nine tenths of the capacity, rounded down.

The simulator also keeps out every object as large as the small queue: with blocks of one size it
caches nothing below a capacity of 20 blocks. Here small capacities work.
"""

from __future__ import annotations

from cxlbench.devices.policies.protocol import empty, full, present
from cxlbench.devices.policies.s3fifo import HITS_TO_MOVE, S3FifoPolicy

GHOST_SHARE = 0.9


class AuthorsS3FifoPolicy(S3FifoPolicy):
    """S3-FIFO in the variant of its authors' simulator; ``evict`` takes amortized constant time."""

    __slots__ = ("_has_evicted", "ghost_blocks")

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self.ghost_blocks = int(capacity_blocks * GHOST_SHARE)
        self._has_evicted = False

    def insert(self, block: int) -> None:
        """Add a block to small; to main if a ghost, or if small is full before any eviction."""
        if block in self:
            raise present(block)
        if len(self) >= self.capacity_blocks:
            raise full(self.capacity_blocks)
        if block in self._ghost:
            del self._ghost[block]
            self._main[block] = 0
        elif self._has_evicted or len(self._small) < self.small_blocks:
            self._small[block] = 0
        else:
            self._main[block] = 0
        while len(self._ghost) > self.ghost_blocks:
            self._ghost.popitem(last=False)

    def evict(self) -> int:
        """Remove and return a block: from main if that is over its share, else from small."""
        if not self._small and not self._main:
            raise empty()
        self._has_evicted = True
        if len(self._main) <= self.main_blocks:
            while self._small:
                block, hits = self._small.popitem(last=False)
                if hits < HITS_TO_MOVE:
                    self._ghost[block] = None
                    return block
                self._main[block] = 0
        return self._evict_main()

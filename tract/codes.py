"""What TraCT's shared-memory programs answer: whole numbers, since compiled code raises nothing.

Every program that can fail returns one of these (alone, or beside values); the host-side classes
turn them into the contract's ``KeyResult`` or into a typed error of :mod:`cxlbench.tract.errors`.
"""

from __future__ import annotations

OK = 0
"""Done as asked."""
MISS = 1
"""No READY entry of that key (probe), or it went away between probe and lock (pin)."""
EXISTS = 2
"""The key or name is there already, READY or being written."""
NO_SPACE = 3
"""No free chunk, and nothing that could be evicted for one."""
TABLE_FULL = 4
"""No free slot in the table, and nothing that could be evicted for one."""
STALE = 5
"""The region's epoch or the entry's generation is not the one that the caller holds."""
HEAP_EMPTY = 6
"""This node's heap has no chunk, and there may be some in the bitmap: refill it, and ask again."""

NOBODY = -1
"""No node (of a scan by the arbiter), no slot (of a probe), no chunk (of the allocator)."""
BUSY = -2
"""The lock has a holder, or one was just granted and has not seen it yet."""

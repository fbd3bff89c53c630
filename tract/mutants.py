"""Wrong versions of TraCT that the checker must find: one flush, check or order taken out of each.

Each names the scenario that shows it and how (see ``mutant_loader.Mutant``).

Left out, since they change nothing that can be seen: no flush after WAITING (the poll flushes), no
flush after a grant (the next scan flushes), ``clflushopt`` on a grant, the local unlock between the
IDLE store and its flush; and the generation in ``confirm``, because this lookup takes the block
from the entry it confirms, under the lock, and never from the probe.
"""

from __future__ import annotations

from cxlbench.emu.causality import Cause
from cxlbench.emu.pod_failure import Kind
from cxlbench.tract.mutant_loader import Mutant

_CAUSAL = (Kind.CAUSALITY,)
_BROKEN = (Kind.INVARIANT, Kind.EXCEPTION)

MISSING_FLUSH = (
    Mutant(
        "flush left out: counter",
        "stress.py",
        "store(mem, at, load(mem, at) + 1)\n        clflush(mem, at)\n",
        "store(mem, at, load(mem, at) + 1)\n",
        "lock_counter",
        _CAUSAL,
        (Cause.NEVER_FLUSHED,),
    ),
    Mutant(
        "flush left out: PENDING",
        "index.py",
        "make_tag(PENDING, owner, generation))\n    clflush(mem, at)\n",
        "make_tag(PENDING, owner, generation))\n",
        "cache_traffic",
        _CAUSAL,
        (Cause.NEVER_FLUSHED,),
    ),
    Mutant(
        "flush left out: READY",
        "index.py",
        "make_tag(READY, owner, generation))\n    clflush(mem, at)\n",
        "make_tag(READY, owner, generation))\n",
        "cache_traffic",
        _CAUSAL,
        (Cause.NEVER_FLUSHED,),
    ),
    Mutant(
        "flush left out: tombstone",
        "index.py",
        "publish(mem, at, make_tag(TOMBSTONE, 0, tag_generation(tag)))",
        "store(mem, at, make_tag(TOMBSTONE, 0, tag_generation(tag)))",
        "cache_traffic",
        _CAUSAL,
        (Cause.NEVER_FLUSHED,),
    ),
    Mutant(
        "flush left out: metadata, list links",
        "lru.py",
        "publish(mem, tail + NEXT, link)",
        "store(mem, tail + NEXT, link)",
        "cache_traffic",
        _CAUSAL,
        (Cause.NEVER_FLUSHED, Cause.OVERWRITTEN),
    ),
    Mutant(
        "flush left out: metadata, live count",
        "eviction.py",
        "publish(mem, lay.cache_at + LIVE, live)",
        "store(mem, lay.cache_at + LIVE, live)",
        "cache_traffic",
        _CAUSAL,
        (Cause.NEVER_FLUSHED,),
    ),
    Mutant(
        "flush left out: bitmap",
        "bitmap.py",
        "publish(mem, at, taken | found)",
        "store(mem, at, taken | found)",
        "cache_traffic",
        _CAUSAL,
        (Cause.NEVER_FLUSHED,),
    ),
    Mutant(
        "flush left out: reference count",
        "pins.py",
        "publish(mem, at, load_fresh(mem, at) + delta)",
        "store(mem, at, load_fresh(mem, at) + delta)",
        "cache_reuse",
        _CAUSAL,
        (Cause.NEVER_FLUSHED,),
    ),
)

HEADER = (
    Mutant(
        "header not flushed",
        "region.py",
        "    publish(mem, MAGIC_WORD * WORD, int(words[MAGIC_WORD]))",
        "    store(mem, MAGIC_WORD * WORD, int(words[MAGIC_WORD]))",
        "format_and_open",
        (Kind.HANG,),
    ),
    Mutant(
        "magic before the sizes",
        "region.py",
        """    for i in range(1, LINE // WORD):
        store(mem, i * WORD, int(words[i]))
    publish(""",
        """    publish(mem, MAGIC_WORD * WORD, int(words[MAGIC_WORD]))
    for i in range(1, LINE // WORD):
        store(mem, i * WORD, int(words[i]))
    publish(""",
        "format_and_open",
        _BROKEN,
    ),
    Mutant(
        "header read without invalidate",
        "region.py",
        "        if i * WORD % LINE == 0:\n            clflush(mem, i * WORD)\n        words",
        "        words",
        "format_and_open",
        (Kind.HANG, *_BROKEN, Kind.CAUSALITY),
        (Cause.NO_INVALIDATE,),
    ),
)

MISSING_INVALIDATE = (
    Mutant(
        "invalidate left out: counter",
        "stress.py",
        "        clflush(mem, at)\n        store(mem, at, load(mem, at) + 1)\n",
        "        store(mem, at, load(mem, at) + 1)\n",
        "lock_counter",
        _CAUSAL,
        (Cause.NO_INVALIDATE,),
    ),
    Mutant(
        "invalidate left out: lookup",
        "index.py",
        "        clflush(mem, at)\n        tag = load(mem, at)\n",
        "        tag = load(mem, at)\n",
        "cache_traffic",
        _CAUSAL,
        (Cause.NO_INVALIDATE,),
    ),
    Mutant(
        "invalidate left out: bitmap",
        "bitmap.py",
        "    taken = load_fresh(mem, at)\n",
        "    taken = load(mem, at)\n",
        "cache_traffic",
        _CAUSAL,
        (Cause.NO_INVALIDATE,),
    ),
    Mutant(
        "invalidate left out: payload",
        "transfer.py",
        "        flush_range(mem, block, len(words) * WORD)\n",
        "        pass\n",
        "cache_traffic",
        _CAUSAL,
        (Cause.NO_INVALIDATE,),
    ),
    Mutant(
        "invalidate left out: own pins after a restart",
        "pins.py",
        "publish(mem, at, load_fresh(mem, at) + delta)",
        "publish(mem, at, load(mem, at) + delta)",
        "reader_restart",
        _CAUSAL,
        (Cause.NO_INVALIDATE,),
    ),
    Mutant(
        "invalidate before the lock",
        "stress.py",
        "        acquire(mem, lay, lock)\n        clflush(mem, at)\n",
        "        clflush(mem, at)\n        acquire(mem, lay, lock)\n",
        "lock_counter",
        _CAUSAL,
        (Cause.NO_INVALIDATE,),
    ),
)

POSTED_FLUSH = (
    Mutant(
        "clflushopt: counter",
        "stress.py",
        "store(mem, at, load(mem, at) + 1)\n        clflush(mem, at)\n",
        "store(mem, at, load(mem, at) + 1)\n        clflushopt(mem, at)\n        mfence(mem)\n",
        "lock_counter",
        _CAUSAL,
        (Cause.POSTED,),
    ),
    Mutant(
        "clflushopt: READY",
        "index.py",
        "make_tag(READY, owner, generation))\n    clflush(mem, at)\n",
        "make_tag(READY, owner, generation))\n    clflushopt(mem, at)\n    mfence(mem)\n",
        "cache_traffic",
        _CAUSAL,
        (Cause.POSTED,),
    ),
    Mutant(
        "clflushopt: bitmap",
        "bitmap.py",
        "publish(mem, at, taken | found)",
        "store(mem, at, taken | found)\n        clflushopt(mem, at)\n        mfence(mem)",
        "cache_traffic",
        _CAUSAL,
        (Cause.POSTED,),
    ),
    Mutant(
        "clflushopt: reference count",
        "pins.py",
        "publish(mem, at, load_fresh(mem, at) + delta)",
        "store(mem, at, load_fresh(mem, at) + delta)\n    clflushopt(mem, at)\n    mfence(mem)",
        "cache_reuse",
        _CAUSAL,
        (Cause.POSTED,),
    ),
)

WRONG_ORDER = (
    Mutant(
        "READY before DMA completion",
        "prefix_cache.py",
        "int(places[i, BLOCK_AT]), payload[i])\n    for i in range(len(places)):\n",
        "int(places[i, BLOCK_AT]), payload[i])\n    publish_chain(mem, lay, places)\n"
        "    for i in range(len(places)):\n",
        "cache_traffic",
        _CAUSAL,
        (Cause.DMA_INCOMPLETE,),
    ),
    Mutant(
        "release before flush",
        "stress.py",
        "        clflush(mem, at)\n        release(mem, lay, lock)\n",
        "        release(mem, lay, lock)\n        clflush(mem, at)\n",
        "lock_counter",
        _CAUSAL,
        (Cause.NEVER_FLUSHED,),
    ),
    Mutant(
        "two nodes' words on one line under two locks",
        "scenarios.py",
        "    return lay.pool_at + which * LINE\n",
        "    return lay.pool_at + which * WORD\n",
        "counters",
        (Kind.LINE_RACE,),
    ),
)

LOCK = (
    Mutant(
        "arbiter grants two",
        "arbiter.py",
        "            return BUSY\n",
        "            pass\n",
        "lock_counter",
        (Kind.EXCLUSION,),
    ),
    Mutant(
        "IDLE unflushed",
        "lock.py",
        "    store(mem, slot, IDLE)\n    clflush(mem, slot)\n",
        "    store(mem, slot, IDLE)\n",
        "lock_counter",
        (Kind.HANG,),
    ),
    Mutant(
        "local unlock before the IDLE store",
        "lock.py",
        "    store(mem, slot, IDLE)\n    clflush(mem, slot)\n    local_unlock(mem, lock)\n",
        "    local_unlock(mem, lock)\n    store(mem, slot, IDLE)\n    clflush(mem, slot)\n",
        "lock_counter",
        (Kind.EXCLUSION, Kind.WRITE_RACE, Kind.HANG, Kind.CAUSALITY, Kind.REGRESS),
    ),
    Mutant(
        "polling without flush",
        "lock.py",
        "        pause(mem, slot, WORD)\n        clflush(mem, slot)\n",
        "        pause(mem, slot, WORD)\n",
        "lock_counter",
        (Kind.HANG, Kind.CAUSALITY),
    ),
    Mutant(
        "WAITING stored again while polling",
        "lock.py",
        "        pause(mem, slot, WORD)\n        clflush(mem, slot)\n",
        """        pause(mem, slot, WORD)
        store(mem, slot, WAITING)
        clflush(mem, slot)
""",
        "lock_counter",
        (Kind.WRITE_RACE, Kind.HANG, Kind.LINE_RACE, Kind.REGRESS),
    ),
    Mutant(
        "a wait cancelled by writing IDLE",
        "lock.py",
        "        pause(mem, slot, WORD)\n        clflush(mem, slot)\n",
        """        pause(mem, slot, WORD)
        clflush(mem, slot)
        if load(mem, slot) == WAITING:
            store(mem, slot, IDLE)
            clflush(mem, slot)
            store(mem, slot, WAITING)
            clflush(mem, slot)
""",
        "lock_counter",
        (Kind.WRITE_RACE, Kind.HANG, Kind.LINE_RACE, Kind.REGRESS),
    ),
    Mutant(
        "arbiter scans once",
        "arbiter.py",
        """        if state == WAITING:
            waiting += 1
    if waiting == 0:
        return NOBODY
""",
        """        if state == WAITING and standing[node] == LIVE:
            return node
    if waiting == 0:
        return NOBODY
""",
        "lock_counter",
        (Kind.EXCLUSION, Kind.WAITING),
    ),
    Mutant(
        "arbiter always begins at node 0",
        "arbiter.py",
        "        node = (last + step) % lay.nodes\n",
        "        node = step - 1\n",
        "lock_counter",
        (Kind.WAITING,),
    ),
)

CACHE = (
    Mutant(
        "READY alone confirmed",
        "index.py",
        """        tag_state(tag) == READY
        and tag_generation(tag) == generation
        and has_key(mem, at, k0, k1, k2, k3)
""",
        "        tag_state(tag) == READY\n",
        "cache_reuse",
        _BROKEN,
    ),
    Mutant(
        "pins of other nodes not looked at",
        "pins.py",
        "load_fresh(mem, pin_at(lay, node, slot))",
        "load_fresh(mem, pin_at(lay, node_id(mem), slot))",
        "cache_reuse",
        (*_BROKEN, Kind.CAUSALITY),
    ),
    Mutant(
        "unpin before the read is complete",
        "scenarios.py",
        """    for i in range(hits):
        dma_wait(mem, int(places[i, HANDLE]))
    wanted = content(first, blocks)
    for i in range(hits):
        if not np.array_equal(payload[i], wanted[i]):
            raise WrongDataError(f"block {first + i} is {payload[i]}, not {wanted[i]}")
    unpin_chain(mem, lay, places, hits)
""",
        """    unpin_chain(mem, lay, places, hits)
    for i in range(hits):
        dma_wait(mem, int(places[i, HANDLE]))
    wanted = content(first, blocks)
    for i in range(hits):
        if not np.array_equal(payload[i], wanted[i]):
            raise WrongDataError(f"block {first + i} is {payload[i]}, not {wanted[i]}")
""",
        "cache_reuse",
        _BROKEN,
    ),
    Mutant(
        "needed tombstones emptied",
        "index.py",
        "            if position <= removed and needed_from > position:\n",
        "            if position <= removed:\n",
        "cache_traffic",
        _BROKEN,
    ),
    Mutant(
        "place chosen before evictions",
        "prefix_cache.py",
        "    if evicted:\n        code, slot = find_place(mem, lay, k0, k1, k2, k3)\n",
        "    if evicted and code == TABLE_FULL:\n"
        "        code, slot = find_place(mem, lay, k0, k1, k2, k3)\n",
        "cache_traffic",
        _BROKEN,
    ),
    Mutant(
        "object READY before it is written",
        "object_store.py",
        """            mem, lay, root, PENDING, n0,""",
        """            mem, lay, root, READY, n0,""",
        "objects",
        (*_BROKEN, Kind.CAUSALITY),
    ),
)

RECOVERY = (
    Mutant(
        "no fence before the obituary",
        "recovery.py",
        "    pod.fence(dead)\n    incarnation",
        "    incarnation",
        "lock_counter_crash",
        (Kind.EXCLUSION, Kind.WRITE_RACE, Kind.LINE_RACE, Kind.HANG, Kind.REGRESS, Kind.CAUSALITY),
    ),
    Mutant(
        "slots of the dead not reset",
        "repair.py",
        "            reset_slots(mem, lay, node)\n",
        "",
        "lock_counter_crash",
        (Kind.HANG, Kind.INVARIANT),
    ),
    Mutant(
        "repair while a live node holds a lock",
        "repair.py",
        "                return False\n    return True\n\n\n@program\ndef drop_reservations",
        "                return True\n    return True\n\n\n@program\ndef drop_reservations",
        "cache_crash",
        (Kind.INVARIANT, Kind.WRITE_RACE, Kind.LINE_RACE, Kind.CAUSALITY, Kind.REGRESS),
    ),
    Mutant(
        "no new epoch before the repair",
        "repair.py",
        "    next_epoch(mem, lay)\n    drop_reservations",
        "    drop_reservations",
        "cache_crash",
        (*_BROKEN, Kind.CAUSALITY, Kind.WRITE_RACE),
    ),
    Mutant(
        "heaps live on in a new epoch",
        "heap.py",
        "    if local_load(mem, HEAP_EPOCH) != epoch:\n",
        "    if local_load(mem, HEAP_EPOCH) > epoch:\n",
        "cache_crash",
        (*_BROKEN, Kind.CAUSALITY, Kind.WRITE_RACE),
    ),
    Mutant(
        "reservations of the dead stay",
        "repair.py",
        "    drop_reservations(mem, lay, standing)\n",
        "",
        "cache_crash",
        _BROKEN,
    ),
    Mutant(
        "pins of the dead stay",
        "repair.py",
        "            clear_pins(mem, lay, node)\n",
        "            pass\n",
        "cache_crash",
        _BROKEN,
    ),
    Mutant(
        "torn list not mended",
        "repair.py",
        "    mend_list(mem, lay)\n",
        "",
        "cache_crash",
        (*_BROKEN, Kind.HANG),
    ),
    Mutant(
        "bitmap not mended",
        "repair.py",
        "    mend_bitmap(mem, lay)\n",
        "",
        "cache_crash",
        _BROKEN,
    ),
    Mutant(
        "live count not mended",
        "repair.py",
        "    mend_live_count(mem, lay)\n",
        "",
        "cache_crash",
        _BROKEN,
    ),
    Mutant(
        "back without admission",
        "recovery.py",
        "    await_admission(mem, lay, incarnation)\n",
        "",
        "cache_crash",
        (*_BROKEN, Kind.EXCLUSION, Kind.WRITE_RACE, Kind.LINE_RACE, Kind.HANG, Kind.CAUSALITY),
    ),
)

ALL = (
    *HEADER,
    *MISSING_FLUSH,
    *MISSING_INVALIDATE,
    *POSTED_FLUSH,
    *WRONG_ORDER,
    *LOCK,
    *CACHE,
    *RECOVERY,
)
"""Every mutant; the names differ."""

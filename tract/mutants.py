"""Wrong versions of TraCT that the checker must find: one flush, check or order taken out of each.

Each names the scenario that shows it and how (see ``mutant_loader.Mutant``). Here are those of the
memory: flushes, invalidates, their order. Those of the protocols are in ``mutants_protocol``.

Left out, since they change nothing that can be seen: no flush after WAITING (the poll flushes), no
flush after a grant (the next scan flushes), ``clflushopt`` on a grant, the local unlock between the
IDLE store and its flush; and the generation in ``confirm``, because this lookup takes the block
from the entry it confirms, under the lock, and never from the probe.
"""

from __future__ import annotations

from cxlbench.emu.causality import Cause
from cxlbench.emu.pod_failure import Kind
from cxlbench.tract.mutant_loader import Mutant
from cxlbench.tract.mutants_protocol import PROTOCOLS

_CAUSAL = (Kind.CAUSALITY, Kind.REGRESS)
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

UNINVALIDATED = (
    Mutant(
        "invalidate left out: oldest entry",
        "lru.py",
        "    return load_fresh(mem, lay.cache_at + HEAD)",
        "    return load(mem, lay.cache_at + HEAD)",
        "cache_upkeep",
        _CAUSAL,
        (Cause.NO_INVALIDATE,),
    ),
    Mutant(
        "invalidate left out: next entry",
        "lru.py",
        "    return load_fresh(mem, link + NEXT)",
        "    return load(mem, link + NEXT)",
        "cache_upkeep",
        _CAUSAL,
        (Cause.NO_INVALIDATE,),
    ),
    Mutant(
        "invalidate left out: a neighbour's link before a store",
        "lru.py",
        "    clflush(mem, backward)\n",
        "",
        "cache_traffic",
        (Kind.REGRESS,),
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
        "scenario_tasks.py",
        "    return lay.pool_at + which * LINE\n",
        "    return lay.pool_at + which * WORD\n",
        "counters",
        (Kind.LINE_RACE,),
    ),
)

ALL = (
    *HEADER,
    *MISSING_FLUSH,
    *MISSING_INVALIDATE,
    *UNINVALIDATED,
    *POSTED_FLUSH,
    *WRONG_ORDER,
    *PROTOCOLS,
)
"""Every mutant; the names differ."""

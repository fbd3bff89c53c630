"""Wrong versions of TraCT's protocols: lock, cache, recovery; see ``mutants``."""

from __future__ import annotations

from cxlbench.emu.pod_failure import Kind
from cxlbench.tract.mutant_loader import Mutant

_BROKEN = (Kind.INVARIANT, Kind.EXCEPTION)

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
        """    return is_ready(mem, lay, slot, generation) and has_key(
        mem, entry_at(lay, slot), k0, k1, k2, k3
    )
""",
        "    return tag_state(load_fresh(mem, entry_at(lay, slot))) == READY\n",
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
        "scenario_tasks.py",
        """    for i in range(hits):
        dma_wait(mem, int(places[i, HANDLE]))
    compare(payload[:hits], first, places)
    unpin_chain(mem, lay, places, hits)
""",
        """    unpin_chain(mem, lay, places, hits)
    for i in range(hits):
        dma_wait(mem, int(places[i, HANDLE]))
    compare(payload[:hits], first, places)
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
        "reserving.py",
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

USE = (
    Mutant(
        "checksum left out of an entry",
        "index.py",
        "    store(mem, at + CHECK, check)\n    store(mem, at + TAG, make_tag(READY",
        "    store(mem, at + TAG, make_tag(READY",
        "cache_upkeep",
        _BROKEN,
    ),
    Mutant(
        "probe ends at a tombstone",
        "index.py",
        "        if state == EMPTY:\n            return NOBODY, 0, looked + 1",
        "        if state in (EMPTY, TOMBSTONE):\n            return NOBODY, 0, looked + 1",
        "cache_traffic",
        _BROKEN,
    ),
    Mutant(
        "own pins counted without the node's lock",
        "pins.py",
        """    local_lock(mem, lay.own_lock)
    publish(mem, at, load_fresh(mem, at) + delta)
    local_unlock(mem, lay.own_lock)
""",
        "    publish(mem, at, load_fresh(mem, at) + delta)\n",
        "reader_restart",
        (Kind.WRITE_RACE,),
    ),
    Mutant(
        "delete without a look at pins",
        "prefix_cache.py",
        "        if ready and room and not is_pinned(mem, lay, slot):",
        "        if ready and room:",
        "cache_upkeep",
        (*_BROKEN, Kind.CAUSALITY),
    ),
    Mutant(
        "delete of a reservation",
        "prefix_cache.py",
        "        if ready and room and not is_pinned(mem, lay, slot):",
        "        if room and not is_pinned(mem, lay, slot):",
        "cache_upkeep",
        _BROKEN,
    ),
    Mutant(
        "heap's epoch read before the lock",
        "reserving.py",
        "    acquire(mem, lay, CACHE_LOCK)\n    epoch = read_epoch(mem, lay)\n",
        "    epoch = read_epoch(mem, lay)\n    acquire(mem, lay, CACHE_LOCK)\n",
        "cache_crash",
        (*_BROKEN, Kind.WRITE_RACE),
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
        "                return False\n    return True\n\n\n@program\ndef is_kept",
        "                return True\n    return True\n\n\n@program\ndef is_kept",
        "cache_crash",
        (Kind.INVARIANT, Kind.WRITE_RACE, Kind.LINE_RACE, Kind.CAUSALITY, Kind.REGRESS),
    ),
    Mutant(
        "no new epoch before the repair",
        "repair.py",
        "    next_epoch(mem, lay)\n    drop_entries",
        "    drop_entries",
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
        "owner >= lay.nodes or is_unrepaired(int(standing[owner]))",
        "owner >= lay.nodes",
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
        "    mend_bitmap(mem, lay, used)\n",
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

SUCCESSION = (
    Mutant(
        "repaired is said before the slots are reset",
        "repair.py",
        """            reset_slots(mem, lay, node)
            judged = load_fresh(mem, verdict_of(lay, node)) >> 8
            set_verdict(mem, lay, node, judged, REPAIRED)
""",
        """            judged = load_fresh(mem, verdict_of(lay, node)) >> 8
            set_verdict(mem, lay, node, judged, REPAIRED)
            reset_slots(mem, lay, node)
""",
        "cache_crashes",
        (*_BROKEN, Kind.HANG),
    ),
    Mutant(
        "successor grants before it repairs",
        "manager.py",
        "                first = INTERNAL_LOCKS\n            else:",
        "                first = 0\n            else:",
        "cache_crash",
        (*_BROKEN, Kind.HANG, Kind.WRITE_RACE, Kind.LINE_RACE),
    ),
    Mutant(
        "two successors",
        "manager.py",
        "    if not has_best_claim(lay, me, standing):\n        return False\n",
        "",
        "lock_counter_crash",
        (Kind.WRITE_RACE, Kind.LINE_RACE, Kind.EXCLUSION, Kind.HANG),
    ),
)

PROTOCOLS = (*LOCK, *CACHE, *USE, *RECOVERY, *SUCCESSION)

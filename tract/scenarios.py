"""TraCT under the explorer: small pods whose every interleaving, eviction and crash may be tried.

Each function is a target of ``cxlbench pod explore`` (``cxlbench.tract.scenarios:NAME``). Regions
are as small as possible, so that nodes meet on every structure within a few hundred steps: a table
of a few slots whose keys share homes, fewer chunks than keys, heaps of one batch. Payload is a
function of its key, so that a reader sees any wrong word.

What must hold: no violation of causality, no race, no hang; a counter under a lock loses nothing; a
block that was looked up is read right; and at the end the region is sound, with every chunk free or
in use. Waiting is bounded where no node dies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from cxlbench.emu.pod_ops import LINE, WORD, PodMemory, dma_wait, pause
from cxlbench.tract.arbiter import LIVE
from cxlbench.tract.bitmap import mark_run
from cxlbench.tract.codes import OK
from cxlbench.tract.errors import ForeignRegionError
from cxlbench.tract.eviction import block_of, count_live
from cxlbench.tract.fsck import fsck
from cxlbench.tract.heap import trim
from cxlbench.tract.index import find_place, mark_ready, write_pending
from cxlbench.tract.layout import HEADER_BYTES, INTERNAL_LOCKS, Layout, Sizes, names, plan
from cxlbench.tract.lru import append
from cxlbench.tract.manager import manage
from cxlbench.tract.membership import DEAD, survey
from cxlbench.tract.object_store import delete as delete_object
from cxlbench.tract.object_store import put, read
from cxlbench.tract.prefix_cache import (
    BLOCK_AT,
    HANDLE,
    PLACE_WORDS,
    insert_chain,
    lookup_chain,
    unpin_chain,
)
from cxlbench.tract.recovery import await_repair, recover, rejoin
from cxlbench.tract.region import format_region, open_region
from cxlbench.tract.repair import is_unrepaired, repair
from cxlbench.tract.stress import count_up
from cxlbench.tract.transfer import start_read, start_write
from cxlbench.tract.words import KEY_WORDS, checksum

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cxlbench.emu.pod_host import HostMemory
    from cxlbench.emu.pod_scenario import Pod

    Words = NDArray[np.int64]

PAYLOAD_WORDS = 16
"""Two lines, so that a DMA can be half done."""
FIRST_USER_LOCK = INTERNAL_LOCKS


class WrongDataError(AssertionError):
    """A block or object was not what was stored."""


def build(pod: Pod, sizes: Sizes, *, blocks: int = 0) -> Layout:
    """Format a region in ``pod``, name its parts for reports, and run a manager on every node.

    The first ``blocks`` blocks are in the cache.
    """
    layout = plan(sizes)
    pod.region(layout.region_bytes)
    pod.prepare(format_region, sizes, layout.region_bytes)
    pod.prepare(preload, layout, blocks)
    for part in names(layout):
        pod.name_range(part.off, part.n_bytes, part.name)
    for node in range(sizes.nodes):
        pod.run(node, manage, layout, name=f"manager of node {node}", daemon=True)
    return layout


def check_region(pod: Pod, lay: Layout) -> Callable[[HostMemory], None]:
    """Return a check for the end: the region is sound, no chunk is lost, nothing is pinned.

    A node may have died so late that the run ended before it was noticed, or repaired; what it left
    is repaired first.
    """

    def region_is_sound(mem: HostMemory) -> None:
        standing = np.zeros(lay.nodes, np.int64)
        survey(mem, lay, standing)
        late = [n for n in range(lay.nodes) if standing[n] == LIVE and not pod.is_alive(n)]
        late += [n for n in range(lay.nodes) if is_unrepaired(int(standing[n]))]
        if late:
            standing[late] = DEAD
            repair(mem, lay, standing)
        report = fsck(mem, lay, in_heaps=0)
        assert report.sound, "; ".join(report.problems)
        assert report.pins == 0, f"{report.pins} pins are left"
        assert report.held_locks == 0, f"{report.held_locks} locks are held"
        assert report.pending == 0, f"{report.pending} reservations are left"

    return region_is_sound


def recover_in_pod(mem: PodMemory, dead: int, pod: Pod, lay: Layout) -> None:
    """Recover from a death; a task of its own keeps the run going until all is repaired."""
    incarnation = recover(mem, dead, pod, lay)
    pod.run(mem.node_id(), await_repair, lay, dead, incarnation, name=f"waits for {dead}")


def recover_and_restart(mem: PodMemory, dead: int, pod: Pod, lay: Layout) -> None:
    """Recover from a death, and start the node again before the repair is done."""
    incarnation = recover(mem, dead, pod, lay)
    pod.restart(dead, come_back, pod, dead, lay, name=f"worker {dead} again")
    pod.run(mem.node_id(), await_repair, lay, dead, incarnation, name=f"waits for {dead}")


# The header


def format_and_open(pod: Pod) -> None:
    """One node formats the region while two others wait for it and open it."""
    sizes = Sizes(nodes=3, slots=1, chunks=1, chunk_bytes=LINE, roots=1)
    lay = plan(sizes)
    pod.region(lay.region_bytes)
    pod.run(0, format_region, sizes, lay.region_bytes, name="formats")
    for node in (1, 2):
        pod.run(node, open_when_there, lay, name=f"opens on node {node}")
    pod.at_end(check_region(pod, lay))


def open_when_there(mem: PodMemory, expected: Layout) -> None:
    """Poll until the region is there; any other error than that it is not is a failure."""
    while True:
        try:
            found = open_region(mem, expected.region_bytes)
        except ForeignRegionError:
            pause(mem, 0, HEADER_BYTES)
        else:
            if found != expected:
                raise WrongDataError(f"the header says {found}")
            return


# A counter under the lock


def lock_counter(pod: Pod) -> None:
    """Three nodes, one with two processes, count under one lock; nobody dies."""
    lay = build(pod, Sizes(nodes=3, slots=1, chunks=1, chunk_bytes=LINE, user_locks=1))
    pod.bounded_waiting(lay.nodes - 1)
    for task, node in enumerate((0, 1, 2, 2)):
        pod.run(node, count_up, lay, FIRST_USER_LOCK, lay.pool_at, 2, name=f"counter {task}")

    def counted(mem: HostMemory) -> None:
        assert mem.load(lay.pool_at) == 8, f"8 increments made {mem.load(lay.pool_at)}"

    pod.at_end(counted)
    pod.at_end(check_region(pod, lay))


def lock_counter_crash(pod: Pod) -> None:
    """Count under one lock while one of three nodes may die anywhere: the others go on."""
    lay = build(pod, Sizes(nodes=3, slots=1, chunks=1, chunk_bytes=LINE, user_locks=1))
    for node in range(3):
        pod.run(node, count_up, lay, FIRST_USER_LOCK, lay.pool_at, 2, name=f"counter {node}")
    pod.on_crash((0, 1, 2), recover_in_pod, pod, lay)
    pod.at_end(check_region(pod, lay))


def two_counters(mem: PodMemory, lay: Layout, times: int, first: int) -> None:
    """Increment two counters, each on a line and under a lock of its own."""
    for i in range(times):
        which = (first + i) % 2
        count_up(mem, lay, FIRST_USER_LOCK + which, counter_at(lay, which), 1)


def counter_at(lay: Layout, which: int) -> int:
    """Return where counter 0 or 1 lies."""
    return lay.pool_at + which * LINE


def counters(pod: Pod) -> None:
    """Two nodes count in two counters under two locks; nobody dies."""
    lay = build(pod, Sizes(nodes=2, slots=1, chunks=2, chunk_bytes=LINE, user_locks=2))
    for node in range(2):
        pod.run(node, two_counters, lay, 4, node, name=f"counter {node}")

    def counted(mem: HostMemory) -> None:
        found = [mem.load(counter_at(lay, which)) for which in range(2)]
        assert found == [4, 4], f"4 increments each made {found}"

    pod.at_end(counted)
    pod.at_end(check_region(pod, lay))


# The prefix cache


def chain_keys(first: int, blocks: int) -> Words:
    """Return keys for blocks ``first``, ``first + 1``, ...; block ``n`` has home ``n // 2``."""
    keys = np.zeros((blocks, KEY_WORDS), np.int64)
    for i in range(blocks):
        keys[i] = ((first + i) // 2, 11 + first + i, -1, 1 << 40)
    return keys


def content(first: int, blocks: int) -> Words:
    """Return what the payload of those blocks must be."""
    payload = np.zeros((blocks, PAYLOAD_WORDS), np.int64)
    for i in range(blocks):
        payload[i] = np.arange(PAYLOAD_WORDS) + 100 * (first + i + 1)
    return payload


def places_for(blocks: int) -> Words:
    """Return what lookup and insert of that many blocks need."""
    return np.zeros((blocks, PLACE_WORDS), np.int64)


def preload(mem: PodMemory, lay: Layout, blocks: int) -> None:
    """Put blocks into an empty cache before any task runs: no locks, nobody else is there."""
    keys, payload = chain_keys(0, blocks), content(0, blocks)
    for i in range(blocks):
        k0, k1, k2, k3 = keys[i].tolist()
        mark_run(mem, lay, i, 1, True)
        block = block_of(lay, i)
        _, slot = find_place(mem, lay, k0, k1, k2, k3)
        generation = write_pending(mem, lay, slot, 0, k0, k1, k2, k3, block, PAYLOAD_WORDS * WORD)
        start_write(mem, lay, block, payload[i])
        mark_ready(mem, lay, slot, 0, generation, checksum(payload[i]))
        append(mem, lay, slot)
        count_live(mem, lay, 1)


def look_up(mem: PodMemory, lay: Layout, first: int, blocks: int) -> int:
    """Look up and read blocks; raise ``WrongDataError`` if one is not what it should be."""
    places = places_for(blocks)
    payload = np.zeros((blocks, PAYLOAD_WORDS), np.int64)
    hits = lookup_chain(mem, lay, chain_keys(first, blocks), places)
    for i in range(hits):
        places[i, HANDLE] = start_read(mem, lay, int(places[i, BLOCK_AT]), payload[i])
    for i in range(hits):
        dma_wait(mem, int(places[i, HANDLE]))
    wanted = content(first, blocks)
    for i in range(hits):
        if not np.array_equal(payload[i], wanted[i]):
            raise WrongDataError(f"block {first + i} is {payload[i]}, not {wanted[i]}")
    unpin_chain(mem, lay, places, hits)
    return hits


def use_cache(mem: PodMemory, lay: Layout, chains: tuple[tuple[int, int], ...]) -> None:
    """Look chains up, and insert what is missing, as a prefill worker does."""
    for first, blocks in chains:
        hits = look_up(mem, lay, first, blocks)
        if hits < blocks:
            at, missing = first + hits, blocks - hits
            keys, payload = chain_keys(at, missing), content(at, missing)
            insert_chain(mem, lay, keys, payload, places_for(missing))
    trim(mem, lay, 0)


SMALL = Sizes(
    nodes=2,
    slots=6,
    chunks=4,
    chunk_bytes=PAYLOAD_WORDS * WORD,
    roots=1,
    evict_above=4,
    heap_batch=2,
)
"""Fewer chunks than blocks, so that every insert evicts soon."""


def cache_traffic(pod: Pod) -> None:
    """Two nodes insert, look up and evict overlapping chains; nobody dies."""
    lay = build(pod, SMALL)
    pod.bounded_waiting(lay.nodes - 1)
    pod.run(0, use_cache, lay, ((0, 2), (3, 2), (0, 2)), name="worker 0")
    pod.run(1, use_cache, lay, ((1, 2), (0, 2), (4, 1)), name="worker 1")
    pod.at_end(check_region(pod, lay))


def cache_processes(pod: Pod) -> None:
    """One of two nodes has two processes, which share its cache, heap and pins."""
    lay = build(pod, SMALL)
    pod.run(0, use_cache, lay, ((0, 2), (3, 1)), name="worker 0")
    pod.run(1, use_cache, lay, ((0, 2), (4, 1)), name="worker 1")
    pod.run(1, use_cache, lay, ((3, 1), (0, 1)), name="worker 2")
    pod.at_end(check_region(pod, lay))


def cache_reuse(pod: Pod) -> None:
    """Two slots and one chunk that keys take from each other, while another node reads."""
    lay = build(
        pod,
        Sizes(
            nodes=2,
            slots=2,
            chunks=1,
            chunk_bytes=PAYLOAD_WORDS * WORD,
            roots=1,
            evict_above=1,
            heap_batch=1,
        ),
        blocks=1,
    )
    pod.run(0, use_cache, lay, ((1, 1), (0, 1)) * 3, name="worker 0")
    pod.run(1, read_only, lay, (0, 1) * 5, name="reader 1")
    pod.at_end(check_region(pod, lay))


def read_only(mem: PodMemory, lay: Layout, blocks: tuple[int, ...]) -> None:
    """Look blocks up, one by one."""
    for block in blocks:
        look_up(mem, lay, block, 1)


THREE = Sizes(
    nodes=3,
    slots=6,
    chunks=4,
    chunk_bytes=PAYLOAD_WORDS * WORD,
    roots=1,
    evict_above=4,
    heap_batch=2,
)


def cache_crash(pod: Pod) -> None:
    """Three nodes; one dies anywhere, or is suspected alive. The others go on; it comes back."""
    lay = build(pod, THREE, blocks=2)
    pod.run(0, use_cache, lay, ((0, 2),), name="worker 0")
    pod.run(1, use_cache, lay, ((1, 2), (3, 1)), name="worker 1")
    pod.run(2, use_cache, lay, ((0, 1), (4, 1)), name="worker 2")
    pod.on_crash((0, 1, 2), recover_and_restart, pod, lay)
    pod.at_end(check_region(pod, lay))


def cache_crashes(pod: Pod) -> None:
    """Three nodes, two of which die, perhaps the one that repairs; nobody comes back."""
    lay = build(pod, THREE, blocks=2)
    pod.run(0, use_cache, lay, ((0, 2), (3, 1)), name="worker 0")
    pod.run(1, use_cache, lay, ((1, 2),), name="worker 1")
    pod.run(2, use_cache, lay, ((0, 2), (4, 1)), name="worker 2")
    pod.on_crash((0, 1, 2), recover_in_pod, pod, lay, at_most=2)
    pod.at_end(check_region(pod, lay))


def come_back(mem: PodMemory, pod: Pod, node: int, lay: Layout) -> None:
    """Rejoin as a new incarnation, with a manager, and use the cache."""
    rejoin(mem, lay)
    pod.run(node, manage, lay, name=f"manager of node {node} again", daemon=True)
    use_cache(mem, lay, ((0, 2),))


def reader_restart(pod: Pod) -> None:
    """Two readers of one block; one of them dies with pins, perhaps, and comes back."""
    sizes = Sizes(nodes=2, slots=1, chunks=1, chunk_bytes=PAYLOAD_WORDS * WORD, roots=1)
    lay = build(pod, sizes, blocks=1)
    for node in range(2):
        pod.run(node, read_only, lay, (0, 0, 0), name=f"reader {node}")
    pod.on_crash(1, recover_and_restart, pod, lay)
    pod.at_end(check_region(pod, lay))


# Named objects


def use_objects(mem: PodMemory, lay: Layout, name: int, seed: int, times: int) -> None:
    """Put, read and delete an object whose name others use too."""
    own = np.arange(PAYLOAD_WORDS, dtype=np.int64) * seed
    found = np.zeros(PAYLOAD_WORDS, np.int64)
    for _ in range(times):
        stored = put(mem, lay, name, 0, 0, 0, own)
        if read(mem, lay, name, 0, 0, 0, found) == OK:
            step = int(found[1])
            if not np.array_equal(found, np.arange(PAYLOAD_WORDS) * step):
                raise WrongDataError(f"object {name} is torn: {found}")
        if stored == OK:
            delete_object(mem, lay, name, 0, 0, 0)


def objects(pod: Pod) -> None:
    """Two nodes put, read and delete objects of one name."""
    lay = build(pod, Sizes(nodes=2, slots=1, chunks=4, chunk_bytes=PAYLOAD_WORDS * WORD, roots=2))
    pod.run(0, use_objects, lay, 5, 3, 2, name="worker 0")
    pod.run(1, use_objects, lay, 5, 7, 2, name="worker 1")
    pod.at_end(check_region(pod, lay))


def objects_crash(pod: Pod) -> None:
    """Three nodes use objects of two names; one of them may die."""
    lay = build(pod, Sizes(nodes=3, slots=1, chunks=4, chunk_bytes=PAYLOAD_WORDS * WORD, roots=2))
    for node in range(3):
        pod.run(node, use_objects, lay, 5 + node % 2, 3 + node, 2, name=f"worker {node}")
    pod.on_crash((0, 1, 2), recover_in_pod, pod, lay)
    pod.at_end(check_region(pod, lay))


ALL: dict[str, Callable[[Pod], None]] = {
    "format_and_open": format_and_open,
    "lock_counter": lock_counter,
    "lock_counter_crash": lock_counter_crash,
    "counters": counters,
    "cache_traffic": cache_traffic,
    "cache_processes": cache_processes,
    "cache_reuse": cache_reuse,
    "cache_crash": cache_crash,
    "cache_crashes": cache_crashes,
    "reader_restart": reader_restart,
    "objects": objects,
    "objects_crash": objects_crash,
}
"""Every scenario by its name."""

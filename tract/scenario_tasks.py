"""What the nodes of TraCT's scenarios do, how regions are made, and what is checked at the end.

Payload is a function of its key, so that a reader sees any wrong word; keys share homes, two by
two. The scenarios themselves are in ``scenarios``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from cxlbench.emu.pod_ops import LINE, WORD, PodMemory, dma_wait, pause
from cxlbench.tract.arbiter import LIVE
from cxlbench.tract.bitmap import mark_run
from cxlbench.tract.chains import look_up as look_up_rest
from cxlbench.tract.codes import OK
from cxlbench.tract.errors import ForeignRegionError
from cxlbench.tract.eviction import block_of, count_live
from cxlbench.tract.fsck import fsck
from cxlbench.tract.heap import trim
from cxlbench.tract.index import (
    BLOCK,
    CHECK,
    LENGTH,
    READY,
    entry_at,
    find_place,
    mark_ready,
    tag_state,
    write_pending,
)
from cxlbench.tract.layout import HEADER_BYTES, INTERNAL_LOCKS, Layout, Sizes, names, plan
from cxlbench.tract.lru import append
from cxlbench.tract.manager import manage
from cxlbench.tract.membership import DEAD, survey
from cxlbench.tract.object_store import delete as delete_object
from cxlbench.tract.object_store import put, read
from cxlbench.tract.places import BLOCK_AT, CHECKSUM, HANDLE, places_for
from cxlbench.tract.prefix_cache import (
    abandon_chain,
    delete,
    evict,
    insert_chain,
    lookup_chain,
    probe_chain,
    unpin_chain,
    write_chain,
)
from cxlbench.tract.recovery import await_repair, recover, rejoin
from cxlbench.tract.region import format_region, open_region
from cxlbench.tract.repair import is_unrepaired, repair
from cxlbench.tract.reserving import reserve_chain
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
BLOCK_BYTES = PAYLOAD_WORDS * WORD
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
    """Return a check for the end: sound, nothing lost or held, every READY entry has its payload.

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
        for slot in range(lay.slots):
            assert is_whole(mem, entry_at(lay, slot)), f"entry {slot} has another payload"

    return region_is_sound


def is_whole(mem: HostMemory, at: int) -> bool:
    """Return whether the entry at ``at`` is not READY, or its block has the checksum it names."""
    if tag_state(mem.load(at)) != READY:
        return True
    block, length = mem.load(at + BLOCK), mem.load(at + LENGTH)
    words = np.array([mem.load(block + i) for i in range(0, length, WORD)], np.int64)
    return checksum(words) == mem.load(at + CHECK)


def recover_in_pod(mem: PodMemory, dead: int, pod: Pod, lay: Layout) -> None:
    """Recover from a death; a task of its own keeps the run going until all is repaired."""
    incarnation = recover(mem, dead, pod, lay)
    pod.run(mem.node_id(), await_repair, lay, dead, incarnation, name=f"waits for {dead}")


def recover_and_restart(mem: PodMemory, dead: int, pod: Pod, lay: Layout) -> None:
    """Recover from a death, and start the node again before the repair is done."""
    incarnation = recover(mem, dead, pod, lay)
    pod.restart(dead, come_back, pod, dead, lay, name=f"worker {dead} again")
    pod.run(mem.node_id(), await_repair, lay, dead, incarnation, name=f"waits for {dead}")


def come_back(mem: PodMemory, pod: Pod, node: int, lay: Layout) -> None:
    """Rejoin as a new incarnation, with a manager, and use the cache."""
    rejoin(mem, lay)
    pod.run(node, manage, lay, name=f"manager of node {node} again", daemon=True)
    use_cache(mem, lay, ((0, 2),))


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


def two_counters(mem: PodMemory, lay: Layout, times: int, first: int) -> None:
    """Increment two counters, each on a line and under a lock of its own."""
    for i in range(times):
        which = (first + i) % 2
        count_up(mem, lay, FIRST_USER_LOCK + which, counter_at(lay, which), 1)


def counter_at(lay: Layout, which: int) -> int:
    """Return where counter 0 or 1 lies."""
    return lay.pool_at + which * LINE


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
    """Look up and read blocks; raise ``WrongDataError`` if one is not what it should be.

    While they are pinned, every probe must find them.
    """
    places = places_for(blocks)
    keys = chain_keys(first, blocks)
    payload = np.zeros((blocks, PAYLOAD_WORDS), np.int64)
    hits = lookup_chain(mem, lay, keys, places)
    for i in range(hits):
        places[i, HANDLE] = start_read(mem, lay, int(places[i, BLOCK_AT]), payload[i])
    if probe_chain(mem, lay, keys[:hits], places_for(hits)) < hits:
        raise WrongDataError(f"of blocks {first} to {first + hits - 1}, pinned, one is not found")
    for i in range(hits):
        dma_wait(mem, int(places[i, HANDLE]))
    compare(payload[:hits], first, places)
    unpin_chain(mem, lay, places, hits)
    return hits


def compare(payload: Words, first: int, places: Words) -> None:
    """Raise ``WrongDataError`` unless blocks from ``first`` on are these, as their entries say."""
    wanted = content(first, len(payload))
    for i in range(len(payload)):
        if not np.array_equal(payload[i], wanted[i]):
            raise WrongDataError(f"block {first + i} is {payload[i]}, not {wanted[i]}")
        if checksum(payload[i]) != places[i, CHECKSUM]:
            raise WrongDataError(f"the checksum in the entry of block {first + i} is wrong")


def use_cache(mem: PodMemory, lay: Layout, chains: tuple[tuple[int, int], ...]) -> None:
    """Look chains up, and insert what is missing, as a prefill worker does."""
    for first, blocks in chains:
        hits = look_up(mem, lay, first, blocks)
        if hits < blocks:
            at, missing = first + hits, blocks - hits
            keys, payload = chain_keys(at, missing), content(at, missing)
            insert_chain(mem, lay, keys, payload, places_for(missing))
    trim(mem, lay, 0)


def read_only(mem: PodMemory, lay: Layout, blocks: tuple[int, ...]) -> None:
    """Look blocks up, one by one."""
    for block in blocks:
        look_up(mem, lay, block, 1)


def give_up(mem: PodMemory, lay: Layout, first: int, blocks: int) -> None:
    """Reserve blocks, write them, and abandon them, with a heap that has been filled meanwhile."""
    keys, payload, places = chain_keys(first, blocks), content(first, blocks), places_for(blocks)
    reserve_chain(mem, lay, keys, PAYLOAD_WORDS * WORD, places)
    write_chain(mem, lay, payload, places)
    evict(mem, lay, lay.heap_capacity)
    abandon_chain(mem, lay, places)
    trim(mem, lay, 0)


def look_after(mem: PodMemory, lay: Layout, first: int, doomed: tuple[int, ...]) -> None:
    """Look up two blocks of which the caller has the first; evict a block, and delete some."""
    places = places_for(2)
    pinned = look_up_rest(mem, lay, chain_keys(first, 2), 1, places)
    evict(mem, lay, 2)
    unpin_chain(mem, lay, places[1:], pinned)
    for number in doomed:
        k0, k1, k2, k3 = chain_keys(number, 1)[0].tolist()
        delete(mem, lay, k0, k1, k2, k3)
    trim(mem, lay, 0)


def use_objects(mem: PodMemory, lay: Layout, name: int, seed: int, times: int) -> None:
    """Put, read and delete an object whose name others use too, another one each time."""
    found = np.zeros(PAYLOAD_WORDS, np.int64)
    for turn in range(times):
        own = np.arange(PAYLOAD_WORDS, dtype=np.int64) * (seed + 100 * turn)
        stored = put(mem, lay, name, 0, 0, 0, own)
        if read(mem, lay, name, 0, 0, 0, found) == OK:
            step = int(found[1])
            if not np.array_equal(found, np.arange(PAYLOAD_WORDS) * step):
                raise WrongDataError(f"object {name} is torn: {found}")
        if stored == OK:
            delete_object(mem, lay, name, 0, 0, 0)

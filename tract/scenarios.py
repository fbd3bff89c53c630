"""TraCT under the explorer: small pods whose every interleaving, eviction and crash may be tried.

Each function is a target of ``cxlbench pod explore`` (``cxlbench.tract.scenarios:NAME``). Regions
are as small as possible, so that nodes meet on every structure within a few hundred steps: a table
of a few slots whose keys share homes, fewer chunks than keys, heaps of one batch. What the nodes do
is in ``scenario_tasks``.

What must hold: no violation of causality, no race, no hang; a counter under a lock loses nothing; a
block that was looked up is read right, and found by whoever probes as long as it is pinned; and at
the end the region is sound, with every chunk free or in use. Waiting is bounded where no node dies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cxlbench.emu.pod_ops import LINE
from cxlbench.tract.layout import Sizes, plan
from cxlbench.tract.region import format_region
from cxlbench.tract.scenario_tasks import (
    BLOCK_BYTES,
    FIRST_USER_LOCK,
    build,
    check_region,
    counter_at,
    give_up,
    look_after,
    open_when_there,
    read_only,
    recover_and_restart,
    recover_in_pod,
    two_counters,
    use_cache,
    use_objects,
)
from cxlbench.tract.stress import count_up

if TYPE_CHECKING:
    from cxlbench.emu.pod_host import HostMemory
    from cxlbench.emu.pod_scenario import Pod


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


def crowded(nodes: int) -> Sizes:
    """Return sizes with fewer chunks than blocks, so that every insert evicts soon."""
    return Sizes(
        nodes=nodes,
        slots=6,
        chunks=4,
        chunk_bytes=BLOCK_BYTES,
        roots=1,
        evict_above=4,
        heap_batch=2,
    )


def cache_traffic(pod: Pod) -> None:
    """Two nodes insert, look up and evict overlapping chains; nobody dies."""
    lay = build(pod, crowded(2))
    pod.bounded_waiting(lay.nodes - 1)
    pod.run(0, use_cache, lay, ((0, 2), (3, 2), (0, 2)), name="worker 0")
    pod.run(1, use_cache, lay, ((1, 2), (0, 2), (4, 1)), name="worker 1")
    pod.at_end(check_region(pod, lay))


def cache_processes(pod: Pod) -> None:
    """One of two nodes has two processes, which share its cache, heap and pins."""
    lay = build(pod, crowded(2))
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
            chunk_bytes=BLOCK_BYTES,
            roots=1,
            evict_above=1,
            heap_batch=1,
        ),
        blocks=1,
    )
    pod.run(0, use_cache, lay, ((1, 1), (0, 1)) * 3, name="worker 0")
    pod.run(1, read_only, lay, (0, 1) * 5, name="reader 1")
    pod.at_end(check_region(pod, lay))


def cache_crash(pod: Pod) -> None:
    """Three nodes; one dies anywhere, or is suspected alive. The others go on; it comes back."""
    lay = build(pod, crowded(3), blocks=2)
    pod.run(0, use_cache, lay, ((0, 2),), name="worker 0")
    pod.run(1, use_cache, lay, ((1, 2), (3, 1)), name="worker 1")
    pod.run(2, use_cache, lay, ((0, 1), (4, 1)), name="worker 2")
    pod.on_crash((0, 1, 2), recover_and_restart, pod, lay)
    pod.at_end(check_region(pod, lay))


def cache_crashes(pod: Pod) -> None:
    """Three nodes, two of which die, perhaps the one that repairs; nobody comes back."""
    lay = build(pod, crowded(3), blocks=2)
    pod.run(0, use_cache, lay, ((0, 2), (3, 1)), name="worker 0")
    pod.run(1, use_cache, lay, ((1, 2),), name="worker 1")
    pod.run(2, use_cache, lay, ((0, 2), (4, 1)), name="worker 2")
    pod.on_crash((0, 1, 2), recover_in_pod, pod, lay, at_most=2)
    pod.at_end(check_region(pod, lay))


def cache_upkeep(pod: Pod) -> None:
    """Three nodes abandon, evict and delete beside inserts and lookups; one of them may die."""
    sizes = Sizes(
        nodes=3,
        slots=8,
        chunks=6,
        chunk_bytes=BLOCK_BYTES,
        roots=1,
        evict_above=6,
        heap_batch=1,
    )
    lay = build(pod, sizes, blocks=4)
    pod.run(0, use_cache, lay, ((0, 2), (1, 1)), name="worker 0")
    pod.run(1, give_up, lay, 4, 2, name="gives up")
    pod.run(2, look_after, lay, 0, (1, 4), name="looks after")
    pod.on_crash((0, 1, 2), recover_in_pod, pod, lay)
    pod.at_end(check_region(pod, lay))


def reader_restart(pod: Pod) -> None:
    """Three readers of one block, two of one node, which dies with pins, perhaps, and is back."""
    sizes = Sizes(nodes=2, slots=1, chunks=1, chunk_bytes=BLOCK_BYTES, roots=1)
    lay = build(pod, sizes, blocks=1)
    for task, node in enumerate((0, 1, 1)):
        pod.run(node, read_only, lay, (0, 0, 0), name=f"reader {task}")
    pod.on_crash(1, recover_and_restart, pod, lay)
    pod.at_end(check_region(pod, lay))


# Named objects


def objects(pod: Pod) -> None:
    """Two nodes put, read and delete objects of one name."""
    lay = build(pod, Sizes(nodes=2, slots=1, chunks=4, chunk_bytes=BLOCK_BYTES, roots=2))
    pod.run(0, use_objects, lay, 5, 3, 2, name="worker 0")
    pod.run(1, use_objects, lay, 5, 7, 2, name="worker 1")
    pod.at_end(check_region(pod, lay))


def objects_crash(pod: Pod) -> None:
    """Three nodes use objects of two names; one of them may die."""
    lay = build(pod, Sizes(nodes=3, slots=1, chunks=4, chunk_bytes=BLOCK_BYTES, roots=2))
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
    "cache_upkeep": cache_upkeep,
    "reader_restart": reader_restart,
    "objects": objects,
    "objects_crash": objects_crash,
}
"""Every scenario by its name."""

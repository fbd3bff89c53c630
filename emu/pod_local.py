"""What native and emulated pods share: a node's own DRAM, time, waiting, and looking at arguments.

A handle of either executor is a NamedTuple of integers, among them the fields below; numba chooses
these implementations by that. Locks and words of a node's own memory lie in its mapping, shared by
the node's processes and coherent between them; a lock is one word in a line of its own, taken by
compare-and-swap and holding the token of its owner, so that a fence can tell who had it.

Fields used: ``region_bytes``, ``locks`` and ``locks_n``, ``words`` and ``words_n`` (addresses and
counts of the local locks and words), ``node``, ``token``.

Waiting spins a little and then yields the processor: with more spinners than processors a spin
that never yields is slower by an order of magnitude.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import register_jitable

from cxlbench.emu import pod_ops
from cxlbench.emu.flush_instructions import (
    compare_and_swap,
    cpu_pause,
    fetch_add,
    load_acquire,
    monotonic_ns,
    sched_yield,
    store_release,
)
from cxlbench.emu.pod_overloads import implement

SPINS = 8
"""Processor pauses before a waiter yields: about a quarter of a microsecond."""


class PodAddressError(IndexError):
    """An operation named a word, or a lock, that is not there, or not aligned."""


def handle_class(mem: Any) -> Any:
    """Return the NamedTuple class of a handle's numba type, or None for any other type."""
    return getattr(mem, "instance_class", None) if isinstance(mem, types.BaseTuple) else None


def is_live(mem: Any) -> bool:
    """Whether ``mem`` is the numba type of a native or emulated handle."""
    return "locks_n" in getattr(handle_class(mem), "_fields", ())


@register_jitable
def check_word(mem: Any, off: int) -> None:
    """Refuse an offset that is not that of an aligned word inside the region."""
    if off < 0 or off >= mem.region_bytes:
        raise PodAddressError("the offset is outside the region (offsets count bytes from 0)")
    if off & 7:
        raise PodAddressError("the offset is not aligned: words lie at multiples of 8 bytes")


@register_jitable
def check_byte(mem: Any, off: int) -> None:
    """Refuse an offset outside the region; flushes take any byte of a line."""
    if off < 0 or off >= mem.region_bytes:
        raise PodAddressError("the offset is outside the region (offsets count bytes from 0)")


@register_jitable
def check_run(mem: Any, off: int, n_bytes: int) -> None:
    """Refuse a run of words that is not aligned or not inside the region."""
    if off < 0 or n_bytes < 0 or n_bytes > mem.region_bytes or off > mem.region_bytes - n_bytes:
        raise PodAddressError("the words are not all inside the region")
    if off & 7:
        raise PodAddressError("the offset is not aligned: words lie at multiples of 8 bytes")


@register_jitable
def wait_a_little() -> None:
    """Spin, then let somebody else run."""
    for _ in range(SPINS):
        cpu_pause()
    sched_yield()


@register_jitable
def take_lock(address: int, token: int) -> None:
    """Take the lock word at ``address``: from 0 to ``token``."""
    while compare_and_swap(address, 0, token) != 0:
        spins = 0
        while load_acquire(address) != 0:
            spins += 1
            if spins & 63:
                cpu_pause()
            else:
                sched_yield()


@register_jitable
def _local_lock_address(mem: Any, i: int) -> int:
    if i < 0 or i >= mem.locks_n:
        raise PodAddressError("no local lock of that number: see local_locks of the pod's shape")
    return mem.locks + 64 * i  # type: ignore[no-any-return]


@register_jitable
def _local_word_address(mem: Any, i: int) -> int:
    if i < 0 or i >= mem.words_n:
        raise PodAddressError("no local word of that number: see local_words of the pod's shape")
    return mem.words + 8 * i  # type: ignore[no-any-return]


@register_jitable
def _local_lock(mem: Any, i: int) -> None:
    take_lock(_local_lock_address(mem, i), mem.token)


@register_jitable
def _local_unlock(mem: Any, i: int) -> None:
    store_release(_local_lock_address(mem, i), 0)


@register_jitable
def _local_load(mem: Any, i: int) -> int:
    return load_acquire(_local_word_address(mem, i))  # type: ignore[no-any-return]


@register_jitable
def _local_store(mem: Any, i: int, value: int) -> None:
    store_release(_local_word_address(mem, i), value)


@register_jitable
def _local_cas(mem: Any, i: int, expected: int, new: int) -> int:
    return compare_and_swap(_local_word_address(mem, i), expected, new)  # type: ignore[no-any-return]


@register_jitable
def _local_add(mem: Any, i: int, delta: int) -> int:
    return fetch_add(_local_word_address(mem, i), delta)  # type: ignore[no-any-return]


@register_jitable
def _now(mem: Any) -> int:
    return monotonic_ns()  # type: ignore[no-any-return]


@register_jitable
def _node_id(mem: Any) -> int:
    return mem.node  # type: ignore[no-any-return]


for _operation, _function in (
    (pod_ops.local_lock, _local_lock),
    (pod_ops.local_unlock, _local_unlock),
    (pod_ops.local_load, _local_load),
    (pod_ops.local_store, _local_store),
    (pod_ops.local_cas, _local_cas),
    (pod_ops.local_add, _local_add),
    (pod_ops.now, _now),
    (pod_ops.node_id, _node_id),
):
    implement(_operation, is_live, _function)

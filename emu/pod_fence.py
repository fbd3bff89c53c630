"""What becomes of a node that is gone: its cache is lost, its write-backs land or do not.

``fence_node`` runs in the host after the node's processes were killed. Of the memory model: the
cache is lost; each posted write-back lands or not, independently; a transfer to ``D`` that a
process had begun is completed (a line is never half written); and once it returns, nothing of the
node lands any more. It also frees the emulator's own locks that the dead held.

``shut_down_node`` is the orderly end: everything in flight lands, dirty lines are written back.

``mem`` is the host's handle on the node. Left out: killing (pod_processes).
"""

from __future__ import annotations

from typing import Any

from cxlbench.emu.flush_instructions import peek, poke, store_release
from cxlbench.emu.pod_cache_kernels import flush_line, lock_set, tag_at, unlock_set
from cxlbench.emu.pod_compile import compiled_once
from cxlbench.emu.pod_device_lines import complete_for_the_dead
from cxlbench.emu.pod_kernel import COUNT_RESCUED, EmulatedFields, draw, kernel
from cxlbench.emu.pod_layout import (
    LINE_LOCKS,
    LOCKS_AT,
    NEVER,
    POSTED_STATE_AT,
    QUEUE_HEAD_AT,
    QUEUE_LOCK_AT,
    QUEUE_TAIL_AT,
    RESCUING,
)
from cxlbench.emu.pod_posted import land, land_due, move_head, posted_at


@kernel
def _free_lines(mem: EmulatedFields, first_token: int, last_token: int) -> int:
    """Complete and free every line of ``D`` that a process with one of these tokens holds."""
    completed = 0
    for number in range(LINE_LOCKS):
        lock = mem.control + LOCKS_AT + 64 * number
        holder = peek(lock)
        token = holder & (RESCUING - 1)
        if first_token <= token <= last_token and complete_for_the_dead(mem, lock, holder):
            store_release(lock, 0)
            completed += 1
    return completed


def fence_lines(mem: EmulatedFields, first_token: int, last_token: int) -> tuple[int, int, int]:
    """Let nothing more of a dead node land; return how much landed, was dropped, was completed."""
    rescued = peek(mem.slot + COUNT_RESCUED)
    _free_lines(mem, first_token, last_token)
    completed = peek(mem.slot + COUNT_RESCUED) - rescued
    poke(mem.node_at + QUEUE_LOCK_AT, 0)
    landed = 0
    dropped = 0
    for number in range(peek(mem.node_at + QUEUE_HEAD_AT), peek(mem.node_at + QUEUE_TAIL_AT)):
        entry = posted_at(mem, number)
        if peek(entry + POSTED_STATE_AT) == 0:
            continue
        if draw(mem, 2):
            land(mem, entry)
            landed += 1
        else:
            poke(entry + POSTED_STATE_AT, 0)
            dropped += 1
    move_head(mem)
    return landed, dropped, completed


def settle_lines(mem: EmulatedFields) -> None:
    """Land everything that the node has in flight."""
    land_due(mem, NEVER)


def shut_down_lines(mem: EmulatedFields) -> None:
    """Land everything in flight, and write every dirty line back."""
    land_due(mem, NEVER)
    for number in range(mem.set_mask + 1):
        at = lock_set(mem, number)
        for way in range(mem.ways):
            tag = peek(tag_at(at, way))
            if tag:
                flush_line(mem, at, (tag >> 1) - 1)
        unlock_set(at)


fence_node: Any = compiled_once(fence_lines)
settle_node: Any = compiled_once(settle_lines)
shut_down_node: Any = compiled_once(shut_down_lines)

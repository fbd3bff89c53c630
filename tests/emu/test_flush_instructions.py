"""Instructions in compiled code: what they leave behind on the stack is nothing."""

from __future__ import annotations

import subprocess
import sys

LOOP = """
import numba
from cxlbench.emu.flush_instructions import monotonic_ns, register_jitable

@register_jitable
def spin(rounds):
    last = 0
    for _ in range(rounds):
        last = max(last, monotonic_ns())
    return last

@numba.njit
def run(rounds):
    return spin(rounds)

print(run(2_000_000) > 0)
"""


def test_the_clock_may_be_read_as_often_as_a_long_wait_takes():
    """In a process of its own: a stack that grows by 16 B a round ends it."""
    ran = subprocess.run(
        [sys.executable, "-c", LOOP], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "True\n"), ran.stderr

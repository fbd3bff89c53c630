"""The operations: the same text interpreted and compiled, and the hints that compile to nothing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from numba import types
from numba.extending import overload

from cxlbench.emu import pod_ops
from cxlbench.emu.pod_host import HostMemory
from cxlbench.emu.pod_ops import (
    LINE,
    PodMemory,
    UnfinishedSectionError,
    compiled,
    critical_enter,
    critical_leave,
    critical_want,
    line_of,
    load,
    optimistic,
    optimistic_begin,
    optimistic_end,
    program,
    store,
)


class ArrayMemory(NamedTuple):
    """The smallest compiled executor: an array of words."""

    words: np.ndarray


def is_array_memory(kind):
    return isinstance(kind, types.BaseNamedTuple) and kind.instance_class is ArrayMemory


@overload(load)
def _load(mem, off):
    return (lambda mem, off: mem.words[off >> 3]) if is_array_memory(mem) else None


@overload(store)
def _store(mem, off, value):
    def put(mem, off, value):
        mem.words[off >> 3] = value

    return put if is_array_memory(mem) else None


@program
def bump(mem, off):
    critical_want(mem, 1)
    critical_enter(mem, 1)
    store(mem, line_of(off), load(mem, line_of(off)) + 1)
    critical_leave(mem, 1)
    optimistic_begin(mem)
    value = load(mem, line_of(off))
    optimistic_end(mem, True)
    return value


def test_one_text_runs_interpreted_and_compiled():
    words = np.zeros(16, np.int64)
    both = bump(HostMemory(128), 72), compiled(bump)(ArrayMemory(words), 72)
    assert both == (1, 1)
    assert words.tolist() == [0] * 8 + [1] + [0] * 7


def test_a_program_stays_the_function_that_it_was():
    assert program(bump) is bump


def test_the_line_of_an_offset():
    assert [line_of(off) for off in (0, 8, 63, 64, 200)] == [0, 0, 0, LINE, 3 * LINE]


def test_a_host_memory_is_a_pod_memory():
    assert isinstance(HostMemory(64), PodMemory)


def test_every_operation_calls_the_method_of_its_name():
    operations = {name for name in dir(PodMemory) if not name.startswith("_")}
    assert all(callable(getattr(pod_ops, name)) for name in operations)

    class Said:
        def __getattr__(self, name):
            return lambda *args: (name, args)

    for name in operations:
        function = getattr(pod_ops, name)
        args = range(function.__code__.co_argcount - 1)
        assert function(Said(), *args) in ((name, tuple(args)), None)


class Told(HostMemory):
    def __init__(self):
        super().__init__(64)
        self.ends = []

    def optimistic_end(self, valid):
        self.ends.append(valid)


@pytest.mark.parametrize("valid", [True, False])
def test_an_optimistic_block_ends_with_its_verdict(valid):
    mem = Told()
    with optimistic(mem) as section:
        section.valid = valid
    assert mem.ends == [valid]


def test_an_optimistic_block_without_a_verdict_is_an_error():
    mem = Told()
    with pytest.raises(UnfinishedSectionError, match=r"section\.valid"), optimistic(mem):
        pass
    assert mem.ends == [False]


def test_an_optimistic_block_left_by_an_exception_is_thrown_away():
    mem = Told()

    def leave():
        with optimistic(mem) as section:
            section.valid = True
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    assert mem.ends == [False]

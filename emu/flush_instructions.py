"""Machine instructions that compiled pod programs need: flushes, fences, atomics, a clock.

All of them work on *addresses*: 64-bit integers, as ``array.ctypes.data`` gives them, of aligned
8-byte words. They are usable inside nopython code and, one call at a time, from Python.

* Flushes and fences of x86-64 (Intel SDM vol. 2): ``clflush``, ``clflushopt``, ``clwb``,
  ``ntstore`` (MOVNTI), ``sfence``, ``mfence``. They exist only where the processor and the code
  generator have them; elsewhere the same names raise ``FlushUnsupportedError``. Nothing stands in
  for a missing flush: a program that believes its line has left the cache would be wrong in
  silence. ``flush_support()`` says beforehand what there is.
* Atomics on words (any architecture): relaxed, acquire and release accesses, compare-and-swap,
  fetch-and-add. They are coherent between processes that share a mapping on one host.
* ``cpu_pause``, ``sched_yield``, ``monotonic_ns`` (CLOCK_MONOTONIC), ``process_exists``.

Left out: aarch64 cache maintenance (DC CVAC needs a kernel that allows it to user space).
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import extending as _extending
from numba import types
from numba.core import cgutils as _untyped_cgutils
from numba.core.registry import cpu_target

X86_NAMES = frozenset({"x86_64", "amd64", "AMD64"})
"""What ``platform.machine()`` calls an x86-64."""
CLOCK_MONOTONIC = 6 if sys.platform == "darwin" else 1
"""The number of that clock in the C library."""

cgutils: Any = _untyped_cgutils
intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = _extending.intrinsic
register_jitable: Callable[[Callable[..., Any]], Callable[..., Any]] = _extending.register_jitable

_INSTEAD = (
    "use the emulated pod (same program text, caches in shared memory) or the explorer, which run"
    " on any processor"
)


class FlushUnsupportedError(RuntimeError):
    """The processor, or the code generator, lacks a flush instruction that native mode needs."""


@dataclass(frozen=True, slots=True)
class FlushSupport:
    """Which flush instructions compiled code can use here; ``reason`` says why one is missing."""

    clflush: bool
    clflushopt: bool
    clwb: bool
    reason: str

    def require(self, instruction: str) -> None:
        """Raise ``FlushUnsupportedError`` unless ``instruction`` is there."""
        if not getattr(self, instruction):
            raise FlushUnsupportedError(self.refusal(instruction))

    def refusal(self, instruction: str) -> str:
        """Return the text of the error: what is missing, why, and what to do."""
        others = [name for name in ("clflush", "clflushopt", "clwb") if name != instruction]
        present = [name for name in others if getattr(self, name)]
        here = f"here: {', '.join(present)}; " if present else ""
        return f"no {instruction} on this host ({self.reason}); {here}{_INSTEAD}"


def flush_support(
    *,
    machine: str | None = None,
    processor_flags: frozenset[str] | None = None,
    target_features: str | None = None,
) -> FlushSupport:
    """Return which flushes there are: those of the processor that the code generator emits too.

    ``machine`` is ``platform.machine()``, ``processor_flags`` the flags line of /proc/cpuinfo
    (empty where there is none: then the code generator's word is taken), ``target_features``
    numba's ``+name,-name`` list. Each is read from the host where it is not given.
    """
    machine = platform.machine() if machine is None else machine
    if machine not in X86_NAMES:
        return FlushSupport(
            clflush=False, clflushopt=False, clwb=False, reason=f"it is {machine}, not x86-64"
        )
    flags = _processor_flags() if processor_flags is None else processor_flags
    if target_features is None:
        target_features = str(cpu_target.target_context.codegen().magic_tuple()[2])
    features = frozenset(target_features.split(","))

    def there(name: str) -> bool:
        return f"+{name}" in features and (not flags or name in flags)

    missing = [name for name in ("clflushopt", "clwb") if not there(name)]
    lacks_flag = [name for name in missing if flags and name not in flags]
    if lacks_flag:
        reason = f"/proc/cpuinfo does not list {', '.join(lacks_flag)}"
    elif missing:
        reason = f"numba's target features leave out {', '.join(missing)}; see NUMBA_CPU_FEATURES"
    else:
        reason = "all are there"
    return FlushSupport(  # CLFLUSH is part of SSE2, and so of every x86-64
        clflush=True, clflushopt=there("clflushopt"), clwb=there("clwb"), reason=reason
    )


def _processor_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


SUPPORT = flush_support()
"""What this host has. Compiled code is generated for it, so it is fixed for the process."""

_I64 = ir.IntType(64)
_I32 = ir.IntType(32)


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


def _reading(ordering: str) -> Callable[..., Any]:
    @intrinsic
    def read(typing_context: Any, address: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.load_atomic(_word(builder, args[0]), ordering, 8)

        return types.int64(types.int64), generate

    return read


def _writing(ordering: str) -> Callable[..., Any]:
    @intrinsic
    def write(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            builder.store_atomic(args[1], _word(builder, args[0]), ordering, 8)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return write


peek = _reading("monotonic")
"""Return the word at an address, in one access that the compiler neither drops nor repeats."""
load_acquire = _reading("acquire")
"""The same; what the word's writer released before it is seen afterwards."""
poke = _writing("monotonic")
"""Write a word (address, value), in one access."""
store_release = _writing("release")
"""The same, after everything before it."""


@intrinsic
def compare_and_swap(typing_context: Any, address: Any, expected: Any, new: Any) -> Any:
    """Set the word to ``new`` if it is ``expected``; return the old value either way."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pair = builder.cmpxchg(_word(builder, args[0]), args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(pair, 0)

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def fetch_add(typing_context: Any, address: Any, delta: Any) -> Any:
    """Add ``delta`` to the word; return the old value."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, args[0]), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


def _call(builder: Any, name: str, result: Any, parameters: list[Any], args: list[Any]) -> Any:
    kind = ir.FunctionType(result, parameters)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _line_instruction(name: str) -> Callable[..., Any]:
    @intrinsic
    def instruction(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], cgutils.voidptr_t)
            _call(builder, name, ir.VoidType(), [cgutils.voidptr_t], [pointer])
            return context.get_dummy_value()

        return types.void(types.int64), generate

    return instruction


def _bare_instruction(name: str) -> Callable[..., Any]:
    @intrinsic
    def instruction(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
            _call(builder, name, ir.VoidType(), [], [])
            return context.get_dummy_value()

        return types.void(), generate

    return instruction


@intrinsic
def _store_nontemporal(typing_context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        write = builder.store(args[1], _word(builder, args[0]), align=8)
        write.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _refusing(name: str, parameters: str) -> Callable[..., Any]:
    text = SUPPORT.refusal(name)

    def refuse_address(address: int) -> None:
        raise FlushUnsupportedError(text)

    def refuse_store(address: int, value: int) -> None:
        raise FlushUnsupportedError(text)

    def refuse_fence() -> None:
        raise FlushUnsupportedError(text)

    chosen: dict[str, Callable[..., Any]]
    chosen = {"address": refuse_address, "store": refuse_store, "fence": refuse_fence}
    return register_jitable(chosen[parameters])


clflush: Callable[..., Any]
sfence: Callable[..., Any]
mfence: Callable[..., Any]
ntstore: Callable[..., Any]
cpu_pause: Callable[..., Any]
if SUPPORT.clflush:
    clflush = _line_instruction("llvm.x86.sse2.clflush")
    sfence = _bare_instruction("llvm.x86.sse.sfence")
    mfence = _bare_instruction("llvm.x86.sse2.mfence")
    cpu_pause = _bare_instruction("llvm.x86.sse2.pause")
    ntstore = _store_nontemporal
else:
    clflush = _refusing("clflush", "address")
    sfence = _refusing("clflush", "fence")
    mfence = _refusing("clflush", "fence")
    ntstore = _refusing("clflush", "store")

    @register_jitable
    def _no_pause() -> None:
        """Do nothing: the hint saves power on x86 and is never needed."""

    cpu_pause = _no_pause


clflushopt = (
    _line_instruction("llvm.x86.clflushopt")
    if SUPPORT.clflushopt
    else _refusing("clflushopt", "address")
)
clwb = _line_instruction("llvm.x86.clwb") if SUPPORT.clwb else _refusing("clwb", "address")


@intrinsic
def full_fence(typing_context: Any) -> Any:
    """Order all accesses of this processor before it with all after it; any architecture."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def keep_apart(typing_context: Any) -> Any:
    """Keep the function that calls this out of line: rare paths are compiled once, not per use."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def sched_yield(typing_context: Any) -> Any:
    """Let another thread have this processor."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        _call(builder, "sched_yield", _I32, [], [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def monotonic_ns(typing_context: Any) -> Any:
    """Return CLOCK_MONOTONIC in ns: the same clock in every process of the host."""

    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        # In the entry block: in a loop, an alloca would take stack in every round.
        pair = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        pointer = builder.bitcast(pair, cgutils.voidptr_t)
        clock = ir.Constant(_I32, CLOCK_MONOTONIC)
        _call(builder, "clock_gettime", _I32, [_I32, cgutils.voidptr_t], [clock, pointer])
        parts = builder.load(pair)
        seconds = builder.extract_value(parts, 0)
        scaled = builder.mul(seconds, ir.Constant(_I64, 1_000_000_000))
        return builder.add(scaled, builder.extract_value(parts, 1))

    return types.int64(), generate


@intrinsic
def process_exists(typing_context: Any, process_id: Any) -> Any:
    """Return 1 if there is a process of that id (even one that nobody has waited for), else 0."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        number = builder.trunc(args[0], _I32)
        answer = _call(builder, "kill", _I32, [_I32, _I32], [number, ir.Constant(_I32, 0)])
        return builder.zext(builder.icmp_signed("==", answer, ir.Constant(_I32, 0)), _I64)

    return types.int64(types.int64), generate

"""Compiling pod programs once: a cache on disk that notices every change of the source.

Compiling a program for a pod takes seconds, and every process of every node needs the result.
``compiled_once`` keeps it on disk. numba's own cache looks at the file of the function only and
would go on running old code after a change to an operation, a constant or a called function that
lives in another file; here the folder is named by a hash of the text of all modules that
implement operations, the versions of numba and llvmlite, and the processor, and the entry is
stamped with the text of every module that the function reaches.

The folder is ``$CXLBENCH_KERNEL_CACHE``, else ``cxlbench/kernels`` in the user's cache folder, else
a temporary one. Old folders may be deleted at any time. Left out: closures over values that change.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import llvmlite  # type: ignore[import-untyped]
import numba
from numba.core import caching
from numba.core.registry import cpu_target

KERNEL_MODULES = (
    "flush_instructions",
    "pod_cache_kernels",
    "pod_device_lines",
    "pod_dma",
    "pod_emulated",
    "pod_fence",
    "pod_kernel",
    "pod_layout",
    "pod_local",
    "pod_mapped_kernels",
    "pod_native",
    "pod_ops",
    "pod_overloads",
    "pod_perform",
    "pod_posted",
)
"""The modules beside this one that implement operations or hold constants of theirs."""

CACHE_VARIABLE = "CXLBENCH_KERNEL_CACHE"

_typeof: Any = numba.typeof


@functools.cache
def kernel_folder() -> Path:
    """Return the folder of what this version of the operations compiles to, on this processor."""
    digest = hashlib.blake2b(digest_size=12)
    for part in (numba.__version__, llvmlite.__version__, sys.version, *_target()):
        digest.update(f"{part}\n".encode())
    for name in KERNEL_MODULES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    for root in _roots():
        folder = root / digest.hexdigest()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:
            continue
        return folder
    return Path(tempfile.mkdtemp(prefix="cxlbench-kernels-"))


def _target() -> tuple[str, ...]:
    return tuple(str(part) for part in cpu_target.target_context.codegen().magic_tuple())


def _roots() -> Iterable[Path]:
    if given := os.environ.get(CACHE_VARIABLE):
        yield Path(given)
        return
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        yield Path(home).expanduser() / "cxlbench" / "kernels"
    except RuntimeError:  # no home folder
        return


def source_stamp(function: Callable[..., Any]) -> str:
    """Return a hash of the text of every module that ``function`` reaches through its globals."""
    texts: dict[str, bytes] = {}
    todo: list[Any] = [function]
    seen: set[int] = set()
    while todo:
        item = inspect.unwrap(getattr(todo[-1], "py_func", todo[-1]))
        todo.pop()
        if id(item) in seen or not isinstance(item, FunctionType):
            continue
        seen.add(id(item))
        path = item.__code__.co_filename
        if path not in texts:
            texts[path] = Path(path).read_bytes() if Path(path).is_file() else b""
        todo.extend(_reached(item))
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted(texts):
        digest.update(texts[path])
    return digest.hexdigest()


def _reached(function: FunctionType) -> Iterable[Any]:
    """Yield what a function names: globals, attributes of modules, and what its closure holds."""
    scope = inspect.getclosurevars(function)
    yield from scope.nonlocals.values()
    for name, value in scope.globals.items():
        yield value
        if isinstance(value, ModuleType):
            yield from (
                getattr(value, attribute)
                for attribute in _attributes(function.__code__, name)
                if hasattr(value, attribute)
            )


def _attributes(code: CodeType, module_name: str) -> Iterable[str]:
    previous: Any = None
    for instruction in dis.get_instructions(code):
        if previous is not None and previous.argval == module_name:
            yield str(instruction.argval)
        previous = instruction


class _Locator(caching._CacheLocator):
    """Tells numba where a function's compiled form lies, and what text it was made of."""

    def __init__(self, function: Callable[..., Any], path: str) -> None:
        self._py_file = path
        self._function = function
        self._name = hashlib.blake2b(path.encode(), digest_size=6).hexdigest()

    def get_cache_path(self) -> str:
        return str(kernel_folder())

    def get_source_stamp(self) -> str:
        return source_stamp(self._function)

    def get_disambiguator(self) -> str:
        return self._name

    @classmethod
    def from_function(cls, function: Callable[..., Any], path: str) -> _Locator:
        return cls(function, path)


class _Implementation(caching.CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012 - numba's name for it


class _Cache(caching.FunctionCache):
    _impl_class = _Implementation


def compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled form of a program, kept on disk for the processes that come after.

    Compile it in the parent, by ``prepare`` or by one call, before nodes start: processes that
    find nothing on disk all compile at once.
    """
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy")(function)
    cache: Any = _Cache
    dispatcher._cache = cache(function)
    result: Callable[..., Any] = dispatcher
    return result


def prepare(function: Callable[..., Any], *arguments: Any) -> bool:
    """Compile for arguments like these, or load from disk; return whether it was on disk."""
    dispatcher: Any = function
    dispatcher.compile(tuple(_typeof(argument) for argument in arguments))
    return bool(dispatcher.stats.cache_hits)

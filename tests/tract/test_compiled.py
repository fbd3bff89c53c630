"""Every program compiles, for memory as a live node has it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cxlbench.tract
from cxlbench.emu.pod_compile import compiled_once, prepare
from cxlbench.emu.pod_native import NativeMemory
from cxlbench.tract.layout import Sizes, plan

MODULES = [
    name
    for _, name, _ in pkgutil.iter_modules(cxlbench.tract.__path__)
    if name not in ("scenarios", "mutants", "mutant_loader", "client", "errors", "codes")
]
LAYOUT = plan(Sizes(nodes=2, slots=8, chunks=8, chunk_bytes=64))
TWO_DIMENSIONAL = ("keys", "places", "payload")


def programs() -> dict[str, Callable[..., Any]]:
    """Return every program of TraCT by its name, as ``module.function``."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(f"cxlbench.tract.{name}")
        for function in vars(module).values():
            own = inspect.isfunction(function) and function.__module__ == module.__name__
            if own and inspect.getsource(function).startswith("@program\n"):
                found[f"{name}.{function.__name__}"] = function
    return found


def outermost() -> list[str]:
    """Return the programs that no other program calls: compiling them compiles all."""
    everything = programs()
    called = set()
    for function in everything.values():
        for name in function.__code__.co_names:
            callee = function.__globals__.get(name)
            if inspect.isfunction(callee) and callee is not function:
                called.add(f"{callee.__module__.split('.')[-1]}.{callee.__name__}")
    return sorted(everything.keys() - called)


def argument(parameter: inspect.Parameter) -> Any:
    if parameter.annotation == "PodMemory":
        return NativeMemory(*[0] * len(NativeMemory._fields))
    if parameter.annotation == "Layout":
        return LAYOUT
    if parameter.annotation == "Words":
        return np.zeros((1, 1) if parameter.name in TWO_DIMENSIONAL else 1, np.int64)
    return {"int": 0, "bool": False}[parameter.annotation]


def test_there_are_programs_in_every_part() -> None:
    parts = {name.split(".")[0] for name in programs()}
    assert parts >= {"lock", "arbiter", "index", "prefix_cache", "repair", "manager", "fsck"}


@pytest.mark.parametrize("name", outermost())
def test_it_compiles_with_all_that_it_calls(name: str) -> None:
    function = programs()[name]
    arguments = [argument(p) for p in inspect.signature(function).parameters.values()]
    compiled = compiled_once(function)
    prepare(compiled, *arguments)
    assert len(compiled.signatures) == 1  # type: ignore[attr-defined]

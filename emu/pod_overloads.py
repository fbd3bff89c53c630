"""Giving the operations of ``pod_ops`` an implementation for one kind of handle.

``implement(operation, owns, function)``: in compiled code ``operation(mem, ...)`` is
``function(mem, ...)`` wherever ``owns`` says that the numba type of ``mem`` is its kind. The
function is one that compiled code can call, with the parameters of the operation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from numba.extending import overload


def implement(
    operation: Callable[..., Any],
    owns: Callable[[Any], bool],
    function: Callable[..., Any],
    *,
    check: Callable[[Any], None] | None = None,
) -> None:
    """Let ``function`` be ``operation`` for handles that ``owns`` knows.

    ``check`` gets the numba type of the operation's last argument and raises if it cannot be.
    """
    # numba compiles what it is given by its parameters: one for each number of them.
    by_parameters: dict[int, Callable[..., Any]] = {
        1: lambda mem: function(mem),
        2: lambda mem, a: function(mem, a),
        3: lambda mem, a, b: function(mem, a, b),
        4: lambda mem, a, b, c: function(mem, a, b, c),
    }
    implementation = by_parameters[len(inspect.signature(operation).parameters)]

    def choose(mem: Any, *arguments: Any) -> Any:
        if not owns(mem):
            return None
        if check is not None:
            check(arguments[-1])
        return implementation

    overload(operation, strict=False)(choose)

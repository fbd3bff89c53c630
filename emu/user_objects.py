"""A user's own part, named as ``module:object``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any


class UserObjectError(ValueError):
    """What ``module:object`` names is not there, or cannot be called."""


def load_callable(spec: str, *, what: str) -> Callable[..., Any]:
    """Return the function or class that ``spec`` names; ``what`` it is for, in the error."""
    module_name, _, object_name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise UserObjectError(
            f"{what} {spec!r}: cannot import {module_name!r} ({error}); "
            "is its folder on PYTHONPATH?"
        ) from error
    found = getattr(module, object_name, None) if object_name else None
    if not callable(found):
        public = [name for name in vars(module) if not name.startswith("_")]
        near = get_close_matches(object_name, public)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserObjectError(
            f"{what} {spec!r}: {module_name!r} has no function {object_name!r}{hint}"
        )
    return found  # type: ignore[no-any-return]

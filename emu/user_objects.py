"""A user's own part, named as ``module:object``: a policy, a device, a tier."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, cast


class UserObjectError(ValueError):
    """What ``module:object`` names is not there, or cannot be called."""


def load_callable(spec: str, *, what: str) -> Callable[..., Any]:
    """Return the function or class that ``spec`` names; the error says ``what`` it is for."""
    module_name, _, object_name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise UserObjectError(
            f"{what} {spec!r}: cannot import {module_name!r} ({error}); "
            "is its folder on PYTHONPATH?"
        ) from error
    found = getattr(module, object_name, None) if object_name else None
    if found is None:
        public = [name for name in vars(module) if not name.startswith("_")]
        near = get_close_matches(object_name, public)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserObjectError(
            f"{what} {spec!r}: {module_name!r} has no object {object_name!r}{hint}"
        )
    if not callable(found):
        raise UserObjectError(
            f"{what} {spec!r}: {object_name} is {found!r}, not a class or function"
        )
    return cast("Callable[..., Any]", found)

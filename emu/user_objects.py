"""A user's own part, named as ``module:object``: a policy, a device, a tier, a scenario."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from types import ModuleType
from typing import Any, cast

_SHOWN = 6


class UserObjectError(ValueError):
    """What ``module:object`` names is not there, or cannot be called."""


def load_callable(spec: str, *, what: str) -> Callable[..., Any]:
    """Return the function or class that ``spec`` names; the error says ``what`` it is for.

    Raises:
        UserObjectError: there is none; the text names what is near. What the module itself raises
            when it is imported is raised as it is, but for a failed import in it.
    """
    module_name, _, object_name = spec.partition(":")
    if not module_name or not all(part.isidentifier() for part in module_name.split(".")):
        raise UserObjectError(f"{what} {spec!r}: {_no_module(module_name, object_name)}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        if module_name.endswith(".py"):
            raise UserObjectError(
                f"{what} {spec!r}: {_no_module(module_name, object_name)}"
            ) from error
        raise UserObjectError(
            f"{what} {spec!r}: cannot import {module_name!r} ({error}){_help(module_name, error)}"
        ) from error
    if not object_name:
        raise UserObjectError(
            f"{what} {spec!r}: say which object of the module, as {module_name}:NAME"
            f"{_near_objects(module, object_name)}"
        )
    found = getattr(module, object_name, None)
    if found is None:
        raise UserObjectError(
            f"{what} {spec!r}: {module_name!r} has no object {object_name!r}"
            f"{_near_objects(module, object_name)}"
        )
    if not callable(found):
        raise UserObjectError(
            f"{what} {spec!r}: {object_name} is {found!r}, not a class or function"
        )
    return cast("Callable[..., Any]", found)


def _no_module(name: str, object_name: str) -> str:
    """Say why a text is no module's name: most often it is a file's."""
    bare = name.rpartition(os.sep)[2].removesuffix(".py")
    if (os.sep in name or name.endswith(".py")) and bare.isidentifier():
        return (
            f"{name!r} is a file: name its module, {bare}:{object_name or 'NAME'}, with its folder "
            "current or on PYTHONPATH"
        )
    return f"cannot import {name!r}: write module:name, such as my_module:my_function"


def _help(name: str, error: ImportError) -> str:
    """Say what may be meant, if it is this module that is not there and not one that it imports."""
    missing = error.name or name
    if missing != name and not name.startswith(f"{missing}."):
        return ""
    package, _, last = name.rpartition(".")
    parent = sys.modules.get(package) if package else None
    folders = sys.path if not package else list(getattr(parent, "__path__", []))
    near = _near(last, (module.name for module in pkgutil.iter_modules(folders)))
    where = f"{package}." if package else ""
    meant = f" did you mean {' or '.join(where + one for one in near)}?" if near else ""
    return f"; is its folder on PYTHONPATH?{meant}"


def _near_objects(module: ModuleType, name: str) -> str:
    public = [one for one in vars(module) if not one.startswith("_")]
    near = _near(name, public)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    own = [one for one in public if getattr(vars(module)[one], "__module__", "") == module.__name__]
    more = ", ..." if len(own) > _SHOWN else ""
    return f"; it has {', '.join(own[:_SHOWN])}{more}" if own else "; it defines nothing"


def _near(name: str, names: Iterable[str]) -> list[str]:
    known = sorted({one for one in names if not one.startswith("_")})
    return get_close_matches(name, known, cutoff=0.7)

"""Where profile files are: a user's folders first, then the ones that come with the package.

A profile is asked for by name (``NAME.toml`` in one of the folders) or by path. The built-in files
are reached as package data, so a wheel, an editable install and a checkout find the same ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from cxlbench.devices.profile_schema import Problem, ProfileError


def builtin_profiles() -> tuple[Traversable, ...]:
    """Return the profile files that come with the package, in the order of their names."""
    inside = files("cxlbench.devices").joinpath("profiles").iterdir()
    return tuple(sorted((f for f in inside if f.name.endswith(".toml")), key=lambda f: f.name))


def own_profiles(folder: Path) -> tuple[Path, ...]:
    """Return the profile files of a user's folder, by name; none when it is not there."""
    return tuple(sorted(folder.glob("*.toml"))) if folder.is_dir() else ()


def is_path(name_or_path: str | Path) -> bool:
    """Return whether a profile is asked for by path rather than by name."""
    text = str(name_or_path)
    return isinstance(name_or_path, Path) or text.endswith(".toml") or "/" in text or "\\" in text


def find_profile(name_or_path: str | Path, *, folders: tuple[Path, ...], base: Path) -> Traversable:
    """Return the file of a profile, or raise ``ProfileError`` with the nearest names.

    Names are looked for in ``folders`` in order, then among the built-in profiles; a relative path
    is taken from ``base``.
    """
    text = str(name_or_path)
    if is_path(name_or_path):
        path = base / text
        if path.is_file():
            return path
        what = "a folder, not a file" if path.is_dir() else "not there"
        raise ProfileError((Problem(text, "", f"profile file {str(path)!r} is {what}"),))
    candidates: list[Traversable] = [path for folder in folders for path in own_profiles(folder)]
    candidates += builtin_profiles()
    for candidate in candidates:
        if candidate.name == f"{text}.toml":
            return candidate
    known = sorted({candidate.name.removesuffix(".toml") for candidate in candidates})
    here = base / f"{text}.toml"
    hint = f"; a file of that name is named by its path: './{text}.toml'" if here.is_file() else ""
    what = f"there is no profile {text!r}{hint or nearest(text, known)}"
    raise ProfileError((Problem(text, "", what),))


def nearest(word: str, possible: Iterable[str]) -> str:
    """Return ``"; did you mean 'a' or 'b'?"`` for a message, or all that is possible."""
    names = list(possible)
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.55)
    if close:
        return f"; did you mean {' or '.join(repr(name) for name in close)}?"
    return f"; possible: {', '.join(names)}"

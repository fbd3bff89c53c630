"""A tier's own settings: read by name with a default, refused by name when nobody knows them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any


class TierOptionError(ValueError):
    """A tier has no such setting, or cannot have this value."""


class Options:
    """Reads settings; ``refuse_others`` must follow the last one."""

    def __init__(self, tier: str, given: Mapping[str, Any]) -> None:
        self._tier = tier
        self._given = dict(given)
        self._known: list[str] = []

    def _value(self, name: str, default: Any) -> Any:
        self._known.append(name)
        return self._given.get(name, default)

    def number(self, name: str, default: float) -> float:
        """Return a setting that is zero or more."""
        value = self._value(name, default)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            raise TierOptionError(
                f"{self._tier}: {name}={value!r}, expected a finite number from 0 on"
            )
        return float(value)

    def count(self, name: str, default: int) -> int:
        """Return a setting that is a whole number of at least 1."""
        value = self._value(name, default)
        whole = isinstance(value, float) and value.is_integer()
        if isinstance(value, bool) or not (isinstance(value, int) or whole) or value < 1:
            raise TierOptionError(
                f"{self._tier}: {name}={value!r}, expected a whole number of at least 1"
            )
        return int(value)

    def optional_count(self, name: str) -> int | None:
        """Return a whole number, or None where it is not given."""
        if self._given.get(name) is None:
            self._known.append(name)
            return None
        return self.count(name, 1)

    def flag(self, name: str, default: bool) -> bool:
        """Return a setting that is true or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise TierOptionError(f"{self._tier}: {name}={value!r}, expected True or False")
        return value

    def text(self, name: str, default: str) -> str:
        """Return a setting that is a name."""
        value = self._value(name, default)
        if not isinstance(value, str) or not value:
            raise TierOptionError(f"{self._tier}: {name}={value!r}, expected a name")
        return value

    def choice(self, name: str, default: str, possible: tuple[str, ...]) -> str:
        """Return a setting that is one of a few names."""
        value = self.text(name, default)
        if value not in possible:
            raise TierOptionError(
                f"{self._tier}: {name}={value!r}, possible are {', '.join(possible)}"
            )
        return value

    def refuse_others(self) -> None:
        """Raise ``TierOptionError`` for settings that were never read."""
        for name in self._given:
            if name not in self._known:
                close = difflib.get_close_matches(name, self._known, n=2, cutoff=0.5)
                hint = f"did you mean {' or '.join(close)}?" if close else ", ".join(self._known)
                raise TierOptionError(f"{self._tier}: there is no setting {name!r}; {hint}")

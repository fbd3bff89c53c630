"""Every rig that a test makes must have been run, and found at rest, by the end of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.hymcache.rig import Rig


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Return what makes rigs; those whose run was not checked fail the test."""
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rig = Rig(**options)
        rigs.append(rig)
        return rig

    yield make
    unchecked = [rig for rig in rigs if not rig.checked]
    assert not unchecked, "a rig was made and not run with its check of rest"

"""The arrays that a caller hands to the programs of ``prefix_cache``: keys, and places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cxlbench.tract.prefix_cache import PLACE_WORDS
from cxlbench.tract.words import KEY_WORDS, key_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.int64]


def numbers_of(keys: Sequence[bytes]) -> Words:
    """Return keys as an array of shape (keys, 4); ``KeyLengthError`` if one is not 32 bytes."""
    numbers = np.zeros((len(keys), KEY_WORDS), np.int64)
    for i, key in enumerate(keys):
        numbers[i] = key_words(key)
    return numbers


def places_for(blocks: int) -> Words:
    """Return an empty row for each of so many blocks."""
    return np.zeros((blocks, PLACE_WORDS), np.int64)

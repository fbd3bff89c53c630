"""The arrays that a caller hands to the programs of the prefix cache: keys, and places.

``keys`` has shape (blocks, 4). ``places`` has shape (blocks, ``PLACE_WORDS``) and is what the
programs hand each other; its columns are the constants below. All are int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cxlbench.tract.words import KEY_WORDS, key_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

SLOT = 0
GENERATION = 1
BLOCK_AT = 2
LENGTH_BYTES = 3
CHECKSUM = 4
CODE = 5
HANDLE = 6
PLACE_WORDS = 7


def numbers_of(keys: Sequence[bytes]) -> Words:
    """Return keys as an array of shape (keys, 4); ``KeyLengthError`` if one is not 32 bytes."""
    numbers = np.zeros((len(keys), KEY_WORDS), np.int64)
    for i, key in enumerate(keys):
        numbers[i] = key_words(key)
    return numbers


def places_for(blocks: int) -> Words:
    """Return an empty row for each of so many blocks."""
    return np.zeros((blocks, PLACE_WORDS), np.int64)

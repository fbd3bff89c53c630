"""Words, keys and checksums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.emu.pod_ops import compiled
from cxlbench.tract.errors import KeyLengthError
from cxlbench.tract.words import MASK_62, checksum, key_of_words, key_words, mix

words = st.integers(-(2**63), 2**63 - 1)


@given(st.binary(min_size=32, max_size=32))
def test_a_key_survives_the_way_through_words(key: bytes) -> None:
    assert key_of_words(key_words(key)) == key


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_keys_of_another_length_are_refused(length: int) -> None:
    with pytest.raises(KeyLengthError, match=f"this one has {length}"):
        key_words(bytes(length))


@given(st.lists(words, min_size=1, max_size=20), st.data())
def test_a_checksum_tells_any_changed_word(values: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(values) - 1))
    other = data.draw(words.filter(lambda w: w != values[at]))
    changed = values.copy()
    changed[at] = other
    first = checksum(np.array(values, np.int64))
    assert first != checksum(np.array(changed, np.int64))
    assert 0 <= first <= MASK_62


@given(st.lists(words, min_size=2, max_size=8, unique=True))
def test_a_checksum_tells_the_order_of_words(values: list[int]) -> None:
    turned = np.array(values[::-1], np.int64)
    assert checksum(turned) != checksum(np.array(values, np.int64))


def test_a_checksum_tells_the_length() -> None:
    assert checksum(np.zeros(3, np.int64)) != checksum(np.zeros(4, np.int64))


def test_compiled_and_interpreted_checksums_agree() -> None:
    rng = np.random.default_rng(5)
    mixed, summed = compiled(mix), compiled(checksum)
    for _ in range(200):
        values = rng.integers(-(2**63), 2**63 - 1, 9)
        state = int(rng.integers(0, 2**62))
        assert mixed(state, int(values[0])) == mix(state, int(values[0]))
        assert summed(values) == checksum(values)
    extremes = np.array([-(2**63), 2**63 - 1, 0, -1], np.int64)
    assert summed(extremes) == checksum(extremes)

"""The content of blocks: every byte is checked, and no block looks like another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cxlbench.emu.memory import TORN, PhantomBuffer
from cxlbench.harness.content import BlockContent
from cxlbench.kv.identity import Namespace, trace_keys

SPACE = Namespace("model", "revision", "bfloat16", "layout", 128)
ONE, OTHER = trace_keys(SPACE, (1, 2))
NBYTES = 3 * 4096

REAL = BlockContent(NBYTES, phantom=False, seed=4)
PHANTOM = BlockContent(NBYTES, phantom=True, seed=4)


def test_content_is_accepted_as_made():
    assert REAL.holds(REAL.make(ONE), ONE)
    assert PHANTOM.holds(PHANTOM.make(ONE), ONE)


@given(st.integers(0, NBYTES - 1), st.integers(1, 255))
def test_any_changed_byte_is_found(place, flip):
    buffer = REAL.make(ONE)
    buffer[place] ^= flip
    assert not REAL.holds(buffer, ONE)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_two_blocks_never_hold_each_other(first, second):
    assume(first != second)
    one, other = trace_keys(SPACE, (first, second))
    for content in (REAL, PHANTOM):
        assert not content.holds(content.make(one), other)
        assert not content.holds(content.make(other), one)


@given(st.integers(0, NBYTES // 4096 - 1))
def test_a_page_of_another_block_is_found(page):
    buffer = REAL.make(ONE)
    buffer[page * 4096 : (page + 1) * 4096] = REAL.make(OTHER)[page * 4096 : (page + 1) * 4096]
    assert not REAL.holds(buffer, ONE)


def test_pages_in_another_order_are_found():
    buffer = REAL.make(ONE)
    assert not REAL.holds(np.roll(buffer, 4096), ONE)


def test_the_seed_changes_the_content():
    assert not BlockContent(NBYTES, phantom=False, seed=5).holds(REAL.make(ONE), ONE)


def test_the_same_seed_makes_the_same_content():
    assert BlockContent(NBYTES, phantom=False, seed=4).holds(REAL.make(ONE), ONE)


@pytest.mark.parametrize("tag", [None, TORN, ("other", 1)])
def test_a_phantom_buffer_with_any_other_tag_is_found(tag):
    assert not PHANTOM.holds(PhantomBuffer(NBYTES, tag), ONE)


def test_a_fresh_buffer_is_not_right_yet():
    for content in (REAL, PHANTOM):
        assert not content.holds(content.empty(), ONE)


@given(st.integers(0, NBYTES // 4096 - 1))
def test_a_read_that_leaves_out_a_page_is_found_in_a_used_buffer(page):
    """The buffer held this very block before: what a tier does not write must not look right."""
    content = BlockContent(NBYTES, phantom=False, seed=4)
    content.recycle(content.make(ONE))
    buffer = content.empty()
    right = REAL.make(ONE)
    for other in range(NBYTES // 4096):
        if other != page:
            buffer[other * 4096 : (other + 1) * 4096] = right[other * 4096 : (other + 1) * 4096]
    assert not content.holds(buffer, ONE)


def test_buffers_are_used_again():
    content = BlockContent(NBYTES, phantom=False, seed=4)
    buffer = content.make(ONE)
    content.recycle(buffer)
    assert content.make(OTHER) is buffer
    assert content.holds(buffer, OTHER)


@pytest.mark.parametrize("nbytes", [0, 7, 4097])
def test_sizes_that_are_no_multiple_of_eight_are_refused(nbytes):
    with pytest.raises(ValueError, match=f"{nbytes} B"):
        BlockContent(nbytes, phantom=False, seed=0)

"""Chained ids and regrouped blocks, against the definition: one id per distinct prefix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.harness.requests import Mode, blocks_of
from cxlbench.harness.traces.blocks import Blocking, Chains

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=12)
MODES = st.sampled_from(Mode)


def chained(prompts):
    chains = Chains()
    result = []
    for prompt in prompts:
        chain: list[int] = []
        chains.extend(chain, prompt)
        result.append(chain)
    return result


def test_the_same_trace_id_behind_another_block_is_another_block():
    assert chained([[5, 6], [7, 6], [5, 6]]) == [[0, 1], [2, 3], [0, 1]]


@given(PROMPTS)
def test_ids_are_equal_exactly_where_whole_prefixes_are(prompts):
    prefix_of: dict[int, list[int]] = {}
    id_of: dict[tuple[int, ...], int] = {}
    for prompt, chain in zip(prompts, chained(prompts), strict=True):
        assert len(chain) == len(prompt)
        for end, block in enumerate(chain, 1):
            assert prefix_of.setdefault(block, prompt[:end]) == prompt[:end]
            assert id_of.setdefault(tuple(prompt[:end]), block) == block


def test_a_new_scope_gives_other_numbers_to_the_same_ids():
    chains = Chains()
    before: list[int] = []
    after: list[int] = []
    chains.extend(before, [1, 2])
    chains.new_scope()
    chains.extend(after, [1, 2])
    assert (before, after, chains.fresh(2)) == ([0, 1], [2, 3], (4, 5))


def tokens_of(prompts, native):
    """Return prompts of small token ids, and their native ids: one per distinct full prefix."""
    names: dict[tuple[int, ...], int] = {}
    ids = []
    for prompt in prompts:
        ends = [*range(native, len(prompt), native), len(prompt)] if prompt else []
        ids.append([names.setdefault(tuple(prompt[:end]), len(names)) for end in ends])
    return ids


@given(PROMPTS, MODES, st.sampled_from([(2, 2), (2, 4), (2, 6), (3, 3), (1, 4)]))
def test_larger_blocks_are_exactly_those_of_the_tokens(prompts, mode, sizes):
    native, asked = sizes
    blocking = Blocking(native, asked, mode, partial_recorded=True)
    prefix_of: dict[int, list[int]] = {}
    id_of: dict[tuple[int, ...], int] = {}
    for prompt, chain in zip(prompts, chained(tokens_of(prompts, native)), strict=True):
        blocks = blocking.regroup(chain, len(prompt))
        assert len(chain) == blocking.recorded(len(prompt))
        assert len(blocks) == blocks_of(len(prompt), asked, mode)
        for place, block in enumerate(blocks, 1):
            prefix = prompt[: place * asked]
            assert prefix_of.setdefault(block, prefix) == prefix
            assert id_of.setdefault(tuple(prefix), block) == block


@given(PROMPTS, MODES, st.sampled_from([(4, 2), (4, 1), (6, 2)]))
def test_smaller_blocks_never_invent_reuse_and_keep_all_that_was_recorded(prompts, mode, sizes):
    native, asked = sizes
    blocking = Blocking(native, asked, mode, partial_recorded=True)
    prefix_of: dict[int, list[int]] = {}
    id_of: dict[tuple[tuple[int, ...], int], int] = {}
    for prompt, chain in zip(prompts, chained(tokens_of(prompts, native)), strict=True):
        blocks = blocking.regroup(chain, len(prompt))
        assert len(blocks) == blocks_of(len(prompt), asked, mode)
        for place, block in enumerate(blocks, 1):
            prefix = prompt[: place * asked]
            assert prefix_of.setdefault(block, prefix) == prefix
            recorded = tuple(prompt[: -(-place * asked // native) * native])
            assert id_of.setdefault((recorded, place), block) == block


def test_mooncakes_blocks_split_into_four_cut_to_the_prompt():
    as_recorded = Blocking(512, 128, Mode.AS_RECORDED, partial_recorded=True)
    whole = Blocking(512, 128, Mode.WHOLE_BLOCKS, partial_recorded=True)
    assert as_recorded.regroup([0, 3], 700) == (0, 1, 2, 3, 12, 13)
    assert whole.regroup([0, 3], 700) == (0, 1, 2, 3, 12)


@pytest.mark.parametrize("asked", [0, -4, 100, 300, 768])
def test_blocks_that_do_not_divide_are_refused(asked):
    with pytest.raises(ValueError, match=f"block_tokens={asked}.*multiple or a divisor of 512"):
        Blocking(512, asked, Mode.AS_RECORDED, partial_recorded=True)


def test_smaller_blocks_than_a_trace_of_full_blocks_are_refused():
    with pytest.raises(ValueError, match=r"full blocks of 64 tokens only.*tail"):
        Blocking(64, 16, Mode.WHOLE_BLOCKS, partial_recorded=False)
    larger = Blocking(64, 128, Mode.AS_RECORDED, partial_recorded=False)
    assert larger.regroup([5, 6, 7], 250) == (6,)

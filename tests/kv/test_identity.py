"""Keys are equal exactly when everything that decides the bytes of a KV block is equal."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cxlbench.kv import identity
from cxlbench.kv.identity import (
    IdentityError,
    Namespace,
    chain_from,
    chain_keys,
    trace_key,
    trace_keys,
)

LLAMA = Namespace("llama-3.1-8b", "main", "bfloat16", "NHD", 16)

# One letter and short: fields that merely were joined would collide all the time.
names = st.text("ab", min_size=1, max_size=3)
namespaces = st.integers(1, 3).flatmap(
    lambda size: st.builds(
        Namespace,
        model=names,
        weights_revision=names,
        dtype=names,
        kv_layout=names,
        block_tokens=st.integers(1, 3),
        tp_rank=st.integers(0, size - 1),
        tp_size=st.just(size),
        salt=st.text("ab", max_size=2),
    )
)
extra_key = st.one_of(
    st.none(),
    st.binary(max_size=2),
    st.text("ab\x00", max_size=2),
    st.integers(-300, 300),
    st.sampled_from([2**63, -(2**63), 2**64, 97, "97", b"97", "", b"", 0]),
)
extra_lists = st.lists(extra_key, max_size=3)
token_lists = st.lists(st.integers(0, 3), min_size=1, max_size=9)


@given(namespaces, namespaces)
def test_different_namespaces_never_share_a_digest(one, other):
    assert (one == other) == (one.digest == other.digest)


@given(namespaces, namespaces, token_lists)
def test_different_namespaces_share_no_key_for_the_same_tokens(one, other, tokens):
    assume(one != other)
    assert not set(chain_keys(one, tokens)) & set(chain_keys(other, tokens))
    assert not set(trace_keys(one, tokens)) & set(trace_keys(other, tokens))


@given(namespaces)
def test_every_single_field_separates(namespace):
    changed = {
        "model": namespace.model + "x",
        "weights_revision": namespace.weights_revision + "x",
        "dtype": namespace.dtype + "x",
        "kv_layout": namespace.kv_layout + "x",
        "block_tokens": namespace.block_tokens + 1,
        "tp_rank": namespace.tp_rank + 1,
        "tp_size": namespace.tp_size + 1,
        "salt": namespace.salt + "x",
    }
    assert changed.keys() == {f.name for f in dataclasses.fields(Namespace) if f.init}
    digests = {namespace.digest}
    for field, value in changed.items():
        room = {"tp_size": namespace.tp_size + 1} if field == "tp_rank" else {}
        digests.add(dataclasses.replace(namespace, **{field: value, **room}).digest)
    assert len(digests) == 1 + len(changed)


@given(extra_lists, extra_lists)
def test_different_extra_keys_never_share(one, other):
    keys = [chain_keys(LLAMA, range(16), extra_keys=extras)[0] for extras in (one, other)]
    assert (one == other) == (keys[0] == keys[1])


@given(token_lists, token_lists)
def test_a_key_names_the_tokens_of_its_block_and_of_all_before(one, other):
    namespace = dataclasses.replace(LLAMA, block_tokens=2)
    for at, (a, b) in enumerate(
        zip(chain_keys(namespace, one), chain_keys(namespace, other), strict=False)
    ):
        end = 2 * (at + 1)
        assert (a == b) == (one[:end] == other[:end])


def test_fields_without_their_lengths_would_collide(monkeypatch):
    # The control for the properties above: it is the length prefix that they depend on.
    one = {**FIELDS, "dtype": "a", "kv_layout": "bkv_layoutb"}
    other = {**FIELDS, "dtype": "akv_layoutb", "kv_layout": "b"}
    assert Namespace(**one).digest != Namespace(**other).digest
    monkeypatch.setattr(identity, "_canonical", lambda value: str(value).encode())
    assert Namespace(**one).digest == Namespace(**other).digest


FIELDS = {
    "model": "m",
    "weights_revision": "r",
    "dtype": "bf16",
    "kv_layout": "NHD",
    "block_tokens": 16,
}


def test_h1_17_tokens_with_blocks_of_16_give_one_key():
    assert len(chain_keys(LLAMA, range(17))) == 1
    assert chain_keys(LLAMA, range(17)) == chain_keys(LLAMA, range(16))


@pytest.mark.parametrize("tokens", [[], (), range(15), np.empty(0, np.int64), [7]])
def test_w9_less_than_a_block_has_no_key(tokens):
    assert chain_keys(LLAMA, tokens) == []


def test_h2_none_among_extra_keys_is_a_value_of_its_own():
    variants = [(), (None,), (None, None), ("",), (b"",), (0,), ("None",)]
    keys = {chain_keys(LLAMA, range(16), extra_keys=extras)[0] for extras in variants}
    assert len(keys) == len(variants)


def test_w9_lora_and_cache_salt_separate():
    plain, lora, salted = (
        chain_keys(LLAMA, range(64), extra_keys=extras) for extras in [(), ("lora-1",), ("salt",)]
    )
    assert len({*plain, *lora, *salted}) == 12


def test_w8_fp16_and_fp8_share_nothing():
    fp8 = dataclasses.replace(LLAMA, dtype="float8_e4m3fn")
    assert not set(chain_keys(LLAMA, range(64))) & set(chain_keys(fp8, range(64)))


def test_the_container_of_the_tokens_does_not_matter():
    expected = chain_keys(LLAMA, list(range(64)))
    for tokens in (
        tuple(range(64)),
        np.arange(64),
        np.arange(64, dtype=np.uint16),
        np.arange(64, dtype=">i4"),
        np.arange(128)[::2] // 2,
    ):
        assert chain_keys(LLAMA, tokens) == expected


@given(st.integers(0, 4), st.integers(0, 70))
def test_a_chain_continues_from_its_last_key(blocks, rest):
    first, second = np.arange(16 * blocks), np.arange(rest) + 1000
    head = chain_keys(LLAMA, first, extra_keys=("x",))
    parent = head[-1] if head else LLAMA.digest
    tail = chain_from(LLAMA, parent, second, extra_keys=("x",))
    assert head + tail == chain_keys(LLAMA, np.concatenate([first, second]), extra_keys=("x",))


PINNED = [
    "90c19260f8c43d014fa01ca56a01bb43990c1d3d153631d8830075ec6a0c213f",
    "d751c50ffdd7be095c04131d671529bfe00557f6493d9b4d3c41003913731c2d",
    "ea5744c0bc0ea8dec41b6f20a0ca3cb2d405ac8e35a9c3a6269e969f0af4cf8d",
    "4671c903c414300bdc8dc28649eb79c9deb9c3c6d9d36d6c5c99618d4d65af08",
]

PROGRAM = """
from cxlbench.kv.identity import Namespace, chain_keys, trace_key
n = Namespace("llama-3.1-8b", "main", "bfloat16", "NHD", 16)
print(n.digest.hex())
for key in chain_keys(n, range(40), extra_keys=("lora", b"salt", 7, None)):
    print(key.hex())
print(trace_key(n, 46).hex())
"""


def test_keys_are_those_that_every_host_computes():
    chain = chain_keys(LLAMA, range(40), extra_keys=("lora", b"salt", 7, None))
    assert [k.hex() for k in (LLAMA.digest, *chain, trace_key(LLAMA, 46))] == PINNED


@pytest.mark.parametrize("hash_seed", ["0", "4242"])
def test_h2_another_process_computes_the_same_keys(hash_seed):
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert printed.split() == PINNED


def test_the_largest_token_id_is_one_of_its_own():
    assert chain_keys(LLAMA, [2**32 - 1] * 16) != chain_keys(LLAMA, [2**32 - 2] * 16)


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ([1, 2, -3], "-3 at position 2"),
        ([2**32], f"{2**32} at position 0"),
        ([0, 2**63], f"{2**63} at position 1"),
        ([1, 2**64], f"{2**64} at position 1"),
        ([1, 2.0], "2.0 at position 1"),
        (["a"], "'a' at position 0"),
        ([True, False], "True at position 0"),
        ([[1, 2], [3, 4]], "shape"),
        ([[1, 2], [3]], "one sequence"),
        (np.array([-1] * 20, np.int8), r"-1\)? at position 0"),
    ],
)
def test_impossible_token_ids_are_refused_by_name(tokens, named):
    with pytest.raises(IdentityError, match=named):
        chain_keys(LLAMA, tokens)


@pytest.mark.parametrize("extras", ["lora", b"salt", (1.5,), (True,), ((1,),)])
def test_extra_keys_without_a_canonical_form_are_refused(extras):
    with pytest.raises(IdentityError, match="extra"):
        chain_keys(LLAMA, range(16), extra_keys=extras)


def test_a_parent_that_is_no_key_is_refused():
    with pytest.raises(IdentityError, match="32 bytes, not of 3"):
        chain_from(LLAMA, b"abc", range(16))


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": ""},
        {"dtype": b"bf16"},
        {"block_tokens": 0},
        {"block_tokens": 16.0},
        {"block_tokens": True},
        {"tp_rank": 1},
        {"tp_rank": -1},
        {"tp_size": 0},
        {"salt": None},
    ],
)
def test_an_impossible_namespace_is_refused(wrong):
    with pytest.raises(IdentityError, match=next(iter(wrong))):
        Namespace(**{**FIELDS, **wrong})


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_trace_keys_are_equal_exactly_for_equal_ids(ids):
    keys = trace_keys(LLAMA, ids)
    assert keys == [trace_key(LLAMA, chained) for chained in ids]
    assert keys == trace_keys(LLAMA, np.array(ids, dtype=np.uint64))
    assert keys == trace_keys(LLAMA, [np.uint64(chained) for chained in ids])
    assert len(set(keys)) == len(set(ids))
    assert all(len(key) == 32 for key in keys)


@pytest.mark.parametrize("wrong", [-1, 2**64, 1.0, "7", None])
def test_impossible_chained_ids_are_refused_by_name(wrong):
    with pytest.raises(IdentityError, match=repr(wrong)):
        trace_key(LLAMA, wrong)

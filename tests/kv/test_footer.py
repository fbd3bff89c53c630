"""A footer is read back as it was written, or not at all; checksums describe what was copied."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.kv import footer
from cxlbench.kv.footer import (
    FOOTER_BYTES,
    PAGE_BYTES,
    Footer,
    FooterError,
    Verify,
    copy_and_checksum,
    footer_offset_bytes,
    object_extent_bytes,
    pack_footer,
    parse_footer,
    payload_checksum,
)

SAMPLE = Footer(bytes(range(32)), 7, 16 << 20, bytes(range(16)))

footers = st.builds(
    Footer,
    key=st.binary(min_size=32, max_size=32),
    generation=st.integers(0, 2**32 - 1),
    payload_bytes=st.integers(1, 2**63 - 1),
    checksum=st.binary(min_size=16, max_size=16),
)


@given(footers)
def test_a_footer_reads_back_as_written(written):
    record = pack_footer(written)
    assert len(record) == FOOTER_BYTES
    assert parse_footer(record) == written


def test_a_footer_reads_back_from_its_page_whatever_fills_the_rest():
    page = np.full(PAGE_BYTES, 0xAA, dtype=np.uint8)
    page[:FOOTER_BYTES] = np.frombuffer(pack_footer(SAMPLE), dtype=np.uint8)
    for buffer in (page, page.view(np.uint64), memoryview(page), bytearray(page), page.tobytes()):
        assert parse_footer(buffer) == SAMPLE


def test_the_record_is_the_same_on_every_host():
    assert pack_footer(SAMPLE).hex() == (
        "43584c42464f4f54010000000700000000000001000000000001020304050607"
        "08090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f0001020304050607"
        "08090a0b0c0d0e0f736cae0e877a579e"
    )


def test_every_single_flipped_bit_makes_it_unreadable():
    record = pack_footer(SAMPLE)
    for bit in range(8 * FOOTER_BYTES):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        assert parse_footer(damaged) is None


@given(footers, footers, st.integers(1, FOOTER_BYTES // 8 - 1))
def test_a_record_torn_between_two_footers_is_unreadable(old, new, words):
    torn = pack_footer(new)[: 8 * words] + pack_footer(old)[8 * words :]
    assert parse_footer(torn) in (None, old, new)


def test_a_cut_record_is_unreadable_at_every_length():
    record = pack_footer(SAMPLE)
    assert [parse_footer(record[:size]) for size in range(FOOTER_BYTES)] == [None] * FOOTER_BYTES


@given(st.binary(max_size=2 * FOOTER_BYTES))
def test_random_bytes_are_no_footer(garbage):
    assert parse_footer(garbage) is None


def test_empty_and_zeroed_memory_is_no_footer():
    for buffer in (b"", bytearray(), np.empty(0, np.uint8), np.zeros(PAGE_BYTES, np.uint8)):
        assert parse_footer(buffer) is None


@pytest.mark.parametrize(("name", "value"), [("_MAGIC", b"CXLBFOOX"), ("FOOTER_VERSION", 2)])
def test_another_magic_or_version_is_no_footer_of_ours(monkeypatch, name, value):
    with monkeypatch.context() as patch:
        patch.setattr(footer, name, value)
        foreign = pack_footer(SAMPLE)
        assert parse_footer(foreign) == SAMPLE
    assert parse_footer(foreign) is None


@pytest.mark.parametrize(
    "wrong",
    [
        Footer(b"short", 0, 1, bytes(16)),
        Footer(bytes(32), 0, 1, bytes(8)),
        Footer(bytes(32), -1, 1, bytes(16)),
        Footer(bytes(32), 2**32, 1, bytes(16)),
        Footer(bytes(32), 0, 0, bytes(16)),
        Footer(bytes(32), 0, 2**63, bytes(16)),
    ],
)
def test_a_footer_that_does_not_fit_is_refused(wrong):
    with pytest.raises(FooterError, match="a footer takes"):
        pack_footer(wrong)


@given(st.binary(max_size=5000), st.integers(1, 6000))
def test_the_copy_is_exact_and_its_checksum_is_that_of_the_payload(payload, chunk):
    src = np.frombuffer(payload, dtype=np.uint8)
    dst = np.full(len(src), 0xEE, dtype=np.uint8)
    checksum = copy_and_checksum(dst, src, chunk)
    assert dst.tobytes() == payload
    assert checksum == payload_checksum(payload) == payload_checksum(src)
    assert checksum == xxhash.xxh3_128(payload).digest()
    assert len(checksum) == 16


def test_a_copy_larger_than_the_default_chunk_is_exact():
    src = np.random.default_rng(1).integers(0, 256, (1 << 20) + 13, dtype=np.uint8)
    dst = np.zeros_like(src)
    assert copy_and_checksum(dst, src) == payload_checksum(src)
    assert np.array_equal(dst, src)


def test_the_checksum_is_of_what_arrived_not_of_what_was_sent():
    memory = np.arange(4096 + 512, dtype=np.uint64).astype(np.uint8)
    memory[::7] = 3
    src, dst = memory[:4096], memory[512:]
    # Overlap is outside the contract; here it makes a source that changes while it is copied.
    assert copy_and_checksum(dst, src, 1024) == payload_checksum(dst)


@pytest.mark.parametrize(
    ("dst", "src", "chunk"),
    [((5,), (4,), 1), ((2, 2), (2, 2), 1), ((4,), (4,), 0), ((4,), (4,), -1)],
)
def test_a_copy_that_does_not_fit_changes_nothing(dst, src, chunk):
    target = np.zeros(dst, dtype=np.uint8)
    with pytest.raises(ValueError, match=r"copy|chunk"):
        copy_and_checksum(target, np.ones(src, dtype=np.uint8), chunk)
    assert not target.any()


@pytest.mark.parametrize(
    ("payload", "offset"),
    [(1, 4096), (4095, 4096), (4096, 4096), (4097, 8192), (16 << 20, 16 << 20)],
)
def test_the_footer_has_its_own_page_after_the_payload(payload, offset):
    assert footer_offset_bytes(payload) == offset
    assert object_extent_bytes(payload) == offset + PAGE_BYTES


@pytest.mark.parametrize("payload", [0, -1])
def test_an_object_without_payload_has_no_extent(payload):
    with pytest.raises(FooterError, match="at least 1 byte"):
        object_extent_bytes(payload)


def test_there_are_two_depths_of_verification():
    assert [verify.value for verify in Verify] == ["full", "footer"]

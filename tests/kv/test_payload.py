"""Payloads, real and phantom: their checksums, and what a reader accepts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cxlbench.emu.memory import TORN, Buffer, PhantomBuffer
from cxlbench.kv.footer import Footer
from cxlbench.kv.payload import ObjectTag, Verifier, checksum_of

KEY, OTHER = b"k" * 32, b"o" * 32
NBYTES = 10_000


def content(*, phantom: bool) -> Buffer:
    if phantom:
        return PhantomBuffer(NBYTES, ObjectTag.of(KEY))
    return np.random.default_rng(1).integers(0, 256, NBYTES, dtype=np.uint8)


def footer_of(payload: Buffer) -> Footer:
    return Footer(KEY, 7, payload.nbytes, checksum_of(payload))


def accepts(payload: Buffer, footer: Footer | None, *, full: bool = True) -> bool:
    """Let a verifier see the bytes arrive in pieces, as a copy feeds them."""
    verifier = Verifier(full=full)
    if verifier.digest is not None and isinstance(payload, np.ndarray):
        for begin in range(0, len(payload), 3000):
            verifier.digest(payload[begin : begin + 3000])
    return verifier.accepts(footer, key=KEY, generation=7, payload=payload)


@pytest.mark.parametrize("phantom", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_what_was_written_is_accepted(phantom: bool, full: bool) -> None:
    payload = content(phantom=phantom)
    assert accepts(payload, footer_of(payload), full=full)


@pytest.mark.parametrize("phantom", [False, True])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    "change", [{"key": OTHER}, {"generation": 6}, {"generation": 8}, {"payload_bytes": NBYTES + 1}]
)
def test_another_object_is_refused(
    change: dict[str, bytes | int], full: bool, phantom: bool
) -> None:
    payload = content(phantom=phantom)
    footer = dataclasses.replace(footer_of(payload), **change)  # type: ignore[arg-type]
    assert not accepts(payload, footer, full=full)


@pytest.mark.parametrize("phantom", [False, True])
def test_a_footer_that_cannot_be_read_is_refused(phantom: bool) -> None:
    assert not accepts(content(phantom=phantom), None)


@pytest.mark.parametrize("at", [0, 2999, 3000, NBYTES - 1])
def test_one_flipped_bit_is_noticed_where_the_payload_is_checked(at: int) -> None:
    payload = content(phantom=False)
    footer = footer_of(payload)
    assert isinstance(payload, np.ndarray)
    payload[at] ^= 1
    assert not accepts(payload, footer)
    assert accepts(payload, footer, full=False)  # as documented: the footer only


def test_bytes_of_the_right_sum_in_the_wrong_order_are_noticed() -> None:
    payload = content(phantom=False)
    footer = footer_of(payload)
    assert isinstance(payload, np.ndarray)
    assert not accepts(np.ascontiguousarray(payload[::-1]), footer)


@pytest.mark.parametrize("tag", [None, TORN, ObjectTag.of(OTHER), b"\0" * 32])
@pytest.mark.parametrize("full", [False, True])
def test_a_phantom_payload_of_another_object_is_refused(tag: object, full: bool) -> None:
    right = content(phantom=True)
    assert not accepts(PhantomBuffer(NBYTES, tag), footer_of(right), full=full)


def test_a_phantom_payload_that_is_nobodys_is_never_accepted() -> None:
    nobodys = PhantomBuffer(NBYTES)
    assert not accepts(nobodys, footer_of(nobodys))


def test_a_phantom_payload_whose_footer_has_another_checksum_is_refused() -> None:
    payload = content(phantom=True)
    footer = dataclasses.replace(footer_of(payload), checksum=bytes(16))
    assert not accepts(payload, footer)

"""The footer that lies behind an object's payload, and the checksums that it carries.

Models what HyMCache §4 leaves open: a one-sided READ cannot be refused by content, so the reader
itself checks that it got the object it asked for. The footer has a 4 KiB page of its own, after the
payload rounded up to whole pages; ``size`` means payload bytes everywhere. The record is the first
80 bytes of that page; the rest of the page is neither covered nor read.

    offset  bytes  content (little-endian)
         0      8  magic
         8      4  version
        12      4  generation
        16      8  payload bytes
        24     32  key
        56     16  xxh3_128 of the payload
        72      8  xxh3_64 of the 72 bytes before

The checksums find torn, stale, misplaced and corrupted data. They are no defence against somebody
who forges data on purpose.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from cxlbench.kv.identity import KEY_BYTES

PAGE_BYTES = 4096
FOOTER_BYTES = 80
"""Bytes of a packed footer; the rest of its page is the caller's to fill."""

CHECKSUM_BYTES = 16
FOOTER_VERSION = 1

ReadableBuffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]

_MAGIC = b"CXLBFOOT"
_RECORD = struct.Struct("<8sIIQ32s16s")
_SELF_CHECK = struct.Struct("<Q")
_MAX_GENERATION = 2**32 - 1
_MAX_PAYLOAD_BYTES = 2**63 - 1


class FooterError(ValueError):
    """A footer or an extent was asked for that cannot exist."""


class Verify(enum.Enum):
    """How much a reader checks before it hands data on."""

    FULL = "full"
    """Key, generation, size, and the checksum over every byte of the payload."""

    FOOTER = "footer"
    """Key, generation and size: finds another or an older object, not a damaged payload."""


@dataclass(frozen=True, slots=True)
class Footer:
    """Who the object in front is: 32-byte key, generation, payload bytes, payload checksum."""

    key: bytes
    generation: int
    payload_bytes: int
    checksum: bytes
    """As :func:`payload_checksum` gives it (16 bytes)."""


def pack_footer(footer: Footer) -> bytes:
    """Return the 80-byte record of a footer.

    Raises:
        FooterError: a field does not fit its place in the record.

    """
    if len(footer.key) != KEY_BYTES or len(footer.checksum) != CHECKSUM_BYTES:
        raise FooterError(
            f"a footer takes a key of {KEY_BYTES} and a checksum of {CHECKSUM_BYTES} bytes, "
            f"not of {len(footer.key)} and {len(footer.checksum)}"
        )
    if not (
        0 <= footer.generation <= _MAX_GENERATION and 0 < footer.payload_bytes <= _MAX_PAYLOAD_BYTES
    ):
        raise FooterError(
            f"a footer takes a generation from 0 to 2**32 - 1 and a payload of 1 to 2**63 - 1 "
            f"bytes, not {footer.generation} and {footer.payload_bytes}"
        )
    record = _RECORD.pack(
        _MAGIC,
        FOOTER_VERSION,
        footer.generation,
        footer.payload_bytes,
        footer.key,
        footer.checksum,
    )
    return record + _SELF_CHECK.pack(xxhash.xxh3_64_intdigest(record))


def parse_footer(buffer: ReadableBuffer) -> Footer | None:
    """Return the footer at the start of a C-contiguous buffer; None if it is damaged in any way.

    Content never raises: a short buffer, another version and random bytes are all None. What the
    payload holds is not looked at.
    """
    start = _view(buffer).cast("B")[:FOOTER_BYTES]
    if len(start) < FOOTER_BYTES:
        return None
    magic, version, generation, payload_bytes, key, checksum = _RECORD.unpack_from(start)
    if magic != _MAGIC or version != FOOTER_VERSION:
        return None
    if (
        xxhash.xxh3_64_intdigest(start[: _RECORD.size])
        != _SELF_CHECK.unpack_from(start, _RECORD.size)[0]
    ):
        return None
    return Footer(key, generation, payload_bytes, checksum)


def payload_checksum(buffer: ReadableBuffer) -> bytes:
    """Return the xxh3_128 (16 bytes, canonical order) of a C-contiguous buffer."""
    return xxhash.xxh3_128_digest(_view(buffer))


def copy_and_checksum(
    dst: NDArray[np.uint8], src: NDArray[np.uint8], chunk: int = 1 << 18
) -> bytes:
    """Copy ``src`` to ``dst`` and return the :func:`payload_checksum` of what arrived in ``dst``.

    Both are one-dimensional, contiguous and of the same length; they do not overlap. Each chunk
    (bytes) is hashed right after it was copied, while its lines are still in the cache. It is the
    copy that is hashed, so the result describes ``dst`` even if ``src`` changes meanwhile.

    Raises:
        ValueError: the two differ in length, or ``chunk`` is not positive.

    """
    if dst.shape != src.shape or dst.ndim != 1:
        raise ValueError(f"cannot copy an array of shape {src.shape} to one of shape {dst.shape}")
    if chunk < 1:
        raise ValueError(f"a chunk has at least 1 byte, not {chunk}")
    hasher = xxhash.xxh3_128()
    for start in range(0, len(src), chunk):
        part = dst[start : start + chunk]
        part[:] = src[start : start + chunk]
        hasher.update(part.data)
    return hasher.digest()


def footer_offset_bytes(payload_bytes: int) -> int:
    """Return where the footer's page begins, counted from the start of the object."""
    if payload_bytes < 1:
        raise FooterError(f"an object has at least 1 byte of payload, not {payload_bytes}")
    return -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES


def object_extent_bytes(payload_bytes: int) -> int:
    """Return the bytes that an object takes on a device: payload in whole pages, and the footer."""
    return footer_offset_bytes(payload_bytes) + PAGE_BYTES


def _view(buffer: ReadableBuffer) -> memoryview:
    return buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)

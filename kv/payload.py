"""What a KV object is made of in memory: real bytes, or a tag that stands for them.

Both have a checksum, so that the reader's test is one and the same text: footer against payload.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash

from cxlbench.emu.memory import Buffer, Digest, PhantomBuffer
from cxlbench.kv.footer import CHECKSUM_BYTES, Footer, payload_checksum

_NO_CHECKSUM = bytes(CHECKSUM_BYTES)


@dataclass(frozen=True, slots=True)
class ObjectTag:
    """The phantom payload of one block: whose it is, and its checksum."""

    key: bytes
    checksum: bytes

    @classmethod
    def of(cls, key: bytes) -> ObjectTag:
        """Return the tag of the block ``key``; its checksum is drawn from the key."""
        return cls(key, key[:CHECKSUM_BYTES])


def checksum_of(buffer: Buffer) -> bytes:
    """Return the checksum that a writer puts into the footer."""
    if isinstance(buffer, PhantomBuffer):
        return buffer.tag.checksum if isinstance(buffer.tag, ObjectTag) else _NO_CHECKSUM
    return payload_checksum(buffer)


class Verifier:
    """Checks one object on arrival; ``digest`` is to be fed the payload as it is copied."""

    __slots__ = ("_hash", "full")

    def __init__(self, *, full: bool) -> None:
        self.full = full
        self._hash = xxhash.xxh3_128() if full else None

    @property
    def digest(self) -> Digest | None:
        """What the copy feeds, or None where only the footer is checked."""
        return self._hash.update if self._hash is not None else None

    def accepts(
        self, footer: Footer | None, *, key: bytes, generation: int, payload: Buffer
    ) -> bool:
        """Whether ``payload`` is the object that was asked for, undamaged as far as is checked."""
        if (
            footer is None
            or footer.key != key
            or footer.generation != generation
            or footer.payload_bytes != payload.nbytes
        ):
            return False
        if isinstance(payload, np.ndarray):
            return self._hash is None or self._hash.digest() == footer.checksum
        tag = payload.tag
        return isinstance(tag, ObjectTag) and tag.key == key and tag.checksum == footer.checksum

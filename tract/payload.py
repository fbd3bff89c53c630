"""A block's payload as words: real bytes, or a tag that stands for them, with its checksum.

TraCT's entry holds key, length and a checksum of the payload, so the entry is what a footer is
elsewhere: a reader that pinned it knows what must come. The checksum is ``words.checksum`` of the
bytes (compiled: every process of the pod can check it), or of a tag the one that the tag carries.

Units: bytes; words of 8 B.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from cxlbench.emu.memory import Buffer, PhantomBuffer
from cxlbench.emu.pod_ops import WORD
from cxlbench.emu.pod_virtual_device import PhantomWords
from cxlbench.kv.payload import ObjectTag
from cxlbench.tract.region import compiled_program
from cxlbench.tract.words import KEY_WORDS, MASK_62, checksum, key_of_words, key_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

_CHECKSUM = struct.Struct("<2q")


def compile_checksum() -> None:
    """Compile what ``checksum_of`` needs for bytes, so that a run in real time need not wait."""
    checksum_of(np.zeros(WORD, np.uint8))


def words_of(buffer: Buffer) -> Words | PhantomWords:
    """Return ``buffer``, of whole words, as what a DMA moves; bytes are not copied."""
    if not isinstance(buffer, PhantomBuffer):
        return buffer.view(np.int64)
    tag = buffer.tag
    stand_in: tuple[int, ...] = ()
    if isinstance(tag, ObjectTag):
        stand_in = (*key_words(tag.key), *_CHECKSUM.unpack(tag.checksum))
    return PhantomWords(buffer.nbytes // WORD, stand_in)


def checksum_of(buffer: Buffer) -> int:
    """Return the checksum (0 to 2**62 - 1) that the entry of this payload gets."""
    if not isinstance(buffer, PhantomBuffer):
        return int(compiled_program(checksum)(buffer.view(np.int64)))
    tag = buffer.tag
    return _tag_checksum(tag) if isinstance(tag, ObjectTag) else 0


def arrived(buffer: Buffer, words: Words | PhantomWords, key: bytes, check: int) -> bool:
    """Whether what a DMA put into ``words``, those of ``buffer``, is the block ``key``.

    A phantom buffer gets the tag that was read.
    """
    if not isinstance(buffer, PhantomBuffer):
        return checksum_of(buffer) == check
    assert isinstance(words, PhantomWords)
    found = words.stand_in
    if len(found) < KEY_WORDS + 2 or not any(found):
        buffer.tag = None
        return False
    a, b, c, d = found[:KEY_WORDS]
    tag = ObjectTag(key_of_words((a, b, c, d)), _CHECKSUM.pack(*found[KEY_WORDS : KEY_WORDS + 2]))
    buffer.tag = tag
    return tag.key == key and _tag_checksum(tag) == check


def _tag_checksum(tag: ObjectTag) -> int:
    first: int = _CHECKSUM.unpack(tag.checksum)[0]
    return first & MASK_62

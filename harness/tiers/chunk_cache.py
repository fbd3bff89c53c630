"""Whole chunks of blocks in the DRAM of one server: what LMCache's local CPU backend keeps.

A chunk is a fixed number of consecutive blocks of a chain, counted from its head, under the key of
its last block. What is found is pinned; the policy is LRU, tails before heads, and evicts chunk by
chunk what nobody uses.

A chunk that begins with blocks that the engine has but does not offer, because they are in its GPU
cache, is stored whole: the copy reads the GPU. The blocks of an unfull chunk at the end of a prompt
are not stored; the answer is EXISTS, since they need not be offered again.

Units: bytes, s.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from cxlbench.harness.tiers.block_store import BlockStore, Entry
from cxlbench.harness.tiers.plain_work import Asked, Offer, Payload
from cxlbench.kv.payload import ObjectTag
from cxlbench.kv.results import KeyResult


def pieces_of(offer: Offer, each: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the parts of a group by chunk of ``each`` blocks, and whether the chunk ends there."""
    begin, count = 0, len(offer.keys)
    while begin < count:
        end = begin + each - (offer.position + begin) % each
        yield begin, min(end, count), end <= count
        begin = end


def chunks_of(offer: Offer, keys: Container[bytes], each: int) -> list[tuple[int, int]]:
    """Return begin and end of a group's whole chunks that are among ``keys``."""
    return [
        (begin, end)
        for begin, end, whole in pieces_of(offer, each)
        if whole and offer.keys[end - 1] in keys
    ]


def chunk_payload(offer: Offer, begin: int, end: int, each: int) -> tuple[Payload, ...]:
    """Return what the chunk holds whose offered blocks are ``begin`` to ``end``."""
    at = offer.position + begin
    held = [ObjectTag.of(key) for key in offer.chain[at - at % each : at]]
    return (*held, *offer.payloads[begin:end])


class ChunkCache:
    """The chunks of one server. A chunk's payload is the payloads of its blocks."""

    def __init__(self, capacity_bytes: int, chunk_blocks: int) -> None:
        self.store = BlockStore(capacity_bytes)
        self.chunk_blocks = chunk_blocks

    def chunks(self, asked: Asked) -> Iterator[bytes]:
        """Yield the keys of a chain's chunks, from the one that has the first wanted block."""
        each = self.chunk_blocks
        for last in range((asked.matched // each + 1) * each - 1, len(asked.chain), each):
            yield asked.chain[last]

    def hold(self, key: bytes, size_bytes: int) -> Entry | None:
        """Pin a chunk of blocks of that size, if it is there."""
        entry = self.store.find(key)
        if entry is None or entry.nbytes != self.chunk_blocks * size_bytes:
            return None
        self.store.pin(entry)
        return entry

    def use(self, asked: Asked, upto: int) -> None:
        """Make the chunks of a chain's first ``upto`` blocks the latest used, heads the most."""
        each = self.chunk_blocks
        chain = asked.chain
        self.store.touch([chain[last] for last in range(upto - 1, 0 if each > 1 else -1, -each)])

    def block(self, entry: Entry, place: int) -> Payload:
        """Return the payload of the block at ``place`` of a chain."""
        assert isinstance(entry.payload, tuple)
        payload: Payload = entry.payload[place % self.chunk_blocks]
        return payload

    def reserve(self, offer: Offer, now: float) -> list[KeyResult | None]:
        """Take space for every whole chunk of a group that is not there, until there is none."""
        results: list[KeyResult | None] = []
        full = False
        for begin, end, whole in pieces_of(offer, self.chunk_blocks):
            last, result = offer.keys[end - 1], None
            if not whole or last in self.store:
                result = KeyResult.EXISTS
            else:
                nbytes = self.chunk_blocks * offer.size_bytes
                full = full or self.store.reserve(last, nbytes, now) is None
                result = KeyResult.NO_SPACE if full else None
            results += [result] * (end - begin)
        return results

    def commit(self, offer: Offer, keys: Sequence[bytes]) -> list[Entry]:
        """Make the reserved chunks of ``keys`` findable, and return them."""
        kept = []
        for begin, end in chunks_of(offer, keys, self.chunk_blocks):
            entry = self.store.entry(offer.keys[end - 1])
            self.store.commit(entry, chunk_payload(offer, begin, end, self.chunk_blocks))
            kept.append(entry)
        return kept

    def abandon(self, keys: Sequence[bytes]) -> None:
        """Give back the space of chunks that will not be committed."""
        for key in keys:
            if key in self.store and self.store.find(key) is None:
                self.store.remove(self.store.entry(key))

"""Identity of a KV block: which tokens, after which tokens, of which model, laid out how.

Models the chained block hash that both papers take for granted (HyMCache §4.1: the key that Master
maps to a location; TraCT's prefix index: ``h_i = hash(h_{i-1}, T_i)``). A key is 32 bytes:

    key_i = SHA-256(tag || key_(i-1) || tokens of block i || extra keys)
    key_(-1) = namespace digest

The hash input is canonical: every part is of fixed size or carries a type tag and its length, so no
two different inputs have the same bytes, and the key is the same on every host, in every process
and for every PYTHONHASHSEED. All integers are little-endian. Text is hashed as the UTF-8 of its
code points, without Unicode normalization.

Left out: which extra keys a request has (LoRA name, cache salt, multi-modal hashes) is the caller's
knowledge, and so is on which blocks they apply: all blocks of one call share them.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 32
"""Bytes of every block key."""

MAX_TOKEN_ID = 2**32 - 1
MAX_CHAINED_ID = 2**64 - 1

ExtraKey: TypeAlias = bytes | str | int | None
TokenIds: TypeAlias = Sequence[int] | NDArray[Any]

_NAMESPACE_TAG = b"cxlbench.namespace/1"
_BLOCK_TAG = b"cxlbench.block/1"
# Tag, digest and id together stay below the 56 bytes that SHA-256 hashes in one compression.
_TRACE_TAG = b"cxlb.trace/1"


class IdentityError(ValueError):
    """Something that cannot be part of a block's identity was given."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything but tokens that decides whether two KV blocks are interchangeable.

    Two requests may share blocks only if all of these are equal. ``tp_rank`` counts from 0;
    ``block_tokens`` is the number of tokens in a block; ``salt`` separates tenants ("" for none).

    Raises:
        IdentityError: a field is of the wrong type, empty, or out of range.

    """

    model: str
    weights_revision: str
    dtype: str
    kv_layout: str
    block_tokens: int
    tp_rank: int = 0
    tp_size: int = 1
    salt: str = ""
    digest: bytes = field(init=False, repr=False, compare=False)
    """SHA-256 (32 bytes) over the canonical bytes of all fields: the parent of first blocks."""

    def __post_init__(self) -> None:
        parts = [_NAMESPACE_TAG]
        for name in ("model", "weights_revision", "dtype", "kv_layout", "salt"):
            text = getattr(self, name)
            if not isinstance(text, str):
                raise IdentityError(f"{name} must be text, not {text!r}")
            if not text and name != "salt":
                raise IdentityError(
                    f"{name} must not be empty: blocks of different {name}s would mix"
                )
            parts += (_canonical(name), _canonical(text))
        for name in ("block_tokens", "tp_rank", "tp_size"):
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool):
                raise IdentityError(f"{name} must be a whole number, not {number!r}")
            parts += (_canonical(name), _canonical(number))
        if self.block_tokens < 1:
            raise IdentityError(f"block_tokens must be at least 1, not {self.block_tokens}")
        if not 0 <= self.tp_rank < self.tp_size:
            raise IdentityError(
                f"tp_rank {self.tp_rank} does not exist with tp_size {self.tp_size}: "
                "ranks go from 0 to tp_size - 1"
            )
        object.__setattr__(self, "digest", hashlib.sha256(b"".join(parts)).digest())


def chain_keys(
    namespace: Namespace, token_ids: TokenIds, *, extra_keys: Sequence[ExtraKey] = ()
) -> list[bytes]:
    """Return the keys of all whole blocks of a prompt, head first.

    ``token_ids`` are at most 2**32 - 1 each; a partial last block has no key, so fewer tokens than
    one block give an empty list. ``extra_keys`` (LoRA name, cache salt, ...) enter every key; their
    order, number and types count, and ``None`` is a value like any other.

    Raises:
        IdentityError: a token id or an extra key that has no canonical form.

    """
    return chain_from(namespace, namespace.digest, token_ids, extra_keys=extra_keys)


def chain_from(
    namespace: Namespace,
    parent: bytes,
    token_ids: TokenIds,
    *,
    extra_keys: Sequence[ExtraKey] = (),
) -> list[bytes]:
    """Return the keys of the whole blocks of ``token_ids`` that follow the block ``parent``.

    ``parent`` is the key of the block before the first token (``namespace.digest`` at the start of
    a prompt): ``chain_keys(a + b) == chain_keys(a) + chain_from(chain_keys(a)[-1], b)`` if ``a``
    ends on a block boundary. Otherwise as :func:`chain_keys`.
    """
    if len(parent) != KEY_BYTES:
        raise IdentityError(f"parent must be a key of {KEY_BYTES} bytes, not of {len(parent)}")
    tokens = memoryview(_token_bytes(token_ids))
    extras = _canonical_extras(extra_keys)
    block_bytes = 4 * namespace.block_tokens
    head = _BLOCK_TAG + namespace.block_tokens.to_bytes(8, "little")
    sha256 = hashlib.sha256
    keys = []
    for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
        hasher = sha256(head + parent)
        hasher.update(tokens[start : start + block_bytes])
        hasher.update(extras)
        parent = hasher.digest()
        keys.append(parent)
    return keys


def trace_key(namespace: Namespace, chained_id: int) -> bytes:
    """Return the key of a block of a trace whose block ids (0 to 2**64 - 1) are already chained.

    Such an id stands for the block and all before it, so it needs no parent. Trace keys never equal
    keys made from tokens. Pure: callers may memoize.

    Raises:
        IdentityError: the id is not a whole number from 0 to 2**64 - 1.

    """
    return trace_keys(namespace, (chained_id,))[0]


def trace_keys(namespace: Namespace, ids: Iterable[int] | NDArray[Any]) -> list[bytes]:
    """Return :func:`trace_key` of each id, in order."""
    sha256 = hashlib.sha256
    prefix = _TRACE_TAG + namespace.digest
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    ids = list(ids)
    try:
        return [sha256(prefix + chained.to_bytes(8, "little")).digest() for chained in ids]
    except (AttributeError, OverflowError):
        # Either a wrong id, or an integer type without to_bytes, such as NumPy's scalars.
        return [sha256(prefix + _chained_id_bytes(chained)).digest() for chained in ids]


def _chained_id_bytes(chained_id: SupportsIndex) -> bytes:
    try:
        return operator.index(chained_id).to_bytes(8, "little")
    except (TypeError, OverflowError):
        raise IdentityError(
            f"a chained block id is a whole number from 0 to {MAX_CHAINED_ID}, not {chained_id!r}"
        ) from None


def _token_bytes(token_ids: TokenIds) -> bytes:
    """Return the token ids as little-endian u32, or raise IdentityError."""
    if len(token_ids) == 0:
        return b""
    try:
        ids = np.asarray(token_ids)
    except ValueError as error:
        raise IdentityError(f"token ids must be one sequence: {error}") from None
    if ids.ndim != 1:
        raise IdentityError(f"token ids must be one sequence, not of shape {ids.shape}")
    if ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN_ID:
        at = next((at for at, token in enumerate(token_ids) if not _is_token_id(token)), 0)
        raise IdentityError(
            f"token id {token_ids[at]!r} at position {at} (of {len(ids)}, as {ids.dtype}) "
            f"is not a whole number from 0 to {MAX_TOKEN_ID}"
        )
    return ids.astype("<u4").tobytes()


def _is_token_id(token: object) -> bool:
    if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
        return False
    return 0 <= int(token) <= MAX_TOKEN_ID


def _canonical(value: ExtraKey) -> bytes:
    """Return type tag, length and content of one value: no two values share their bytes."""
    if value is None:
        tag, content = b"N", b""
    elif isinstance(value, bytes):
        tag, content = b"B", value
    elif isinstance(value, str):
        # Lone surrogates come from undecodable file names; "surrogatepass" keeps them distinct.
        tag, content = b"S", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value.bit_length() // 8 + 1
        tag, content = b"I", value.to_bytes(size, "little", signed=True)
    else:
        raise IdentityError(
            f"extra keys are bytes, text, whole numbers or None, not {value!r} "
            f"of type {type(value).__name__}"
        )
    return tag + len(content).to_bytes(8, "little") + content


def _canonical_extras(extra_keys: Sequence[ExtraKey]) -> bytes:
    if isinstance(extra_keys, (bytes, str)):
        raise IdentityError(f"extra_keys is a sequence of keys: write ({extra_keys!r},)")
    return len(extra_keys).to_bytes(8, "little") + b"".join(map(_canonical, extra_keys))

"""The scheduler's half of the vLLM adapter: what to look up, load and store, and when.

It knows requests, tokens and block ids, but neither tensors nor vLLM's classes, so it can be tested
without them. The rules it lives by are vLLM's (v1 connector interface):

* ``matched`` is asked again and again while a request waits, also with another count of locally
  computed tokens. It submits one lookup, and answers None until that has ended.
* One token at least is always left to compute: a block is only asked for if a token follows it.
* Whole blocks only. A local hit that ends inside a block gets nothing from the tier.
* A load that failed is not tried again by the same request: vLLM recomputes, and asking again
  would never end.
* A block is stored when all of its tokens are known *and* computed by the end of the step for which
  the order is given. What could not be stored is offered again with the next block of the request
  that fills, or by a later request that has the same block in its local cache.

Each request has a request id of its own in the tier; a preempted request that comes back gets a
new one, because its first one has had its lookup. Stores may outlive the request: its id is
released when they have ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from cxlbench.kv.embedded import Submission
from cxlbench.kv.identity import ExtraKey, Namespace, chain_from

REMEMBERED_REFUSALS = 1 << 16


class EngineRequest(Protocol):
    """What is needed of vLLM's ``Request``."""

    @property
    def request_id(self) -> str:
        """The engine's name of the request."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: prompt and output so far."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Those tokens; only ever appended to."""

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether every token of the prompt must be computed."""


class SchedulerTier(Protocol):
    """What is needed of ``EmbeddedTier``; all calls return at once."""

    def new_request_id(self) -> int:
        """Return an unused request id."""

    def submit_lookup(
        self, request_id: int, keys: Sequence[bytes], size_bytes: int, *, matched: int = 0
    ) -> Submission:
        """Look ``keys[matched:]`` up."""

    def release(self, request_id: int) -> None:
        """Give back what the request holds, now."""

    def release_after_stores(self, request_id: int) -> None:
        """Give back what the request holds when its stores have ended."""


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """Consecutive blocks of one request that the worker shall load or store."""

    request: str
    tier_request: int
    first_block: int
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TierOrders:
    """What the worker shall do in one step."""

    loads: tuple[BlockOrder, ...] = ()
    stores: tuple[BlockOrder, ...] = ()


@dataclass(frozen=True, slots=True)
class NotStored:
    """A block that the tier did not take."""

    request: str
    block: int
    key: bytes


@dataclass(eq=False, slots=True)
class _State:
    """One request. ``keys`` are those of its leading whole blocks, as far as they were needed."""

    engine: EngineRequest
    namespace: Namespace
    extra_keys: tuple[ExtraKey, ...]
    keys: list[bytes] = field(default_factory=list)
    tier_request: int | None = None
    lookup: Submission | None = None
    """Submitted and not yet used or given up."""
    lookup_first: int = 0
    asked_first: int = 0
    load: BlockOrder | None = None
    may_load: bool = True
    block_ids: list[int] = field(default_factory=list)
    filled: int = 0
    next_store: int | None = None

    def chain(self, blocks: int) -> tuple[bytes, ...]:
        """Return the keys of the first ``blocks`` blocks."""
        size, have = self.namespace.block_tokens, len(self.keys)
        if have < blocks:
            parent = self.keys[-1] if have else self.namespace.digest
            tokens = self.engine.all_token_ids[have * size : blocks * size]
            self.keys += chain_from(self.namespace, parent, tokens, extra_keys=self.extra_keys)
        return tuple(self.keys[:blocks])


class SchedulerSide:
    """Decides for every request what the tier does for it. One thread; nothing blocks."""

    def __init__(self, tier: SchedulerTier, namespace: Namespace, block_bytes: int) -> None:
        self.namespace = namespace
        self._tier = tier
        self._block_bytes = block_bytes
        self._block_tokens = namespace.block_tokens
        self._states: dict[str, _State] = {}
        self._loads: list[BlockOrder] = []
        self._ending: dict[str, int] = {}
        self._refused: OrderedDict[bytes, None] = OrderedDict()

    # -- before a request runs --------------------------------------------------------------------

    def matched(
        self, request: EngineRequest, extra_keys: Sequence[ExtraKey], computed_tokens: int
    ) -> int | None:
        """Return how many tokens after ``computed_tokens`` the tier can deliver; None: not yet."""
        state = self._states.get(request.request_id)
        if state is None:
            state = _State(request, self.namespace, tuple(extra_keys))
            self._states[request.request_id] = state
        first, inside = divmod(computed_tokens, self._block_tokens)
        usable = max(0, request.num_tokens - 1) // self._block_tokens
        state.asked_first = first
        if inside or not usable or not state.may_load or request.skip_reading_prefix_cache:
            return 0
        if state.lookup is None or first < state.lookup_first:
            self._look_up(state, first, usable)
        lookup = state.lookup
        if first >= usable or lookup is None:
            return 0
        if lookup.completion is None:
            return None
        end = min(state.lookup_first + lookup.completion.leading_hits, usable)
        return max(0, end - first) * self._block_tokens

    def _look_up(self, state: _State, first: int, usable: int) -> None:
        """Also done if all is matched locally: it tells the tier that the chain is in use."""
        self._give_up(state)
        state.tier_request = self._tier.new_request_id()
        state.lookup_first = min(first, usable)
        state.lookup = self._tier.submit_lookup(
            state.tier_request,
            state.chain(usable),
            self._block_bytes,
            matched=state.lookup_first,
        )

    def allocated(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """Note that the request has got blocks, and what of ``matched`` the engine will use."""
        state = self._states.get(request_id)
        if state is None:
            return
        lookup, state.lookup = state.lookup, None
        if external_tokens:
            assert state.tier_request is not None
            first = state.asked_first
            end = first + -(-external_tokens // self._block_tokens)
            state.load = BlockOrder(
                request_id,
                state.tier_request,
                first,
                state.chain(end)[first:],
                tuple(block_ids[first:end]),
            )
            self._loads.append(state.load)
        elif lookup is not None and (
            lookup.keys if lookup.completion is None else lookup.completion.leading_hits
        ):
            self._give_up(state)  # found, but not wanted: it must not wait in the tier

    # -- each step --------------------------------------------------------------------------------

    def set_blocks(self, request_id: str, block_ids: Iterable[int]) -> None:
        """Note all block ids of a request that starts, or starts again."""
        state = self._states.get(request_id)
        if state is not None:
            state.block_ids = list(block_ids)

    def add_blocks(self, request_id: str, block_ids: Iterable[int]) -> None:
        """Note further block ids of a request that runs."""
        state = self._states.get(request_id)
        if state is not None:
            state.block_ids.extend(block_ids)

    def orders(self, steps: Mapping[str, tuple[int, int]]) -> TierOrders:
        """Return what the worker shall do in the step that computes ``steps``.

        ``steps``: for each request, tokens computed before the step, and tokens that it computes.
        """
        loads, self._loads = tuple(self._loads), []
        stores = []
        for request_id, (computed, scheduled) in steps.items():
            state = self._states.get(request_id)
            if state is not None:
                order = self._store_order(state, computed, scheduled)
                if order is not None:
                    stores.append(order)
        return TierOrders(loads, tuple(stores))

    def _store_order(self, state: _State, computed: int, scheduled: int) -> BlockOrder | None:
        # With speculative tokens or overlapping steps, more may be computed than is known.
        known = min(computed + scheduled, state.engine.num_tokens)
        full = min(known // self._block_tokens, len(state.block_ids))
        if state.next_store is None:
            state.next_store = self._first_refused(state, computed // self._block_tokens)
            state.filled = state.next_store
        if full <= state.filled:
            return None
        first = state.next_store
        state.filled = state.next_store = full
        if state.tier_request is None:
            state.tier_request = self._tier.new_request_id()
        keys = state.chain(full)[first:]
        for key in keys:
            self._refused.pop(key, None)
        return BlockOrder(
            state.engine.request_id,
            state.tier_request,
            first,
            keys,
            tuple(state.block_ids[first:full]),
        )

    def _first_refused(self, state: _State, blocks: int) -> int:
        if self._refused:
            for index, key in enumerate(state.chain(blocks)):
                if key in self._refused:
                    return index
        return blocks

    # -- what came of it --------------------------------------------------------------------------

    def loads_ended(self, requests: Iterable[str], failed_block_ids: frozenset[int]) -> None:
        """Note loads that the worker reported; ``failed_block_ids`` are to be recomputed."""
        for request_id in requests:
            state = self._states.get(request_id)
            if state is None:
                # Released when it was aborted, but the load may have reached the tier after that.
                tier_request = self._ending.pop(request_id, None)
                if tier_request is not None:
                    self._tier.release(tier_request)
                continue
            load, state.load = state.load, None
            if load is None:
                continue
            for place, block_id in enumerate(load.block_ids):
                if block_id in failed_block_ids:
                    self._load_failed(state, load.first_block + place)
                    break

    def _load_failed(self, state: _State, block: int) -> None:
        state.may_load = False
        self._give_up(state)
        if state.next_store is not None:
            state.next_store = min(state.next_store, block)
            state.filled = min(state.filled, block)

    def not_stored(self, blocks: Iterable[NotStored]) -> None:
        """Remember blocks that the tier did not take, to offer them again later."""
        for block in blocks:
            self._refused[block.key] = None
            self._refused.move_to_end(block.key)
            if len(self._refused) > REMEMBERED_REFUSALS:
                self._refused.popitem(last=False)
            state = self._states.get(block.request)
            if state is not None and state.next_store is not None:
                state.next_store = min(state.next_store, block.block)

    def finished(self, request_id: str) -> None:
        """Give back what a request holds that ended, in whatever way."""
        state = self._states.pop(request_id, None)
        if state is None or state.tier_request is None:
            return
        if state.load is not None:
            self._ending[request_id] = state.tier_request
            self._tier.release(state.tier_request)
        else:
            self._tier.release_after_stores(state.tier_request)

    def forget(self, salt: str) -> None:
        """Make all that is stored unfindable, by going on in a namespace with another salt."""
        self.namespace = replace(self.namespace, salt=salt)
        self._refused.clear()
        for state in self._states.values():
            state.may_load = False
            if state.load is None:
                self._give_up(state)

    def open_requests(self) -> int:
        """Return how many requests are open, for the tier or the engine."""
        return len(self._states) + len(self._ending)

    def _give_up(self, state: _State) -> None:
        state.lookup = None
        if state.tier_request is not None:
            self._tier.release_after_stores(state.tier_request)
            state.tier_request = None

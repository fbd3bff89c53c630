"""The vLLM connector that every tier shares: all but how a tier is made.

``VllmTierConnector`` is a vLLM v1 KV connector (tested with 0.32; the interface is the one of
0.28-0.33). vLLM makes two objects of it, one for the scheduler and one for the worker; the work is
done by ``vllm_scheduler.SchedulerSide`` and ``vllm_worker.WorkerSide``, and this class translates.
Loads are asynchronous, between the engine's steps, so that a slow tier delays no other request.

``kv_connector_extra_config`` keys that are used here (all optional); the others go to the tier:

* ``tier_id``: connectors of one process with the same id share one tier (default: the engine's id);
* ``salt``, ``weights_revision``: see ``vllm_identity``;
* ``store_limit_bytes``: bound of the copies that wait to be stored.

Left out, and refused with a message: several workers per engine (TP, PP), a worker in another
process than the scheduler, hybrid and sliding-window caches, ``kv_load_failure_policy`` other than
``recompute``.
"""

from __future__ import annotations

import logging
import sys
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from cxlbench.kv.embedded import EmbeddedTier, EmbeddedTierError
from cxlbench.kv.vllm_identity import block_bytes_of, extra_keys_of, namespace_of
from cxlbench.kv.vllm_layout import LayoutError, VllmBlocks
from cxlbench.kv.vllm_scheduler import NotStored, SchedulerSide, TierOrders
from cxlbench.kv.vllm_worker import STORE_LIMIT_BYTES, WorkerSide

ADAPTER_KEYS = frozenset({"tier_id", "salt", "weights_revision", "store_limit_bytes"})

_log = logging.getLogger("cxlbench.kv.vllm")


class UnsupportedEngineError(ValueError):
    """The engine is configured in a way that the tier cannot serve."""


@dataclass
class TierMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's half tells the worker's, each step."""

    orders: TierOrders


@dataclass
class TierReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the worker's half tells the scheduler's."""

    not_stored: tuple[NotStored, ...]

    def aggregate(self, other: TierReport) -> TierReport:
        """Return both reports as one."""
        return TierReport(self.not_stored + other.not_stored)


class VllmTierConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """A vLLM KV connector over a tier. Subclasses say how a tier is attached and detached."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        extra = dict(transfer.kv_connector_extra_config)
        _check_supported(vllm_config, kv_cache_config)
        self.namespace = namespace_of(vllm_config, kv_cache_config, extra)
        self.block_bytes = block_bytes_of(kv_cache_config)
        self._num_blocks = kv_cache_config.num_blocks
        self._engine_id = str(transfer.engine_id)
        self._reads, self._writes = transfer.is_kv_consumer, transfer.is_kv_producer
        self._resets = 0
        self._store_limit_bytes = int(extra.get("store_limit_bytes", STORE_LIMIT_BYTES))
        self.tier_id = str(extra.get("tier_id", self._engine_id))
        _log.info("tier %s: a block has %s B, %s", self.tier_id, self.block_bytes, self.namespace)
        settings = {name: value for name, value in extra.items() if name not in ADAPTER_KEYS}
        self.tier: EmbeddedTier | None = self.attach_tier(self.tier_id, settings)
        self.scheduler_side = SchedulerSide(self.tier, self.namespace, self.block_bytes)
        self.worker_side: WorkerSide | None = None

    @abstractmethod
    def attach_tier(self, tier_id: str, settings: Mapping[str, object]) -> EmbeddedTier:
        """Return the tier of that id; the engine's other connector object gets the same."""

    @abstractmethod
    def detach_tier(self, tier_id: str) -> None:
        """Give back what ``attach_tier`` returned."""

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that is not stored is a later miss, nothing worse."""
        return False

    def at_rest(self) -> dict[str, int]:
        """Count what the tier and this object hold; all zero when no request is open."""
        counts = dict(self.tier.at_rest()) if self.tier is not None else {}
        counts["engine requests"] = self.scheduler_side.open_requests()
        if self.worker_side is not None:
            counts["engine transfers"] = self.worker_side.open_transfers()
        return counts

    def shutdown(self) -> None:
        """Let go of the tier; the last to do so closes it, within its deadline."""
        tier, self.tier = self.tier, None
        if tier is not None:
            try:
                self.detach_tier(self.tier_id)
            except EmbeddedTierError as error:
                _log.warning("%s", error)

    # -- scheduler --------------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens the tier can deliver, asynchronously; None while it looks."""
        extra_keys = extra_keys_of(request)
        if extra_keys is None or not self._reads:
            return 0, False
        tokens = self.scheduler_side.matched(request, extra_keys, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the request's blocks; may be called twice, the second time with 0 tokens."""
        self.scheduler_side.allocated(
            request.request_id, blocks.get_block_ids()[0], num_external_tokens
        )

    def build_connector_meta(self, scheduler_output: Any) -> TierMetadata:
        """Return the worker's orders for this step."""
        side, computed = self.scheduler_side, {}
        for new in scheduler_output.scheduled_new_reqs:
            side.set_blocks(new.req_id, new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, block_ids, tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            computed[request_id] = tokens
            if request_id in cached.resumed_req_ids:
                side.set_blocks(request_id, block_ids[0])
            elif block_ids is not None:
                side.add_blocks(request_id, block_ids[0])
        steps = {
            request_id: (computed[request_id], tokens)
            for request_id, tokens in scheduler_output.num_scheduled_tokens.items()
        }
        orders = side.orders(steps)
        return TierMetadata(orders if self._writes else replace(orders, stores=()))

    def update_connector_output(self, connector_output: Any) -> None:
        """Learn which loads have ended, and which blocks were not stored."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, TierReport):
            self.scheduler_side.not_stored(report.not_stored)
        self.scheduler_side.loads_ended(
            connector_output.finished_recving or (),
            frozenset(connector_output.invalid_block_ids),
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Release the request. Its blocks may be freed: what is being stored has been copied."""
        self.scheduler_side.finished(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Make all blocks stored so far unfindable (after the weights were changed in place)."""
        self._resets += 1
        self.scheduler_side.forget(f"{self.namespace.salt}#{self._engine_id}#{self._resets}")
        return True

    # -- worker -----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Learn where the engine's blocks lie."""
        memory = VllmBlocks(kv_caches, self._num_blocks)
        if memory.block_bytes != self.block_bytes:
            raise LayoutError(
                f"a block has {memory.block_bytes} B in the engine's KV cache, but "
                f"{self.block_bytes} B by its configuration: this form is not supported"
            )
        assert self.tier is not None
        self.worker_side = WorkerSide(self.tier, memory, store_limit_bytes=self._store_limit_bytes)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads that the scheduler ordered."""
        if self.worker_side is not None:
            self.worker_side.start_loads(self._orders().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request only runs when its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are stored whole, at the end of the step."""

    def wait_for_save(self) -> None:
        """Copy the blocks that this step completed, and start to store them."""
        if sys.exc_info()[0] is not None:
            return  # called on the way out of a forward pass that failed: nothing was computed
        if self.worker_side is not None:
            self.worker_side.start_stores(self._orders().stores)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose load has ended; the blocks it filled are in place."""
        if self.worker_side is None:
            return None, None
        return None, self.worker_side.collect() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that the loads just reported did not fill."""
        return set() if self.worker_side is None else self.worker_side.take_failed_block_ids()

    def build_connector_worker_meta(self) -> TierReport | None:
        """Report the blocks that were not stored."""
        not_stored = () if self.worker_side is None else self.worker_side.take_not_stored()
        return TierReport(not_stored) if not_stored else None

    def _orders(self) -> TierOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, TierMetadata)
        return metadata.orders


def _check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise UnsupportedEngineError for what the module's docstring leaves out."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    if parallel.world_size > 1 or getattr(parallel, "decode_context_parallel_size", 1) > 1:
        raise UnsupportedEngineError(
            f"an embedded tier serves one worker, the engine has {parallel.world_size}: "
            "use tensor and pipeline parallel sizes of 1"
        )
    if parallel.distributed_executor_backend not in (None, "uni"):
        raise UnsupportedEngineError(
            "an embedded tier lives in the process of scheduler and worker, but the executor "
            f"{parallel.distributed_executor_backend!r} puts the worker elsewhere: use "
            "--distributed-executor-backend uni (on a CPU set VLLM_ENABLE_V1_MULTIPROCESSING=0)"
        )
    if transfer.kv_load_failure_policy != "recompute":
        raise UnsupportedEngineError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: set it to "
            '"recompute", for a tier may always turn out to miss what it announced'
        )
    groups = kv_cache_config.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    full = [
        isinstance(spec, FullAttentionSpec)
        and not spec.sliding_window
        and not spec.attention_chunk_size
        for spec in specs
    ]
    if full != [True]:
        names = [type(spec).__name__ for spec in specs]
        raise UnsupportedEngineError(
            f"only models with one group of full-attention layers can be cached, not {names}"
        )

"""The KV connector: spans go into vLLM's paged blocks before a forward, computed spans come out when a request ends.

vLLM instantiates the class twice in one process, for its scheduler and for its worker. Loading is synchronous: the
engine runs one request at a time, so there is no other work that an asynchronous load could overlap with, and a
synchronous one spares the extra scheduler step (2-5 ms at 1,024 tokens). It is also the one whose failures end
cleanly: with ``kv_load_failure_policy="fail"`` vLLM drops the step's token, evicts the blocks and ends the request, and
the engine then asks again without loads. ``recompute`` would keep the blocks in front of the failed one, which may be
approximate, and would count the failed tokens as cached.

Spans are read back in `request_finished`, once for the whole request: the blocks are still owned by it, every step's
forward is complete (no asynchronous scheduling), tokens of any earlier step, of chunked prefill and of vLLM's own
prefix cache are all there, and nothing is added to the time to the first token.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from ctxwin.adapters.vllm.registry import PARAM, Exchange, Transfer, find_exchange
from ctxwin.operator.relocate import relocate

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_log = logging.getLogger("ctxwin.engines")


@dataclass(frozen=True)
class Load:
    """Tokens ``[begin, end)`` of one request, to be written into its blocks."""

    exchange: str
    handle: str
    blocks: tuple[int, ...]
    begin: int
    end: int


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]  # mypy sees vLLM as untyped
    """What the worker loads in one step."""

    loads: list[Load]


class CtxwinConnector(KVConnectorBase_V1):  # type: ignore[misc]  # mypy sees vLLM as untyped
    """Loads and captures the spans of the requests that carry a ctxwin handle; others pass untouched."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        name = self._kv_transfer_config.kv_connector_extra_config.get(PARAM, "")
        self._exchange: Exchange = find_exchange(name)
        self._planned: list[Load] = []
        self._failed_blocks: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a span that is not captured is computed again, nobody waits for it."""
        return False

    # Scheduler side

    def _transfer(self, request: Request) -> tuple[str, Transfer] | None:
        handle = (request.kv_transfer_params or {}).get(PARAM)
        if handle is None:
            return None
        try:
            return handle, self._exchange.get(handle)
        except KeyError:
            # The caller gave up on this request; it is about to be aborted and must not load anything.
            return None

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens the spans cover beyond vLLM's own prefix hit; the last prompt token is always computed."""
        found = self._transfer(request)
        if found is None:
            return 0, False
        _, transfer = found
        transfer.local_tokens = num_computed_tokens
        return max(0, min(transfer.covered, request.num_prompt_tokens - 1) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        found = self._transfer(request)
        if found is None:
            return
        handle, transfer = found
        transfer.planned_tokens = num_external_tokens
        if num_external_tokens == 0:
            return
        (ids,) = blocks.get_block_ids()
        begin = transfer.local_tokens
        self._planned.append(Load(self._exchange.name, handle, tuple(ids), begin, begin + num_external_tokens))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Loads:
        planned, self._planned = self._planned, []
        return Loads(planned)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Reads the captures back; the blocks may be freed at once."""
        found = self._transfer(request)
        if found is None or not found[1].captures or found[1].error is not None:
            return False, None
        transfer = found[1]
        try:
            assert self._exchange.paged is not None
            for name, (begin, end) in transfer.captures.items():
                computed = request.num_computed_tokens
                until = computed if end is None else end
                if begin < until <= computed:
                    transfer.captured[name] = self._exchange.paged.read(block_ids, begin, until)
        except Exception as error:
            transfer.error = error
            _log.warning("reading spans back from the paged cache failed: %s", error)
        return False, None

    # Worker side

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        for load in metadata.loads:
            # vLLM keeps one worker-side connector per process, whichever engine made it; the load names its engine.
            exchange = find_exchange(load.exchange)
            transfer = exchange.get(load.handle)
            try:
                self._load(exchange, transfer, load)
            except Exception as error:
                transfer.error = error
                size = exchange.paged.block_size if exchange.paged else 1
                self._failed_blocks.update(load.blocks[load.begin // size : -(-load.end // size)])
                _log.warning("loading tokens [%d, %d) into the paged cache failed: %s", load.begin, load.end, error)

    @torch.inference_mode()
    def _load(self, exchange: Exchange, transfer: Transfer, load: Load) -> None:
        paged = exchange.paged
        if paged is None:
            raise RuntimeError("the engine is not up yet")
        keys, values, loaded = [], [], 0
        for placed in transfer.loads:
            begin, end = max(placed.begin, load.begin), min(placed.end, load.end)
            if begin >= end:
                continue
            part = placed.span.slice(begin - placed.begin, end - placed.begin)
            part = relocate(part, exchange.kv, placed.start)
            keys.append(part.k)
            values.append(part.v)
            loaded += end - begin
        if loaded != load.end - load.begin:
            raise RuntimeError(f"spans must cover all {load.end - load.begin} tokens of the load, got {loaded}")
        # One write a layer for all spans: the kernel's call costs more than the copy that joins them.
        slots = paged.slots(load.blocks, load.begin, load.end)
        transfer.bytes_loaded += paged.write(torch.cat(keys, 1), torch.cat(values, 1), slots)
        transfer.loaded_tokens = loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are complete when the forward begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save by layer: spans are read back whole in `request_finished`."""

    def wait_for_save(self) -> None:
        """Nothing pending."""

"""The KV connector: spans go into vLLM's paged blocks before a forward, computed spans come out when a request ends.

vLLM instantiates the class for its scheduler and for each of its workers, in one process or in several. The connector
works for requests that carry a ctxwin handle; all others pass untouched.

**Loading.** KV that only this window can hit (its blocks are its own, see `spaces`) is loaded synchronously, in the step
that needs it. Exact KV stands in blocks that plain requests share; it is loaded asynchronously, because vLLM
publishes the blocks of an asynchronous load only once they are written, while a plain request that comes in the
same step could hit those of a synchronous one, and would fail with it. With ``kv_load_failure_policy="fail"`` vLLM
drops the step's token, evicts the blocks and ends that request alone, and the engine then asks again.
``recompute`` would keep the blocks in front of the failed one, which may be approximate.

**Reading back** happens when a request has ended, for all its captures at once: every step's forward is complete, tokens of
earlier steps, of chunked prefill and of vLLM's own prefix cache are all there, and nothing is added to the time to the
first token. In the engine's own process the blocks are read on the spot; elsewhere vLLM keeps them until the workers
have written them out in the next step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from ctxwin.engines.vllm.paged import PagedKV
from ctxwin.engines.vllm.refusals import check_config
from ctxwin.engines.vllm.spool import SPOOL, SpoolReader
from ctxwin.engines.vllm.transfers import PARAM, Exchange, Job, find_exchange, is_handle
from ctxwin.errors import UnsupportedModel
from ctxwin.kv.kernels import Part

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

ABORT_S = 30.0
"""How long a request whose transfer is gone waits for its abort; a client of a server may have made its handle up, and is
served without spans then."""
STEPS = 8
"""Steps within which a synchronous load is known to have failed; more than vLLM has under way at once."""
_log = logging.getLogger("ctxwin.engines")


@dataclass(frozen=True)
class Load:
    """Tokens ``[begin, end)`` of one request, to be written into its blocks."""

    source: str
    handle: str
    request: str
    blocks: tuple[int, ...]
    begin: int
    end: int
    background: bool


@dataclass(frozen=True)
class Save:
    """Token ranges of one ended request, to be read out of its blocks, by name."""

    source: str
    handle: str
    request: str
    blocks: tuple[int, ...]
    ranges: dict[str, tuple[int, int]]


@dataclass
class _Unproven:
    """Blocks that vLLM's prefix cache names since a synchronous load was planned: those of the load, and all behind them."""

    step: int
    request: str
    first: int
    blocks: set[int]


@dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]  # mypy sees vLLM as untyped
    """What the workers do in one step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


_IDLE = Step()  # of steps with nothing to do, the many; nobody writes to it


class CtxwinConnector(KVConnectorBase_V1):  # type: ignore[misc]  # mypy sees vLLM as untyped
    """Loads and captures the spans of the requests that carry a ctxwin handle."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._block_size = int(vllm_config.cache_config.block_size)
        self._step = Step()
        self._asked: dict[str, tuple[int, str, Job]] = {}  # local hit, handle and job of requests that may load
        self._orphans: dict[str, float] = {}  # requests whose transfer is gone, and since when
        self._pool: BlockPool | None = None
        self._steps = 0
        self._unproven: deque[_Unproven] = deque()  # loads of the last `STEPS` steps
        self._failed_blocks: set[int] = set()
        self._received: set[str] = set()
        self._sent: set[str] = set()
        self._paged: PagedKV | None = None
        self._heads: slice | None = None
        self._rank = 0
        self._local: Exchange | None = None
        self._spool: SpoolReader | None = None
        if extra.get(SPOOL):
            self._spool = SpoolReader(str(extra[SPOOL]))
            self._spool.end_with_engine()
        else:
            self._local = find_exchange(str(extra.get(PARAM, "")))
        try:
            check_config(vllm_config)
        except UnsupportedModel as error:
            if self._spool is not None:
                self._spool.refuse(error)
            raise

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a span that is not captured is computed again, nobody waits for it."""
        return False

    # Scheduler side

    def _job(self, request: Request) -> tuple[str, Job] | None:
        handle = (request.kv_transfer_params or {}).get(PARAM)
        if not is_handle(handle):
            return None
        if self._spool is not None:
            job = self._spool.job(handle)
        else:
            assert self._local is not None
            transfer = self._local.get(handle)
            job = None if transfer is None else transfer.job
        # None: the caller gave up on this request; it is about to be aborted and must not load anything.
        return None if job is None else (handle, job)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens the spans cover beyond vLLM's own prefix hit, and whether they are loaded in the background.

        Asked again after a preemption. A request whose transfer was taken back waits for its abort: computed in place it
        would leave KV and embeddings of blank media under the names of real ones.
        """
        found = self._job(request)
        if found is None:
            return (None if self._orphaned(request) else 0), False
        handle, job = found
        count = job.wanted(num_computed_tokens, request.num_prompt_tokens, self._block_size)
        asked = num_computed_tokens, handle, job
        if self._asked.get(request.request_id) != asked:  # a request that waits for room is asked about in every step
            self._asked[request.request_id] = asked
            self._seen(handle, num_computed_tokens, count)
        return count, count > 0 and job.background(num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        # Called a second time, with no tokens, when a background load is done.
        asked = self._asked.pop(request.request_id, None)
        if asked is None or not num_external_tokens:
            return
        begin, handle, job = asked
        (ids,) = blocks.get_block_ids()
        background = job.background(begin)
        load = Load(
            self._source, handle, request.request_id, tuple(ids), begin, begin + num_external_tokens, background
        )
        self._step.loads.append(load)
        if not background:
            first = begin // self._block_size
            self._unproven.append(_Unproven(self._steps, request.request_id, first, set(ids[first:])))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        self._steps += 1
        while self._unproven and self._unproven[0].step <= self._steps - STEPS:
            self._unproven.popleft()
        if not (self._step.loads or self._step.saves):
            return _IDLE
        step, self._step = self._step, Step()
        return step

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pool = gpu_block_pool

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Takes blocks of failed loads out of the prefix cache.

        vLLM does so for the requests that still run. Those of one that was aborted or preempted in the very step would
        stay, and whoever came next would find there what the memory held before.
        """
        failed = connector_output.invalid_block_ids
        if not failed or self._pool is None:
            return
        for load in self._unproven:
            if not load.blocks.isdisjoint(failed):
                self._pool.evict_blocks(load.blocks)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Reads the captures back, or has vLLM keep the blocks until the workers have."""
        self._asked.pop(request.request_id, None)
        self._orphans.pop(request.request_id, None)
        for load in self._unproven:
            if load.request == request.request_id:
                load.blocks.update(block_ids[load.first :])
        found = self._job(request)
        if found is None or not found[1].captures or _failed(request):
            return False, None
        handle, job = found
        # Asynchronous scheduling counts tokens of a step that is still running.
        computed = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        ranges = {n: (begin, computed if end is None else end) for n, (begin, end) in job.captures.items()}
        ranges = {name: r for name, r in ranges.items() if r[0] < r[1] <= computed}
        if self._spool is not None:
            if len(ranges) < len(job.captures):
                missing = sorted(set(job.captures) - set(ranges))
                self._spool.fail(handle, RuntimeError(f"the request ended before {missing} were computed"))
                return False, None
            self._step.saves.append(Save(self._source, handle, request.request_id, tuple(block_ids), ranges))
            return True, None
        self._read_here(handle, block_ids, ranges)
        return False, None

    def _orphaned(self, request: Request) -> bool:
        """Whether a request carries a handle whose transfer is gone, and its abort may still be on its way."""
        if not is_handle((request.kv_transfer_params or {}).get(PARAM)):
            return False
        now = time.monotonic()
        return now - self._orphans.setdefault(request.request_id, now) < ABORT_S

    @property
    def _source(self) -> str:
        return str(self._spool.path) if self._spool is not None else self._local.name if self._local else ""

    def _seen(self, handle: str, local: int, planned: int) -> None:
        if self._spool is not None:
            self._spool.seen(handle, local, planned)
            return
        transfer = self._local.get(handle) if self._local else None
        if transfer is not None:
            # Asked anew after a preemption: what was loaded before has left, or is a hit now.
            transfer.local_tokens, transfer.planned_tokens, transfer.loaded_tokens = local, planned, 0

    def _read_here(self, handle: str, blocks: list[int], ranges: dict[str, tuple[int, int]]) -> None:
        assert self._local is not None
        transfer = self._local.get(handle)
        if transfer is None or transfer.error is not None:
            return
        try:
            assert self._local.paged is not None
            for name, (begin, end) in ranges.items():
                transfer.captured[name] = self._local.paged.read(blocks, begin, end)
        except Exception as error:
            transfer.error = error
            _log.warning("reading spans back from the paged cache failed: %s", error)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learns the cache's packing, where the engine is in another process.

        Raises UnsupportedModel, which ends vLLM's start-up; the engine is told why.
        """
        if self._spool is None:
            return  # the engine does this itself: vLLM keeps one worker-side connector for all engines of a process
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        from ctxwin.engines.vllm.ranks import own_heads

        try:
            kv, self._rank = self._spool.kv, get_tensor_model_parallel_rank()
            self._heads = own_heads(kv.heads, self._rank, get_tensor_model_parallel_world_size())
            own = replace(kv, heads=self._heads.stop - self._heads.start)
            layers = self._vllm_config.compilation_config.static_forward_context
            self._paged = PagedKV(layers, own, self._block_size)
        except Exception as error:
            self._spool.refuse(error)
            raise

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        for save in step.saves:
            self._save(save)
        for load in step.loads:
            self._load(load)

    def _load(self, load: Load) -> None:
        try:
            if self._spool is not None:
                self._load_files(load)
            else:
                self._load_here(load)
        except Exception as error:
            # The engine is told before vLLM ends the request, so that it knows why.
            self._tell(load, error)
            size = self._block_size
            self._failed_blocks.update(load.blocks[load.begin // size : -(-load.end // size)])
            _log.warning("loading tokens [%d, %d) into the paged cache failed: %s", load.begin, load.end, error)
        if load.background:
            self._received.add(load.request)

    def _tell(self, load: Load, error: Exception) -> None:
        if self._spool is not None:
            self._spool.fail(load.handle, error)
            return
        transfer = find_exchange(load.source).get(load.handle)
        if transfer is not None:
            transfer.error = error

    def _load_here(self, load: Load) -> None:
        # vLLM keeps one worker-side connector per process, whichever engine made it; the load names its engine.
        exchange = find_exchange(load.source)
        transfer = exchange.get(load.handle)
        if transfer is None:
            raise LookupError("the transfer was taken back")
        if exchange.paged is None:
            raise RuntimeError("the engine is not up yet")
        parts = []
        for placed in transfer.loads:
            begin, end = max(placed.begin, load.begin) - placed.begin, min(placed.end, load.end) - placed.begin
            if begin < end:
                parts.append(Part(placed.span, placed.start, placed.patch, begin, end))
        transfer.bytes_loaded += _write(exchange.paged, parts, exchange.kv, load)
        transfer.loaded_tokens = load.end - load.begin

    def _load_files(self, load: Load) -> None:
        assert self._spool is not None and self._paged is not None
        parts = []
        for entry in self._spool.loads(load.handle):
            begin, end = max(0, load.begin - entry.begin), min(entry.tokens, load.end - entry.begin)
            if begin < end:
                patch = None if entry.patch is None else self._spool.patch(entry.patch, entry.basis)
                span = self._spool.span(entry.span)
                if span.tokens != entry.tokens:
                    raise ValueError(f"{entry.span} must hold {entry.tokens} tokens, got {span.tokens}")
                parts.append(Part(span, entry.start, patch, begin, end))
        _write(self._paged, parts, self._spool.kv, load, self._heads)

    def _save(self, save: Save) -> None:
        assert self._spool is not None and self._paged is not None
        try:
            for name, (begin, end) in save.ranges.items():
                k, v = self._paged.read(save.blocks, begin, end)
                self._spool.give(save.handle, name, self._rank, k, v)
        except Exception as error:
            self._spool.fail(save.handle, error)
            _log.warning("reading spans back from the paged cache failed: %s", error)
        self._sent.add(save.request)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(requests whose blocks may be freed, requests whose background load has ended, well or not)."""
        if not (self._sent or self._received):
            return None, None
        sent, received = self._sent, self._received
        self._sent, self._received = set(), set()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are complete when the forward begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save by layer: spans are read back whole."""

    def wait_for_save(self) -> None:
        """Nothing pending."""


@torch.inference_mode()
def _write(paged: PagedKV, parts: list[Part], kv: Any, load: Load, heads: slice | None = None) -> int:
    placing = paged.place(parts, kv, heads)
    if placing.tokens != load.end - load.begin:
        raise RuntimeError(f"spans must cover all {load.end - load.begin} tokens of the load, got {placing.tokens}")
    return paged.write(placing, paged.slots(load.blocks, load.begin, load.end))


def _failed(request: Request) -> bool:
    from vllm.v1.request import RequestStatus

    failed: bool = request.status == RequestStatus.FINISHED_ERROR
    return failed

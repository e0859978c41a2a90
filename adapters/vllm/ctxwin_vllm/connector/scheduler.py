"""The scheduler's half of the connector: it plans loads, and when other requests may find their blocks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.request import RequestStatus

from ctxwin.kv.merge import FixedPoint
from ctxwin_vllm import internals
from ctxwin_vllm.transport import base
from ctxwin_vllm.transport.base import PARAM, CaptureSpec, Endpoint, LoadSpec, RequestMeta, SaveSpec

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

ABORT_S = 30.0
"""How long a request whose transfer is gone waits for its abort. Then it is served without spans: a server's client may have
invented its handle."""
SAVE_BYTES = 16 << 20
"""KV that is read back in one step: a request that comes meanwhile waits for that much only, or for one chunk that is larger."""
BACKLOG = 8
"""Where more reads wait, an eighth of them runs in each step, so that blocks are not kept faster than they are read."""
STEPS = 8  # steps within which a failed synchronous load is reported; more than vLLM has in flight at once


@dataclass
class _Unproven:
    """Blocks that vLLM's prefix cache has published since a synchronous load was planned: the load's and all later ones."""

    step: int
    request: str
    first: int
    blocks: set[int]


@dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]  # mypy sees vLLM as untyped
    """Loads, saves and captures of the workers in one step of the engine whose transport is ``source``."""

    source: str = ""
    captures: list[CaptureSpec] = field(default_factory=list)
    loads: list[LoadSpec] = field(default_factory=list)
    saves: list[SaveSpec] = field(default_factory=list)


@dataclass
class _Answer:
    """An answer that drops slots while it is generated, in the request's first blocks: those before ``next``, when they exist."""

    request: Request
    handle: str
    blocks: list[int]
    schedule: FixedPoint
    next: int


class SchedulerHalf:
    """Methods that vLLM's scheduler calls; names and arguments are vLLM's."""

    def __init__(self, endpoint: Endpoint, source: str, block_size: int, attention: int = 0) -> None:
        self.endpoint = endpoint
        self._attention = attention  # the group of layers with KV; the other groups of a hybrid hold states
        self.source = source
        self.block_size = block_size
        self._step, self._idle = Step(source), Step(source)  # the latter of all steps with nothing to do
        self._saves: deque[SaveSpec] = deque()  # reads of requests that have ended, in pieces of `SAVE_BYTES`
        self._capturing: dict[str, tuple[int, ...]] = {}  # blocks of the states of requests whose chunk is captured
        # local hit, handle and metadata of requests that may load
        self._planned: dict[str, tuple[int, str, RequestMeta]] = {}
        self._loading: set[str] = set()  # requests with a background load: vLLM counts its tokens from the begin
        self._reserved: list[SaveSpec] = []  # ended requests whose transfer is looked for
        self._orphans: dict[str, float] = {}  # requests whose transfer is gone, and since when
        self._pool: BlockPool | None = None
        self._steps = 0
        self._unproven: deque[_Unproven] = deque()  # loads of the last `STEPS` steps
        self._answers: dict[str, _Answer] = {}  # those that drop slots

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens the spans cover beyond vLLM's own prefix hit, and whether they are loaded in the background.

        Called again after a preemption. A request whose transfer was removed waits for its abort: computed in place it would
        leave KV and embeddings of placeholder media under the names of real ones.
        """
        handle = _handle(request)
        if base.is_reserved(handle):
            return 0, False
        meta = self.endpoint.request_meta(handle) if handle else None
        if meta is None:  # the caller may have given up on this request; it is about to be aborted and must not load
            return (None if self._orphaned(request) else 0), False
        count = meta.tokens_to_load(num_computed_tokens, request.num_prompt_tokens)
        answer = self._answers.get(request.request_id)
        if answer and (answer.schedule != meta.hold or request.num_tokens > answer.next):
            # Preempted: what it held is gone, and must not be loaded as it was, nor a step pass its elimination.
            handle = ""
        planned = num_computed_tokens, handle, meta
        if self._planned.get(request.request_id) != planned:  # vLLM calls this in every step for a waiting request
            self._planned[request.request_id] = planned
            self.endpoint.report_hit(handle, num_computed_tokens, count)
        return count, count > 0 and self._background(meta, num_computed_tokens)

    def _background(self, meta: RequestMeta, hit: int) -> bool:
        """Return True if a load after a prefix hit of ``hit`` tokens runs outside the steps, so that it is complete before its
        blocks can be found; for a hybrid vLLM fails single requests only then."""
        return self.endpoint.kv.recurrent or hit < meta.private_from

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plan the load; called a second time, with no tokens, when a background load is done."""
        planned = self._planned.pop(request.request_id, None)
        if planned is None:
            return
        begin, handle, meta = planned
        ids, states = self._split(blocks.get_block_ids())
        if meta.hold is not None and handle:
            following = meta.covered + meta.hold.every
            self._answers[request.request_id] = _Answer(request, handle, list(ids), replace(meta.hold), following)
        if self.endpoint.kv.maps and (tokens := meta.capture_after(begin + num_external_tokens)):
            self._capturing[request.request_id] = states
            self._step.captures.append(CaptureSpec(self.source, states, tokens))
        if not num_external_tokens:
            return
        end, background = begin + num_external_tokens, self._background(meta, begin)
        load = LoadSpec(self.source, handle, request.request_id, tuple(ids), begin, end, background, states)
        self._step.loads.append(load)
        if background:
            self._loading.add(request.request_id)
        else:
            first = begin // self.block_size
            self._unproven.append(_Unproven(self._steps, request.request_id, first, set(ids[first:])))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        """Return the work of the coming step."""
        self._steps += 1
        while self._unproven and self._unproven[0].step <= self._steps - STEPS:
            self._unproven.popleft()
        if self._reserved:
            self._find_reserved()
        if self._answers:
            self._compact(scheduler_output)
        if not (self._step.loads or self._saves or self._step.captures):
            return self._idle
        count = min(len(self._saves), 1 + len(self._saves) // BACKLOG)
        self._step.saves.extend(self._saves.popleft() for _ in range(count))
        step, self._step = self._step, Step(self.source)
        return step

    def _compact(self, output: SchedulerOutput) -> None:
        """Have answers that reach their next elimination keep fewer slots from this step on, as if a session went on from them.

        vLLM must know an answer's last token then: with asynchronous scheduling it waits for that one.
        """
        self._resume()
        cached = output.scheduled_cached_reqs
        for name, answer in self._answers.items():
            request, schedule, end = answer.request, answer.schedule, answer.request.num_computed_tokens
            if name in cached.req_ids and name not in cached.resumed_req_ids:
                more = cached.new_block_ids[cached.req_ids.index(name)]
                answer.blocks += more[self._attention] if more else []
            if end == answer.next and name in cached.req_ids:
                keep = schedule.append(schedule.every)
                answer.next = schedule.slots + schedule.every
                if keep is not None:
                    where = self.source, answer.handle, name, tuple(answer.blocks)
                    self._step.loads.append(LoadSpec(*where, 0, end, False, keep=tuple(keep)))
                    internals.shorten(request, len(keep), output, (answer.blocks,))
            if request.num_computed_tokens + output.num_scheduled_tokens.get(name, 0) == answer.next:
                internals.pause(request, True)

    def _resume(self) -> None:
        for answer in self._answers.values():
            if not answer.request.num_output_placeholders:
                internals.pause(answer.request, False)

    def has_pending_block_frees(self) -> bool:
        """Return True while blocks of requests that have ended are kept to be read; vLLM waits for them before it preempts."""
        return bool(self._saves or self._reserved)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Keep vLLM's block pool."""
        self._pool = gpu_block_pool

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Evict blocks of failed loads from the prefix cache.

        vLLM does so for running requests only. Blocks of a request that was aborted or preempted in that same step would stay,
        and the next request would hit whatever the memory held.
        """
        self._resume()
        self._loading -= connector_output.finished_recving or set()
        failed = connector_output.invalid_block_ids
        if not failed or self._pool is None:
            return
        for load in self._unproven:
            if not load.blocks.isdisjoint(failed):
                self._pool.evict_blocks(load.blocks)

    def request_finished_all_groups(
        self, request: Request, groups: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Read the captures back, or have vLLM keep the blocks until the workers have read them."""
        block_ids, states = self._split(groups)
        keep_blocks = self._read_back(request, block_ids, states)
        # A preempted request has lost its blocks, where another request may be captured by now.
        if self._capturing.pop(request.request_id, None) == states and not keep_blocks:
            self._step.captures.append(CaptureSpec(self.source, states, 0))
        return keep_blocks, None

    def _read_back(self, request: Request, block_ids: list[int], states: tuple[int, ...]) -> bool:
        """Read the captures of a request that has ended; return True if the workers do so in the next steps."""
        for by_request in (self._planned, self._orphans, self._answers, self.endpoint.kept):
            by_request.pop(request.request_id, None)
        for load in self._unproven:
            if load.request == request.request_id:
                load.blocks.update(block_ids[load.first :])
        handle = _handle(request)
        if not handle or request.status == RequestStatus.FINISHED_ERROR:
            return False
        # Asynchronous scheduling counts tokens of a step that is still running.
        computed = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        computed = 0 if request.request_id in self._loading else computed
        save = SaveSpec(self.source, handle, request.request_id, tuple(block_ids), {}, states, computed)
        # No file is read on the way to the answer.
        meta = self.endpoint.request_meta(handle) if self.endpoint.in_memory or not base.is_reserved(handle) else None
        if meta is None and base.is_reserved(handle) and block_ids:
            self._reserved.append(save)
            return True
        return meta is not None and self._plan_saves(save, meta)

    def _find_reserved(self) -> None:
        """Read back requests whose transfer was added; release blocks for which none comes, or that others need."""
        waiting, self._reserved = self._reserved, []
        for save in waiting:
            awaited = self.endpoint.awaits(save.handle)  # before the look for its transfer, which comes first
            meta = self.endpoint.request_meta(save.handle)
            short = self._pool is not None and self._pool.get_num_free_blocks() < len(save.blocks)
            if meta is None and awaited and not short:
                self._reserved.append(save)
            elif meta is None or not self._plan_saves(save, meta):
                self._saves.append(save)  # reads nothing

    def _plan_saves(self, save: SaveSpec, meta: RequestMeta) -> bool:
        """Read the captures of an ended request; return True if the workers do so in the next steps."""
        ranges = {n: (begin, save.computed if end is None else end) for n, (begin, end) in meta.captures.items()}
        ranges = {name: r for name, r in ranges.items() if r[0] < r[1] <= save.computed}
        save = replace(save, ranges=ranges)
        if not meta.captures or self.endpoint.read_now(save, meta):
            return False
        self._saves.extend(_pieces(save, max(1, SAVE_BYTES // self.endpoint.kv.token_bytes)))
        return True

    def _split(self, groups: Sequence[list[int]]) -> tuple[list[int], tuple[int, ...]]:
        """Return a request's blocks of KV and, for a hybrid, its block in each group (the states' in recurrent ones)."""
        states = tuple(ids[0] if ids else -1 for ids in groups) if len(groups) > 1 else ()
        return groups[self._attention], states

    def _orphaned(self, request: Request) -> bool:
        """Return True if a request's transfer is gone and its abort may still be under way."""
        now = time.monotonic()
        return bool(_handle(request)) and now - self._orphans.setdefault(request.request_id, now) < ABORT_S


def _handle(request: Request) -> str:
    """Return the handle of a request; "" for one without."""
    handle = (request.kv_transfer_params or {}).get(PARAM)
    return handle if base.is_handle(handle) else ""


def _pieces(save: SaveSpec, tokens: int) -> list[SaveSpec]:
    """Return the ranges of ``save`` in runs of up to so many ``tokens``, or of one range that has more."""
    runs: list[dict[str, tuple[int, int]]] = [{}]
    count = 0
    for name, (begin, end) in save.ranges.items():
        if runs[-1] and count + end - begin > tokens:
            runs.append({})
            count = 0
        runs[-1][name] = begin, end
        count += end - begin
    return [replace(save, ranges=run, last=i == len(runs)) for i, run in enumerate(runs, 1)]

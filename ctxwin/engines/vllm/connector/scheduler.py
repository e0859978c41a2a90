"""The scheduler's half of the connector: what is loaded, and when it may be found by others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.request import RequestStatus

from ctxwin.engines.vllm.transport import PARAM, Endpoint, Hear, Job, Load, Save, is_handle

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

ABORT_S = 30.0
"""How long a request whose transfer is gone waits for its abort; then it is served without spans, as a server's client may have
invented its handle."""
STEPS = 8
"""Steps within which a failed synchronous load becomes known; more than vLLM has in flight at once."""


@dataclass
class _Unproven:
    """Blocks that vLLM's prefix cache names since a synchronous load was planned: those of the load, and all behind them."""

    step: int
    request: str
    first: int
    blocks: set[int]


@dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]  # mypy sees vLLM as untyped
    """What the workers load and save in one step, and what they have to hear of it."""

    hears: list[Hear] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


_IDLE = Step()  # of steps with nothing to do, the many; nobody writes to it


class SchedulerHalf:
    """What vLLM's scheduler calls; names and arguments are vLLM's."""

    def __init__(self, endpoint: Endpoint, source: str, block_size: int, attention: int = 0) -> None:
        self.endpoint = endpoint
        self._attention = attention  # the group of layers whose blocks hold KV; a hybrid's others hold states
        self.source = source
        self.block_size = block_size
        self._step = Step()
        self._hearing: dict[str, tuple[int, ...]] = {}  # blocks of the states of requests whose chunk is heard
        self._asked: dict[str, tuple[int, str, Job]] = {}  # local hit, handle and job of requests that may load
        self._orphans: dict[str, float] = {}  # requests whose transfer is gone, and since when
        self._pool: BlockPool | None = None
        self._steps = 0
        self._unproven: deque[_Unproven] = deque()  # loads of the last `STEPS` steps

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens the spans cover beyond vLLM's own prefix hit, and whether they are loaded in the background.

        Called again after a preemption. A request whose transfer was taken back waits for its abort: computed in place it
        would leave KV and embeddings of blank media under the names of real ones.
        """
        found = self._job(request)
        if found is None:
            return (None if self._orphaned(request) else 0), False
        handle, job = found
        count = job.wanted(num_computed_tokens, request.num_prompt_tokens, self.block_size)
        asked = num_computed_tokens, handle, job
        if self._asked.get(request.request_id) != asked:  # vLLM asks about a request that waits for room in every step
            self._asked[request.request_id] = asked
            self.endpoint.seen(handle, num_computed_tokens, count)
        return count, count > 0 and self._background(job, num_computed_tokens)

    def _background(self, job: Job, hit: int) -> bool:
        """Whether a load goes on outside the steps: for a hybrid vLLM fails single requests only then."""
        return self.endpoint.kv.recurrent or job.background(hit)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plans the load; called a second time, with no tokens, when a background load is done."""
        asked = self._asked.pop(request.request_id, None)
        if asked is None:
            return
        begin, handle, job = asked
        ids, states = self._split(blocks.get_block_ids())
        if self.endpoint.kv.maps and (tokens := job.behind(begin + num_external_tokens)):
            self._hearing[request.request_id] = states
            self._step.hears.append(Hear(self.source, states, tokens))
        if not num_external_tokens:
            return
        end, background = begin + num_external_tokens, self._background(job, begin)
        self._step.loads.append(
            Load(self.source, handle, request.request_id, tuple(ids), begin, end, background, states)
        )
        if not background:
            first = begin // self.block_size
            self._unproven.append(_Unproven(self._steps, request.request_id, first, set(ids[first:])))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        """What the workers do in the coming step."""
        self._steps += 1
        while self._unproven and self._unproven[0].step <= self._steps - STEPS:
            self._unproven.popleft()
        if not (self._step.loads or self._step.saves or self._step.hears):
            return _IDLE
        step, self._step = self._step, Step()
        return step

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Learns vLLM's block pool."""
        self._pool = gpu_block_pool

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Takes blocks of failed loads out of the prefix cache.

        vLLM does so for the requests that still run. Those of one that was aborted or preempted in that same step would
        stay, and the next request would find there what the memory held before.
        """
        failed = connector_output.invalid_block_ids
        if not failed or self._pool is None:
            return
        for load in self._unproven:
            if not load.blocks.isdisjoint(failed):
                self._pool.evict_blocks(load.blocks)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, of a model that has one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, groups: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Reads the captures back, or has vLLM keep the blocks until the workers have."""
        block_ids, states = self._split(groups)
        kept = self._read_back(request, block_ids, states)
        # A preempted request has lost its blocks, and others may be heard there.
        if self._hearing.pop(request.request_id, None) == states and not kept:
            self._step.hears.append(Hear(self.source, states, 0))
        return kept, None

    def _read_back(self, request: Request, block_ids: list[int], states: tuple[int, ...]) -> bool:
        """Reads the captures of a request that has ended; whether the workers do so in the next step."""
        self._asked.pop(request.request_id, None)
        self._orphans.pop(request.request_id, None)
        for load in self._unproven:
            if load.request == request.request_id:
                load.blocks.update(block_ids[load.first :])
        found = self._job(request)
        if found is None or not found[1].captures or request.status == RequestStatus.FINISHED_ERROR:
            return False
        handle, job = found
        # Asynchronous scheduling counts tokens of a step that is still running.
        computed = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        ranges = {n: (begin, computed if end is None else end) for n, (begin, end) in job.captures.items()}
        ranges = {name: r for name, r in ranges.items() if r[0] < r[1] <= computed}
        save = Save(self.source, handle, request.request_id, tuple(block_ids), ranges, states, computed)
        if self.endpoint.read_now(save, job):
            return False
        self._step.saves.append(save)
        return True

    def _split(self, groups: Sequence[list[int]]) -> tuple[list[int], tuple[int, ...]]:
        """A request's blocks of KV, and of a hybrid its block in each group, which for recurrent layers is the one of states."""
        states = tuple(ids[0] if ids else -1 for ids in groups) if len(groups) > 1 else ()
        return groups[self._attention], states

    def _job(self, request: Request) -> tuple[str, Job] | None:
        handle = (request.kv_transfer_params or {}).get(PARAM)
        if not is_handle(handle):
            return None
        job = self.endpoint.job(handle)
        # None: the caller gave up on this request; it is about to be aborted and must not load anything.
        return None if job is None else (handle, job)

    def _orphaned(self, request: Request) -> bool:
        """Whether a request carries a handle whose transfer is gone, and its abort may still be on its way."""
        if not is_handle((request.kv_transfer_params or {}).get(PARAM)):
            return False
        now = time.monotonic()
        return now - self._orphans.setdefault(request.request_id, now) < ABORT_S

"""The contract between an engine and its connector: what one vLLM request has to load and capture.

vLLM carries only a small string from the caller to the connector (``kv_transfer_params``), a handle under which everything else
waits. An engine has a `Transport`, and each process of vLLM that runs the connector an `Endpoint` of it.
"""

from __future__ import annotations

import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from ctxwin.engines.segments import Segment
from ctxwin.errors import UnsupportedModel
from ctxwin.kv.kernels import SpanSlice
from ctxwin.kv.layout import SpanKV, SpanOrigin, outputs_in, outputs_named
from ctxwin.kv.merge import FixedPoint
from ctxwin.kv.relocate import relocate
from ctxwin.kv.states import named, since_exact, states_in
from ctxwin_vllm.ranks import own_heads

if TYPE_CHECKING:
    from ctxwin.kv.layout import KVSpec
    from ctxwin_vllm.draft_model import DraftModelKV
    from ctxwin_vllm.paged import PagedKV
    from ctxwin_vllm.paged_states import PagedStates
    from ctxwin_vllm.resident import Selection
    from ctxwin_vllm.stage_outputs import Queries, StageOutputs

PARAM = "ctxwin"
"""Key of the handle in ``kv_transfer_params``, and of the transport's source in the connector's extra config."""
ALL = "all"
"""Name of the capture of a whole prompt and of what is generated behind it, which becomes no span as it is."""
DRAFTED = ("drafter.k", "drafter.v")
"""Names of the draft model's KV among the tensors of a capture."""
SUMS, SLOTS = "attention", "slots"
"""Names of `Transfer.sums` among them (each rank's are the mean over its heads, as many as on the others), and of slots."""
_RESERVED = "r"
_HANDLE = re.compile(_RESERVED + "?[0-9a-f]{32}")


def new_handle(*, reserved: bool = False) -> str:
    """A name for one transfer that no client of a server can guess; ``reserved``: see `Transport.reserve`."""
    return _RESERVED * reserved + secrets.token_hex(16)


def is_reserved(handle: str) -> bool:
    """Return True for the handle of a transfer that may not be added yet."""
    return handle.startswith(_RESERVED)


def is_handle(name: object) -> TypeGuard[str]:
    """Return True if ``name`` has the form of a handle; over HTTP anything may arrive."""
    return isinstance(name, str) and _HANDLE.fullmatch(name) is not None


@dataclass
class RequestMeta:
    """Metadata of one request for vLLM's scheduler.

    Attributes:
        covered: prompt tokens that the loads cover.
        placeholder_tokens: prompt tokens up to the end of the last medium that carries no embeddings because its KV will be
            loaded; these cannot be computed.
        captures: token ranges ``[begin, end)`` to read back when the request finishes, by name; an ``end`` of None is
            the last token whose KV was computed.
        private_from: prompt token from which on no other request finds the blocks; earlier blocks may be hit by requests
            without a handle. See `cache_namespace.CacheNamespace`.
        min_load: fewest tokens to load behind a prefix hit; fewer are computed with the new ones. 0 where the
            loaded KV is not what a forward would compute.
        expected_hit: prompt tokens that vLLM's own prefix cache is known to hold, and that no load has: where it has dropped
            some of them, all that follows is computed.
        hold: the slots that its answer keeps while it is generated, of those that it loads and its own; None is all of them.
        attention_of: the capture for whose tokens `Transfer.sums` are read as well; "" for none.
    """

    covered: int = 0
    placeholder_tokens: int = 0
    captures: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    private_from: int = 0
    min_load: int = 0
    expected_hit: int = 0
    hold: FixedPoint | None = None
    attention_of: str = ""

    def tokens_to_load(self, hit: int, prompt: int) -> int:
        """Return the number of tokens to load after a prefix hit of ``hit`` tokens; vLLM always computes the last prompt token.

        vLLM's hits are whole blocks, but a load may end, and so begin to be continued, anywhere in one.
        """
        count = max(0, min(self.covered, prompt - 1) - hit) if hit >= self.expected_hit else 0
        return 0 if count < self.min_load and hit >= max(1, self.placeholder_tokens) else count

    def capture_after(self, loaded: int) -> int:
        """Return the length of the capture that begins right after ``loaded`` tokens, whose map can be captured; 0 for none."""
        ranges = self.captures.values()
        return next((end - begin for begin, end in ranges if begin == loaded and end is not None), 0)


@dataclass(eq=False, kw_only=True)
class Transfer(RequestMeta):
    """One request: its instructions and their outcome.

    Attributes:
        loads: segments with spans that cover one contiguous prefix of the prompt behind the ``expected_hit``, in order;
            positions count from its begin.
        tenant: owner of the loads; the same key names other KV for another tenant.
        embeddings: vision embeddings ``[tokens, width]`` for the encoder cache, by multimodal identifier.
        local_tokens: prompt tokens that vLLM's own prefix cache served.
        planned_tokens: prompt tokens that vLLM's scheduler expects the connector to write.
        loaded_tokens: prompt tokens that the connector wrote.
        bytes_loaded: bytes of KV that the connector wrote.
        captured: ``(k, v)`` of each capture, ``[layers, tokens, heads, dim]``, keys as they lie in the cache.
        states: states of a hybrid's recurrent layers after the captures that its request ended with.
        outputs: stage outputs for the tokens of each capture, where the engine keeps them.
        drafted: the draft model's ``(k, v)`` of each capture, as `captured`, where it keeps KV.
        origins: those that spans of the captures will have, where workers of other processes may keep copies of them.
        sums: attention that each slot up to the last of those tokens got from them, ``[layers, slots]``; see `attention_sums`.
        reads: an event behind the reads of the captures on the device; None where they are done.
        error: why a load or a capture failed; the request's answer must then be discarded.
    """

    loads: tuple[Segment, ...] = ()
    tenant: str = ""
    embeddings: dict[str, torch.Tensor] = field(default_factory=dict)
    local_tokens: int = 0
    planned_tokens: int = 0
    loaded_tokens: int = 0
    bytes_loaded: int = 0
    captured: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    states: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    outputs: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    drafted: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    origins: dict[str, SpanOrigin] = field(default_factory=dict)
    sums: torch.Tensor | None = None
    reads: Any = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.covered = self.expected_hit + sum(segment.tokens for segment in self.loads)

    def take(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take in a capture, by its tensors (`Endpoint.read`)."""
        self.captured[name] = tensors["k"], tensors["v"]
        if DRAFTED[0] in tensors:
            self.drafted[name] = tensors[DRAFTED[0]], tensors[DRAFTED[1]]
        self.states[name], self.outputs[name] = states_in(tensors), outputs_in(tensors)
        self.sums = tensors.get(SUMS, self.sums)


@dataclass(frozen=True)
class LoadSpec:
    """Tokens ``[begin, end)`` of one request, to be written into its blocks.

    Attributes:
        source: the transport that knows ``handle``; engines of one process share vLLM's worker-side connector.
        background: True if the request waits for the load outside the steps.
        states: the request's block in each group of layers, for a hybrid.
        keep: of an answer at work: of its slots, those that stay, moved to the first ones; nothing else is written.
    """

    source: str
    handle: str
    request: str
    blocks: tuple[int, ...]
    begin: int
    end: int
    background: bool
    states: tuple[int, ...] = ()
    keep: tuple[int, ...] = ()


@dataclass(frozen=True)
class SaveSpec:
    """Token ranges of one ended request, to be read out of its blocks, by name.

    Attributes:
        states: the request's block in each group of layers, for a hybrid.
        computed: tokens of the request that are computed; its states are those after them.
        last: False if more ranges of the request are read in later steps, so that its blocks are still needed.
    """

    source: str
    handle: str
    request: str
    blocks: tuple[int, ...]
    ranges: dict[str, tuple[int, int]]
    states: tuple[int, ...] = ()
    computed: int = 0
    last: bool = True


@dataclass(frozen=True)
class CaptureSpec:
    """A chunk that one request is about to compute, whose map on the recurrent states is captured.

    Attributes:
        states: the request's block in each group of layers.
        tokens: tokens of the chunk, which come next in the request; 0 drops the capture of a request that has ended unread.
    """

    source: str
    states: tuple[int, ...]
    tokens: int


class Transport(ABC):
    """The engine's side; thread-safe.

    Attributes:
        kv: layout of the model's KV (all heads).
        source: what the connector's extra config holds under `PARAM`.
        capture_queries: `Endpoint.capture_queries` of all workers; set by the engine.
    """

    kv: KVSpec
    source: str
    capture_queries: Callable[[bool], None]

    def __init__(self) -> None:
        self._capturing = threading.Lock()

    @contextmanager
    def capturing_queries(self) -> Iterator[None]:
        """Capture the queries of all that is computed within the context; one context at a time."""
        with self._capturing:
            self.capture_queries(True)
            try:
                yield
            finally:
                self.capture_queries(False)

    @abstractmethod
    def reserve(self) -> str:
        """Return the handle of a transfer that loads nothing, and is added or removed while its request runs: vLLM's scheduler
        looks for it behind the answer, and keeps the blocks until then. Raises OSError where there is no room for it."""

    @abstractmethod
    def add(self, transfer: Transfer, handle: str = "") -> str:
        """Submit a transfer and return its handle, which is new or was reserved. Raises OSError where there is no room for it."""

    @abstractmethod
    def collect(self, handle: str, transfer: Transfer, finished: bool) -> None:
        """Copy the connector's reports into ``transfer``; wait for its captures if the request ``finished`` without an error."""

    @abstractmethod
    def remove(self, handle: str) -> None:
        """Remove a transfer."""

    def select(self, origin: SpanOrigin | None, selection: Selection) -> SpanKV | None:
        """Return a span of what is selected of a capture, without its KV, if all workers keep a copy of that; else None."""
        return None

    @abstractmethod
    def __len__(self) -> int:
        """Number of transfers that have not been removed."""

    @abstractmethod
    def close(self) -> None:
        """Remove all transfers. Idempotent."""


class Endpoint(ABC):
    """vLLM's side: the scheduler reads request metadata and reports hits, workers load and save.

    Attributes:
        kv: layout of the model's KV (all heads).
        paged: the worker's paged cache, once it is allocated.
        states: states of a hybrid's recurrent layers.
        draft_model: layers of the speculative draft model, where they keep KV.
        outputs: the stage outputs beside the cache, in the worker that keeps them.
        queries: the queries of what is computed, while they are captured.
        heads: the KV heads that the worker has; None is all of them.
        rank: the worker's number among all of them.
        behind: True where what is read is written behind the step, as on a GPU.
        in_memory: True where transfers are in this process, so that looking one up takes no time.
        kept: KV of answers that drop slots, by request, and by how much later ones of their tokens stand too early.
    """

    kv: KVSpec
    paged: PagedKV | None = None
    states: PagedStates | None = None
    draft_model: DraftModelKV | None = None
    outputs: StageOutputs | None = None
    queries: Queries | None = None
    heads: slice | None = None
    rank, behind, in_memory = 0, False, False

    def __init__(self) -> None:
        self.kept: dict[str, tuple[SpanKV, int]] = {}

    @abstractmethod
    def request_meta(self, handle: str) -> RequestMeta | None:
        """Return a request's metadata; None for a handle that is not (or no longer) known."""

    @abstractmethod
    def awaits(self, handle: str) -> bool:
        """Return True while a reserved transfer is neither added nor removed."""

    @abstractmethod
    def report_hit(self, handle: str, local: int, planned: int) -> None:
        """Report how many tokens the scheduler found in its own cache, and how many it expects to be loaded."""

    @abstractmethod
    def read_now(self, save: SaveSpec, meta: RequestMeta) -> bool:
        """Read the captures of a request that has ended; return False if the workers must read them in the next steps."""

    @abstractmethod
    def fail(self, handle: str, error: BaseException) -> None:
        """Report to the engine why a load or a capture failed."""

    def refuse(self, error: BaseException) -> None:  # noqa: B027  # in one process the engine sees the error itself
        """Report to the engine why this process cannot serve its model, before it ends with ``error``."""

    def open_cache(
        self, layers: Mapping[str, Any], block_size: int, groups: Sequence[Sequence[str]], speculative: Any = None
    ) -> None:
        """Learn the packing of the worker's cache: layers by name, as in ``compilation_config.static_forward_context``, in
        ``groups`` that share a block table each, and vLLM's ``SpeculativeConfig``. Raises UnsupportedModel."""
        from ctxwin_vllm.draft_model import DraftModelKV, draft_model_spec, split
        from ctxwin_vllm.internals import pipeline, stage_layers, tensor_parallel
        from ctxwin_vllm.paged import PagedKV
        from ctxwin_vllm.paged_states import PagedStates

        try:
            (rank, size), (stage, stages) = tensor_parallel(), pipeline()
            if stages > 1 and self.kv.kinds:
                raise UnsupportedModel(
                    f"pipeline_parallel_size must be 1 for a model whose layers are of several kinds, got {stages}; serve it "
                    "by tensor_parallel_size or from replicas"
                )
            self.rank = stage * size + rank
            self.heads = own_heads(self.kv.heads, rank, size)
            stage_range = stage_layers(self.kv.layers, stage, stages)
            kv = replace(self.kv, layers=len(stage_range), heads=self.heads.stop - self.heads.start)
            self.states = PagedStates(layers, groups, self.kv.maps) if self.kv.recurrent else None
            if (draft_kv := draft_model_spec(speculative, self.kv)) is not None:
                layers, draft_layers = split(layers, self.kv.layers)
                self.draft_model = DraftModelKV(draft_layers, draft_kv, block_size, rank, size)
            self.paged = PagedKV(layers, kv, block_size, first=stage_range.start)
            self.behind = self.paged.device.type != "cpu"
        except Exception as error:
            self.refuse(error)
            raise

    @abstractmethod
    def parts(self, handle: str, begin: int, end: int) -> list[SpanSlice]:
        """Return KV of the prompt tokens ``[begin, end)``. Raises LookupError, OSError or StoreCorrupt where it is gone."""

    def load(self, load: LoadSpec) -> None:
        """Write a load into the paged cache. Any failure raises."""
        if self.paged is None:
            raise RuntimeError("the engine is not up yet")
        with self.paged.loads.begin(background=load.background):
            if load.keep:
                return self._compact(load, self.paged)
            parts = self.parts(load.handle, load.begin, load.end)
            # States first: a missing one raises before anything is written.
            nbytes = 0
            if self.states is not None:
                self.states.write(load.states, self.states.states_after(parts))
                nbytes = state_bytes(since_exact(parts))
            if self.states is not None and load.end % self.paged.block_size:
                # The pages of a hybrid also hold states: the rest of the last block, read as KV, could be NaN.
                self.paged.clear(load.blocks[load.end // self.paged.block_size])
            if (draft := self.draft_model) is not None:
                write(draft.paged, draft.slices(parts), draft.kv, load, draft.heads)
            if self.outputs is not None:
                self.outputs.write(parts, self.paged.slots(load.blocks, load.begin, load.end))
            self.finish_load(load, nbytes + write(self.paged, parts, self.kv, load, self.heads))

    @torch.inference_mode()
    def _compact(self, load: LoadSpec, paged: PagedKV) -> None:
        """Move the slots that an answer keeps to its first ones, their keys turned to where its next token stands now.

        All turn anew from the request's first frame, in which they are kept beside the cache, so that rounding does not add up.
        """
        held, dropped = self.kept.get(load.request, (None, 0))
        begin = 0 if held is None else held.tokens
        k, v = paged.read(load.blocks, begin, load.end)
        places = torch.arange(load.end).expand(3, -1)
        span = relocate(SpanKV(k, v, places[:, begin:], 0), paged.kv, dropped)
        index = torch.tensor(load.keep, device=k.device)
        parts = [span] if held is None else [held, span]
        k, v = (torch.cat([getattr(part, name) for part in parts], dim=1).index_select(1, index) for name in "kv")
        dropped += load.end - len(index)
        span = SpanKV(k, v, places[:, : len(index)], dropped)
        self.kept[load.request] = span, dropped
        paged.keep(span.origin, k, v)
        write(paged, [SpanSlice(span, 0, approximate=True)], paged.kv, replace(load, end=len(index)))

    def capture(self, capture: CaptureSpec) -> None:
        """Capture the map of a chunk; `read_now` or `save` reads it with the states."""
        if self.states is not None:
            self.states.capture(capture.states, capture.tokens)

    def capture_queries(self, on: bool, /) -> None:
        """Begin to capture the queries of all that is computed, or end that."""
        from ctxwin_vllm.stage_outputs import Queries

        assert self.paged is not None
        if self.queries is not None:
            self.queries.close()
        self.queries = Queries(self.paged) if on else None

    def finish_load(self, load: LoadSpec, nbytes: int) -> None:  # noqa: B027  # the other processes' engine counts by itself
        """Account for a load that is written."""

    def read(self, save: SaveSpec, name: str) -> dict[str, torch.Tensor]:
        """Return a capture of an ended request (this rank's heads), as tensors of a record where the cache is."""
        assert self.paged is not None
        begin, end = save.ranges[name]
        tensors = dict(zip("kv", self.paged.read(save.blocks, begin, end), strict=True))
        if self.draft_model is not None:
            tensors |= zip(DRAFTED, self.draft_model.paged.read(save.blocks, begin, end), strict=True)
        if self.states is not None and end == save.computed:
            tensors |= named(self.states.read(save.states))
        if self.outputs is not None:
            tensors |= outputs_named(self.outputs.read(self.paged.slots(save.blocks, begin, end)))
        if self.queries is not None and getattr(self.request_meta(save.handle), "attention_of", "") == name:
            tensors[SUMS] = self.queries.sums(save.blocks, begin, end)
        return tensors

    def save(self, save: SaveSpec) -> None:
        """Read captures out of the paged cache for the engine."""
        raise NotImplementedError

    def flush(self, most: int = 0) -> None:  # noqa: B027  # in one process callers wait for their own
        """Wait until ``most`` of the reads of `save` are not written yet."""


def blank_span(kv: KVSpec, positions: torch.Tensor, start: int, device: str = "meta", **rest: Any) -> SpanKV:
    """Return a span without numbers, whose KV lies elsewhere or which has no tokens."""
    shape, dtype = (kv.layers, positions.shape[1], kv.heads), getattr(torch, kv.dtype)
    k, v = (torch.empty(*shape, width, dtype=dtype, device=device) for width in (kv.k_dim, kv.v_dim))
    return SpanKV(k, v, positions, start, **rest)


def state_bytes(parts: Iterable[SpanSlice | Segment]) -> int:
    """Return the bytes of the states and maps of spans."""
    return sum(s.nbytes for part in parts if part.span is not None for s in part.span.states.values())


def overlaps(tokens: Iterable[int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(index, first, last)`` of the runs of ``tokens`` that overlap ``[begin, end)``; bounds count within each run."""
    at = 0
    for i, count in enumerate(tokens):
        first, last = max(0, begin - at), min(count, end - at)
        if first < last:
            yield i, first, last
        at += count


@torch.inference_mode()
def write(paged: PagedKV, parts: Sequence[SpanSlice], kv: KVSpec, load: LoadSpec, heads: slice | None = None) -> int:
    """Write slices into a request's blocks; return the bytes. Raises RuntimeError where they do not cover the load."""
    plan = paged.plan(parts, kv, heads)
    if plan.tokens != load.end - load.begin:
        raise RuntimeError(f"spans must cover all {load.end - load.begin} tokens of the load, got {plan.tokens}")
    return paged.write(plan, paged.slots(load.blocks, load.begin, load.end))

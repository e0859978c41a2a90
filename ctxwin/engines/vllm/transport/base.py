"""The contract between an engine and its connector: what one vLLM request has to load and capture.

vLLM carries only a small string from the caller to the connector (``kv_transfer_params``), a handle under which everything else
waits. An engine has a `Transport`, and each process of vLLM that runs the connector an `Endpoint` of it.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from ctxwin.engines.base import Segment
from ctxwin.kv.kernels import Part
from ctxwin.kv.states import since_exact

if TYPE_CHECKING:
    from ctxwin.engines.vllm.drafter import DrafterKV
    from ctxwin.engines.vllm.paged import PagedKV
    from ctxwin.engines.vllm.paged_states import PagedStates
    from ctxwin.kv.layout import KVSpec

PARAM = "ctxwin"
"""Key of the handle in ``kv_transfer_params``, and of the transport's source in the connector's extra config."""
_HANDLE = re.compile(r"[0-9a-f]{32}")


def new_handle() -> str:
    """A name for one transfer that no client of a server can guess."""
    return secrets.token_hex(16)


def is_handle(name: object) -> TypeGuard[str]:
    """Whether ``name`` can be a handle at all; over HTTP anything may arrive."""
    return isinstance(name, str) and _HANDLE.fullmatch(name) is not None


@dataclass
class Job:
    """What vLLM's scheduler must know of one request.

    Attributes:
        covered: prompt tokens that the loads cover.
        blank: prompt tokens up to the end of the last medium that carries no embeddings, because its KV will be loaded;
            these cannot be computed.
        captures: token ranges ``[begin, end)`` to read back when the request finishes, by name; an ``end`` of None is
            the last token whose KV was computed.
        own: prompt token from which on nobody else finds the blocks; those in front may be hit by requests that know
            nothing of ctxwin. See `prefix_space.Space`.
        exact: whether a forward gives what is loaded.
    """

    covered: int = 0
    blank: int = 0
    captures: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    own: int = 0
    exact: bool = False

    def wanted(self, hit: int, prompt: int, block: int) -> int:
        """Tokens to load behind a prefix hit of ``hit`` tokens; vLLM computes the last prompt token in any case.

        Exact KV that would fill less than a block is computed together with what is new: that costs less than a load
        in the background, and an append to a warm window reloads nothing.
        """
        count = max(0, min(self.covered, prompt - 1) - hit)
        if self.exact and 0 < count < block and hit >= max(1, self.blank):
            return 0
        return count

    def behind(self, loaded: int) -> int:
        """Tokens of the capture that begins right behind the first ``loaded``, whose map can be heard; 0 for none."""
        ranges = self.captures.values()
        return next((end - begin for begin, end in ranges if begin == loaded and end is not None), 0)

    def background(self, hit: int) -> bool:
        """Whether what is loaded behind a prefix hit of ``hit`` tokens must be there before anybody can find it."""
        return hit < self.own


@dataclass(eq=False, kw_only=True)
class Transfer(Job):
    """One request: its instructions, and what became of them.

    Attributes:
        loads: segments with spans that cover one contiguous prefix of the prompt, in order; positions count from its
            begin.
        tenant: whose they are: the same key names other KV for another tenant.
        embeddings: vision embeddings ``[tokens, width]`` for the encoder cache, by multimodal identifier.
        local_tokens: prompt tokens that vLLM's own prefix cache served.
        planned_tokens: prompt tokens that vLLM's scheduler counts on the connector to write.
        loaded_tokens: prompt tokens that it wrote.
        bytes_loaded: bytes of KV that the connector wrote.
        captured: ``(k, v)`` of each capture, ``[layers, tokens, heads, dim]``, keys as they lie in the cache.
        states: of a hybrid's recurrent layers behind the captures that its request ended with.
        outputs: what else the forwards gave for the tokens of each capture, where the engine keeps it.
        drafted: a speculative drafter's ``(k, v)`` of each capture, as `captured`, where it keeps KV.
        queries_of: the capture whose queries are wanted, too; "" for none.
        queries: those, ``[tokens, layers, heads, dim]``.
        error: why a load or a capture failed; the request's answer must then be thrown away.
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
    queries_of: str = ""
    queries: torch.Tensor | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.covered = sum(segment.tokens for segment in self.loads)


@dataclass(frozen=True)
class Load:
    """Tokens ``[begin, end)`` of one request, to be written into its blocks.

    Attributes:
        source: the transport that knows ``handle``; engines of one process share vLLM's worker-side connector.
        background: whether the request waits for it outside the steps.
        states: of a hybrid, the request's block in each group of layers.
    """

    source: str
    handle: str
    request: str
    blocks: tuple[int, ...]
    begin: int
    end: int
    background: bool
    states: tuple[int, ...] = ()


@dataclass(frozen=True)
class Save:
    """Token ranges of one ended request, to be read out of its blocks, by name.

    Attributes:
        states: of a hybrid, the request's block in each group of layers.
        computed: tokens of the request whose KV is there, and behind which its states are.
    """

    source: str
    handle: str
    request: str
    blocks: tuple[int, ...]
    ranges: dict[str, tuple[int, int]]
    states: tuple[int, ...] = ()
    computed: int = 0


@dataclass(frozen=True)
class Hear:
    """A chunk that one request is about to compute, whose map on the recurrent states is wanted.

    Attributes:
        states: the request's block in each group of layers.
        tokens: of the chunk, next in the request; 0 where it has ended unread.
    """

    source: str
    states: tuple[int, ...]
    tokens: int


class Transport(ABC):
    """The engine's side; thread-safe.

    Attributes:
        kv: layout of the model's KV (all heads).
        source: what the connector's extra config holds under `PARAM`.
    """

    kv: KVSpec
    source: str

    @abstractmethod
    def add(self, transfer: Transfer) -> str:
        """Hands a transfer over; returns its handle. Raises OSError where there is no room for it."""

    @abstractmethod
    def collect(self, handle: str, transfer: Transfer, finished: bool) -> None:
        """Brings what the connector reported into ``transfer``; waits for its captures where it ``finished`` well."""

    @abstractmethod
    def remove(self, handle: str) -> None:
        """Forgets a transfer."""

    @abstractmethod
    def __len__(self) -> int:
        """Transfers that have not been removed."""

    @abstractmethod
    def close(self) -> None:
        """Forgets everything. Idempotent."""


class Endpoint(ABC):
    """vLLM's side: the scheduler asks for jobs and reports, workers load and save.

    Attributes:
        kv: layout of the model's KV (all heads).
        paged: the worker's paged cache, once it is there.
        states: a hybrid's recurrent layers beside it.
        drafter: a speculative drafter's layers beside it, where they keep KV.
        heads: the KV heads that the worker has; None is all of them.
    """

    kv: KVSpec
    paged: PagedKV | None = None
    states: PagedStates | None = None
    drafter: DrafterKV | None = None
    heads: slice | None = None

    @abstractmethod
    def job(self, handle: str) -> Job | None:
        """None for a handle that is not (or no longer) known."""

    @abstractmethod
    def seen(self, handle: str, local: int, planned: int) -> None:
        """Tells the engine how many tokens the scheduler found in its own cache, and how many it expects to be loaded."""

    @abstractmethod
    def read_now(self, save: Save, job: Job) -> bool:
        """Handles the captures of a request that has ended; False where the workers must read them in the next step."""

    @abstractmethod
    def fail(self, handle: str, error: BaseException) -> None:
        """Tells the engine why it waits in vain."""

    def refuse(self, error: BaseException) -> None:  # noqa: B027  # in one process the engine sees the error itself
        """Tells the engine why this process cannot serve its model, before it dies of ``error``."""

    def open_cache(  # noqa: B027  # see `LocalTransport.paged`
        self, layers: Mapping[str, Any], block_size: int, groups: Sequence[Sequence[str]], speculative: Any = None
    ) -> None:
        """Learns the packing of the worker's cache. Raises UnsupportedModel.

        Args:
            layers: by name, as in ``compilation_config.static_forward_context``.
            block_size: tokens in a block of KV.
            groups: the names of the layers that share a block table, each.
            speculative: vLLM's ``SpeculativeConfig``, or None.
        """

    @abstractmethod
    def parts(self, handle: str, begin: int, end: int) -> list[Part]:
        """KV of the prompt tokens ``[begin, end)``. Raises LookupError, OSError or StoreCorrupt where it is gone."""

    def load(self, load: Load) -> None:
        """Writes a load into the paged cache. Raises whatever prevents that."""
        if self.paged is None:
            raise RuntimeError("the engine is not up yet")
        parts = self.parts(load.handle, load.begin, load.end)
        # States first: what they lack is told before anything is written.
        nbytes = 0
        if self.states is not None:
            self.states.write(load.states, self.states.behind(parts))
            nbytes = state_bytes(since_exact(parts))
        if self.states is not None and load.end % self.paged.block_size:
            # Its pages are states' at other times: read as KV, what a load leaves of its last block would be NaN.
            self.paged.clear(load.blocks[load.end // self.paged.block_size])
        if self.drafter is not None:
            theirs = self.drafter
            write(theirs.paged, theirs.placed(parts), theirs.kv, load, theirs.heads)
        self.loaded(load, nbytes + write(self.paged, parts, self.kv, load, self.heads))

    def hear(self, hear: Hear) -> None:
        """Expects a chunk whose map is wanted; `read_now` or `save` finds it with the states."""
        if self.states is not None:
            self.states.hear(hear.states, hear.tokens)

    def loaded(self, load: Load, nbytes: int) -> None:  # noqa: B027  # the other processes' engine counts by itself
        """Called when a load is written."""

    def save(self, save: Save) -> None:
        """Reads captures out of the paged cache for the engine."""
        raise NotImplementedError


def state_bytes(parts: Iterable[Part | Segment]) -> int:
    """Bytes of the states and maps of spans."""
    return sum(s.nbytes for part in parts if part.span is not None for s in part.span.states.values())


def overlaps(tokens: Iterable[int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """``(index, first, last)`` of the runs of ``tokens`` that reach into ``[begin, end)``, cut to it, counted within each."""
    at = 0
    for i, count in enumerate(tokens):
        first, last = max(0, begin - at), min(count, end - at)
        if first < last:
            yield i, first, last
        at += count


@torch.inference_mode()
def write(paged: PagedKV, parts: Sequence[Part], kv: KVSpec, load: Load, heads: slice | None = None) -> int:
    """Writes parts into a request's blocks; returns the bytes. RuntimeError where they do not cover the load."""
    placing = paged.place(parts, kv, heads)
    if placing.tokens != load.end - load.begin:
        raise RuntimeError(f"spans must cover all {load.end - load.begin} tokens of the load, got {placing.tokens}")
    return paged.write(placing, paged.slots(load.blocks, load.begin, load.end))

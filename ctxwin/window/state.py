"""The immutable state of a window: what is placed, what each placed chunk's KV has absorbed, what was evicted.

Pydantic models, so that a snapshot is this state and nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from ctxwin.chunk import Chunk
from ctxwin.errors import UnknownChunk
from ctxwin.fidelity import Fidelity, Lane
from ctxwin.hashing import digest
from ctxwin.window.antecedents import Antecedents, Order, pack, unpack

_SHOWN = 8


class Conditioning(BaseModel):
    """What a placed chunk's KV has absorbed, and where that KV is.

    Attributes:
        provenance: digest of the chunk and of all KV in front of it when it was computed (see `Front`).
        antecedents: placement ids in front when it was computed; the edges of the cascade graph.
        exact: whether it equals what a re-prefill behind exactly these antecedents gives.
        depth: length of the chain of approximations it stands on; 0 where exact.
        lane: how it came to be.
        span: store key of its span (of the base it is rebuilt from, where there is a patch).
        patch: store key of the patch that is added to the base, if any.
        base: store key of the span that a removal patch is to correct; None once it is formed.
        slots: how many slots its span has, where it is merged and has fewer than tokens; None elsewhere.
        absorbed: first and last arrival of all that it may carry something of, antecedents and what approximations in front
            of it carried; None where nothing was in front.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    provenance: str
    antecedents: Antecedents
    exact: bool
    depth: int
    lane: Lane
    span: str
    patch: str | None = None
    base: str | None = None
    slots: int | None = Field(default=None, ge=1)
    absorbed: tuple[int, int] | None = None

    def without_antecedents(self) -> Conditioning:
        """A copy to be written beside them."""
        return self.model_copy(update={"antecedents": Antecedents()})

    def carries(self, placement: str, arrival: int) -> bool:
        """Whether this KV may hold something of a chunk. Never wrong for one it does hold."""
        if placement in self.antecedents:
            return True
        # Exact KV holds its antecedents and nothing else.
        return not self.exact and self.absorbed is not None and self.absorbed[0] <= arrival <= self.absorbed[1]


class Placed(BaseModel):
    """One placement of a chunk.

    Attributes:
        tokens: KV slots; advance: how far the next chunk's start moves on.
        media: first token and number of tokens of each picture and video in it, in order.
        arrival: counts appends over the window's lifetime; the chronological order.
        read: the window's version when it was last read: placed, recalled or touched (`Window.touch`).
        reads: how often it was recalled or touched.
        kv: its conditioned KV; None: must be computed.
        seen: whether it has been computed before (a recomputation is ``formed``, not ``computed``).
        unseen: placement ids put in front of it later that it was allowed not to absorb.
        exact_only: whether an audit found it served too far from a re-prefill: it is served exactly from then on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    chunk: Chunk
    chunk_id: str
    tokens: int
    advance: int
    media: tuple[tuple[int, int], ...] = ()
    arrival: int
    read: int = 0
    reads: int = 0
    pinned: bool = False
    conditioned: bool = True
    kv: Conditioning | None = None
    seen: bool = False
    unseen: tuple[str, ...] = ()
    exact_only: bool = False

    def replace(self, **changes: Any) -> Placed:
        """A copy with some fields changed."""
        return self.model_copy(update=changes)


class State(BaseModel):
    """A version of a window. As JSON it takes O(n) for the usual n chunks (`ctxwin.window.antecedents`).

    Attributes:
        window: id of the window; stays over versions and restarts, a fork has its own.
        placed: chunks in prompt order; evicted: what can be recalled, oldest eviction first.
        libraries: the version of each library that it has drawn from, by name: it goes on reading that one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    window: str = ""
    engine: str
    system_prompt: str
    system_prompt_tokens: int
    system_prompt_advance: int
    budget: int
    fidelity: Fidelity
    version: int = 0
    arrivals: int = 0
    placed: tuple[Placed, ...] = ()
    evicted: tuple[Placed, ...] = ()
    libraries: dict[str, int] = {}

    @model_serializer(mode="wrap")
    def _packed(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fronts: dict[str, list[Antecedents | None]] = {}
        bare = {}
        for name, chunks in (("placed", self.placed), ("evicted", self.evicted)):
            fronts[name] = [p.kv.antecedents if p.kv else None for p in chunks]
            bare[name] = tuple(p.replace(kv=p.kv and p.kv.without_antecedents()) for p in chunks)
        return pack(handler(self.replace(**bare)), fronts)

    @model_validator(mode="before")
    @classmethod
    def _unpacked(cls, data: Any) -> Any:
        return unpack(data) if isinstance(data, dict) and "ids" in data else data

    @property
    def tokens(self) -> int:
        """Tokens of the system prompt and of what is placed."""
        return self.system_prompt_tokens + sum(p.tokens for p in self.placed)

    @property
    def system_prompt_key(self) -> str:
        """Provenance of the system prompt itself."""
        return _digest("system_prompt", self.engine, self.system_prompt)

    @property
    def neutral_key(self) -> str:
        """Provenance of the empty system prompt."""
        return _digest("system_prompt", self.engine, "")

    def index(self, placement: str) -> int:
        """Index of a placed chunk; raises UnknownChunk."""
        for i, p in enumerate(self.placed):
            if p.id == placement:
                return i
        gone = any(p.id == placement for p in self.evicted)
        hint = "it is evicted: recall it first" if gone else f"this version places {_named(self.placed)}"
        raise UnknownChunk(f"id must be a placed chunk, got {placement!r}; {hint}")

    def find_evicted(self, placement: str) -> Placed:
        """The evicted placement of this id; UnknownChunk if there is none."""
        for p in self.evicted:
            if p.id == placement:
                return p
        placed = any(p.id == placement for p in self.placed)
        hint = "it is placed already" if placed else f"evicted are {_named(self.evicted)}"
        raise UnknownChunk(f"id must be an evicted chunk, got {placement!r}; {hint}")

    def find(self, placement: str) -> Placed:
        """A placed or evicted chunk; raises UnknownChunk."""
        for p in (*self.placed, *self.evicted):
            if p.id == placement:
                return p
        raise UnknownChunk(f"id must be a placed or evicted chunk, got {placement!r}")

    def replace(self, **changes: Any) -> State:
        """A copy with some fields changed."""
        return self.model_copy(update=changes)

    def edited(self, **changes: Any) -> State:
        """The next version."""
        return self.replace(version=self.version + 1, **changes)

    def starts(self) -> list[int]:
        """Start position of every placed chunk."""
        at, out = self.system_prompt_advance, []
        for p in self.placed:
            out.append(at)
            at += p.advance
        return out

    def keys(self) -> set[str]:
        """Store keys this version needs to stay available."""
        kv = {k for p in self.placed if p.kv for k in (p.kv.span, p.kv.patch, p.kv.base) if k}
        # The pixels of in-memory media are nowhere else.
        memory = (m for p in self.placed if p.chunk.keep_source for m in p.chunk.media if m.source is None)
        return kv | {f"source/{m.content}" for m in memory}


def _named(chunks: Sequence[Placed]) -> str:
    """Their ids for a message, the newest of them where there are many."""
    more = f" and {len(chunks) - _SHOWN} more" if len(chunks) > _SHOWN else ""
    return f"{[p.id for p in chunks[-_SHOWN:]]}{more}"


ANYTHING = "*"
"""In place of the contents that KV absorbed, where they are too many to name."""


def content_name(chunk_id: str) -> str:
    """What a record calls a chunk that its KV absorbed; two chunks may share a name, and are then forgotten together."""
    return chunk_id[:16]


def provenance_of(chain: str, chunk_id: str) -> str:
    """Provenance of a chunk's KV: the content, and the chain of provenances in front of it (see `Front`)."""
    return _digest("provenance", chain, chunk_id)


def span_key(provenance: str, approximations: str = "") -> str:
    """Store key of a span. Exact and approximate KV of one provenance never share a key.

    Args:
        approximations: digest of the approximate KV in front of it; "" where it is exact. A provenance does not say by which
            patch (rank, layers) a chunk came to it, and the KV computed behind it depends on that.
    """
    return "span/" + _digest("span", provenance, approximations)


@dataclass(frozen=True)
class Front:
    """What stands in front of a place in the prompt, as it is served; grows chunk by chunk at constant cost.

    Attributes:
        order, length: the placement ids in front are the first ``length`` of ``order``.
        chain: digest of the system prompt and of the provenance of each chunk in front, in order.
        approximations: digest of the keys of what is approximate in front; "" while everything is exact.
        contents: digest of the system prompt and of the chunks in front, in order, however they are served.
        depth: of KV that is computed here: 0 while everything is exact, else one more than the deepest in front.
        absorbed: what KV that is computed here may carry something of; see `Conditioning`.
    """

    order: Order
    chain: str
    contents: str
    length: int = 0
    approximations: str = ""
    depth: int = 0
    absorbed: tuple[int, int] | None = None

    @classmethod
    def of(cls, state: State) -> Front:
        """Of the first place in ``state``."""
        key = state.system_prompt_key
        return cls(Order(p.id for p in state.placed), key, key)

    @property
    def exact(self) -> bool:
        """Whether everything in front is exact."""
        return not self.approximations

    @property
    def antecedents(self) -> Antecedents:
        """The ids in front."""
        return Antecedents(self.order, self.length)

    def contents_behind(self, placed: Placed) -> str:
        """`contents` of the next place, with a chunk here."""
        return _digest("contents", self.contents, placed.chunk_id, placed.conditioned)

    def behind(self, placed: Placed, served: Conditioning) -> Front:
        """Of the next place, with a chunk here that is served as ``served``."""
        arrived = (placed.arrival, placed.arrival)
        approximations, depth, absorbed = self.approximations, self.depth, hull(self.absorbed, arrived)
        if not served.exact:
            approximations = _digest("approximations", approximations, served.span, served.patch)
            depth = max(depth, 1 + served.depth)
            absorbed = hull(absorbed, served.absorbed)
        chain = _digest("front", self.chain, served.provenance)
        contents = self.contents_behind(placed)
        return Front(self.order, chain, contents, self.length + 1, approximations, depth, absorbed)

    def computed(self, chunk_id: str, lane: Lane) -> Conditioning:
        """The conditioning of a chunk that is computed here."""
        provenance = provenance_of(self.chain, chunk_id)
        return Conditioning(
            provenance=provenance,
            antecedents=self.antecedents,
            exact=self.exact,
            depth=self.depth,
            lane=lane,
            span=span_key(provenance, self.approximations),
            absorbed=self.absorbed,
        )


def hull(a: tuple[int, int] | None, b: tuple[int, int] | None) -> tuple[int, int] | None:
    """The smallest interval that holds both."""
    if a is None or b is None:
        return a or b
    return min(a[0], b[0]), max(a[1], b[1])


def patch_key(provenance: str, base: str, name: str) -> str:
    """Store key of a patch that turns the base span into KV of ``provenance``."""
    return "patch/" + _digest("patch", provenance, base, name)


def orbit_key(system_prompt_key: str, chunk_id: str, antecedents: Sequence[str], name: str) -> str:
    """Store key of an orbit patch: system prompt, chunk, and the antecedents' contents as a set."""
    return "orbit/" + _digest("orbit", system_prompt_key, chunk_id, tuple(sorted(antecedents)), name)


def partial_key(provenance: str, approximations: str, base: str, count: int) -> str:
    """Store key of a chunk of which all text and the first ``count`` tokens of each picture were computed in context, and the
    rest is the span ``base``."""
    return span_key(provenance, _digest("partial", approximations, base, count))


def merged_key(span: str, patch: str | None, slots: int) -> str:
    """Store key of what a span, with its patch, is in so many slots."""
    return "span/" + _digest("merged", span, patch, slots)


ORDERS_MET = (64, 32, 16, 8, 4, 2)
"""After how many orders met the mean over them is stored as a patch of its own; a stored one never changes."""


def orbit_keys(system_prompt_key: str, chunk_id: str, antecedents: Sequence[str], name: str) -> Iterator[str]:
    """Store keys of the orbit patches of a set: the one that was asked for, then those of the most orders met."""
    for met in ("", *(f",met={n}" for n in ORDERS_MET)):
        yield orbit_key(system_prompt_key, chunk_id, antecedents, name + met)


@lru_cache(maxsize=1 << 13, typed=True)
def _digest(*parts: Hashable) -> str:
    """`digest`, remembered: lanes are chosen at every ask, mostly over what the ask before has seen.

    A window of n chunks takes a few digests a chunk.
    """
    return digest(*parts)

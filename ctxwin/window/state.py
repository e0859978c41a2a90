"""The immutable state of a window: placed chunks, the antecedents of their KV, and evicted chunks.

Pydantic models, so that a snapshot is this state and nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from ctxwin.chunk import Chunk
from ctxwin.errors import UnknownChunk
from ctxwin.fidelity import Fidelity, Lane
from ctxwin.hashing import digest
from ctxwin.validation import validate
from ctxwin.window.antecedents import Antecedents, pack, unpack
from ctxwin.window.difference import Difference
from ctxwin.window.placed_list import PlacedList

FORMAT = 2
"""Format of snapshots."""
_SHOWN = 8
_OF_TEXT: tuple[Lane, ...] = ("computed", "formed", "resident", "edited")
"""Lanes that add no other approximation than a difference of text."""
EVERY_ARRIVAL = (0, 2**53 - 1)
"""Bounds of what may carry something of any chunk, also of one that arrives later."""


class Conditioning(BaseModel):
    """Antecedents that a placed chunk's KV has absorbed, and the store keys of that KV.

    Attributes:
        provenance: digest of the chunk and of all KV before it when it was computed (see `Prefix`).
        antecedents: placement ids before it when it was computed; the edges of the cascade graph.
        exact: whether it equals a re-prefill after exactly these antecedents.
        depth: length of the chain of approximations it stands on; 0 where exact.
        lane: how it came to be.
        span: store key of its span (of the base it is rebuilt from, where there is a patch).
        patch: store key of the patch that is added to the base, if any.
        base: store key of the span that a removal patch is to correct; None once it is formed.
        slots: how many slots its span has, where it is merged and has fewer than tokens; None elsewhere.
        absorbed: first and last arrival of all that it may carry something of, antecedents and what approximations in front
            of it carried; None where nothing was in front.
        difference: from the text that KV it stands on was conditioned on, if nothing else makes it an approximation. Lane
            ``edited`` of a placement: itself was conditioned behind another system prompt.
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
    difference: Difference | None = None

    @property
    def has_known_text(self) -> bool:
        """True if all text that it absorbed is its antecedents' but for ``difference``: no patch or survivor is part of it."""
        if self.patch is not None or self.slots is not None:
            return False
        return self.exact or (self.difference is not None and self.lane in _OF_TEXT)

    def without_antecedents(self) -> Conditioning:
        """Return a copy without antecedents, which are stored apart."""
        return self.model_copy(update={"antecedents": Antecedents()})

    def carries(self, placement: str, arrival: int) -> bool:
        """Return True if this KV may hold something of a chunk. Has false positives, no false negatives."""
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
        read: the window's version when it was last read: placed, recalled or touched (`Window.maintenance.touch`).
        reads: how often it was recalled or touched.
        kv: its conditioned KV; None: must be computed.
        seen: whether it has been computed before (a recomputation is ``formed``, not ``computed``).
        unseen: placement ids placed before it later, which it was allowed not to absorb.
        exact_only: whether an audit found it too far from a re-prefill; it is served exactly from then on.
        tail: whether a look back placed it at the end of an exact window, from where it leaves first (`edits.free_tail`).
        pending: lazy edits that wait for a break of the prefix (`edits.apply_pending`): ``evict``, ``toggle``, and
            ``insert`` with the id of the chunk to go before.
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
    tail: bool = False
    pending: dict[Literal["evict", "toggle", "insert"], str] = {}

    @property
    def keys(self) -> list[str]:
        """The store keys that must stay available while it is placed."""
        kv, chunk = self.kv, self.chunk
        keys = [key for key in (kv.span, kv.patch, kv.base) if key] if kv else []
        if chunk.keep_source:  # the pixels of in-memory media are nowhere else
            keys += [f"source/{part.content}" for part in chunk.media if part.source is None]
        return keys

    def replace(self, **changes: Any) -> Placed:
        """Return a copy with some fields changed."""
        return self.model_copy(update=changes)


class State(BaseModel):
    """A version of a window. As JSON it takes O(n) for the usual n chunks (`ctxwin.window.antecedents`).

    Attributes:
        window: id of the window; stays over versions and restarts, a fork has its own.
        root: of a fork, the window that it descends from; "" where it is no fork.
        placed: chunks in prompt order; evicted: chunks that can be recalled, oldest eviction first.
        low_water: tokens that the window falls to when it is over its budget; None: to the budget; ``auto``: by the sizes of
            chunks, where it is exact.
        prefill: ``idle``: the KV of the next ask is computed ahead of it while the engine idles (`ctxwin.window.idle`).
        libraries: the version of each library that it has drawn from, by name: it goes on reading that one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    window: str = ""
    root: str = ""
    engine: str
    system_prompt: str
    system_prompt_tokens: int
    system_prompt_advance: int
    budget: int
    low_water: int | Literal["auto"] | None = None
    prefill: Literal["idle"] | None = None
    fidelity: Fidelity
    version: int = 0
    arrivals: int = 0
    placed: PlacedList[Placed] = Field(default_factory=PlacedList)
    evicted: PlacedList[Placed] = Field(default_factory=PlacedList)
    libraries: dict[str, int] = {}

    @model_serializer(mode="wrap")
    def _packed(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        antecedents: dict[str, list[Antecedents | None]] = {}
        bare = {}
        for name, chunks in (("placed", self.placed), ("evicted", self.evicted)):
            antecedents[name] = [p.kv.antecedents if p.kv else None for p in chunks]
            bare[name] = tuple(p.replace(kv=p.kv and p.kv.without_antecedents()) for p in chunks)
        packed = pack(handler(self.model_copy(update=bare)), antecedents)
        return packed | {"format": FORMAT} if "orders" in packed else packed

    @model_validator(mode="before")
    @classmethod
    def _unpacked(cls, data: Any) -> Any:
        if isinstance(data, State):
            return data
        if not isinstance(data, dict):
            raise ValueError(f"a snapshot must be a State, its dict or its JSON, got {type(data).__name__}")
        if data.get("format", FORMAT) != FORMAT:  # before its fields, which may be others
            raise ValueError(f"snapshot format must be {FORMAT}, got {data['format']!r}; use the ctxwin that wrote it")
        return unpack(data) if "orders" in data else data

    @property
    def unit(self) -> str:
        """The window that this one descends from, itself where it is no fork: what happens to one of these says little more than
        what happens to all of them (`ctxwin.audit.evidence`)."""
        return self.root or self.window

    @property
    def tokens(self) -> int:
        """Tokens of the system prompt and of the placed chunks."""
        return self.system_prompt_tokens + self.placed.tokens

    @property
    def conditioned(self) -> bool:
        """True if no placed chunk is served without its context."""
        return all(map(attrgetter("conditioned"), self.placed))

    @property
    def system_prompt_key(self) -> str:
        """Provenance of the system prompt itself."""
        return system_prompt_provenance(self.engine, self.system_prompt)

    @property
    def neutral_key(self) -> str:
        """Provenance of the empty system prompt."""
        return _digest("system_prompt", self.engine, "")

    def index(self, placement: str) -> int:
        """Return the index of a placed chunk. Raises UnknownChunk."""
        at = self.placed.place_of(placement)
        if at is not None:
            return at
        is_evicted = self.evicted.place_of(placement) is not None
        hint = "it is evicted: recall it first" if is_evicted else f"this version places {_named(self.placed)}"
        raise UnknownChunk(f"id must be a placed chunk, got {_describe_id(placement)}; {hint}")

    def find_evicted(self, placement: str) -> Placed:
        """Return the evicted placement of this id. Raises UnknownChunk if there is none."""
        entry = self.evicted.get(placement)
        if entry is not None:
            return entry
        hint = "it is placed already" if self.placed.get(placement) else f"evicted are {_named(self.evicted)}"
        raise UnknownChunk(f"id must be an evicted chunk, got {_describe_id(placement)}; {hint}")

    def find(self, placement: str) -> Placed:
        """Return a placed or evicted chunk. Raises UnknownChunk."""
        entry = self.placed.get(placement) or self.evicted.get(placement)
        if entry is None:
            raise UnknownChunk(f"id must be a placed or evicted chunk, got {_describe_id(placement)}")
        return entry

    def replace(self, **changes: Any) -> State:
        """Return a copy with some fields changed."""
        for name in ("placed", "evicted"):
            if not isinstance(changes.get(name, self.placed), PlacedList):
                changes[name] = getattr(self, name).followed_by(changes[name])
        return self.model_copy(update=changes)

    def edited(self, **changes: Any) -> State:
        """Return the next version with some fields changed."""
        return self.replace(version=self.version + 1, **changes)

    def starts(self) -> list[int]:
        """Return the start position of every placed chunk."""
        return [*accumulate((p.advance for p in self.placed), initial=self.system_prompt_advance)][:-1]

    def keys(self) -> set[str]:
        """Return the store keys that must stay available for this version."""
        return {key for p in self.placed for key in p.keys}


def _describe_id(placement: object) -> str:
    """Return the text of an id for an error message, with the remedy if it is a list or a chunk."""
    return repr(placement) if isinstance(placement, str) else f"{repr(placement)[:80]}: pass one id, a str"


def _named(chunks: PlacedList[Placed]) -> str:
    """Return their ids for a message: only the newest if there are many."""
    more = f" and {len(chunks) - _SHOWN} more" if len(chunks) > _SHOWN else ""
    return f"{[*chunks.ids[-_SHOWN:]]}{more}"


ANYTHING = "*"
"""Stands for the contents that KV absorbed if they are too many to name."""


def content_name(chunk_id: str) -> str:
    """Return a record's name of a chunk that its KV absorbed. Chunks that share a name are forgotten together."""
    return chunk_id[:16]


def system_prompt_provenance(engine: str, system_prompt: str) -> str:
    """Return the provenance of a system prompt on an engine, by its identity."""
    return _digest("system_prompt", engine, system_prompt)


def provenance_of(chain: str, chunk_id: str) -> str:
    """Return the provenance of a chunk's KV: its content, and the chain of provenances before it (see `Prefix`)."""
    return _digest("provenance", chain, chunk_id)


def span_key(provenance: str, approximations: str = "") -> str:
    """Return the store key of a span. Exact and approximate KV of one provenance never share a key.

    Args:
        approximations: digest of the approximate KV before it; "" where it is exact. A provenance does not say by which
            patch (rank, layers) a chunk came to it, and the KV computed behind it depends on that.
    """
    return "span/" + _digest("span", provenance, approximations)


def placed_order(placed: PlacedList[Placed]) -> Antecedents:
    """Return the ids of placed chunks, where they stand in it as a run of the order that the last one with KV was conditioned on,
    so that the chunks of a stream share one. O(placed)."""
    ids = [*placed.ids]
    last = next((p.kv.antecedents for p in reversed(placed) if p.kv is not None), None)
    return (None if last is None else last.order.run(last.version, ids)) or Antecedents(ids)


@dataclass(frozen=True)
class Prefix:
    """Prefix of a place in the prompt, as it is served; grows chunk by chunk at constant cost.

    Attributes:
        antecedents: placement ids of the prefix.
        chain: digest of the system prompt and of the provenance of each preceding chunk, in order.
        approximations: digest of the keys of preceding approximations; "" while everything is exact.
        contents: digest of the system prompt and of the preceding chunks, in order, however they are served.
        depth: of KV that is computed here: 0 while everything is exact, else one more than the deepest before it.
        absorbed: arrivals that KV computed here may carry something of; see `Conditioning`.
        difference: of KV that is computed here; see `Conditioning`.
    """

    antecedents: Antecedents
    chain: str
    contents: str
    approximations: str = ""
    depth: int = 0
    absorbed: tuple[int, int] | None = None
    difference: Difference | None = None

    @classmethod
    def of(cls, state: State, placed: Antecedents | None = None) -> Prefix:
        """Return the prefix of the first place in ``state``. ``placed``: its `placed_order`, if that is known."""
        key, ids = state.system_prompt_key, placed_order(state.placed) if placed is None else placed
        return cls(Antecedents(ids.order, ids.begin, ids.begin, 0, ids.version), key, key)

    def gives_kv_of(self, other: Prefix) -> bool:
        """Return True if KV that is computed here is the same as there, whichever orders name what precedes it."""
        return (self.chain, self.approximations, self.contents) == (other.chain, other.approximations, other.contents)

    @property
    def exact(self) -> bool:
        """True if the whole prefix is exact."""
        return not self.approximations

    @property
    def length(self) -> int:
        """Number of chunks in the prefix."""
        return self.antecedents.length

    def contents_with(self, entry: Placed) -> str:
        """Return `contents` of the next place, with a chunk here."""
        return _digest("contents", self.contents, entry.chunk_id, entry.conditioned)

    def extended_by(self, entry: Placed, conditioning: Conditioning) -> Prefix:
        """Return the prefix of the next place, with a chunk here that is served as ``conditioning``."""
        arrived = (entry.arrival, entry.arrival)
        approximations, depth, absorbed = self.approximations, self.depth, interval_union(self.absorbed, arrived)
        difference = self.difference
        if not conditioning.exact:
            has_text = conditioning.has_known_text and (self.exact or difference is not None)
            difference = conditioning.difference.covering(difference) if has_text and conditioning.difference else None
            approximations = _digest("approximations", approximations, conditioning.span, conditioning.patch)
            depth = max(depth, 1 + conditioning.depth)
            absorbed = interval_union(absorbed, conditioning.absorbed)
        chain = _digest("front", self.chain, conditioning.provenance)
        contents, antecedents = self.contents_with(entry), self.antecedents.through(entry.id, self.length + 1)
        return Prefix(antecedents, chain, contents, approximations, depth, absorbed, difference)

    def computed(self, chunk_id: str, lane: Lane) -> Conditioning:
        """Return the conditioning of a chunk that is computed here."""
        provenance = provenance_of(self.chain, chunk_id)
        return Conditioning(
            provenance=provenance, antecedents=self.antecedents, exact=self.exact, depth=self.depth, lane=lane,
            span=span_key(provenance, self.approximations), absorbed=self.absorbed, difference=self.difference,
        )  # fmt: skip


def interval_union(a: tuple[int, int] | None, b: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the smallest interval that contains both; None is the empty one."""
    if a is None or b is None:
        return a or b
    return min(a[0], b[0]), max(a[1], b[1])


def patch_key(provenance: str, base: str, name: str) -> str:
    """Return the store key of a patch that turns the base span into KV of ``provenance``."""
    return "patch/" + _digest("patch", provenance, base, name)


def orbit_key(system_prompt_key: str, chunk_id: str, antecedents: Sequence[str], name: str) -> str:
    """Return the store key of an orbit patch: system prompt, chunk, and the antecedents' contents as a set."""
    return "orbit/" + _digest("orbit", system_prompt_key, chunk_id, tuple(sorted(antecedents)), name)


def partial_key(provenance: str, approximations: str, base: str, count: int) -> str:
    """Return the store key of a chunk of which all text and the first ``count`` tokens of each picture were computed in
    context, and the rest is the span ``base``."""
    return span_key(provenance, _digest("partial at once", approximations, base, count))


def merged_key(span: str, patch: str | None, slots: int) -> str:
    """Return the store key of a span, with its patch, merged into so many slots."""
    return "span/" + _digest("merged", span, patch, slots)


OBSERVED_ORDERS = (64, 32, 16, 8, 4, 2)
"""Numbers of observed orders after which their mean is stored as a patch of its own, which never changes."""


def orbit_keys(system_prompt_key: str, chunk_id: str, antecedents: Sequence[str], name: str) -> Iterator[str]:
    """Yield store keys of the orbit patches of a set: the prepared one, then those of the most observed orders."""
    for suffix in ("", *(f",met={n}" for n in OBSERVED_ORDERS)):
        yield orbit_key(system_prompt_key, chunk_id, antecedents, name + suffix)


@lru_cache(maxsize=1 << 16, typed=True)  # some 20 MB where windows of thousands of chunks fill it
def _digest(*parts: Hashable) -> str:
    """Return `digest`, cached: each ask chooses lanes, mostly over the chunks of the previous ask.

    A window of n chunks takes a few digests a chunk.
    """
    return digest(*parts)


def read_state(state: State | dict[str, Any] | str) -> State:
    """Return a snapshot (model, dict or JSON) as a state. Raises ValueError for one that is malformed."""
    if isinstance(state, State):
        return state
    read = State.model_validate_json if isinstance(state, str) else State.model_validate
    return cast("State", validate(read, state, "the snapshot is malformed: "))

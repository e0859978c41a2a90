"""The immutable state of a window: what is placed, what each placed chunk's KV has absorbed, what was evicted.

Pydantic models, so that a snapshot is this state and nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict

from ctxwin.chunk import Chunk
from ctxwin.errors import UnknownChunk
from ctxwin.fidelity import Fidelity, Lane
from ctxwin.hashing import digest


class Conditioning(BaseModel):
    """What a placed chunk's KV has absorbed, and where that KV is.

    Attributes:
        provenance: digest of system prompt and antecedents in order, each with its own provenance (see `provenance_of`).
        antecedents: placement ids in front when it was computed; the edges of the cascade graph.
        exact: whether it equals what a re-prefill behind exactly these antecedents gives.
        depth: length of the chain of approximations it stands on; 0 where exact.
        lane: how it came to be.
        span: store key of its span (of the base it is rebuilt from, where there is a patch).
        patch: store key of the patch that is added to the base, if any.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    provenance: str
    antecedents: tuple[str, ...]
    exact: bool
    depth: int
    lane: Lane
    span: str
    patch: str | None = None


class Placed(BaseModel):
    """One placement of a chunk.

    Attributes:
        tokens: KV slots; advance: how far the next chunk's start moves on.
        arrival: counts appends over the window's lifetime; the chronological order.
        read: the window's version when it was last read: placed, recalled or touched (`Window.touch`).
        kv: its conditioned KV; None: must be computed.
        seen: whether it has been computed before (a recomputation is ``formed``, not ``computed``).
        unseen: placement ids put in front of it later that it was allowed not to absorb.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    chunk: Chunk
    chunk_id: str
    tokens: int
    advance: int
    arrival: int
    read: int = 0
    pinned: bool = False
    conditioned: bool = True
    kv: Conditioning | None = None
    seen: bool = False
    unseen: tuple[str, ...] = ()

    def replace(self, **changes: Any) -> Placed:
        """A copy with some fields changed."""
        return self.model_copy(update=changes)


class State(BaseModel):
    """A version of a window.

    Attributes:
        window: id of the window; stays over versions and restarts, a fork has its own.
        placed: chunks in prompt order; evicted: what can be recalled, oldest eviction first.
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

    @property
    def tokens(self) -> int:
        """Tokens of the system prompt and of what is placed."""
        return self.system_prompt_tokens + sum(p.tokens for p in self.placed)

    @property
    def system_prompt_key(self) -> str:
        """Provenance of the system prompt itself."""
        return _digest("system_prompt", self.engine, self.system_prompt)

    def index(self, placement: str) -> int:
        """Index of a placed chunk; raises UnknownChunk."""
        for i, p in enumerate(self.placed):
            if p.id == placement:
                return i
        gone = any(p.id == placement for p in self.evicted)
        hint = "it is evicted: recall it first" if gone else f"this version places {[p.id for p in self.placed]}"
        raise UnknownChunk(f"id must be a placed chunk, got {placement!r}; {hint}")

    def find_evicted(self, placement: str) -> Placed:
        """The evicted placement of this id; UnknownChunk if there is none."""
        for p in self.evicted:
            if p.id == placement:
                return p
        placed = any(p.id == placement for p in self.placed)
        hint = "it is placed already" if placed else f"evicted are {[p.id for p in self.evicted]}"
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
        kv = {k for p in self.placed if p.kv for k in (p.kv.span, p.kv.patch) if k}
        # The pixels of in-memory media are nowhere else.
        memory = (m for p in self.placed if p.chunk.keep_source for m in p.chunk.media if m.source is None)
        return kv | {f"source/{m.content}" for m in memory}


def provenance_of(system_prompt_key: str, chunk_id: str, front: Iterable[str]) -> str:
    """Provenance of a chunk's KV: system prompt, then its antecedents in order, each by its own provenance."""
    return _digest("provenance", system_prompt_key, chunk_id, tuple(front))


def span_key(provenance: str, front: Iterable[Conditioning] | None = None) -> str:
    """Store key of a span. Exact and approximate KV of one provenance never share a key.

    Args:
        front: None where it is exact; else what stands in front as it is served, of which something is not exact. A
            provenance does not say by which patch (rank, layers) a chunk came to it; the KV computed behind it depends on that.
    """
    served = None if front is None else tuple((f.span, f.patch) for f in front if not f.exact)
    return "span/" + _digest("span", provenance, served)


def patch_key(provenance: str, base: str, name: str) -> str:
    """Store key of a patch that turns the base span into KV of ``provenance``."""
    return "patch/" + _digest("patch", provenance, base, name)


def orbit_key(system_prompt_key: str, chunk_id: str, antecedents: Sequence[str], name: str) -> str:
    """Store key of an orbit patch: system prompt, chunk, and the antecedents' contents as a set."""
    return "orbit/" + _digest("orbit", system_prompt_key, chunk_id, tuple(sorted(antecedents)), name)


@lru_cache(maxsize=1 << 13, typed=True)
def _digest(*parts: Hashable) -> str:
    """`digest`, remembered: lanes are chosen at every ask, mostly over what the ask before has seen.

    A window of n chunks names n keys of up to n antecedents each: 100 chunks take 2.8 ms anew, 0.1 ms remembered.
    """
    return digest(*parts)

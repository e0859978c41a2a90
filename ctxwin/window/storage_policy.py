"""Storage policy: the form in which a chunk's KV is worth its bytes.

A chunk of S bytes of KV, placed in n contexts behind one system prompt, takes n S bytes as conditioned KV, and S + n P as
one canonical with n patches (P is a few percent to a tenth of S). Conditioned KV may be exact, a patch never is, and
forming a canonical takes a forward. From that follows:

1. While all that open windows place fits into `ROOM` of the store, conditioned KV stays as it is.
2. Beyond that bytes are short. A chunk becomes canonical + patch where the canonical is held, or is shared by at least two
   contexts: for a single one S + P is more than S.
3. A patch is stored only in place of the KV it represents, never beside it. What a removal patch corrects stays (an
   antecedent that comes back finds it exact), so the patch alone is what another context of it costs.
4. What was evicted keeps, while bytes are short, the cheapest form that serves it at its chronological place (`likely_form`).
   If no stored form does, it is rebuilt from its source, which is marked as used so that KV leaves the store first.
5. A patch that has never served is dropped when bytes are short, unless a window still names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from ctxwin.window.placed_list import difference
from ctxwin.window.state import Placed, State

if TYPE_CHECKING:
    from ctxwin.kv.layout import KVSpec

ROOM: Final = 0.75
"""Share of a store that conditioned KV may take; the rest is for embeddings, sources and what comes back."""

Form = Literal["conditioned", "canonical", "source"]


@dataclass(frozen=True)
class Demand:
    """Bytes that the open windows of one store would take as conditioned KV.

    Attributes:
        bytes: of all contexts, each once.
        limit: of the store; 0 where it has none.
        contexts: the different contexts of a chunk, by system prompt and content.
    """

    bytes: int = 0
    limit: int = 0
    contexts: Mapping[tuple[str, str], Collection[str]] = field(default_factory=dict)

    @property
    def short(self) -> bool:
        """True if the store cannot hold all of it and leave room for the rest."""
        return 0 < ROOM * self.limit < self.bytes

    def pays(self, state: State, entry: Placed, canonical_held: bool) -> bool:
        """Return True if bytes are short and canonical + patch saves some."""
        shared = len(self.contexts.get((state.system_prompt_key, entry.chunk_id), ())) > 1
        return self.short and (canonical_held or shared)


class DemandTracker:
    """The `Demand` of a store's open windows, kept up to date: O(windows), and O(chunks that changed).

    Not thread-safe.
    """

    def __init__(self, kv: KVSpec) -> None:
        self._kv = kv
        self._states: dict[int, State] = {}
        self._contexts: dict[tuple[str, str], Counter[str]] = {}
        self._bytes = 0

    def demand(self, states: Mapping[int, State], limit: int) -> Demand:
        """Return the demand of windows in these states. Its contexts are the tracker's own: they follow later calls."""
        for window in self._states.keys() - states.keys():
            state = self._states.pop(window)
            self._count(state, state.placed, -1)
        for window, state in states.items():
            old = self._states.get(window)
            if old is state:
                continue
            self._states[window] = state
            leaving: Sequence[Placed] = old.placed if old else ()
            coming: Sequence[Placed] = state.placed
            if old is not None and (old.window, old.system_prompt_key) == (state.window, state.system_prompt_key):
                leaving, coming = difference(old.placed.contents, state.placed.contents)
            self._count(state, coming, 1)
            self._count(old or state, leaving, -1)
        return Demand(self._bytes, limit, self._contexts)

    def _count(self, state: State, placed: Iterable[Placed], sign: int) -> None:
        system_prompt = state.system_prompt_key
        for p in placed:
            counts = self._contexts.setdefault((system_prompt, p.chunk_id), Counter())
            context = context_of(state, p)
            was_held = context in counts
            counts[context] += sign
            if not counts[context]:
                del counts[context]
            if was_held != (context in counts):
                self._bytes += sign * (p.tokens * self._kv.token_bytes + self._kv.state_bytes)
            if not counts:
                del self._contexts[system_prompt, p.chunk_id]


def context_of(state: State, entry: Placed) -> str:
    """Return a key of the context that a chunk's KV was conditioned in."""
    return entry.kv.provenance if entry.kv else f"{state.window}/{entry.id}"


def likely_form(state: State, evicted: Placed, canonical_held: bool, keeps_survivors: bool) -> Form:
    """Return the cheapest form that serves ``evicted`` when `Window.recall` brings it back to its chronological place."""
    preceding = list(state.placed.ids[: state.placed.place_behind(evicted.arrival)])
    if not preceding and canonical_held:
        return "canonical"  # there it is exact
    absorbed = evicted.kv.antecedents if evicted.kv else ()
    if preceding == list(absorbed) or (keeps_survivors and preceding == [a for a in absorbed if a in set(preceding)]):
        return "conditioned"
    return "canonical" if canonical_held else "source"

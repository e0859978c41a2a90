"""`Layout`: a window's chunks as an engine takes them; and `Work`: the cost of an operation beside its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, count, repeat
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, NamedTuple

from ctxwin.engines.cost import Workload
from ctxwin.engines.results import PrefillCost
from ctxwin.engines.segments import Segment, without_spans
from ctxwin.fidelity import Lane
from ctxwin.hashing import digest
from ctxwin.window.choice import Choice
from ctxwin.window.prices import Prices
from ctxwin.window.state import ANYTHING, Prefix, State, content_name

if TYPE_CHECKING:
    from ctxwin.kv.layout import SpanKV

MAX_NAMED = 1024
"""Most contents that a record names; KV that absorbed more counts as having absorbed anything."""


class Salt(NamedTuple):
    """The name of a prefix-cache space, and how many first chunks it is made of; "" is the exact one's."""

    chunks: int = 0
    name: str = ""


@dataclass
class Work(PrefillCost):
    """Cost of one operation beyond `Engine.generate`: forwards run to form canonicals and patches, and misses."""

    misses: int = 0
    system_prompt: bool = False  # whether the system prompt was among them
    background: bool = False  # no caller is waiting for it
    priced_ms: float = 0.0  # of its time: what has a price of its own
    stopped: Callable[[], bool] | None = None  # polled during background forwards; once it is true they are given up


@dataclass(frozen=True)
class Layout:
    """A layout ready for an engine: system prompt first, then one segment per placed chunk.

    Attributes:
        tokens: of all segments; ``lanes``: those of chunks by lane.
        standing: how many first chunks were taken over from the layout before; ``loads``: what loads of these take.
        ms: milliseconds up to the first token as planned, without the query's tokens.
        ahead: KV of chunks that were computed early, by index into the segments, as an answer would capture it.
    """

    choices: tuple[Choice, ...]
    segments: tuple[Segment, ...]
    salt: str
    contents: tuple[str, ...]
    counts: tuple[int, ...]
    tokens: int
    lanes: Mapping[Lane, int]
    standing: int = 0
    loads: Workload | None = None
    ms: float = 0.0
    ahead: Mapping[int, SpanKV] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """True if all chunks are served exactly."""
        return not self.choices or self.choices[-1].ends_exact

    def absorbed(self, index: int) -> Sequence[str]:
        """Return the names of the contents that KV absorbs when computed at chunk ``index`` (or after the last one)."""
        count = self.counts[index]
        return self.contents[:count] if count <= MAX_NAMED else [ANYTHING]

    def end(self, state: State) -> Prefix:
        """Return the prefix of a chunk that is appended."""
        return self.choices[-1].next_prefix if self.choices else Prefix.of(state)

    def as_computed(self, state: State) -> Layout:
        """Return this layout as served when the engine could load nothing: all of it computed in place, and exact."""
        choices = computed_choices(state, Prices())
        names = tuple(dict.fromkeys(content_name(c.entry.chunk_id) for c in choices))
        lanes: dict[Lane, int] = {"computed": sum(self.lanes.values())} if choices else {}
        segments, counts = tuple(without_spans(self.segments)), tuple(range(len(choices) + 1))
        return Layout(tuple(choices), segments, "", names, counts, self.tokens, lanes)


def salt_of(segments: Sequence[Segment], previous: Salt | None = None, same: int = 0) -> Salt:
    """Return the prefix-cache space of a layout: "" (the exact one) or a digest of the KV that a forward would not give.

    ``previous``: that of a layout with the same system prompt and ``same`` first chunks.

    Everything up to the last segment that is `approximate` names the space; what stands behind it is what a forward behind
    exactly that gives, so the engine's own chain of block hashes tells it apart. An append or a fork therefore stays in
    its space, and an edit undone comes back to it.
    """
    first = same + 1 if previous is None or previous.chunks <= same else 0
    last = max(compress(count(first), map(attrgetter("approximate"), segments[first:])), default=0)
    if first and not last:
        return previous or Salt()
    named = segments[: last + 1] if last else ()
    patched = any(map(is_not, map(attrgetter("patch"), named), repeat(None)))
    keys = [segment.key for segment in named] if patched else map(attrgetter("span_key"), named)
    return Salt(last, digest("salt", "\n".join(keys)) if last else "")


def computed_choices(state: State, prices: Prices) -> list[Choice]:
    """Return the choices by which all placed chunks are computed in place."""
    choices: list[Choice] = []
    prefix, offset = Prefix.of(state), state.system_prompt_tokens
    for entry in state.placed:
        conditioning = prefix.computed(entry.chunk_id, "computed")
        choice = Choice(entry, "computed", prefix, conditioning, compute=True)
        choices.append(replace(choice, ms=prices.of(choice, offset)))
        prefix, offset = prefix.extended_by(entry, conditioning), offset + entry.tokens
    return choices

"""`Choice`: the lane that serves one placed chunk, and what its KV is then conditioned on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, Self

from ctxwin.engines.segments import partial_ranges
from ctxwin.fidelity import Fidelity, Lane
from ctxwin.window.state import Conditioning, Placed, Prefix, provenance_of, span_key

SAVES_MS = 5.0
"""Least saving in milliseconds for which a lane replaces an earlier one of the order."""


class Premises(NamedTuple):
    """Lookups that led to a choice, the first admissible one of a chunk behind a prefix. It stays valid while they give the same
    answers. Choices with the same object are one, but for its price and what an answer wrote back to its placement.

    Attributes:
        stored: whether each key that was looked up is stored.
        joins: whether a forward would share a request.
    """

    fidelity: Fidelity
    stored: Mapping[str, bool]
    joins: bool


@dataclass(frozen=True)
class Choice:
    """How one placed chunk is served.

    Attributes:
        prefix: what precedes it, as it is served.
        conditioning: provenance, exactness and keys of the KV as served; what later chunks are conditioned on.
        compute: whether a forward over the chunk runs in place (its KV is captured under ``conditioning.span``).
        form_canonical: whether the canonical must first be formed by a forward behind the system prompt.
        partial_base: the canonical that gives what is not computed of it (MPIC); then ``conditioning`` describes the mixture.
        recompute: with it: how many tokens of each picture are computed in place, beside all text.
        not_attended: placement ids in front that its KV has not absorbed.
        evicted_antecedents: placement ids it has absorbed that do not stand in front any more.
        reused: whether its serving is repeated from the memo: it followed the same contents, and no other lane applies.
        ms: its cost in milliseconds, without a request of its own.
        premises: None where it must be made anew.
    """

    entry: Placed
    lane: Lane
    prefix: Prefix
    conditioning: Conditioning
    compute: bool = False
    form_canonical: bool = False
    partial_base: Conditioning | None = None
    recompute: int = 0
    not_attended: Sequence[str] = ()
    evicted_antecedents: Sequence[str] = ()
    reused: bool = False
    ms: float = 0.0
    premises: Premises | None = field(default=None, repr=False, compare=False)

    def of_entry(self, entry: Placed) -> Self:
        """Return this choice of the placement as it stands behind an answer; only exact KV is chosen whatever it has itself."""
        goes_on = self.lane == "resident" and self.conditioning.exact
        return replace(self, entry=entry, premises=self.premises if goes_on else None)

    def stands(self, fidelity: Fidelity | None) -> bool:
        """Return True if it goes on behind others at its price, as long as all that it was made on is the same."""
        made = self.premises
        goes_on = made is not None and made.fidelity is fidelity and not self.reused
        return goes_on and (not (made and made.joins) or self.ms < SAVES_MS)

    @property
    def ends_exact(self) -> bool:
        """True if all up to it is exact."""
        return self.prefix.exact and self.conditioning.exact

    @property
    def next_prefix(self) -> Prefix:
        """The prefix of the next place."""
        return self.prefix.extended_by(self.entry, self.conditioning)

    @property
    def parts(self) -> list[tuple[int, bool]]:
        """Tokens of each of its pieces, and whether the piece is computed in place."""
        if self.partial_base is None:
            return [(self.entry.tokens, self.compute)]
        ranges = partial_ranges(self.entry.media, self.recompute, self.entry.tokens)
        cuts = [0, *(at for pair in ranges for at in pair), self.entry.tokens]
        return [(end - begin, bool(i % 2)) for i, (begin, end) in enumerate(pairwise(cuts)) if begin < end]

    @property
    def recomputed_tokens(self) -> int:
        """Number of its tokens that are computed in place in lane ``partial``."""
        return 0 if self.partial_base is None else sum(tokens for tokens, compute in self.parts if compute)

    @property
    def slots(self) -> int:
        """Number of KV slots."""
        return self.conditioning.slots or self.entry.tokens

    @property
    def updates_entry(self) -> bool:
        """True if ``conditioning`` becomes the placement's own (a survivor, an edited or a toggled chunk keeps its own)."""
        outlived = self.lane == "merged" and self.entry.kv is not None and self.conditioning.depth > self.entry.kv.depth
        return self.lane not in ("survivor", "edited", "canonical") and not self.reused and not outlived

    @property
    def in_place(self) -> bool:
        """True if a forward here, after the prefix as it is served, gives exactly this KV."""
        here = span_key(provenance_of(self.prefix.chain, self.entry.chunk_id), self.prefix.approximations)
        return self.compute or (self.conditioning.patch is None and self.conditioning.span == here)


@dataclass(frozen=True)
class ServedMemo:
    """Record of how a chunk was served, to be reused after the same contents (`Prefix.contents_with`)."""

    lane: Lane
    conditioning: Conditioning
    not_attended: Sequence[str]
    evicted_antecedents: Sequence[str]

    @classmethod
    def of(cls, choice: Choice) -> Self:
        """Return the memo of ``choice``."""
        lane: Lane = "resident" if choice.compute else choice.lane
        return cls(lane, choice.conditioning, choice.not_attended, choice.evicted_antecedents)

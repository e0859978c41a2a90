"""Comparison of the text that KV was conditioned on with the text that precedes it now, for lane ``edited``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress
from typing import TYPE_CHECKING

from ctxwin.window.difference import Change, Difference
from ctxwin.window.state import Placed, State

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.window.antecedents import Antecedents, Order


@dataclass(frozen=True)
class EditedText:
    """How the text before a chunk differs from what its KV was conditioned on.

    Attributes:
        not_attended: placement ids before it that its KV has not absorbed.
        evicted_antecedents: placement ids that it absorbed and that do not precede it any more.
    """

    difference: Difference
    not_attended: tuple[str, ...]
    evicted_antecedents: tuple[str, ...]


class Differences:
    """Comparison of what chunks were conditioned on with what precedes them now.

    Args:
        engine: gives the tokens of text; those of pictures and sound do not tell their content, so that a changed one is
            never compared.
        most: tokens of a difference at most.
    """

    def __init__(self, state: State, engine: Engine, most: int) -> None:
        self._state, self._engine, self._most = state, engine, most
        self._ids = tuple(p.id for p in state.placed)
        self._first = 0
        self._prefix_lengths: dict[tuple[Order, int, int], int] = {}  # by order, where a run of it begins, and version
        self._ends: dict[tuple[Order, int, int], tuple[int, int, int]] = {}
        self._changes: dict[tuple[int, tuple[str, ...], tuple[str, ...]], Change | None] = {}

    def of(self, entry: Placed, index: int) -> EditedText | None:
        """Return the difference of the chunk at ``index``; None where there is none, it is unknown or has too many tokens.

        O(1) for chunks that were conditioned together; where chunks were changed, once a tokenisation of these.
        """
        kv = entry.kv
        if kv is None or not kv.has_known_text:
            return None
        changed = self._changed(kv.antecedents, index)
        if changed is None:
            return None
        first, removed, added = changed
        difference = kv.difference
        if removed or added:
            change = self._change(first, removed, added)
            if change is None:
                return None
            difference = change.applied_to(difference)
        if difference is None or not 0 < difference.tokens <= self._most:
            return None
        only_added, only_removed = (tuple(p for p in a if p not in b) for a, b in ((added, removed), (removed, added)))
        return EditedText(difference, only_added, only_removed)

    def _changed(self, was: Antecedents, index: int) -> tuple[int, tuple[str, ...], tuple[str, ...]] | None:
        """Return where antecedents and the first ``index`` placed ids begin to differ, and what differs up to their common end;
        None where it is too many chunks."""
        n = was.length
        first = min(self._common_prefix_length(was), n, index)
        if first == n == index:
            return first, (), ()
        last = self._common_end(was, index, first)
        return None if last is None else (first, was[first : n - last], self._ids[first : index - last])

    def _common_prefix_length(self, was: Antecedents) -> int:
        """Return how many first ids a run, with what follows it, and the placed ones have in common; once a run O(its length)."""
        run = was.order, was.begin, was.version
        if run not in self._prefix_lengths:
            ids = [*compress(was.order.ids[was.begin :], was.order.members(was.version)[was.begin :])][: len(self._ids)]
            first = self._first if tuple(ids[: self._first]) == self._ids[: self._first] else 0
            while first < len(ids) and ids[first] == self._ids[first]:
                first += 1
            self._first = self._prefix_lengths[run] = first  # mostly that of the next one, too
        return self._prefix_lengths[run]

    def _common_end(self, was: Antecedents, index: int, first: int) -> int | None:
        """Return how many ids behind ``first`` both have in common at the end; None if too few."""
        # A chunk behind the last one mostly follows the same change.
        n, run, ids = was.length, (was.order, was.begin, was.version), tuple(was)
        previous, place, last = self._ends.get(run, (n, index, 0))
        if n - previous == index - place > 0 and ids[previous:n] == self._ids[place:index]:
            last += n - previous
            self._ends[run] = n, index, last
            return last
        # Every chunk has a token, so that with more chunks between too many differ.
        last = max(0, max(n, index) - first - self._most - 2)
        if last > min(n, index) - first or ids[n - last : n] != self._ids[index - last : index]:
            return None
        while last < min(n, index) - first and ids[n - 1 - last] == self._ids[index - 1 - last]:
            last += 1
        self._ends[run] = n, index, last
        return last

    def _change(self, first: int, removed: tuple[str, ...], added: tuple[str, ...]) -> Change | None:
        """Return the change of the tokens; None if they are not known."""
        key = first, removed, added
        if key not in self._changes:
            old, new = map(self._tokens, (removed, added))
            known = old is not None and new is not None
            self._changes[key] = Change.between(old or (), new or (), self._offsets[first]) if known else None
        return self._changes[key]

    @cached_property
    def _offsets(self) -> list[int]:
        """Tokens before each placed chunk, and before the next one."""
        return list(accumulate((p.tokens for p in self._state.placed), initial=self._state.system_prompt_tokens))

    @cached_property
    def _entries(self) -> dict[str, Placed]:
        return {p.id: p for p in (*self._state.evicted, *self._state.placed)}

    def _tokens(self, ids: tuple[str, ...]) -> list[int] | None:
        """Return the tokens of chunks of text; None for others, and for one whose tokens are known no more."""
        tokens: list[int] = []
        for placement in ids:
            entry = self._entries.get(placement)
            if entry is None or entry.media:
                return None
            if placement in self._ids or entry.chunk.keep_source:
                tokens += self._engine.encode(entry.chunk).token_ids
            else:  # a segment of a chat, which is named by a digest
                stored = self._engine.repo.record_of(entry.kv.span).get("token_ids", ()) if entry.kv else ()
                if len(stored) != entry.tokens:
                    return None
                tokens += stored
        return tokens

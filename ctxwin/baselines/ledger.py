"""`Ledger`: what windows computed, beside what users of a prefix cache would have computed for the same asks.

The users follow `ctxwin.baselines.policies`. Those who trim keep a looked-back chunk until they trim it. All have vLLM's block
size and encoder cache, and their caches forget nothing.
"""

from __future__ import annotations

import io
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from ctxwin.baselines.policies import NAMES, POLICIES, Policy, PrefixUser
from ctxwin.baselines.prefix_cache import PrefixCache, Prompt
from ctxwin.baselines.reprefill import Reference
from ctxwin.engines.base import Engine
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded
from ctxwin.store.lru import LRUCache
from ctxwin.window.events import Event
from ctxwin.window.state import Placed, State

if TYPE_CHECKING:
    from ctxwin.window.window import Window

_KEPT = 4096  # encoded chunks remembered, and branches that were closed


class Ledger:
    """Counts the asks of the windows it watches. Its `Ledger.__call__` is an observer (`Window.observe`).

    Args:
        engine: of the windows. All it prefills from now on counts as theirs, background work included.
        reserve_tokens: tokens that the users of a prefix cache keep free for a query and its answer.
        reference: re-prefill every ask exactly, so that answers can be compared; its cost is not counted.
        policies: users of a prefix cache to follow; empty for a caller that adds their costs itself (`note`).

    Attributes:
        rows: a dict for each ask: ``window``, ``parent``, ``version``, ``query``, ``answer``, ``answer_reprefill`` and
            ``truth`` (None where not known), ``placed`` (chunks), ``prompt_tokens``, ``tokens_by_lane``, and for ctxwin
            and each policy ``prompt_tokens`` (how much an ask shows), ``prompt_tokens_naive``, ..., ``computed_tokens``, ... and
            ``vision_encodes``, ....

    Not for engines that serve other windows at the same time: their work would be counted, too.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        reserve_tokens: int = 48,
        reference: bool = False,
        policies: Sequence[Policy] = POLICIES,
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self._engine, self._reserve_tokens, self._reference = engine, reserve_tokens, reference
        self._policies = tuple(policies)
        self._reserve_tokens_of: dict[str, int] = {}
        self._users: dict[str, dict[Policy, PrefixUser[str]]] = {}  # by window id
        self._ended: OrderedDict[str, None] = OrderedDict()  # branches that were closed; they may still be adopted
        self._caches = {policy: PrefixCache() for policy in self._policies}
        self._encoded: LRUCache[Encoded] = LRUCache(_KEPT)
        self._tokens: dict[str, int] = {}  # by placement id
        self._references: dict[str, Reference] = {}
        self._counted = self._counters()
        self._patches = self._patched()
        self._lock = threading.RLock()

    def watch(self, window: Window, reserve_tokens: int | None = None) -> None:
        """Count this window and its later forks. One that is watched already is not counted twice.

        Raises ValueError for a window of another engine: its work would not be seen.
        """
        if window.engine is not self._engine:
            raise ValueError("window must run on the ledger's engine, got one on another; make one for each engine")
        self._reserve_tokens_of[window.id] = self._reserve_tokens if reserve_tokens is None else reserve_tokens
        window.observe(self)
        with self._lock:
            self._follow(window.id, window.snapshot())

    def note(self, **fields: Any) -> None:
        """Add fields to the row of the latest ask."""
        self.rows[-1] |= fields

    def truth(self, text: str | None) -> None:
        """Note the right answer of the latest ask; None where it is not known."""
        self.note(truth=text)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the engine's work inside the ``with`` block from the count, for instance a comparison."""
        start = self._counters()
        try:
            yield
        finally:
            now = self._counters()
            self._counted = (self._counted[0] + now[0] - start[0], self._counted[1] + now[1] - start[1])

    def __call__(self, event: Event) -> None:
        with self._lock:
            if event.op == "fork" and event.other is not None:
                users = self._follow(event.window, event.state)
                self._users[event.other] = {policy: user.copy() for policy, user in users.items()}
                self._reserve_tokens_of[event.other] = self._reserve_tokens_of.get(event.window, self._reserve_tokens)
            elif event.op == "adopt" and event.other in self._users:
                self._users[event.window] = {p: user.copy() for p, user in self._users[event.other].items()}
            elif event.op == "close":
                if event.parent is not None:  # a branch; a closed window may be restored
                    self._end(event.window)
            elif event.op == "ask":
                self._ask(event)
            elif event.op == "disposable":
                self._withdraw(event)
            else:
                self._edit(event)

    def _follow(self, window: str, state: State) -> dict[Policy, PrefixUser[str]]:
        """The prefix-cache users of a window; also records the token counts of what it places."""
        users = self._users.setdefault(window, {policy: PrefixUser(policy) for policy in self._policies})
        self._tokens.update((p.id, p.tokens) for p in state.placed)
        return users

    def _end(self, branch: str) -> None:
        self._ended[branch] = None
        while len(self._ended) > _KEPT:
            oldest, _ = self._ended.popitem(last=False)
            self._users.pop(oldest, None)
            self._reserve_tokens_of.pop(oldest, None)

    def _withdraw(self, event: Event) -> None:
        """Remove the two asks that only tested a chunk; their cost is added to the next ask."""
        tested = (i for i in reversed(range(len(self.rows))) if self._tested(self.rows[i], event))
        for i in list(islice(tested, 2)):
            row = self.rows.pop(i)
            self._counted = (self._counted[0] - row["computed_tokens"], self._counted[1] - row["vision_encodes"])

    def _tested(self, row: Mapping[str, Any], event: Event) -> bool:
        return (row["parent"], row["query"]) == (event.window, event.query) and row["window"] in self._ended

    def _edit(self, event: Event) -> None:
        for policy, user in self._follow(event.window, event.state).items():
            if policy == "naive":
                continue  # it sends what the window places
            if event.op in ("append", "insert"):
                self._arrive(user, event.state, event.ids, at_end=event.op == "append" or policy == "append")
            elif event.op in ("recall", "look_back"):
                self._arrive(user, event.state, event.ids, at_end=policy == "append")
            elif event.op in ("evict", "forget"):  # these chunks are meant to go; `slide` only makes room
                user.leave(event.ids)
            elif event.op == "reorder":
                user.reorder([p.id for p in event.state.placed])

    def _arrive(self, user: PrefixUser[str], state: State, ids: Sequence[str], *, at_end: bool) -> None:
        reserved = state.system_prompt_tokens + self._reserve_tokens_of.get(state.window, self._reserve_tokens)
        placed_ids = [p.id for p in state.placed]

        def fits(chunks: Sequence[str]) -> bool:
            return reserved + sum(self._tokens[i] for i in chunks) <= state.budget

        for new in ids:
            later = () if at_end or new not in placed_ids else placed_ids[placed_ids.index(new) + 1 :]
            user.arrive(new, fits, before=later)

    def _ask(self, event: Event) -> None:
        assert event.query is not None and event.answer is not None
        state, answer = event.state, event.answer
        users = self._follow(event.window, state)
        entries = [p for p in state.placed if p.id not in event.ids]  # without the exchange that it remembered
        system_prompt = self._engine.encode_system_prompt(state.system_prompt)
        query = self._engine.encode_query(event.query)
        now = self._counters()
        row: dict[str, Any] = {
            "window": event.window,
            "parent": event.parent,
            "version": event.version,
            "query": event.query,
            "answer": answer.text.strip(),
            "answer_reprefill": None,
            "truth": None,
            "placed": len(entries),
            "prompt_tokens": answer.usage.prompt_tokens,
            "tokens_by_lane": dict(answer.usage.reused_tokens),
            "computed_tokens": now[0] - self._counted[0],
            "vision_encodes": now[1] - self._counted[1],
        }
        self._counted = now
        by_id = {p.id: p for p in (*state.placed, *state.evicted)}
        for policy, user in users.items():
            if policy == "naive":
                user.held = [p.id for p in entries]
            else:
                fresh = [p.id for p in entries if p.id not in user.seen]
                self._arrive(user, state, fresh, at_end=policy == "append")
            parts = [system_prompt, *(self._encode(by_id[i]) for i in user.held if i in by_id)]
            computed, encodes = self._caches[policy].serve(Prompt.of([*parts, query]))
            # A prefix cache keeps what was generated, too.
            exchange = self._engine.encode_exchange(event.query, answer.token_ids)
            self._caches[policy].hold(Prompt.of([*parts, exchange]))
            row |= {f"computed_tokens_{policy}": computed, f"vision_encodes_{policy}": encodes}
            row[f"prompt_tokens_{policy}"] = sum(part.tokens for part in (*parts, query))
            if policy != "naive":
                self._arrive(user, state, event.ids, at_end=True)
        if self._reference:
            reference = self._references.setdefault(state.system_prompt, Reference(self._engine, system_prompt))
            sampling = Sampling(max(1, answer.usage.answer_tokens + event.ended))  # the end is a token, too
            exact = reference.reprefill([self._encode(p) for p in entries], query, sampling)
            row["answer_reprefill"] = exact.text.strip()
            # Not `aside`: another window may work meanwhile, and that counts.
            self._counted = (self._counted[0] + exact.computed_tokens, self._counted[1])
        self.rows.append(row)

    def _encode(self, entry: Placed) -> Encoded:
        return self._encoded.get_or_build(entry.chunk_id, lambda: self._engine.encode(entry.chunk))

    def _counters(self) -> tuple[int, int]:
        """Tokens prefilled and vision encodes run by the engine so far."""
        return self._engine.counters.prefill_tokens, self._engine.counters.vision_encodes

    def _patched(self) -> dict[str, int]:
        """Patches formed so far, served (each once) and dropped."""
        counted = self._engine.repo.counters
        return {"formed": counted.patches, "served": counted.patches_served, "dropped": counted.patches_dropped}

    def summary(self) -> dict[str, Any]:
        """Sums over all asks (`summarise`); work since the last one is included. ``patches`` counts those of the engine."""
        now = self._counters()
        rest = {"computed_tokens": now[0] - self._counted[0], "vision_encodes": now[1] - self._counted[1]}
        patches = {what: count - self._patches[what] for what, count in self._patched().items()}
        return {**summarise(self.rows, rest, policies=self._policies), "patches": patches}

    def table(self) -> str:
        """The sums as a table for people."""
        from rich.console import Console
        from rich.table import Table

        s = self.summary()
        names = {"": "ctxwin", **{f"_{policy}": NAMES[policy] for policy in self._policies}}
        table = Table(title=f"{s['asks']} asks: ctxwin, and what prefix caching would have computed")
        for column in ("", "tokens computed", "ctxwin's share", "tokens shown", "vision encodes"):
            table.add_column(column, justify="left" if not column else "right")
        for key, name in names.items():
            share = s.get(f"share_of{key}")
            percentage = "" if share is None else f"{100 * share:.1f} %"
            shown = f"{s[f'prompt_tokens{key}']:,}"
            table.add_row(name, f"{s[f'computed_tokens{key}']:,}", percentage, shown, str(s[f"vision_encodes{key}"]))
        lines = io.StringIO()
        Console(file=lines, width=100).print(table)
        by_lane = sorted(s["tokens_by_lane"].items(), key=lambda lane: -lane[1])
        lines.write(f"chunks' tokens by lane: {', '.join(f'{lane} {tokens:,}' for lane, tokens in by_lane)}\n")
        lines.write(f"patches: {', '.join(f'{count:,} {what}' for what, count in s['patches'].items())}\n")
        if s["known"]:
            right = s["right_reprefill"]
            reprefill = "" if right is None else f"; a re-prefill of the same chunks: {right}"
            lines.write(f"right: {s['right']} of {s['known']}{reprefill}\n")
        elif s["compared"]:
            lines.write(f"the same answer as a re-prefill: {s['agree']} of {s['compared']}\n")
        return lines.getvalue()


def summarise(
    rows: Sequence[Mapping[str, Any]], rest: Mapping[str, int] | None = None, *, policies: Sequence[Policy] = POLICIES
) -> dict[str, Any]:
    """Sums over rows of a ledger.

    Args:
        rows: see `Ledger.rows`.
        rest: further work of ctxwin's to count.
        policies: users of a prefix cache whose costs the rows hold.

    Returns:
        ``asks``; ``known`` asks with a truth, and of these ``right`` and ``right_reprefill``; ``compared`` asks with a
        re-prefill, and how many of these ``agree``; ``prompt_tokens``, ``computed_tokens`` and ``vision_encodes`` of ctxwin
        and of each policy (0 where the rows do not hold them); ``share_of_naive``, ...: ctxwin's tokens over the policy's;
        ``tokens_by_lane``.
    """
    with_truth = [row for row in rows if row["truth"] is not None]
    compared = [row for row in rows if row["answer_reprefill"] is not None]
    sums = {
        name: sum(row.get(name, 0) for row in rows) + (rest or {}).get(name, 0)
        for count in ("prompt_tokens", "computed_tokens", "vision_encodes")
        for name in (count, *(f"{count}_{policy}" for policy in policies))
    }
    lanes: Counter[str] = Counter()
    for row in rows:
        lanes.update(row["tokens_by_lane"])
    policy_tokens = {policy: sums[f"computed_tokens_{policy}"] for policy in policies}
    return {
        "asks": len(rows),
        "known": len(with_truth),
        "right": sum(row["answer"] == row["truth"] for row in with_truth),
        "right_reprefill": sum(row["answer_reprefill"] == row["truth"] for row in with_truth) if compared else None,
        "compared": len(compared),
        "agree": sum(row["answer"] == row["answer_reprefill"] for row in compared),
        **sums,
        **{f"share_of_{p}": sums["computed_tokens"] / n if n else None for p, n in policy_tokens.items()},
        "tokens_by_lane": dict(lanes),
    }

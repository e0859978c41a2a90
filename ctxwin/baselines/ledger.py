"""`Ledger`: what windows computed, beside what users of a prefix cache would have computed for the same asks.

Three users (`../README.md`, "Measured"): ``naive`` sends the same prompt for every ask; ``trim`` drops the older half when its
window is full, so that most asks extend a cached prompt; ``append`` does that, too, and puts a looked-back chunk at the end.
The last two keep a looked-back chunk until they trim it. All have vLLM's block size and encoder cache, and forget nothing.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from ctxwin.baselines.prefix_cache import PrefixCache, Prompt
from ctxwin.baselines.reprefill import Reference
from ctxwin.engines.base import Encoded, Engine, Sampling
from ctxwin.window.events import Event
from ctxwin.window.state import Placed, State

if TYPE_CHECKING:
    from ctxwin.window.window import Window

NAMES = {
    "naive": "prefix cache: same prompts",
    "trim": "prefix cache: trim half when full",
    "append": "trim, look back at the end",
}
"""The users of a prefix cache: name for people by policy."""
POLICIES = tuple(NAMES)
_KEPT = 4096  # encoded chunks remembered, and branches that were closed


@dataclass
class _User:
    """What one user of a prefix cache holds in the prompt, for one window: placement ids in prompt order.

    ``seen`` is whatever it has held: what was trimmed does not come back by itself.
    """

    policy: str
    held: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def copy(self) -> _User:
        return _User(self.policy, list(self.held), set(self.seen))


class Ledger:
    """Counts the asks of the windows it watches. Its `Ledger.__call__` is an observer (`Window.observe`).

    Args:
        engine: of the windows. Everything it prefills from now on counts as theirs, background work included.
        reserve_tokens: tokens that the users of a prefix cache keep free for a query and its answer.
        reference: re-prefill every ask exactly, for answers to compare with; its cost is not counted.

    Not for engines that other windows use meanwhile: their work would be counted, too.
    """

    def __init__(self, engine: Engine, *, reserve_tokens: int = 48, reference: bool = False) -> None:
        self.rows: list[dict[str, Any]] = []
        self._engine, self._reserve_tokens, self._reference = engine, reserve_tokens, reference
        self._reserve_tokens_of: dict[str, int] = {}
        self._users: dict[str, dict[str, _User]] = {}  # by window id
        self._ended: OrderedDict[str, None] = OrderedDict()  # branches that were closed; they may still be adopted
        self._caches = {policy: PrefixCache() for policy in POLICIES}
        self._encoded: OrderedDict[str, Encoded] = OrderedDict()
        self._tokens: dict[str, int] = {}  # by placement id
        self._references: dict[str, Reference] = {}
        self._told = self._counters()
        self._lock = threading.RLock()

    def watch(self, window: Window, reserve_tokens: int | None = None) -> None:
        """Counts this window and its later forks. One that is watched already is not counted twice.

        Raises ValueError for a window of another engine: its work would not be seen.
        """
        if window.engine is not self._engine:
            raise ValueError(
                "window must run on the ledger's engine, got one on another; make a ledger for each engine"
            )
        self._reserve_tokens_of[window.id] = self._reserve_tokens if reserve_tokens is None else reserve_tokens
        if self not in window._observers:
            window.observe(self)
        with self._lock:
            self._follow(window.id, window.snapshot())

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

    def truth(self, text: str) -> None:
        """The true answer of the latest ask."""
        self.rows[-1]["truth"] = text

    # -- the users of a prefix cache ----------------------------------------------------------------------------------

    def _follow(self, window: str, state: State) -> dict[str, _User]:
        """The users of a window; what it places and they do not hold has just arrived for them."""
        users = self._users.setdefault(window, {policy: _User(policy) for policy in POLICIES})
        self._tokens.update((p.id, p.tokens) for p in state.placed)
        return users

    def _end(self, branch: str) -> None:
        self._ended[branch] = None
        while len(self._ended) > _KEPT:
            oldest, _ = self._ended.popitem(last=False)
            self._users.pop(oldest, None)
            self._reserve_tokens_of.pop(oldest, None)

    def _withdraw(self, event: Event) -> None:
        """The two asks that tested a chunk: work of ours, which a user of a prefix cache does not do."""
        asked = (i for i in reversed(range(len(self.rows))) if self._tested(self.rows[i], event))
        for i in list(islice(asked, 2)):
            row = self.rows.pop(i)
            self._told = (self._told[0] - row["computed_tokens"], self._told[1] - row["vision_encodes"])

    def _tested(self, row: dict[str, Any], event: Event) -> bool:
        return (row["parent"], row["query"]) == (event.window, event.query) and row["window"] in self._ended

    def _edit(self, event: Event) -> None:
        users = self._follow(event.window, event.state)
        for policy in ("trim", "append"):
            user = users[policy]
            if event.op in ("append", "insert"):
                self._arrive(user, event.state, event.ids, at_end=event.op == "append" or policy == "append")
            elif event.op in ("recall", "look_back"):
                self._arrive(user, event.state, event.ids, at_end=policy == "append")
            elif event.op in (
                "evict",
                "forget",
            ):  # meant to go; `slide` only makes room, which they do in their own way
                user.held = [i for i in user.held if i not in event.ids]
            elif event.op == "reorder":
                rank = {p.id: i for i, p in enumerate(event.state.placed)}
                user.held.sort(key=lambda i: rank.get(i, -1))  # what only they still hold is the oldest

    def _arrive(self, user: _User, state: State, ids: Iterable[str], *, at_end: bool) -> None:
        placed = [p.id for p in state.placed]
        for new in ids:
            user.seen.add(new)
            if new in user.held:
                continue
            while (
                user.held
                and self._size(state, [*user.held, new])
                + self._reserve_tokens_of.get(state.window, self._reserve_tokens)
                > state.budget
            ):
                user.held = user.held[max(1, len(user.held) // 2) :]
            if at_end or new not in placed:
                user.held.append(new)
            else:  # at its place: in front of the first one it holds that stands behind it in the window
                behind = set(placed[placed.index(new) + 1 :])
                at = next((k for k, i in enumerate(user.held) if i in behind), len(user.held))
                user.held.insert(at, new)

    def _size(self, state: State, ids: Sequence[str]) -> int:
        return state.system_prompt_tokens + sum(self._tokens[i] for i in ids)

    # -- asks ---------------------------------------------------------------------------------------------------------

    def _ask(self, event: Event) -> None:
        assert event.query is not None and event.answer is not None
        state, answer = event.state, event.answer
        users = self._follow(event.window, state)
        placed = [p for p in state.placed if p.id not in event.ids]  # without the exchange that it remembered
        known = {p.id: p for p in (*state.placed, *state.evicted)}
        system_prompt, query = (
            self._engine.encode_system_prompt(state.system_prompt),
            self._engine.encode_query(event.query),
        )
        spent = self._spent()
        row: dict[str, Any] = {
            "window": event.window, "parent": event.parent, "version": event.version,
            "query": event.query, "answer": answer.text.strip(),
            "answer_reprefill": None, "truth": None, "placed": len(placed), "prompt_tokens": answer.usage.prompt_tokens,
            "tokens_by_lane": dict(answer.usage.reused_tokens), "computed_tokens": spent[0], "vision_encodes": spent[1],
        }  # fmt: skip
        for policy, user in users.items():
            if policy == "naive":
                user.held = [p.id for p in placed]
            else:
                fresh = [p.id for p in placed if p.id not in user.seen]
                self._arrive(user, state, fresh, at_end=policy == "append")
            parts = [system_prompt, *(self._encode(known[i]) for i in user.held if i in known), query]
            computed, encodes = self._caches[policy].serve(Prompt.of(parts))
            # A prefix cache keeps what was generated, too.
            exchange = self._engine.encode_exchange(event.query, answer.token_ids)
            self._caches[policy].hold(Prompt.of([*parts[:-1], exchange]))
            row |= {f"computed_tokens_{policy}": computed, f"vision_encodes_{policy}": encodes}
            if policy != "naive":
                self._arrive(user, state, event.ids, at_end=True)
        if self._reference:
            reference = self._references.setdefault(state.system_prompt, Reference(self._engine, system_prompt))
            sampling = Sampling(max(1, answer.usage.answer_tokens + 1))
            exact = reference.reprefill([self._encode(p) for p in placed], query, sampling)
            row["answer_reprefill"] = exact.text.strip()
            # Not what the counters say now: another window may have worked meanwhile.
            self._told = (self._told[0] + exact.computed_tokens, self._told[1])
        self.rows.append(row)

    def _encode(self, placed: Placed) -> Encoded:
        found = self._encoded.get(placed.chunk_id)
        if found is None:
            found = self._encoded[placed.chunk_id] = self._engine.encode(placed.chunk)
            while len(self._encoded) > _KEPT:
                self._encoded.popitem(last=False)
        return found

    def _counters(self) -> tuple[int, int]:
        return self._engine.counters.prefill_tokens, self._engine.counters.vision_encodes

    def _spent(self) -> tuple[int, int]:
        """Tokens prefilled and vision encodes run since the last call."""
        now, before = self._counters(), self._told
        self._told = now
        return now[0] - before[0], now[1] - before[1]

    # -- showing ------------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Sums over all asks, and how many answers were right. Work since the last ask is included."""
        rest = tuple(a - b for a, b in zip(self._counters(), self._told, strict=True))
        known = [r for r in self.rows if r["truth"] is not None]
        compared = [r for r in self.rows if r["answer_reprefill"] is not None]
        sums = {
            f"{what}{policy}": sum(r[f"{what}{policy}"] for r in self.rows)
            for what in ("computed_tokens", "vision_encodes")
            for policy in ("", *(f"_{p}" for p in POLICIES))
        }
        sums["computed_tokens"] += rest[0]
        sums["vision_encodes"] += rest[1]
        ours, lanes = sums["computed_tokens"], dict[str, int]()
        for row in self.rows:
            for lane, tokens in row["tokens_by_lane"].items():
                lanes[lane] = lanes.get(lane, 0) + tokens
        return {
            "asks": len(self.rows),
            "known": len(known),
            "right": sum(r["answer"] == r["truth"] for r in known),
            "right_reprefill": sum(r["answer_reprefill"] == r["truth"] for r in known) if compared else None,
            "compared": len(compared),
            "agree": sum(r["answer"] == r["answer_reprefill"] for r in compared),
            "prompt_tokens": sum(r["prompt_tokens"] for r in self.rows),
            **sums,
            **{
                f"share_of_{p}": ours / sums[f"computed_tokens_{p}"] if sums[f"computed_tokens_{p}"] else None
                for p in POLICIES
            },
            "tokens_by_lane": lanes,
        }

    def table(self) -> str:
        """The sums as a table for people."""
        from rich.console import Console
        from rich.table import Table

        s = self.summary()
        names = {"": "ctxwin", **{f"_{policy}": name for policy, name in NAMES.items()}}
        table = Table(title=f"{s['asks']} asks: ctxwin, and what prefix caching would have computed")
        for column in ("", "tokens computed", "ctxwin's share", "vision encodes"):
            table.add_column(column, justify="left" if not column else "right")
        for key, name in names.items():
            share = s.get(f"share_of{key}")
            shown = "" if share is None else f"{100 * share:.1f} %"
            table.add_row(name, f"{s[f'computed_tokens{key}']:,}", shown, str(s[f"vision_encodes{key}"]))
        lines = io.StringIO()
        Console(file=lines, width=100).print(table)
        if s["known"]:
            again = "" if s["right_reprefill"] is None else f"; a re-prefill of the same chunks: {s['right_reprefill']}"
            lines.write(f"right: {s['right']} of {s['known']}{again}\n")
        elif s["compared"]:
            lines.write(f"the same answer as a re-prefill: {s['agree']} of {s['compared']}\n")
        return lines.getvalue()

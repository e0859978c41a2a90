"""Lazy drops: what a client has dropped from its history is served for a while longer, so that the prefix stands.

An agent that drops or replaces its oldest screenshot on every turn breaks vLLM's prefix cache there on every turn. With lazy
drops the dropped parts stay in the prompt until a bound (`Bounds`) would be exceeded; then it follows the client in one step.

The prompt that was served last is remembered for each conversation, and the next request compared with it
(`ctxwin_chats.continuation`). One that is not its continuation, or the same again, is served as sent.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ctxwin.hashing import digest
from ctxwin_chats.context_management import Count
from ctxwin_chats.continuation import CUTS, KEYED, Continuation, Part, continue_history, turns_field
from ctxwin_chats.records import Record, Records

_TURN_TOKENS = 16
"""Tokens that a template adds to a turn, at most, by estimate; a prompt that vLLM refuses all the same is served as it came."""
_log = logging.getLogger("ctxwin.serve")


@dataclass(frozen=True)
class Bounds:
    """How much a prompt may have beyond what the client sent.

    Attributes:
        pictures: dropped pictures in it.
        tokens: of all dropped parts, without the template's own.
        turns: requests of the conversation in a row that are served longer than sent.
    """

    pictures: int = 8
    tokens: int = 4096
    turns: int = 10

    @classmethod
    def parse(cls, text: str) -> Bounds | None:
        """Return the bounds in ``text`` (``on``, or e.g. ``pictures=8,turns=5``); None for ``off``. Raises ValueError."""
        if text in ("", "off"):
            return None
        entries = [] if text == "on" else [entry.strip().partition("=") for entry in text.split(",")]
        values = {name: int(value) for name, _, value in entries if re.fullmatch("[0-9]{1,9}", value)}
        if len(values) < len(entries) or values.keys() - {f.name for f in fields(cls)}:
            raise ValueError(f"lazy drops must be on, off, or like pictures=8,tokens=4096,turns=10, got {text[:80]!r}")
        return cls(**values)


@dataclass(frozen=True)
class Kept:
    """Parts of a prompt beyond those that the client sent; ``followed``: a bound had it follow the client."""

    parts: int = 0
    pictures: int = 0
    tokens: int = 0
    turns: int = 0
    followed: bool = False

    def report(self) -> dict[str, int]:
        """Return the entry of an answer's ``usage``."""
        return {name: value for name, value in asdict(self).items() if name != "followed"}


@dataclass(eq=False, kw_only=True)
class Prompt(Record):
    """The prompt that was served last in one conversation, and for how many requests in a row it was longer than sent."""

    history: tuple[Part, ...]
    turns: int


class LazyDrops(Records[Prompt]):
    """The prompts last served to one tenant's conversations.

    A request that names no conversation is served as sent: two with the same texts could not be told apart. Of one name the
    conversation that reaches furthest into the request is continued; none, where two would be continued in different ways.
    """

    def serve(self, data: dict[str, Any], name: str, bounds: Bounds, count: Count, context: int) -> Kept:
        """Put back into the body ``data`` what the client has dropped, within ``bounds`` and a context of ``context`` tokens.

        Args:
            name: the client's name of the conversation.

        Cost: linear in the request, and a count of the tokens that were not counted before where something is kept.
        """
        turns_name = turns_field(data)
        turns = data.get(turns_name)
        if not name or not isinstance(turns, list) or any(data.get(cut) is not None for cut in CUTS):
            return Kept()
        sent = tuple(map(Part.read, turns))
        key = digest("history", turns_name, name, json.dumps([data.get(field) for field in KEYED]))
        record, continuation = self._continued(key, sent)
        extra = Kept()
        if record is not None and continuation is not None and continuation.drops:
            extra = self._within(data, continuation, record.turns + 1, bounds, count, context)
        history = sent if extra.followed or continuation is None else continuation.history
        if continuation is not None and extra.parts:
            if extra.turns == 1:
                _log.debug("%d dropped parts stay in a conversation for now (%s)", extra.parts, bounds)
            old = [part.build() for part in history[: continuation.old]]
            data[turns_name] = [*old, *turns[continuation.new :]]
        size = sum(turn.size for turn in history)
        self.keep(record, Prompt(key=key, name=name, size=size, history=history, turns=extra.turns))
        return extra

    def _continued(self, key: str, sent: Sequence[Part]) -> tuple[Prompt | None, Continuation | None]:
        """Return the conversation that a request continues, and how; None where there is none, or no single one."""
        pairs = [
            (record, one) for record in self.find(key) if (one := continue_history(record.history, sent)) is not None
        ]
        furthest = max((one.new for _, one in pairs), default=0)
        pairs = [(record, one) for record, one in pairs if one.new == furthest]
        whole = [pair for pair in pairs if not pair[1].drops]
        histories = {tuple(turn.digest for turn in one.history) for _, one in pairs}
        return whole[-1] if whole else pairs[-1] if len(histories) == 1 else (None, None)

    def _within(
        self, data: dict[str, Any], continuation: Continuation, turns: int, bounds: Bounds, count: Count, context: int
    ) -> Kept:
        """Return what is kept; nothing where it would exceed a bound."""
        leaves = [leaf for part in continuation.drops for leaf in part.leaves()]
        pictures = sum(leaf.kind == "picture" for leaf in leaves)
        if pictures > bounds.pictures or turns > bounds.turns:
            return Kept(followed=True)
        tokens = sum(part.measure(count) for part in continuation.drops)
        whole = sum(turn.measure(count) + _TURN_TOKENS for turn in continuation.history) + _TURN_TOKENS
        whole += sum(count(data.get(name)) for name in ("system", "instructions", "tools"))
        answers = [data.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")]
        answer = max((n for n in answers if isinstance(n, int)), default=context // 4)
        if tokens > bounds.tokens or whole + answer > context:
            return Kept(followed=True)
        return Kept(len(leaves), pictures, tokens, turns)

"""Volatile system prompts: what changes in one from request to request is served late, so that the prefix stands.

A clock, a memory or a list in the system prompt breaks vLLM's prefix cache there with every request. `VolatilePrompts` compares a
conversation's system prompts by lines and sentences. Those that the earlier ones had, too, are the frame and stay. All others are
late: they stand in front of the question (`put`), as a system message or as a text. The next request does not have them there, so
that question and its answer are computed again with it, but nothing in front of them. Behind the question they would spare that
as well, but models take what stands last for the question: SmolLM2-135M answers with the time then.

What is late stays late until the frame breaks, because one of its lines is gone or stands elsewhere. Then what has not changed
for `SETTLED` requests returns to its place. Nothing is served that the request itself does not hold. A conversation that begins
is served with the frame of another one of the tenant where all that it has besides stands where the other's late lines stood.

With ``append`` the system prompt stays as the conversation was first served, and each turn keeps in front of its question the
lines that had changed until then, so that the prompt only grows. What is gone from the system prompt therefore stays in it, up
to a share of the context; from then on what changes is late. Where the history begins with another turn, all is computed again,
and one late text is left.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate, pairwise, takewhile
from typing import Any

from ctxwin.hashing import digest
from ctxwin_chats.context_management import Count
from ctxwin_chats.continuation import CUTS, Part, first_turn, is_rules, turns_field
from ctxwin_chats.records import Record, Records
from ctxwin_chats.shared_records import SavedRecords

SETTLED = 8
"""Requests in a row after which a late line counts as one that does not change."""
SHORT = 1000
"""Characters that may be late although the frame has fewer, in a conversation that begins with the same turn."""
SHARE = 16
"""Earlier requests' lines may take one part of the context in so many."""
_HEADER_TOKENS = 10
"""Tokens that a template adds around a message and where it divides another, by estimate."""
_MOST_PIECES = 4096
_MOST_TEXTS = 512
"""Texts that are remembered of conversations that begin with the same turn."""
_SENTENCE = re.compile(r"(?<=[.!?])[ \t]+(?=\S)")
_BILLING = "x-anthropic-billing-header"
"""Begins a text that vLLM takes out of system prompts, since it changes with every request."""


Lines = tuple[tuple[int, str], ...]
"""Lines of a system prompt, each with its hash."""


@dataclass(frozen=True)
class Late:
    """Parts of system prompts that are served elsewhere than in that of the request.

    Attributes:
        earlier: how many of their tokens are of earlier requests; None where these are left out.
        key: of the conversation; "" where the request is served as sent.
        lines: of the request's system prompt; standing: hashes of those in their place.
        record_name: see `Record`.
    """

    parts: int = 0
    tokens: int = 0
    text: str = ""
    earlier: int | None = None
    key: str = ""
    lines: Lines = ()
    standing: frozenset[int] = frozenset()
    record_name: str = ""

    def report(self, *, as_system: bool) -> dict[str, Any]:
        """Return the entry of an answer's ``usage``."""
        entry = {"parts": self.parts, "tokens": self.tokens, "form": "system" if as_system else "text"}
        return entry if self.earlier is None else entry | {"earlier": self.earlier}


@dataclass(eq=False, kw_only=True)
class Frame(Record):
    """The lines of a system prompt that stand, as hashes.

    Attributes:
        late: the others of the last request, and for how many requests in a row each has been late.
        gaps: before how many of the lines each of those stands.
        first: digest of the first turn behind the system prompt.
        origin: names the first frame that this one continues.
    """

    lines: tuple[int, ...]
    late: dict[int, int]
    gaps: frozenset[int]
    first: str
    origin: str


@dataclass(frozen=True)
class AppendedLines:
    """Lines in front of the question of one turn.

    Attributes:
        lines: those that had changed since the turn before; tokens: of these.
        current: hashes of all lines of the system prompt at that time.
    """

    lines: Lines
    tokens: int
    current: frozenset[int]


@dataclass(eq=False, kw_only=True)
class GrowingPrompt(Record):
    """A conversation whose prompt only grows.

    Attributes:
        head: its system prompt as first served (`_head`); lines: of that.
        texts: what was appended, by the digest of the turns up to its own.
    """

    head: tuple[dict[str, Any], list[Any]]
    lines: Lines
    texts: Mapping[str, AppendedLines]


class VolatilePrompts(Records[Frame]):
    """The frames of one tenant's conversations. A conversation without a name is known by its first turn.

    Args:
        most, ttl: see `Records`.
        context: tokens that the model takes.
    """

    def __init__(self, most: int, ttl: float, context: int = 1 << 15) -> None:
        super().__init__(most, ttl)
        self._growing_prompts: Records[GrowingPrompt] = Records(most, ttl)
        self._most_earlier = context // SHARE

    def saved(self) -> list[SavedRecords[Any]]:
        """Return what a conversation's record has of its system prompt."""
        return [
            SavedRecords.of("frames", self, Frame),
            SavedRecords.of("growing_prompts", self._growing_prompts, GrowingPrompt),
        ]

    def take(self, data: dict[str, Any], name: str, count: Count, record_name: str = "") -> Late:
        """Take what is volatile out of the system prompt of the body ``data``. Cost: linear in the system prompt."""
        turns: Any = data.get(turns_field(data))
        slots = [*_slots(data)]
        pieces = [(slot, piece) for slot, (holder, field) in enumerate(slots) for piece in split(holder[field])]
        if (
            not 0 < len(pieces) <= _MOST_PIECES
            or _last_turn(turns) is None
            or any(data.get(c) is not None for c in CUTS)
        ):
            return Late()
        first = first_turn(turns)
        name = name or first
        shared = digest("volatile", turns_field(data), json.dumps([data.get(f) for f in ("model", "cache_salt")]))
        key = digest("volatile", shared, name)
        hashes, sizes = [_hash(piece.strip()) for _, piece in pieces], [len(piece) for _, piece in pieces]
        record, stable = self._continued(key, first, hashes, sizes)
        if record is None:
            stable = self._begun(shared, hashes, sizes)
        late = [i for i in range(len(pieces)) if i not in stable]
        standing = tuple(hashes[i] for i in sorted(stable))
        is_most = 2 * sum(sizes[i] for i in stable) >= sum(sizes)  # else, perhaps, the prompt of another agent
        origin = record.origin if record and is_most else digest("frame", key, str(hashes))
        frame = Frame(
            key=key, name=name, size=128 * len(pieces) + 1024, first=first, origin=origin, record_name=record_name,
            lines=standing, gaps=frozenset(_gaps(stable, len(pieces))),
            late={hashes[i]: 1 + (record.late.get(hashes[i], 0) if record else 0) for i in late},
        )  # fmt: skip
        self.keep(record, frame)
        lines = tuple((line, piece.rstrip()) for line, (_, piece) in zip(hashes, pieces, strict=True))
        late_lines = Late(key=origin, lines=lines, standing=frozenset(standing), record_name=record_name)
        if not late:
            return late_lines
        same = (one for one in self.find(shared) if one.lines == frame.lines)
        self.keep(next(same, None), replace(frame, key=shared, name=f"all:{shared}", record_name=""))
        texts = [""] * len(slots)
        for i in sorted(stable):
            texts[pieces[i][0]] += pieces[i][1]
        for (holder, field), text in zip(slots, texts, strict=True):
            holder[field] = text
        _drop(data, [holder for (holder, _), text in zip(slots, texts, strict=True) if not text])
        text = "\n".join(lines[i][1] for i in late)
        return replace(late_lines, parts=len(late), tokens=count(text), text=text)

    def place(self, data: dict[str, Any], late: Late, count: Count, *, as_system: bool, appends: bool = False) -> Late:
        """Put what was taken out of ``data``, which may have other turns since, in front of the question; return what stands so.

        Args:
            appends: earlier requests' lines stay where they stood, as these will. Cost: linear in the request.
        """
        if not appends or not late.key:
            if late.parts:
                put(data, late.text, as_system=as_system)
            return late
        head, turns = _head(data)
        at = _last_turn(turns)
        assert at is not None, "`take` leaves such a request as it is"
        parts = [Part.read(turn).digest for turn in turns]
        digests = [*accumulate(parts, lambda front, part: digest("turns", front, part))]
        key = digest("growing", late.key, digests[0], json.dumps([*_others(data)]))
        current = frozenset(line for line, _ in late.lines)
        old = next(iter(self._growing_prompts.find(key)), None)
        removed = tuple(one for one in old.lines if one[0] not in current) if old is not None else ()
        texts: dict[str, AppendedLines] = {}
        if old is None or count(_text(removed)) > self._most_earlier:
            lines, removed = tuple(one for one in late.lines if one[0] in late.standing), ()
            head = copy.deepcopy(head)
        else:
            head, lines, texts = old.head, old.lines, dict(old.texts)
            data.update(copy.deepcopy(head[0]))
            if isinstance(data[turns_field(data)], list):
                data[turns_field(data)] = [*copy.deepcopy(head[1]), *turns]
        texts.pop(digests[at], None)
        earlier = [(i, texts[turn]) for i, turn in enumerate(digests[:at]) if turn in texts]
        lines_in_front = earlier[-1][1].current if earlier else frozenset(line for line, _ in lines)
        fresh = tuple(one for one in late.lines if one[0] not in lines_in_front)
        new = AppendedLines(fresh, count(_text(fresh)), current)
        tokens = sum(one.tokens for _, one in earlier) + count(_text(removed))
        headers = _HEADER_TOKENS * (1 + len(earlier))
        if current != lines_in_front and tokens + new.tokens + headers <= self._most_earlier:
            texts = dict([*texts.items(), (digests[at], new)][-_MOST_TEXTS:])
        size = len(json.dumps(head)) + sum(512 + 100 * len(one.current) + 8 * one.tokens for one in texts.values())
        grown = GrowingPrompt(
            key=key, name="", size=size, head=head, lines=lines, texts=texts, record_name=late.record_name
        )
        self._growing_prompts.keep(old, grown)
        for i, one in [(at, new), *reversed(earlier)]:
            if one.lines:
                put(data, _text(one.lines), as_system=as_system, at=len(head[1]) + i)
        moved = len(fresh) + len(removed) + sum(len(one.lines) for _, one in earlier)
        return replace(late, parts=moved, tokens=tokens + new.tokens, text=_text(fresh), earlier=tokens)

    def _begun(self, shared: str, hashes: Sequence[int], sizes: Sequence[int]) -> set[int]:
        """Return the pieces that stay in a conversation's first request, by frames of other conversations; else all."""
        for record in reversed(self.find(shared)):
            standing = _embed(record.lines, hashes)
            if (
                standing is not None
                and 2 * sum(sizes[i] for i in standing) >= sum(sizes)
                and record.gaps.issuperset(_gaps(standing, len(hashes)))
            ):
                return standing
        return set(range(len(hashes)))

    def _continued(
        self, key: str, first: str, hashes: Sequence[int], sizes: Sequence[int]
    ) -> tuple[Frame | None, set[int]]:
        """Return the frame that a system prompt continues, and which of its pieces stay; all, where it continues none."""
        best: tuple[tuple[bool, int], Frame | None, set[int]] = ((False, -1), None, set(range(len(hashes))))
        for record in self.find(key):
            standing = _embed(record.lines, hashes)
            stable = standing
            if stable is None:
                stable_lines = {line for line, age in record.late.items() if age >= SETTLED}.union(record.lines)
                stable = {i for i, line in enumerate(hashes) if line in stable_lines}
            size = sum(sizes[i] for i in stable)
            is_short = record.first == first and sum(sizes) - size <= SHORT
            if size and (is_short or 2 * size >= sum(sizes)) and (standing is not None, size) >= best[0]:
                best = ((standing is not None, size), record, stable)
        return best[1:]


def put(data: dict[str, Any], text: str, *, as_system: bool, at: int | None = None) -> None:
    """Put what is late in front of the question, the last text of the user's last turn; behind a result of a tool.

    Args:
        as_system: in a system message, which divides a turn that shows something in front of its question.
        at: the turn; None is the last one.
    """
    name = turns_field(data)
    if isinstance(data[name], str):
        data[name] = [{"role": "user", "content": data[name]}]
    turns = data[name]
    at = _last_turn(turns) if at is None else at
    assert at is not None, "`take` leaves such a request as it is"
    turn = turns[at]
    field = "output" if "output" in turn else "content"
    whole = turn.get(field) or ""
    parts = [whole] if isinstance(whole, str) else whole
    texts = [i for i, part in enumerate(parts) if isinstance(part, str) or (isinstance(part, dict) and "text" in part)]
    cut = texts[-1] if texts and turn.get("role") == "user" else len(parts)
    if any(isinstance(part, dict) and part.get("type") == "tool_result" for part in parts[cut:]):
        cut = len(parts)  # a result follows its call
    if as_system:
        head = [turn] if cut == len(parts) else [{**turn, field: parts[:cut]}] if cut else []
        tail = [turn] if cut == 0 else [{**turn, field: parts[cut:]}] if cut < len(parts) else []
        turns[at : at + 1] = [*head, {"role": "system", "content": text}, *tail]
        return
    tagged = f"<system>\n{text}\n</system>"
    if isinstance(whole, str):
        turns[at] = {**turn, field: f"{tagged}\n\n{whole}" if cut == 0 else f"{whole}\n\n{tagged}"}
    else:
        part = {"type": "input_text" if name == "input" else "text", "text": tagged + "\n"}
        turns[at] = {**turn, field: [*parts[:cut], part, *parts[cut:]]}


def split(text: str) -> list[str]:
    """Split a text into sentences and lines, each with the space behind it."""
    pieces: list[str] = []
    for line in text.splitlines(keepends=True):
        ends = [0, *(match.end() for match in _SENTENCE.finditer(line)), len(line)]
        for begin, end in pairwise(ends):
            if pieces and not line[begin:end].strip():
                pieces[-1] += line[begin:end]
            else:
                pieces.append(line[begin:end])
    return pieces


def takes_late_system(render: Callable[[list[dict[str, str]]], str]) -> bool:
    """Return whether a chat template renders a system message within a turn, and leaves what is in front as it was."""
    turns = [
        ("system", "Rules."),
        ("user", "First?"),
        ("assistant", "Answer."),
        ("user", "Seen."),
        ("system", "It is late."),
    ]
    messages = [{"role": role, "content": text} for role, text in [*turns, ("user", "Second?")]]
    try:
        prefix, late, whole = render(messages[:-2]), render(messages[:-1]), render(messages)
    except Exception:  # which kind it is depends on the template
        return False
    is_last = whole.startswith(prefix) and "It is late." in whole[len(prefix) :].partition("Second?")[0]
    return is_last and late.startswith(prefix) and "It is late." in late[len(prefix) :]


def _hash(line: str) -> int:
    """Return a hash of a line that is the same in every process."""
    return int.from_bytes(blake2b(line.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def _embed(lines: Sequence[int], hashes: Sequence[int]) -> set[int] | None:
    """Return the first pieces that are the lines of a frame, in its order; None where one is not there."""
    positions: list[int] = []
    for i, line in enumerate(hashes):
        if len(positions) < len(lines) and line == lines[len(positions)]:
            positions.append(i)
    return set(positions) if len(positions) == len(lines) else None


def _gaps(stable: set[int], total: int) -> Iterator[int]:
    """Yield for each piece that is not stable how many stable ones are in front of it."""
    count_in_front = 0
    for i in range(total):
        if i in stable:
            count_in_front += 1
        else:
            yield count_in_front


def _text(lines: Lines) -> str:
    return "\n".join(text for _, text in lines)


def _head(data: Mapping[str, Any]) -> tuple[tuple[dict[str, Any], list[Any]], list[Any]]:
    """Return a system prompt, as fields of the body and as turns, and the turns behind it."""
    turns = data[turns_field(data)]
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    rules = [*takewhile(is_rules, turns)]
    fields = {name: data[name] for name in ("instructions", "system") if name in data}
    return (fields, rules), turns[len(rules) :]


def _holders(data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield what holds the system prompt, with the name of its content."""
    yield data, "instructions"
    yield data, "system"
    turns = data.get(turns_field(data))
    for turn in takewhile(is_rules, turns if isinstance(turns, list) else ()):
        yield turn, "content"


def _others(data: dict[str, Any]) -> Iterator[Any]:
    """Yield the parts of a system prompt that are no texts."""
    for holder, name in _holders(data):
        content = holder.get(name)
        for part in content if isinstance(content, list) else ():
            if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
                yield part


def _slots(data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield what holds a text of the system prompt, with its name there."""
    for holder, name in _holders(data):
        content = holder.get(name)
        parts = [(part, "text") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        for one, field in parts or [(holder, name)]:
            text = one.get(field)
            if isinstance(text, str) and text and not text.startswith(_BILLING):
                yield one, field


def _drop(data: dict[str, Any], empty: Sequence[dict[str, Any]]) -> None:
    """Drop what has no text left of a system prompt: parts, turns, fields."""

    def is_empty(value: Any) -> bool:
        return any(value is one for one in empty)

    for holder, name in [*_holders(data)] if empty else ():
        content = holder.get(name)
        if isinstance(content, list):
            holder[name] = [part for part in content if not is_empty(part)]
            if content and not holder[name]:
                empty = [*empty, holder]
    for name in ("instructions", "system"):
        if name in data and data[name] in ("", []):
            del data[name]
    name = turns_field(data)
    if isinstance(data[name], list):
        data[name] = [turn for turn in data[name] if not is_empty(turn)]


def _last_turn(turns: Any) -> int | None:
    """Return where the last turn of the user, or result of a tool, is; None where there is none."""
    if isinstance(turns, str):
        return 0
    for index in range(len(turns) - 1 if isinstance(turns, list) else -1, -1, -1):
        turn = turns[index]
        if not isinstance(turn, dict) or not isinstance(turn.get("output", turn.get("content")), str | list):
            continue
        if turn.get("role") in ("user", "tool") or str(turn.get("type")).endswith("_output"):
            return index
    return None

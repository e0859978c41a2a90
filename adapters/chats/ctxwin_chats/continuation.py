"""Histories as parts with digests, and how a request continues the history that was served before.

Parts that are gone, or became a placeholder, while the rest of the history is unchanged and in order, are drops.
`continue_history` finds them. Everything else (an edited text, other rules or tools, another order, an insertion) is none.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ctxwin.hashing import digest
from ctxwin_chats.context_management import PICTURES, Count

_TRIES = 32
"""Turns of a request that are held against the last remembered one, the newest first."""
_PLACEHOLDER = re.compile(r"\s*(?:[\[<(](?![^\n]*(?:redact|secret|private))[^\n]{0,78}[\])>])?\s*", re.IGNORECASE)
KEYED = ("model", "cache_salt", "system", "instructions", "tools", "documents")
"""Fields besides the turns that stand in a prompt, or decide whose prompt it is."""
RULES = ("system", "developer")
"""Roles of the turns of a system prompt."""
CUTS = ("previous_response_id", "truncate_prompt_tokens")
"""Fields of requests whose prompt is not what they hold."""


@dataclass(eq=False, slots=True)
class Part:
    """A turn, or a part of its content, with the parts of its own content.

    Attributes:
        head: JSON of it, without its content; "" in an outline.
        frame: digest of that and of the field.
        field: name of its content; "" where it has none.
        is_text: whether its content is a text, which is its only part then.
        calls: ids of tool calls (+) and of their results (-), in order.
        tokens: once counted.
    """

    head: str
    frame: str
    field: str
    is_text: bool
    parts: tuple[Part, ...]
    kind: str
    calls: tuple[str, ...]
    digest: str
    size: int
    tokens: int | None = None

    @classmethod
    def read(cls, value: Any) -> Part:
        """Return a turn or a part of JSON. Marks of the client's cache (``cache_control``) do not count."""
        name, content = "", ()
        if isinstance(value, dict):
            name = next((n for n in ("content", "output") if isinstance(value.get(n), str | list)), "")
            content = value[name] if name else ()
            value = {key: item for key, item in value.items() if key not in (name, "cache_control")}
        parts = tuple(map(cls.read, [content] if isinstance(content, str) else content))
        head, is_text = json.dumps(value), isinstance(content, str)
        calls = (*_calls(value), *(call for part in parts for call in part.calls))
        return cls._of(head, digest("frame", head, name), name, is_text, parts, _kind(value, calls), calls)

    @classmethod
    def _of(
        cls, head: str, frame: str, field: str, is_text: bool, parts: tuple[Part, ...], kind: str, calls: Any
    ) -> Part:
        identity = digest("part", frame, is_text, [part.digest for part in parts])
        size = len(head) + 256 + sum(part.size for part in parts)
        return cls(head, frame, field, is_text, parts, kind, tuple(calls), identity, size)

    def with_parts(self, parts: tuple[Part, ...]) -> Part:
        """Return it with other parts, and their calls."""
        calls = (call for part in parts for call in part.calls)
        return self._of(self.head, self.frame, self.field, self.is_text, parts, self.kind, calls)

    def outline(self) -> Part:
        """Return it without what it holds, for comparisons alone."""
        parts = tuple(part.outline() for part in self.parts)
        return replace(self, head="", parts=parts, size=256 + sum(part.size for part in parts))

    def build(self) -> Any:
        """Return it as JSON."""
        value = json.loads(self.head)
        if self.field:
            content = [part.build() for part in self.parts]
            value[self.field] = content[0] if self.is_text else content
        return value

    def leaves(self) -> Iterator[Part]:
        """Yield the parts that have no parts, or itself where it is one."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()

    def measure(self, count: Count) -> int:
        """Return its tokens, counted once."""
        if self.tokens is None:
            self.tokens = count(json.loads(self.head)) + sum(part.measure(count) for part in self.parts)
        return self.tokens


Lost = tuple[Part, Part | None]
"""A part that a request lacks, and the one that stands there instead: a placeholder, or a result without its content."""


@dataclass(frozen=True)
class Continuation:
    """The history to serve for a request that continues what was served before.

    Attributes:
        old: number of remembered turns in it; the request's turns from ``new`` on follow them.
        lost: parts of what was remembered that the request lacks, each with what stands there instead, if anything.
    """

    history: tuple[Part, ...]
    old: int
    new: int
    lost: list[Lost]

    @property
    def drops(self) -> list[Part]:
        """The parts in it that the request lacks."""
        return _dropped_parts(self.lost)


def turns_field(data: Mapping[str, Any]) -> str:
    """Return the name of the field with a request's turns."""
    return "input" if "input" in data else "messages"


def first_turn(turns: Any) -> str:
    """Return a name of a conversation that has none, by its first turn behind the rules; "" where there is no such turn."""
    if isinstance(turns, list):
        turns = next((turn for turn in turns if not is_rules(turn)), None)
    return "" if turns is None else f"first:{Part.read(turns).digest}"


def is_rules(turn: Any) -> bool:
    """Return whether a turn is part of the system prompt."""
    return isinstance(turn, dict) and turn.get("role") in RULES


def continue_history(remembered: Sequence[Part], sent: Sequence[Part]) -> Continuation | None:
    """Return ``remembered`` with what is new in ``sent``; None where ``sent`` is not ``remembered`` with drops and something new.

    The same request again, or a part of it, is continued by itself, with nothing kept. The last turn of ``remembered`` must be in
    ``sent``, once; the answer to it and the next turns of others may follow, or parts in it if it is the last one there, too.
    Cost: linear.
    """
    if not remembered or not sent:
        return None
    *earlier, last = remembered
    index = _find_last(last, sent)
    if index is None:
        return None
    matches, turn, following = _match(earlier, sent[:index]), sent[index], sent[index + 1 :]
    if len(matches) < index:
        return None
    lacking, tail = _lacking(last, turn), last
    if lacking is None:
        lacking, tail = _extend(last, turn) or ([], last)
    elif not following:  # the same request again
        return Continuation(tuple(sent), len(remembered), len(sent), [])
    missing = _unmatched(earlier, matches)
    lost = [*missing, *lacking]
    dropped = _dropped_parts(lost)
    moved = {part.digest for part in _dropped_parts(missing) if part.kind != "answer"} & {
        part.digest for part in following
    }
    if moved or any(part.kind in ("rules", "linked") for part in _all(dropped)):
        return None
    of_model = [part.kind in ("answer", "call") for part in following]
    if dropped and of_model != sorted(of_model, reverse=True):  # more than one answer is new
        return None
    history, dangling = (*earlier, tail, *following), _dangling(sent)
    if any(dangling.get(call) != number for call, number in _dangling(history).items()):
        return None
    return Continuation(history, len(remembered), index + 1, lost)


def _find_last(last: Part, sent: Sequence[Part]) -> int | None:
    """Return where the last remembered turn is in a request; None where it is not, or more than once."""
    equal = [index for index, turn in enumerate(sent) if turn.digest == last.digest]
    if equal:
        return equal[0] if len(equal) == 1 else None
    alike = [index for index, turn in enumerate(sent) if turn.frame == last.frame]
    for index in alike[: -_TRIES - 1 : -1]:
        if _lacking(last, sent[index]) is not None or (index == len(sent) - 1 and _extend(last, sent[index])):
            return index
    return None


def _match(old: Sequence[Part], new: Sequence[Part]) -> list[tuple[int, list[Lost]]]:
    """Match parts to old ones, each with the first that it can be: (index of that, what it lacks of it).

    So the longest beginning of ``new`` that is left of ``old`` is matched.
    """
    matches: list[tuple[int, list[Lost]]] = []
    for index, part in enumerate(old):
        if len(matches) == len(new):
            break
        if (lacking := _lacking(part, new[len(matches)])) is not None:
            matches.append((index, lacking))
    return matches


def _unmatched(old: Sequence[Part], matches: Sequence[tuple[int, list[Lost]]]) -> list[Lost]:
    inside = dict(matches)
    return [lost for index, one in enumerate(old) for lost in inside.get(index, [(one, None)])]


def _dropped_parts(lost: Sequence[Lost]) -> list[Part]:
    """Return the parts that are missing: of a result without its content, these."""
    return [
        piece for part, new in lost for piece in (part.parts if new is not None and part.kind == "result" else (part,))
    ]


def _lacking(old: Part, new: Part) -> list[Lost] | None:
    """Return the parts of ``old`` that ``new`` lacks; None where ``new`` is not ``old`` with drops."""
    if new.digest == old.digest:
        return []
    if old.kind == "picture" and new.kind == "placeholder":
        return [(old, new)]
    if old.kind == "rules" or not old.field or old.frame != new.frame:
        return None
    if old.kind == "result" and is_cleared(new):
        return [(old, new)]
    if old.is_text or new.is_text:
        return None
    matches = _match(old.parts, new.parts)
    return _unmatched(old.parts, matches) if len(matches) == len(new.parts) else None


def is_cleared(result: Part) -> bool:
    """Return whether a result has no content but a placeholder."""
    return [part.kind for part in result.parts] in ([], ["placeholder"])


def _extend(last: Part, turn: Part) -> tuple[list[Lost], Part] | None:
    """Continue a turn within itself: what ``turn`` lacks, and the turn to serve; None where it is not continued.

    What stood behind the newest part that is still there, as the question behind the pictures, is not kept. A turn that only
    exchanged its end is an edit.
    """
    matches = [] if last.is_text or turn.is_text or last.kind == "rules" else _match(last.parts, turn.parts)
    if not any(last.parts[old].digest == turn.parts[new].digest for new, (old, _) in enumerate(matches)):
        return None
    head, added = last.parts[: matches[-1][0] + 1], turn.parts[len(matches) :]
    lacking = _unmatched(head, matches)
    is_edit = len(added) <= len(last.parts) - len(head)
    if is_edit or {part.digest for part, _ in lacking} & {part.digest for part in added}:
        return None
    return lacking, last.with_parts((*head, *added))


def _all(parts: Sequence[Part]) -> Iterator[Part]:
    for part in parts:
        yield part
        yield from _all(part.parts)


def _calls(value: Any) -> Iterator[str]:
    """Yield the ids of the tool calls (+) and results (-) in a turn or part."""
    if not isinstance(value, dict):
        return
    calls = value.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        yield f"+{call.get('id') if isinstance(call, dict) else call}"
    kind = str(value.get("type"))
    if kind == "tool_use":
        yield f"+{value.get('id')}"
    elif "call_id" in value:
        yield f"{'-' if kind.endswith('_output') else '+'}{value['call_id']}"
    elif kind == "tool_result" or value.get("role") == "tool":
        yield f"-{value.get('tool_use_id', value.get('tool_call_id'))}"


def _dangling(turns: Sequence[Part]) -> dict[str, int]:
    """Return the calls without a result (> 0), and the results without a call (< 0)."""
    open_calls: Counter[str] = Counter()
    for call in (call for turn in turns for call in turn.calls):
        open_calls[call[1:]] += 1 if call[0] == "+" else -1
    return {call: number for call, number in open_calls.items() if number}


def _kind(value: Any, calls: Sequence[str]) -> str:
    if not isinstance(value, dict):
        return "placeholder" if isinstance(value, str) and _PLACEHOLDER.fullmatch(value) else ""
    kind, role = value.get("type"), value.get("role")
    if role in RULES:
        return "rules"
    if role == "tool" or kind in ("tool_result", "function_call_output"):
        return "result"
    if role == "assistant" and not calls:
        return "answer"
    if role == "assistant" or kind == "reasoning" or (isinstance(kind, str) and kind.endswith("_call")):
        return "call"
    medium = next((value[name] for name in ("image_url", "video_url", "audio_url", "source") if name in value), "data:")
    if isinstance(medium, dict):
        medium = medium.get("url", "data:")
    if not isinstance(medium, str) or not medium.startswith("data:") or value.get("uuid") is not None:
        return "linked"  # what it names may change
    if kind in PICTURES:
        return "picture"
    words = value.get("text")
    return "placeholder" if isinstance(words, str) and _PLACEHOLDER.fullmatch(words) else ""

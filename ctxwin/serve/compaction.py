"""Compaction, as Anthropic's Messages and OpenAI's Responses have it: a summary takes the place of what stands in front of it.

Past the request's threshold the served model writes the summary, in a request of its own behind the same conversation, so that
the window behind it computes the instructions alone. The answer hands the summary to the client as the API's own block, and
the client sends it back: everything in front of the newest block is then left out.

| | Messages | Responses |
|---|---|---|
| asked by | ``{"edits": [{"type": "compact_20260112"}]}`` | ``[{"type": "compaction", "compact_threshold": N}]`` |
| block | ``{"type": "compaction", "content": summary}`` | an item whose ``encrypted_content`` holds the summary, as base64 |
"""

from __future__ import annotations

import base64
import binascii
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, TypeAdapter

from ctxwin.serve.specs import Body, checked

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
INSTRUCTIONS = (
    "Summarise this conversation so that the work can go on without anything that stands above: the task and its rules, what "
    "was decided and found, names, numbers and paths that are still needed, and the next step. Answer with the summary alone."
)
_HEADING = "Summary of the conversation so far:\n\n"
_MARK = "ctxwin:"
_INDEXED = ("content_block_start", "content_block_delta", "content_block_stop")


class Trigger(Body):
    """From how many tokens of a request on."""

    type: Literal["input_tokens"]
    value: int = Field(ge=0)


class Compact(Body):
    """See the module; the fields and their defaults are the API's."""

    type: Literal["compact_20260112"]
    trigger: Trigger | None = None
    instructions: str | None = Field(default=None, max_length=20_000)
    pause_after_compaction: bool = False

    @property
    def threshold(self) -> int:
        """Tokens of a request above which it is compacted."""
        return 150_000 if self.trigger is None else self.trigger.value


class _Entry(Body):
    type: Literal["compaction"]
    compact_threshold: int | None = Field(default=None, ge=0)


_ENTRIES: TypeAdapter[list[_Entry]] = TypeAdapter(list[_Entry])


def asked_in(path: str, data: dict[str, Any]) -> Compact | None:
    """The compaction that a request asks for, taken out of its ``context_management``. ValueError where it is malformed."""
    given = data.get("context_management")
    if path == RESPONSES and isinstance(given, list):
        del data["context_management"]
        read: list[_Entry] = checked(_ENTRIES.validate_python, given)
        least = read[-1].compact_threshold if read else None
        trigger = None if least is None else Trigger(type="input_tokens", value=least)
        return Compact(type="compact_20260112", trigger=trigger) if read else None
    edits = given.get("edits") if isinstance(given, dict) else None
    if path != MESSAGES or not isinstance(edits, list):
        return None
    wanted = [e for e in edits if isinstance(e, dict) and e.get("type") == "compact_20260112"]
    if wanted:
        data["context_management"] = {"edits": [e for e in edits if e not in wanted]}
    return checked(Compact.model_validate, wanted[-1]) if wanted else None


@dataclass
class Compacted:
    """What became of a request.

    Attributes:
        summary: None where the model gave none; nothing is left out then.
        used: tokens in and out of the request that wrote it.
    """

    path: str
    summary: str | None
    used: tuple[int, int] = (0, 0)
    id: str = field(default_factory=lambda: f"cmp_{uuid.uuid4().hex}")

    def block(self) -> dict[str, Any]:
        """The block of the answer."""
        if self.path == MESSAGES:
            return {"type": "compaction", "content": self.summary}
        sealed = _MARK + base64.b64encode((self.summary or "").encode()).decode()
        return {"type": "compaction", "id": self.id, "encrypted_content": sealed}

    def told(self, answer: dict[str, Any]) -> None:
        """Puts the block in front of what an answer holds; Messages' usage tells both requests apart."""
        for holder in (answer, answer.get("response"), answer.get("message")):
            if not isinstance(holder, dict):
                continue
            place = holder.get("content" if self.path == MESSAGES else "output")
            if isinstance(place, list) and (self.path == RESPONSES or holder is answer):
                if self.path == RESPONSES and holder.get("status") in ("in_progress", "queued"):
                    continue  # of a stream's first event, which has no output yet
                place.insert(0, self.block())
            usage = holder.get("usage")
            if self.path == MESSAGES and isinstance(usage, dict) and "output_tokens" in usage:
                usage["iterations"] = [_used("compaction", *self.used), _used("message", **_tokens(usage))]

    def events(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """One event of a stream, and those of the block around it: behind the first event, in front of all content."""
        kind = event.get("type")
        if self.path == MESSAGES:
            if kind in _INDEXED:
                event["index"] += 1
            if kind == "message_delta":
                self.told(event)
            yield event
            if kind == "message_start":
                yield {"type": _INDEXED[0], "index": 0, "content_block": {"type": "compaction", "content": None}}
                delta = {"type": "compaction_delta", "content": self.summary}
                yield {"type": _INDEXED[1], "index": 0, "delta": delta}
                yield {"type": _INDEXED[2], "index": 0}
            return
        if kind not in ("response.created", "response.in_progress"):
            event["sequence_number"] = event.get("sequence_number", 0) + 2
            if "output_index" in event:
                event["output_index"] += 1
            if kind in ("response.completed", "response.incomplete", "response.failed"):
                self.told(event)
        yield event
        if kind == "response.in_progress":
            number = event.get("sequence_number", 1)
            for step, name in enumerate(("response.output_item.added", "response.output_item.done"), 1):
                yield {"type": name, "output_index": 0, "item": self.block(), "sequence_number": number + step}

    def paused_events(self, model: Any) -> Iterator[dict[str, Any]]:
        """`paused_answer` as a stream."""
        answer = self.paused_answer(model)
        yield from self.events({"type": "message_start", "message": {**answer, "content": [], "stop_reason": None}})
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": answer["stop_reason"], "stop_sequence": None},
            "usage": answer["usage"],
        }
        yield {"type": "message_stop"}

    def paused_answer(self, model: Any) -> dict[str, Any]:
        """The answer to a request that wants nothing but the block (Messages only)."""
        usage = {"input_tokens": 0, "output_tokens": 0, "iterations": [_used("compaction", *self.used)]}
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [self.block()],
            "stop_reason": "compaction",
            "stop_sequence": None,
            "usage": usage,
        }


def resume(path: str, data: dict[str, Any]) -> bool:
    """Leaves out what stands in front of the newest compaction block of a request, and says its summary instead.

    Returns whether there was one. ValueError for a block that is not what an answer held.
    """
    name = "messages" if path == MESSAGES else "input"
    given = data.get(name)
    turns: list[Any] = given if isinstance(given, list) else []
    found = False
    summary: str | None
    rest: list[dict[str, Any]]
    for at in range(len(turns) - 1, -1, -1):
        turn = turns[at]
        if not isinstance(turn, dict):
            continue
        if path == RESPONSES and turn.get("type") == "compaction":
            summary, rest = _unsealed(turn.get("encrypted_content")), []
        elif path == MESSAGES and (cut := _cut(turn)) is not None:
            summary, rest = cut
        else:
            continue
        if not summary:  # compaction failed there: nothing was left out
            turns[at : at + 1] = rest
        elif found:
            del turns[at]
        else:
            rules = [t for t in turns[:at] if isinstance(t, dict) and t.get("role") in ("system", "developer")]
            turns[: at + 1] = [*rules, {"role": "user", "content": _HEADING + summary}, *rest]
            return True
        found = True
    return found


def request_for(path: str, data: dict[str, Any], compact: Compact, most: int) -> dict[str, Any]:
    """The body of the request that writes the summary, of at most ``most`` tokens."""
    name, limit = ("messages", "max_tokens") if path == MESSAGES else ("input", "max_output_tokens")
    asked = compact.instructions or INSTRUCTIONS
    left_out = ("stop_sequences", "thinking", "text", "response_format", "stop", "store", "metadata", "stream_options")
    made = {key: value for key, value in data.items() if key not in left_out}
    turns = [{"role": "user", "content": made[name]}] if isinstance(made[name], str) else [*made[name]]
    last = turns[-1] if turns and isinstance(turns[-1], dict) else {}
    kind = "text" if path == MESSAGES else "input_text"
    if last.get("role") == "user":  # two turns of a user's in a row are none of many templates
        content = last.get("content")
        parts = [{"type": kind, "text": content}] if isinstance(content, str) else [*(content or ())]
        turns[-1] = {**last, "content": [*parts, {"type": kind, "text": asked}]}
    else:
        turns.append({"role": "user", "content": asked})
    made |= {name: turns, limit: most, "stream": False}
    if made.get("tools"):
        made["tool_choice"] = {"type": "none"} if path == MESSAGES else "none"
    return made


def read_summary(path: str, answer: Any) -> tuple[str | None, tuple[int, int]]:
    """The summary in an answer, None where there is none, and the tokens in and out."""
    parts: list[Any] = []
    if path == MESSAGES:
        parts = answer.get("content") or []
    else:
        for item in answer.get("output") or ():
            parts += item.get("content") or [] if item.get("type") == "message" else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    usage = answer.get("usage") or {}
    return "".join(texts).strip() or None, (int(usage.get("input_tokens") or 0), int(usage.get("output_tokens") or 0))


def apply(path: str, data: dict[str, Any], summary: str) -> None:
    """Has the summary take the place of all turns but the last one, where that is the user's."""
    name = "messages" if path == MESSAGES else "input"
    turns = data[name]
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    rules = [t for t in turns[:-1] if isinstance(t, dict) and t.get("role") in ("system", "developer")]
    last = turns[-1] if turns and isinstance(turns[-1], dict) else {}
    content = last.get("content")
    kind = "text" if path == MESSAGES else "input_text"
    said: dict[str, Any] = {"role": "user", "content": _HEADING + summary}
    if last.get("role") == "user" and not _answers_calls(content):
        parts = [{"type": kind, "text": content}] if isinstance(content, str) else [*(content or ())]
        said = {**last, "content": [{"type": kind, "text": _HEADING + summary}, *parts]}
    data[name] = [*rules, said]


def _answers_calls(content: Any) -> bool:
    """Whether a turn holds results, whose calls the summary replaces."""
    return isinstance(content, list) and any(isinstance(p, dict) and p.get("type") == "tool_result" for p in content)


def _cut(turn: dict[str, Any]) -> tuple[str | None, list[dict[str, Any]]] | None:
    """The newest summary in a turn, and what stands behind it; None where there is no block."""
    given = turn.get("content")
    content: list[Any] = given if isinstance(given, list) else []
    for at in range(len(content) - 1, -1, -1):
        block = content[at]
        if isinstance(block, dict) and block.get("type") == "compaction":
            summary = block.get("content")
            if summary is not None and not (isinstance(summary, str) and summary):
                raise ValueError(f"a compaction block must have its summary or null, got {str(summary)[:60]!r}")
            rest = content[at + 1 :] if summary else [*content[:at], *content[at + 1 :]]
            return summary, [{**turn, "content": rest}] if rest else []
    return None


def _unsealed(sealed: Any) -> str:
    try:
        if isinstance(sealed, str) and sealed.startswith(_MARK):
            return base64.b64decode(sealed[len(_MARK) :], validate=True).decode()
    except (binascii.Error, ValueError):
        pass
    raise ValueError(f"a compaction item must be one that this server gave, got {str(sealed)[:60]!r}; leave it out")


def _used(kind: str, input_tokens: int, output_tokens: int) -> dict[str, Any]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"type": kind, "input_tokens": input_tokens, "output_tokens": output_tokens, **cached}


def _tokens(usage: dict[str, Any]) -> dict[str, int]:
    return {name: int(usage.get(name) or 0) for name in ("input_tokens", "output_tokens")}


def line_of(event: dict[str, Any]) -> bytes:
    """An event of a stream as it is sent."""
    body = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return f"event: {event.get('type', 'message')}\ndata: {body}\n\n".encode()

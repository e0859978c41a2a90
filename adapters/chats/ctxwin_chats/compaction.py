"""Compaction, as Anthropic's Messages and OpenAI's Responses have it: a summary replaces the turns before it.

Past the request's threshold the served model writes the summary, in a further request of the same conversation, so that its
window computes the instructions alone. The answer gives the summary to the client as the API's own block, and the client sends
it back: everything before the newest block is then left out.

| | Messages | Responses |
|---|---|---|
| asked by | ``{"edits": [{"type": "compact_20260112"}]}`` | ``[{"type": "compaction", "compact_threshold": N}]`` |
| at once | ``compaction={"type": "summarize"}`` | |
| block | ``{"type": "compaction", "content": summary}`` | an item whose ``encrypted_content`` holds the summary, as base64 |
"""

from __future__ import annotations

import base64
import binascii
import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, TypeAdapter

from ctxwin.validation import validate
from ctxwin_chats.bodies import Body

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
INSTRUCTIONS = (
    "Summarise this conversation so that the work can go on without anything that stands above: the task and its rules, what "
    "was decided and found, names, numbers and paths that are still needed, and the next step. Answer with the summary alone."
)
_HEADING = "Summary of the conversation so far:\n\n"
_MARK = "ctxwin:"
_INDEXED = ("content_block_start", "content_block_delta", "content_block_stop")


class Trigger(Body):
    """Number of a request's tokens above which it is compacted."""

    type: Literal["input_tokens"]
    value: int = Field(ge=0)


class CompactEdit(Body):
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


class _Summarize(Body):
    """The field ``compaction`` of Messages: the answer is the block alone."""

    type: Literal["summarize"]
    instructions: str | None = Field(default=None, max_length=20_000)


def take_compaction(path: str, data: dict[str, Any]) -> CompactEdit | None:
    """Remove the compaction from a request's ``context_management`` and return it. Raises ValueError where it is malformed."""
    management = data.get("context_management")
    if path == MESSAGES and data.get("compaction") is not None:
        summarize: _Summarize = validate(_Summarize.model_validate, data.pop("compaction"))
        trigger = Trigger(type="input_tokens", value=0)
        instructions = (summarize.instructions or "").strip() or None
        return CompactEdit(
            type="compact_20260112", trigger=trigger, instructions=instructions, pause_after_compaction=True
        )
    if path == RESPONSES and isinstance(management, list):
        for entry in management:
            kind = entry.get("type") if isinstance(entry, dict) else entry
            if kind != "compaction":
                raise ValueError(
                    f"an entry of context_management must be {{'type': 'compaction'}}, got {str(kind)[:80]!r}; edits of "
                    "other types stand in {'edits': [...]}"
                )
        del data["context_management"]
        entries: list[_Entry] = validate(_ENTRIES.validate_python, management)
        threshold = entries[-1].compact_threshold if entries else None
        input_trigger = None if threshold is None else Trigger(type="input_tokens", value=threshold)
        return CompactEdit(type="compact_20260112", trigger=input_trigger) if entries else None
    edits = management.get("edits") if isinstance(management, dict) else None
    if path != MESSAGES or not isinstance(edits, list):
        return None
    requested = [e for e in edits if isinstance(e, dict) and e.get("type") == "compact_20260112"]
    if requested:
        data["context_management"] = {"edits": [e for e in edits if e not in requested]}
    return validate(CompactEdit.model_validate, requested[-1]) if requested else None


@dataclass
class Compaction:
    """The compaction of one request.

    Attributes:
        summary: None where the model wrote none; nothing is left out then.
        usage: of the request that wrote it, as the route reports it.
    """

    path: str
    summary: str | None
    usage: dict[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=lambda: f"cmp_{uuid.uuid4().hex}")

    def block(self) -> dict[str, Any]:
        """Return the block of the answer."""
        if self.path == MESSAGES:
            return {"type": "compaction", "content": self.summary}
        sealed = _MARK + base64.b64encode((self.summary or "").encode()).decode()
        return {"type": "compaction", "id": self.id, "encrypted_content": sealed}

    def add_to(self, answer: dict[str, Any]) -> None:
        """Insert the block before an answer's content; Messages' usage lists both requests."""
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
                usage["iterations"] = [_iteration("compaction", self.usage), _iteration("message", usage)]

    def events(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield one event of a stream, with the block's own events after the first event and before all content."""
        kind = event.get("type")
        if self.path == MESSAGES:
            if kind in _INDEXED:
                event["index"] += 1
            if kind == "message_delta":
                self.add_to(event)
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
                self.add_to(event)
        yield event
        if kind == "response.in_progress":
            number = event.get("sequence_number", 1)
            for step, name in enumerate(("response.output_item.added", "response.output_item.done"), 1):
                yield {"type": name, "output_index": 0, "item": self.block(), "sequence_number": number + step}

    def paused_events(self, model: Any) -> Iterator[dict[str, Any]]:
        """Yield `paused_answer` as the events of a stream."""
        answer = self.paused_answer(model)
        yield from self.events({"type": "message_start", "message": {**answer, "content": [], "stop_reason": None}})
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": answer["stop_reason"], "stop_sequence": None},
            "usage": answer["usage"],
        }
        yield {"type": "message_stop"}

    def paused_answer(self, model: Any) -> dict[str, Any]:
        """Return the answer to a request that wants nothing but the block (Messages only)."""
        usage = {"input_tokens": 0, "output_tokens": 0, "iterations": [_iteration("compaction", self.usage)]}
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
    """Replace everything before the newest compaction block of a request by the block's summary.

    Returns whether there was a block. Raises ValueError for a block that no answer of this server held.
    """
    name = "messages" if path == MESSAGES else "input"
    turns_field = data.get(name)
    turns: list[Any] = turns_field if isinstance(turns_field, list) else []
    has_block = False
    summary: str | None
    following: list[dict[str, Any]]
    index = len(turns) - 1
    while index >= 0:
        turn = turns[index] if isinstance(turns[index], dict) else {}
        if path == RESPONSES and turn.get("type") == "compaction":
            summary, following = _unseal(turn.get("encrypted_content")), []
        elif path == MESSAGES and (cut := _split_at_summary(turn)) is not None:
            summary, following = cut
        else:
            index -= 1
            continue
        has_block = True
        if not summary:  # compaction had failed: nothing was left out; the rest of the turn may have an older block
            turns[index : index + 1] = following
            index -= not following
            continue
        rules = [t for t in turns[:index] if isinstance(t, dict) and t.get("role") in ("system", "developer")]
        rest = [*following, *turns[index + 1 :]]
        turns[:] = [*rules, _with_summary(path, summary, rest[:1]), *(rest[1:] if _is_users(rest[:1]) else rest)]
        return True
    return has_block


def request_for(path: str, data: dict[str, Any], compact: CompactEdit, most: int) -> dict[str, Any]:
    """Return the body of the request that writes the summary, of at most ``most`` tokens."""
    name, limit = ("messages", "max_tokens") if path == MESSAGES else ("input", "max_output_tokens")
    instructions = compact.instructions or INSTRUCTIONS
    left_out = ("stop_sequences", "thinking", "text", "response_format", "stop", "store", "metadata", "stream_options")
    body = {key: value for key, value in data.items() if key not in left_out}
    turns = [{"role": "user", "content": body[name]}] if isinstance(body[name], str) else [*body[name]]
    last_turn = turns[-1] if turns and isinstance(turns[-1], dict) else {}
    kind = "text" if path == MESSAGES else "input_text"
    if last_turn.get("role") == "user":  # many templates refuse two user turns in a row
        content = last_turn.get("content")
        parts = [{"type": kind, "text": content}] if isinstance(content, str) else [*(content or ())]
        turns[-1] = {**last_turn, "content": [*parts, {"type": kind, "text": instructions}]}
    else:
        turns.append({"role": "user", "content": instructions})
    body |= {name: turns, limit: most, "stream": False}
    if body.get("tools"):
        body["tool_choice"] = {"type": "none"} if path == MESSAGES else "none"
    return body


def read_summary(path: str, answer: Any) -> tuple[str | None, dict[str, Any]]:
    """Return the summary in an answer (None where there is none), and the usage of that answer."""
    parts: list[Any] = []
    if path == MESSAGES:
        parts = answer.get("content") or []
    else:
        for item in answer.get("output") or ():
            parts += item.get("content") or [] if item.get("type") == "message" else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "".join(texts).strip() or None, answer.get("usage") or {}


def replace_turns(path: str, data: dict[str, Any], summary: str) -> None:
    """Replace all turns by the summary; the last turn stays where it is the user's."""
    name = "messages" if path == MESSAGES else "input"
    turns = data[name]
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    rules = [t for t in turns[:-1] if isinstance(t, dict) and t.get("role") in ("system", "developer")]
    data[name] = [*rules, _with_summary(path, summary, turns[-1:])]


def _is_users(turns: Sequence[Any]) -> bool:
    """Return whether there is a turn, and it is the user's."""
    return bool(turns) and isinstance(turns[0], dict) and turns[0].get("role") == "user"


def _with_summary(path: str, summary: str, turns: Sequence[Any]) -> dict[str, Any]:
    """Return the user's turn that begins with the summary, and goes on with the first of ``turns`` where that is the user's, as
    many templates refuse two user turns in a row; without tool results, whose calls the summary replaces."""
    content, kind = turns[0].get("content") if _is_users(turns) else None, "text" if path == MESSAGES else "input_text"
    parts = [{"type": kind, "text": content}] if isinstance(content, str) else [*(content or ())]
    parts = [part for part in parts if not isinstance(part, dict) or part.get("type") != "tool_result"]
    if not parts:
        return {"role": "user", "content": _HEADING + summary}
    return {**turns[0], "content": [{"type": kind, "text": _HEADING + summary}, *parts]}


def _split_at_summary(turn: dict[str, Any]) -> tuple[str | None, list[dict[str, Any]]] | None:
    """Return the newest summary in a turn, and the content after it; None where there is no block."""
    blocks = turn.get("content")
    content: list[Any] = blocks if isinstance(blocks, list) else []
    for index in range(len(content) - 1, -1, -1):
        block = content[index]
        if isinstance(block, dict) and block.get("type") == "compaction":
            summary = block.get("content")
            if summary is not None and not (isinstance(summary, str) and summary):
                raise ValueError(f"a compaction block must have its summary or null, got {str(summary)[:60]!r}")
            following = content[index + 1 :] if summary else [*content[:index], *content[index + 1 :]]
            return summary, [{**turn, "content": following}] if following else []
    return None


def _unseal(sealed: Any) -> str:
    try:
        if isinstance(sealed, str) and sealed.startswith(_MARK):
            return base64.b64decode(sealed[len(_MARK) :], validate=True).decode()
    except (binascii.Error, ValueError):
        pass
    raise ValueError(f"a compaction item must be one that this server gave, got {str(sealed)[:60]!r}; leave it out")


_COUNTS = ("input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


def _iteration(kind: str, usage: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, **{name: int(usage.get(name) or 0) for name in _COUNTS}}


def encode_event(event: dict[str, Any]) -> bytes:
    """Return an event as a server-sent event."""
    body = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return f"event: {event.get('type', 'message')}\ndata: {body}\n\n".encode()

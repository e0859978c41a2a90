"""``context_management`` of a request, as in Anthropic's API: old tool results and pictures are cleared first.

Cleared content becomes a placeholder, so that every call keeps its result, and the request's window turns that into edits of
its KV: what follows a cleared result is not recomputed where the model's profile allows it. A `Policy` does the same for
clients that send no ``context_management``.

- ``clear_tool_uses_20250919`` clears the oldest tool results, all but ``keep``, once ``trigger`` is exceeded; the arguments of
  their calls, too, with ``clear_tool_inputs``, or those of the tools that it names.
- ``clear_thinking_20251015`` takes the thinking out of all assistant turns but the newest ``keep`` that hold any.
- ``clear_images`` (ours) clears the oldest pictures, all but ``keep``.

``clear_at_least`` has results and pictures cleared in batches that free so many tokens each. Between two of them the prefix of a
history that grows stands, although every request brings the whole history again.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from ctxwin.errors import BadMedia, BudgetExceeded
from ctxwin.validation import validate
from ctxwin_chats.bodies import Body, decode_data, picture_size

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine

CLEARED = "[cleared to save context]"
"""Placeholder of cleared content."""
PICTURES = {"image_url": "text", "input_image": "input_text", "image": "text"}
"""Types of picture parts, and of the text part that takes their place."""
_RESULTS = {"function_call_output": ("call_id", "output"), "tool_result": ("tool_use_id", "content")}
Count = Callable[[Any], int]
"""Tokens of a part of a request."""


class _Amount(Body):
    type: Literal["input_tokens", "tool_uses", "images"]
    value: int = Field(ge=0)


class ClearToolUses(Body):
    """See the module; the fields and their defaults are the API's."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: _Amount = _Amount(type="input_tokens", value=100_000)
    keep: _Amount = _Amount(type="tool_uses", value=3)
    clear_at_least: _Amount | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = False


class _ThinkingTurns(Body):
    type: Literal["thinking_turns"]
    value: int = Field(ge=1)


class _All(Body):
    type: Literal["all"]


class ClearThinking(Body):
    """See the module; the field and its default are the API's."""

    type: Literal["clear_thinking_20251015"]
    keep: _ThinkingTurns | _All | Literal["all"] = _ThinkingTurns(type="thinking_turns", value=1)


class ClearImages(Body):
    """See the module."""

    type: Literal["clear_images"]
    trigger: _Amount = _Amount(type="images", value=0)
    keep: _Amount = _Amount(type="images", value=3)
    clear_at_least: _Amount | None = None


Edit = ClearToolUses | ClearThinking | ClearImages
EDITS = ("clear_tool_uses_20250919", "clear_thinking_20251015", "clear_images")


class _Asked(Body):
    edits: list[Annotated[Edit, Field(discriminator="type")]] = Field(default=[], max_length=16)


class Policy(Body):
    """Edits of requests that have no ``context_management``, read from a TOML file.

    Attributes:
        budget: tokens of a request above which old tool results are cleared; None clears none.
        keep: how many tool results stay, the newest.
        clear_at_least: tokens that clearing results must free each time.
        exclude_tools: tools whose results always stay.
        pictures: how many pictures stay, the newest; None keeps all.
        pictures_at_once: how many pictures are cleared together.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    budget: int | None = Field(default=None, ge=1)
    keep: int = Field(default=3, ge=0)
    clear_at_least: int = Field(default=0, ge=0)
    exclude_tools: tuple[str, ...] = Field(default=(), strict=False)  # lists of a TOML file
    pictures: int | None = Field(default=None, ge=0)
    pictures_at_once: int = Field(default=1, ge=1)

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Return the policy in a file. Raises ValueError, which names the file, and OSError."""
        try:
            policy: Policy = validate(cls.model_validate, tomllib.loads(path.read_text("utf-8-sig")), "")
            return policy
        except ValueError as error:
            raise ValueError(f"{path} must hold {', '.join(cls.model_fields)}: {error}") from None

    def edits(self) -> list[Edit]:
        """Return the equivalent edits of a client."""
        edits: list[Edit] = []
        if self.budget is not None:
            edits.append(
                ClearToolUses(
                    type="clear_tool_uses_20250919",
                    trigger=_Amount(type="input_tokens", value=self.budget),
                    keep=_Amount(type="tool_uses", value=self.keep),
                    clear_at_least=_Amount(type="input_tokens", value=self.clear_at_least),
                    exclude_tools=[*self.exclude_tools],
                )
            )
        if self.pictures is not None:
            keep, once = (_Amount(type="images", value=value) for value in (self.pictures, self.pictures_at_once))
            edits.append(ClearImages(type="clear_images", keep=keep, clear_at_least=once))
        return edits


@dataclass
class _Result:
    """One tool result: its location, and its call where the request holds that."""

    holder: dict[str, Any]
    key: str
    call: dict[str, Any] | None

    @property
    def tool(self) -> str:
        call = self.call or {}
        function = call.get("function")
        return str((function if isinstance(function, dict) else call).get("name", ""))

    @property
    def is_cleared(self) -> bool:
        return self.holder.get(self.key) == CLEARED


def manage(data: dict[str, Any], policy: Policy | None, count: Count) -> list[dict[str, Any]] | None:
    """Apply the ``context_management`` of a request's body ``data``, or else ``policy``, and remove that field.

    Returns the applied edits as the API reports them; None where neither requests any.

    Raises:
        ValueError: an unknown edit. Cost: O(request), and a count of its tokens where an edit needs that.
    """
    request = data.pop("context_management", None)
    if request is not None:
        _check_types(request)
        edits = validate(_ASKED.validate_python, request).edits
    elif policy is not None:
        edits = policy.edits()
    else:
        return None
    applied = []
    for edit in edits:
        if counts := _apply(data, edit, count):
            applied.append({"type": edit.type, **counts})
    return applied


_ASKED: TypeAdapter[_Asked] = TypeAdapter(_Asked)


def _check_types(request: Any) -> None:
    """Raise ValueError, with a remedy, for unknown edits: other APIs have edits of their own in the same field."""
    edits = request.get("edits", []) if isinstance(request, dict) else None
    if not isinstance(edits, list):
        raise ValueError(
            f"context_management must be {{'edits': [...]}} with edits of the types {', '.join(EDITS)}, or, on /v1/responses, "
            f"[{{'type': 'compaction'}}]; got {str(request)[:80]!r}"
        )
    for edit in edits:
        kind = edit.get("type") if isinstance(edit, dict) else edit
        if isinstance(kind, str) and kind.startswith("compact"):
            raise ValueError(
                f"the edit {kind[:80]!r} is not served here: /v1/messages takes compact_20260112, /v1/responses "
                "[{'type': 'compaction', 'compact_threshold': N}]; leave it out elsewhere"
            )
        if kind not in EDITS:
            raise ValueError(f"an edit must be one of {', '.join(EDITS)}, got {str(kind)[:80]!r}; leave it out")


def _apply(data: dict[str, Any], edit: Edit, count: Count) -> dict[str, int]:
    if isinstance(edit, ClearImages):
        return _clear_images(data, edit, count)
    if isinstance(edit, ClearThinking):
        return _clear_thinking(data, edit, count)
    return _clear_results(data, edit, count)


def _clear_results(data: dict[str, Any], edit: ClearToolUses, count: Count) -> dict[str, int]:
    results = [*_results(data)]
    if not _is_reached(edit.trigger, data, count, uses=len(results), images=0):
        return {}
    old = results[: max(0, len(results) - edit.keep.value)]
    old = [r for r in old if not r.is_cleared and r.tool not in (edit.exclude_tools or ())]
    inputs, cleared = edit.clear_tool_inputs, count(CLEARED)
    with_call = [r.tool in inputs if isinstance(inputs, list) else bool(inputs) for r in old]
    freed = [
        count(r.holder.get(r.key)) + (count(_arguments(r)) if has_call else 0) - cleared
        for r, has_call in zip(old, with_call, strict=True)
    ]
    number = _in_batches(freed, edit.clear_at_least)
    for result, has_call in zip(old[:number], with_call, strict=False):
        result.holder[result.key] = CLEARED
        if has_call and result.call is not None:
            _clear_arguments(result.call)
    return {"cleared_tool_uses": number, "cleared_input_tokens": max(0, sum(freed[:number]))} if number else {}


def _in_batches(freed: Sequence[int], least: _Amount | None) -> int:
    """Return how many of the oldest to clear, in batches that free at least so much each, or have so many.

    Batches are counted from the front, so that a longer history has the same ones and perhaps another.
    """
    end = batch = 0
    for index, tokens in enumerate(freed):
        batch += max(0, tokens) if least is None or least.type == "input_tokens" else 1
        if least is None or batch >= least.value:
            end, batch = index + 1, 0
    return end


_THINKING = ("thinking", "redacted_thinking")
_REASONING = ("reasoning", "reasoning_content", "thinking_blocks")
"""Fields of an assistant's turn in a chat, which has no blocks of thinking: vLLM's, older servers', LiteLLM's."""


def _clear_thinking(data: dict[str, Any], edit: ClearThinking, count: Count) -> dict[str, int]:
    if not isinstance(edit.keep, _ThinkingTurns):
        return {}
    old = [turn for turn in _turns(data) if any(_thoughts(turn))][: -edit.keep.value]
    freed = sum(count(part) for turn in old for part in _thoughts(turn))
    for turn in old:
        _drop_thoughts(turn)
    items = data.get("input")
    if isinstance(items, list):  # an item of Responses holds reasoning only
        data["input"] = [item for item in items if not any(item is turn for turn in old)]
    return {"cleared_thinking_turns": len(old), "cleared_input_tokens": freed} if old else {}


def _thoughts(turn: dict[str, Any]) -> list[Any]:
    """Return the reasoning in an assistant's turn of a chat or of messages, or in an item of responses."""
    if turn.get("type") == "reasoning":
        return [turn.get("content") or turn.get("summary") or turn]
    if turn.get("role") != "assistant":
        return []
    blocks = [part for part in _parts(turn) if isinstance(part, dict) and part.get("type") in _THINKING]
    return [*blocks, *(turn[name] for name in _REASONING if turn.get(name))]


def _drop_thoughts(turn: dict[str, Any]) -> None:
    parts = _parts(turn)
    if parts:
        remaining = [part for part in parts if not (isinstance(part, dict) and part.get("type") in _THINKING)]
        turn["content"] = remaining or [{"type": "text", "text": CLEARED}]  # a turn must have content
    for name in _REASONING:
        turn.pop(name, None)


def _clear_images(data: dict[str, Any], edit: ClearImages, count: Count) -> dict[str, int]:
    pictures = [*_pictures(data)]
    if not _is_reached(edit.trigger, data, count, uses=0, images=len(pictures)):
        return {}
    old, cleared = pictures[: max(0, len(pictures) - edit.keep.value)], count(CLEARED)
    freed = [max(0, count(parts[index]) - cleared) for parts, index in old]
    number = _in_batches(freed, edit.clear_at_least)
    for parts, index in old[:number]:
        parts[index] = {"type": PICTURES[parts[index]["type"]], "text": CLEARED}
    return {"cleared_images": number, "cleared_input_tokens": sum(freed[:number])} if number else {}


def _is_reached(trigger: _Amount, data: dict[str, Any], count: Count, *, uses: int, images: int) -> bool:
    have = {"tool_uses": uses, "images": images}
    now = (
        have[trigger.type] if trigger.type in have else count([data.get(name) for name in ("system", "tools", *_TURNS)])
    )
    return now > trigger.value


_TURNS = ("messages", "input")


def _turns(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in _TURNS:
        turns = data.get(name)
        yield from (turn for turn in (turns if isinstance(turns, list) else ()) if isinstance(turn, dict))


def _parts(turn: dict[str, Any]) -> list[Any]:
    content = turn.get("content")
    return content if isinstance(content, list) else []


def _results(data: dict[str, Any]) -> Iterator[_Result]:
    """Yield the tool results of a chat, of responses, or of messages, oldest first."""
    calls: dict[Any, dict[str, Any]] = {}
    for turn in _turns(data):
        for part in (turn, *_parts(turn), *(turn.get("tool_calls") or ())):
            if not isinstance(part, dict):
                continue
            kind = part.get("type")
            if kind in ("function", "tool_use", "function_call"):
                calls[part.get("call_id") or part.get("id")] = part
            elif kind in _RESULTS:
                name, key = _RESULTS[kind]
                yield _Result(part, key, calls.get(part.get(name)))
        if turn.get("role") == "tool":
            yield _Result(turn, "content", calls.get(turn.get("tool_call_id")))


def _arguments(result: _Result) -> Any:
    call = result.call or {}
    return call.get("input") or (call.get("function") or call).get("arguments")


def _clear_arguments(call: dict[str, Any]) -> None:
    if call.get("type") == "tool_use":
        call["input"] = {}
    else:
        (call.get("function") or call)["arguments"] = "{}"


def _pictures(data: dict[str, Any]) -> Iterator[tuple[list[Any], int]]:
    """Yield the location (list, index) of every picture, oldest first, those inside tool results included."""

    def within(parts: list[Any]) -> Iterator[tuple[list[Any], int]]:
        for index, part in enumerate(parts):
            if isinstance(part, dict) and part.get("type") in PICTURES:
                yield parts, index
            elif isinstance(part, dict) and isinstance(inner := part.get("content"), list):
                yield from within(inner)

    for turn in _turns(data):
        yield from within(_parts(turn))
        if isinstance(output := turn.get("output"), list):
            yield from within(output)


def counter(engine: Engine) -> Count:
    """Return a function that counts a request's tokens by its texts and picture sizes, without the template's own."""
    checkpoint: Any = getattr(getattr(engine, "encoder", None), "checkpoint", None)
    patches = getattr(getattr(checkpoint, "image_processor", None), "get_number_of_image_patches", None)

    def text_tokens(text: str) -> int:
        try:
            return len(engine.text_ids(text))
        except BudgetExceeded:  # more than the model takes, which is all that a trigger needs
            return engine.spec.max_tokens

    def picture_tokens(width: int, height: int) -> int:
        return 0 if patches is None else int(patches(height, width)) // int(checkpoint.patches_per_token)

    def count(value: Any) -> int:
        if isinstance(value, str):
            return text_tokens(value) if value else 0
        if isinstance(value, list):
            return sum(map(count, value))
        if not isinstance(value, dict):
            return 0
        if value.get("type") in PICTURES:
            source = value.get("source") if value["type"] == "image" else value.get("image_url")
            data = source.get("data") or source.get("url") if isinstance(source, dict) else source
            try:
                return picture_tokens(*picture_size(decode_data(data))) if isinstance(data, str) else 0
            except BadMedia:
                return 0  # the decoder reports the error
        names = ("type", "role", "id", "call_id", "tool_call_id", "tool_use_id", "cache_control")
        return sum(count(item) for name, item in value.items() if name not in names)

    return count

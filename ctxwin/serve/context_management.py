"""``context_management`` of a request, as Anthropic's API has it: old tool results and pictures leave before the prompt is made.

What is cleared becomes a placeholder, so that every call keeps its result, and the window behind the request turns that into
edits of its KV: what stands behind a cleared result is not computed again where the model's profile allows it. A `Policy` does
the same for clients that send nothing.

- ``clear_tool_uses_20250919`` clears the oldest tool results, all but ``keep``, once ``trigger`` is exceeded; the arguments of
  their calls, too, with ``clear_tool_inputs``.
- ``clear_images`` (ours) clears the oldest pictures, all but ``keep``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ctxwin.errors import BadMedia, BudgetExceeded
from ctxwin.serve.specs import Body, checked, decode_data, picture_size

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine

CLEARED = "[cleared to save context]"
"""What stands in place of what was cleared."""
_PICTURES = {"image_url": "text", "input_image": "input_text", "image": "text"}
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
    clear_tool_inputs: bool = False


class ClearImages(Body):
    """See the module."""

    type: Literal["clear_images"]
    trigger: _Amount = _Amount(type="images", value=0)
    keep: _Amount = _Amount(type="images", value=3)


class _Asked(Body):
    edits: list[Annotated[ClearToolUses | ClearImages, Field(discriminator="type")]] = Field(max_length=16)


class Policy(Body):
    """What happens to requests that say nothing: a TOML file.

    Attributes:
        budget: tokens of a request from which on old tool results are cleared; None clears none.
        keep: how many tool results stay, the newest.
        exclude_tools: whose results always stay.
        pictures: how many pictures stay, the newest; None keeps all.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    budget: int | None = Field(default=None, ge=1)
    keep: int = Field(default=3, ge=0)
    exclude_tools: tuple[str, ...] = ()
    pictures: int | None = Field(default=None, ge=0)

    @classmethod
    def read(cls, path: Path) -> Policy:
        """The policy in a file. Raises ValueError, which names the file, and OSError."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text()))
        except (ValidationError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{path} must hold budget, keep, exclude_tools or pictures: {error}") from None

    def edits(self) -> list[ClearToolUses | ClearImages]:
        """The edits that a client would have to send."""
        made: list[ClearToolUses | ClearImages] = []
        if self.budget is not None:
            trigger, keep = _Amount(type="input_tokens", value=self.budget), _Amount(type="tool_uses", value=self.keep)
            kind: Any = "clear_tool_uses_20250919"
            made.append(ClearToolUses(type=kind, trigger=trigger, keep=keep, exclude_tools=[*self.exclude_tools]))
        if self.pictures is not None:
            made.append(ClearImages(type="clear_images", keep=_Amount(type="images", value=self.pictures)))
        return made


@dataclass
class _Result:
    """One tool result: where it stands, and its call where that is in the request."""

    holder: dict[str, Any]
    key: str
    call: dict[str, Any] | None

    @property
    def tool(self) -> str:
        call = self.call or {}
        function = call.get("function")
        return str((function if isinstance(function, dict) else call).get("name", ""))

    @property
    def cleared(self) -> bool:
        return self.holder.get(self.key) == CLEARED


def manage(data: dict[str, Any], policy: Policy | None, count: Count) -> list[dict[str, Any]] | None:
    """Clears in ``data``, a request's body, what its ``context_management`` asks for, else what ``policy`` says.

    Returns the edits that were applied, as the API reports them; None where nobody asked for any. The field itself is taken out.

    Raises:
        ValueError: an edit that there is not. Cost: O(request), and a count of its tokens where an edit needs that.
    """
    given = data.pop("context_management", None)
    if given is not None:
        edits = checked(_ASKED.validate_python, given).edits
    elif policy is not None:
        edits = policy.edits()
    else:
        return None
    applied = []
    for edit in edits:
        done = _clear_images(data, edit, count) if isinstance(edit, ClearImages) else _clear_results(data, edit, count)
        if done:
            applied.append({"type": edit.type, **done})
    return applied


_ASKED: TypeAdapter[_Asked] = TypeAdapter(_Asked)


def _clear_results(data: dict[str, Any], edit: ClearToolUses, count: Count) -> dict[str, int]:
    results = [*_results(data)]
    if not _reached(edit.trigger, data, count, uses=len(results), images=0):
        return {}
    old = results[: max(0, len(results) - edit.keep.value)]
    old = [r for r in old if not r.cleared and r.tool not in (edit.exclude_tools or ())]
    held = [count(r.holder.get(r.key)) + (count(_arguments(r)) if edit.clear_tool_inputs else 0) for r in old]
    freed = max(0, sum(held) - len(old) * count(CLEARED))
    if not old or (edit.clear_at_least and freed < edit.clear_at_least.value):
        return {}
    for result in old:
        result.holder[result.key] = CLEARED
        if edit.clear_tool_inputs and result.call is not None:
            _clear_arguments(result.call)
    return {"cleared_tool_uses": len(old), "cleared_input_tokens": freed}


def _clear_images(data: dict[str, Any], edit: ClearImages, count: Count) -> dict[str, int]:
    pictures = [*_pictures(data)]
    if not _reached(edit.trigger, data, count, uses=0, images=len(pictures)):
        return {}
    old = pictures[: max(0, len(pictures) - edit.keep.value)]
    freed = 0
    for parts, index in old:
        part = parts[index]
        parts[index] = {"type": _PICTURES[part["type"]], "text": CLEARED}
        freed += max(0, count(part) - count(CLEARED))
    return {"cleared_images": len(old), "cleared_input_tokens": freed} if old else {}


def _reached(trigger: _Amount, data: dict[str, Any], count: Count, *, uses: int, images: int) -> bool:
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
    """The tool results of a chat, of responses, or of messages, oldest first."""
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
    """Where the pictures stand, oldest first, those inside tool results included."""

    def within(parts: list[Any]) -> Iterator[tuple[list[Any], int]]:
        for index, part in enumerate(parts):
            if isinstance(part, dict) and part.get("type") in _PICTURES:
                yield parts, index
            elif isinstance(part, dict) and isinstance(inner := part.get("content"), list):
                yield from within(inner)

    for turn in _turns(data):
        yield from within(_parts(turn))
        if isinstance(output := turn.get("output"), list):
            yield from within(output)


def counter(engine: Engine) -> Count:
    """Counts a request's tokens by its texts and the sizes of its pictures, apart from what the template adds."""
    checkpoint: Any = getattr(getattr(engine, "encoder", None), "checkpoint", None)
    patches = getattr(getattr(checkpoint, "image_processor", None), "get_number_of_image_patches", None)

    def text_tokens(text: str) -> int:
        try:
            return len(engine.text_ids(text))
        except BudgetExceeded:  # more than the model takes, which is all that a trigger wants to know
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
        if value.get("type") in _PICTURES:
            source = value.get("source") if value["type"] == "image" else value.get("image_url")
            data = source.get("data") or source.get("url") if isinstance(source, dict) else source
            try:
                return picture_tokens(*picture_size(decode_data(data))) if isinstance(data, str) else 0
            except BadMedia:
                return 0  # whoever decodes it says what is wrong with it
        names = ("type", "role", "id", "call_id", "tool_call_id", "tool_use_id", "cache_control")
        return sum(count(item) for name, item in value.items() if name not in names)

    return count

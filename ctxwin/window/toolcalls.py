"""Tool calls read out of an answer, in the syntax that the model's own chat template writes them in."""

import json
import re
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ctxwin.engines.base import Engine
from ctxwin.engines.encoding.templates import PROBE_CALL, Template
from ctxwin.errors import UnsupportedModel
from ctxwin.window.answer import BrokenCall, ToolCall
from ctxwin.window.ask import until_stop

Part = str | ToolCall | BrokenCall
_NAME, _ARGUMENTS = PROBE_CALL["function"]["name"], PROBE_CALL["function"]["arguments"]
_JSON = json.JSONDecoder()


@dataclass(frozen=True)
class Syntax:
    """A call is ``opening``, a JSON object with the fields ``name`` and ``arguments``, and ``closing``; blanks between."""

    opening: str
    closing: str
    name: str
    arguments: str


def template_of(engine: Engine) -> Template:
    """Return the engine's chat template. Raises UnsupportedModel if it has none."""
    if engine.template is None:
        raise UnsupportedModel(f"the {engine.spec.name} engine shows no chat template, so it takes no tools")
    return engine.template


def is_plain_text(engine: Engine, text: str) -> bool:
    """Return True if a piece of the template can be written as content: it contains no special token."""
    return engine.text_ids(text) == engine.template_ids(text)


def learn(engine: Engine) -> Syntax:
    """Return the syntax, read off a probe call that the chat template renders.

    Raises UnsupportedModel: the template takes no tool calls, does not write them as JSON between two marks, or marks them
    with special tokens, which are no part of an answer's text.
    """
    rendered = template_of(engine).answer("", [PROBE_CALL])
    for start in (i for i, char in enumerate(rendered) if char == "{"):
        try:
            parsed, end = _JSON.raw_decode(rendered, start)
        except json.JSONDecodeError:
            continue
        fields = {key: value for key, value in parsed.items() if isinstance(value, str | dict)}
        name = next((k for k, v in fields.items() if v == _NAME), None)
        arguments = next((k for k, v in fields.items() if v == _ARGUMENTS), None)
        opening, closing = rendered[:start].strip(), rendered[end:].strip()
        if name is None or arguments is None or not opening or not closing or set("{[") & set(opening):
            break
        if not is_plain_text(engine, opening):
            raise UnsupportedModel(f"the chat template marks tool calls with the special token {opening!r}")
        return Syntax(opening, closing, name, arguments)
    raise UnsupportedModel(f"the chat template must write tool calls as JSON between two marks, got {rendered!r}")


class Reader:
    """Incremental reader of an answer: text, calls, and malformed calls."""

    def __init__(self, syntax: Syntax | None) -> None:
        self._syntax = syntax
        self._at = 0
        self._after_call = False

    def read(self, text: str, *, last: bool = False) -> list[Part]:
        """Return the parts that became final with this text.

        Args:
            text: the whole answer so far; it must begin with what was passed before.
            last: whether nothing follows.
        """
        text = text if last else text.rstrip("\ufffd")  # half a character: its text changes with the next token
        parts: list[Part] = []
        while True:
            at = -1 if self._syntax is None else text.find(self._syntax.opening, self._at)
            self._read_text(text, at, last, parts)
            if at < 0 or not self._read_call(text, last, parts):
                return parts

    def _read_text(self, text: str, call: int, last: bool, parts: list[Part]) -> None:
        if call < 0:  # an end that may become the opening of a call is held back
            marks = [] if self._syntax is None else [self._syntax.opening]
            visible = until_stop(text[self._at :], marks, last=last)[0]
        else:
            visible = text[self._at : call]
        end = self._at + len(visible)
        if self._after_call:
            visible = visible.lstrip()
        if self._syntax is not None and (call >= 0 or not last):
            # Blanks in front of a call belong to it.
            end -= 0 if call >= 0 else len(visible) - len(visible.rstrip())
            visible = visible.rstrip()
        if visible:
            parts.append(visible)
            self._after_call = False
        self._at = max(self._at, end)

    def _read_call(self, text: str, last: bool, parts: list[Part]) -> bool:
        """Read the call that begins here; return False if more text is needed first."""
        syntax = self._syntax
        assert syntax is not None
        begin = self._at + len(syntax.opening)
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        closed = _outside_strings(text, syntax.closing, begin)
        if closed < 0 and not last:
            return False
        parsed: Any = None
        with suppress(json.JSONDecodeError):
            parsed, end = _JSON.raw_decode(text, begin)
            if text[end : closed if closed >= 0 else len(text)].strip():
                parsed = None  # there is more than the object
        after = len(text) if closed < 0 else closed + len(syntax.closing)
        parts.append(_call(syntax, parsed, text[self._at : after], complete=closed >= 0))
        self._at, self._after_call = after, True
        return True


def _call(syntax: Syntax, parsed: Any, raw: str, *, complete: bool) -> Part:
    identity = f"call_{uuid.uuid4().hex[:24]}"
    parsed = parsed if isinstance(parsed, dict) else {}
    name, arguments = parsed.get(syntax.name), parsed.get(syntax.arguments, {})
    if isinstance(arguments, str):
        with suppress(json.JSONDecodeError):
            arguments = json.loads(arguments)
    if isinstance(name, str) and name and isinstance(arguments, dict):
        return ToolCall(name, arguments, identity)
    want = f"{{{syntax.name!r}: a name, {syntax.arguments!r}: an object}}"
    error = f"a tool call must be JSON {want}" + ("" if complete else ", and this one was not finished")
    return BrokenCall(name if isinstance(name, str) else None, raw, error, identity)


def _outside_strings(text: str, mark: str, start: int) -> int:
    """Return the index of ``mark`` outside JSON strings, which may contain it; -1 if there is none (yet)."""
    for match in re.compile(rf'({re.escape(mark)})|"(?:[^"\\]|\\.)*("?)', re.DOTALL).finditer(text, start):
        if match[1] or not match[2]:
            return match.start() if match[1] else -1
    return -1

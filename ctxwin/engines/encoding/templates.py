"""Prompt pieces extracted from a model's own chat template by rendering it with sentinels.

A window needs the template in pieces that can be combined in any order: the opening (*system prompt*), the closing (*query*),
and the turns around a whole message. `Template` renders small conversations whose texts are sentinels, cuts the result at the
sentinels, and compares. Where an earlier turn reads differently once later turns follow (stripped thinking, numbered
pictures, a dropped system turn), there is no such piece, and requesting it raises UnsupportedModel with the reason.

Pieces are tokenised separately; "the same prompt" means the same token ids.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2

from ctxwin.errors import UnsupportedModel

Render = Callable[..., str]
"""``(messages, add_generation_prompt[, tools])`` to text; tools are JSON schemas in OpenAI's form."""

IMAGE = {"type": "image"}
_SYSTEM, _USER, _LATER, _LAST = "CTXWINSYS", "CTXWINUSER", "CTXWINLATER", "CTXWINLAST"
_ONE, _TWO = "CTXWINONE", "CTXWINTWO"
_WITH_SYSTEM = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}]
PROBE_CALL: dict[str, Any] = {
    "id": "CTXWINABC",
    "type": "function",
    "function": {"name": "CTXWINNAME", "arguments": {"CTXWINKEY": "CTXWINVALUE"}},
}
"""A tool call for probing how the template writes one."""
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
"""Errors that a Jinja template raises for a conversation that it does not accept."""


@dataclass(frozen=True)
class ToolTurn:
    """Template text around the results of tool calls.

    Attributes:
        opening: between the answer with the calls and the first result.
        between: between two results.
        tail: between the last result and the closing that asks for the next answer.
        reopening: between the last result and a user's text.
    """

    opening: str
    between: str
    tail: str
    reopening: str


class Template:
    """The pieces of one chat template.

    Without a chat template (a base model) pieces are plain concatenation: the system prompt and a newline, chunks as they are,
    the query and a newline; there are no turns, so messages are refused.

    Args:
        render: renders messages; None where the tokenizer has no chat template.
        image: texts of the tokens that open, stand for and close a picture (``<|vision_start|>``, ``<|image_pad|>``,
            ``<|vision_end|>``); None without vision.

    Raises:
        UnsupportedModel: the template cannot be cut into an opening and a closing at all.
    """

    def __init__(self, render: Render | None, image: tuple[str, str, str] | None = None) -> None:
        self._render = render
        self._lists = False
        self._image = image
        self._turns: Callable[[str], tuple[str, str]] = cache(self._read_turns)
        self._picture: Callable[[], str] = cache(self._read_picture)
        self._tools: Callable[[], ToolTurn] = cache(self._read_tool_turn)
        self._failure = ""  # the template's own error, of its last rendering that failed
        if render is None:
            self._opening, self._closing = "", "\n"
            return
        cut = self._cut([_user(_USER)], _USER)
        if cut is None:  # SmolVLM's template takes contents as lists only
            self._lists = True
            cut = self._cut([_user(_USER)], _USER)
        if cut is None:
            raise UnsupportedModel(
                f"the chat template must show a user message as it is, to be cut into pieces, and does not{self._failure}"
            )
        self._opening, self._closing = cut

    @property
    def plain(self) -> bool:
        """True if there is no chat template."""
        return self._render is None

    def system_prompt(self, text: str) -> tuple[str, str]:
        """Return the template text before and after ``text`` in the system prompt, up to the opening of the user turn.

        An empty text gives the opening that the template makes without a system message. Raises UnsupportedModel where
        the template has no system turn.
        """
        if self._render is None:
            return ("", "\n") if text else ("", "")
        if not text:
            return (self._opening, "")
        return self._system()

    @property
    def closing(self) -> str:
        """Template text after a query: the end of the user turn and the opening of the assistant's."""
        return self._closing

    def picture(self) -> tuple[str, str]:
        """Return the template text before and after the placeholders of one picture: its opening and closing tokens, and text.

        Where the template writes the placeholder without the opening token, the model's processor adds both tokens
        right around it (InternVL). Raises UnsupportedModel where the template numbers pictures or drops them.
        """
        if self._image is None:
            raise UnsupportedModel("the model does not see pictures")
        start, pad, end = self._image
        opening, _, after = self._picture().partition(pad)
        return (opening, after) if start in opening else (opening + start, end + after)

    def turns(self, role: str) -> tuple[str, str]:
        """Return the template text around a message of ``role``: closing the open user turn, and opening a new one.

        Raises UnsupportedModel where the template has no such turn, or writes it differently depending on its place.
        """
        return self._turns(role)

    def check_message(self, role: str, content: str | Sequence[dict[str, Any]]) -> None:
        """Raise UnsupportedModel where the template rewrites this content (strips thinking, for example)."""
        opening, closing = self.turns(role)
        if not isinstance(content, str) and self._image is not None and self._picture_in_front() is not None:
            content = "".join(block.get("text", "") for block in content)  # pictures keep their position in the window
        content_text = content if isinstance(content, str) else "".join(self._block_text(block) for block in content)
        pieces = self._cut([*self._base(), {"role": role, "content": content}, _user(_LAST)], _USER, _LAST)
        got = None if pieces is None else pieces[1]
        want = f"{opening}{content_text}{closing}"
        if got is None or _loose(got, opening, closing) != content_text.strip() or not got.startswith(opening):
            raise UnsupportedModel(
                f"the chat template rewrites an earlier {role} turn: {_near(want, got or '')}; pass the content in the form "
                "that the template gives it (for example without the thinking part)"
            )

    def exchange(self, answer: str) -> tuple[str, str, str]:
        """Return an earlier assistant turn with ``answer``: its opening, its content, and its end with a reopened user turn.

        Opening and content are `closing` and ``answer`` unless the template writes them differently there, as where it drops
        thinking. Raises UnsupportedModel where it has no such turn, whatever the answer.
        """
        if self._render is None:
            return self._closing, answer, "\n"
        opening, after = self.turns("assistant")
        with suppress(UnsupportedModel):  # a template that refuses this very answer shows it in no other form
            shown = self.answer(answer)
            answer = answer if shown.strip() == answer.strip() else shown  # blanks at the ends may be trimmed
        # SmolVLM's answers themselves begin with a space; LLaVA-OneVision's template adds one after earlier roles.
        opening = self._closing if _unspaced(opening) == _unspaced(self._closing) else opening
        return opening, answer, after

    def system(self, text: str, tools: Sequence[dict[str, Any]]) -> str:
        """Return the system prompt that renders as the template's own system turn with ``text`` and ``tools``.

        Raises UnsupportedModel where the template takes no tools, or writes them outside the system turn.
        """
        if self._render is None:
            raise UnsupportedModel("the tokenizer has no chat template, so tools cannot be offered to the model")
        opening, closing = self._system()
        messages = [*([{"role": "system", "content": _SYSTEM}] if text else []), _user(_USER)]
        plain, with_tools = self._cut(messages, _USER), self._cut(messages, _USER, tools=list(tools))
        if with_tools is None or with_tools == plain:
            raise UnsupportedModel("the chat template takes no tools; use a model that was trained to call tools")
        front, behind = with_tools
        turn = front[len(opening) : len(front) - len(closing)]
        framed = front.startswith(opening) and front.endswith(closing) and behind == self._closing
        if not framed or turn.count(_SYSTEM) != bool(text):
            raise UnsupportedModel("the chat template shows tools elsewhere than in the system turn, the system prompt")
        return turn.replace(_SYSTEM, text) if text else turn

    def answer(self, text: str, calls: Sequence[dict[str, Any]] = ()) -> str:
        """Return the content of an earlier assistant turn with ``text`` and tool ``calls``.

        Raises UnsupportedModel where it takes no tool calls.
        """
        if self._render is None:
            if calls:
                raise UnsupportedModel("the tokenizer has no chat template, so tool calls cannot be shown to the model")
            return text
        if not text and not calls:
            return ""
        opening, closing = self.turns("assistant")
        pieces = self._cut([*self._base(), _answer(text, calls), _user(_LAST)], _USER, _LAST)
        if pieces is None or not pieces[1].startswith(opening) or not pieces[1].endswith(closing):
            raise UnsupportedModel(f"the chat template does not show an answer with {len(calls)} tool calls")
        body = pieces[1][len(opening) : len(pieces[1]) - len(closing)]
        if calls and body.strip() == text.strip():
            raise UnsupportedModel("the chat template drops tool calls; use a model that was trained to call tools")
        return body

    def tool_turn(self) -> ToolTurn:
        """Return the template text around tool results; raise UnsupportedModel where it depends on their position."""
        return self._tools()

    def _read_tool_turn(self) -> ToolTurn:
        if self._render is None:
            raise UnsupportedModel("the tokenizer has no chat template, so a tool result has no turn to be")
        opening, closing = self.turns("assistant")
        head = opening + self.answer("", [PROBE_CALL])
        base = [*self._base(), _answer("", [PROBE_CALL])]
        pending = self._cut([*base, _result(_ONE)], _USER, _ONE)
        reopened = self._cut([*base, _result(_ONE), _user(_LAST)], _USER, _ONE, _LAST)
        twice = self._cut([*base, _result(_ONE), _result(_TWO), _user(_LAST)], _USER, _ONE, _TWO, _LAST)
        answered = self._cut([*base, _result(_ONE), _answer(_TWO, ()), _user(_LAST)], _USER, _ONE, _TWO, _LAST)
        if pending is None or reopened is None or twice is None or answered is None:
            raise UnsupportedModel("the chat template has no turn for tool results")
        tail = pending[2].removesuffix(self._closing)
        turn = ToolTurn(pending[1].removeprefix(head), twice[2], tail, reopened[2])
        if (
            pending[1] != head + turn.opening
            or pending[2] != tail + self._closing
            or {reopened[1], twice[1], answered[1]} != {pending[1]}
            or twice[3] != turn.reopening
            or answered[2:4] != [tail + opening, closing]
        ):
            raise UnsupportedModel("the chat template writes tool results differently depending on their place")
        return turn

    def _cut(self, messages: list[dict[str, Any]], *sentinels: str, tools: Any = None) -> list[str] | None:
        """Render ``messages`` and split the text at the sentinels; None where one is missing, doubled or out of order."""
        assert self._render is not None
        if self._lists:
            messages = [{**m, "content": _listed(m["content"])} for m in messages]
        try:
            rest = self._render(messages, True) if tools is None else self._render(messages, True, tools)
        except _REFUSALS as error:
            self._failure = f": {error}"
            return None
        if any(rest.count(s) != 1 for s in sentinels):
            return None
        parts = []
        for sentinel in sentinels:
            head, sentinel_found, rest = rest.partition(sentinel)
            if not sentinel_found:
                return None
            parts.append(head)
        return [*parts, rest]

    def _base(self) -> list[dict[str, Any]]:
        """Return the turns before a probed one, with a system turn where the template has one."""
        return _WITH_SYSTEM if self._cut(_WITH_SYSTEM, _SYSTEM, _USER) else [_user(_USER)]

    def _system(self) -> tuple[str, str]:
        cut = self._cut(_WITH_SYSTEM, _SYSTEM, _USER)
        if cut is None:
            raise UnsupportedModel(
                'the chat template has no system turn (it refuses or drops a system message); use system_prompt="" and put '
                "the instructions into the first chunk"
            )
        if cut[2] != self._closing:
            raise UnsupportedModel("the chat template closes the user turn differently where there is a system turn")
        return cut[0], cut[1]

    def _read_turns(self, role: str) -> tuple[str, str]:
        if self._render is None:
            raise UnsupportedModel(
                "the tokenizer has no chat template, so a message has no turn to be; use Chunk.text for plain text"
            )
        base = self._base()
        plain = self._cut(base, _USER)
        once = self._cut([*base, {"role": role, "content": _ONE}, _user(_LATER)], _USER, _ONE, _LATER)
        if plain is None or once is None:
            raise UnsupportedModel(f"the chat template has no {role} turn behind a user turn to close and reopen")
        if once[0] != plain[0]:
            raise UnsupportedModel(f"the chat template rewrites what comes before when a {role} turn follows")
        later_turns = [{"role": role, "content": _ONE}, _user(_LATER), {"role": role, "content": _TWO}, _user(_LAST)]
        twice = self._cut([*base, *later_turns], _USER, _ONE, _LATER, _TWO, _LAST)
        if twice is None or twice[:3] != once[:3] or twice[1:3] != twice[3:5] or twice[5] != once[3]:
            raise UnsupportedModel(f"the chat template writes a {role} turn differently depending on its place")
        if once[3] != self._closing:
            raise UnsupportedModel("the chat template closes a later user turn differently from the first")
        return once[1], once[2]

    def _read_picture(self) -> str:
        """Return the template's text for a picture, the same at any position; SmolVLM's omits a space directly after a role."""
        assert self._image is not None
        if self._render is None:
            return "".join(self._image)
        moved = self._picture_in_front()
        if moved is not None:
            return moved
        content = [IMAGE, {"type": "text", "text": _ONE}, IMAGE, {"type": "text", "text": _LAST}]
        cut = self._cut([{"role": "user", "content": content}], _ONE, _LAST)
        if cut is None or cut[1].count(self._image[1]) != 1:
            raise UnsupportedModel("the chat template does not take pictures between texts")
        if _unspaced(cut[0]) != _unspaced(self._opening + cut[1]) or cut[2] != self._closing:
            raise UnsupportedModel(
                "the chat template numbers its pictures or writes them differently depending on their place: "
                f"{_near(cut[0].removeprefix(self._opening), cut[1])}; a picture must read the same wherever it stands"
            )
        return cut[1]

    def _picture_in_front(self) -> str | None:
        """Return the text for a picture where the template moves pictures before a message's text (LLaVA); else None.

        The template orders a single message so; these models accept a picture and a line break anywhere in the text.
        """
        assert self._image is not None
        start, pad, _ = self._image
        cut = self._cut([{"role": "user", "content": [{"type": "text", "text": _ONE}, IMAGE]}], _ONE)
        if cut is None or cut[0].count(pad) != 1 or pad in cut[1]:
            return None
        front, _, after = cut[0].partition(pad)
        mark = start if front.endswith(start) else ""
        return mark + pad + after if _unspaced(front.removesuffix(mark)) == _unspaced(self._opening) else None

    def _block_text(self, block: dict[str, Any]) -> str:
        if block["type"] == "text":
            return str(block["text"])
        return self._picture() if self._image is not None else ""


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _listed(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _unspaced(text: str) -> str:
    return "".join(text.split())


def _answer(text: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})


def _result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": "CTXWINNAME", "tool_call_id": PROBE_CALL["id"]}


def _loose(got: str, opening: str, closing: str) -> str:
    """Return the content between ``opening`` and ``closing``, without the whitespace a template may trim at its ends."""
    return got[len(opening) : len(got) - len(closing)].strip() if got.endswith(closing) else "\0"


def _near(want: str, got: str) -> str:
    """Return both texts from their first difference, shortened for an error message."""
    at = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got)))
    begin = max(at - 10, 0)
    return f"{want[begin : at + 30]!r} becomes {got[begin : at + 30]!r}"

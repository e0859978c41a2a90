"""Chats whose histories are edited as clients edit them.

A `History` is a short program: a route, and steps that edit a conversation and then ask. It is data, drawn by `histories`, so
that Hypothesis can shrink one that fails; `serve.history_runner` asks its requests.

What the server does with a request before vLLM sees it (``context_management``, compaction) is written down here a second time,
as plainly as possible, for the oracle has to ask what comes out of it.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from ctxwin.tiny import world
from ctxwin_chats.compaction import INSTRUCTIONS
from ctxwin_chats.context_management import CLEARED

Route = Literal["chat", "responses", "messages"]
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
HEADING = "Summary of the conversation so far:\n\n"
_WORDS = ("step", "color of", "shape of", "now", "frame", "look at", "what is", "the screen")

Part = tuple[str, int, int]
"""``("text", word, number)``, ``("picture", number, 0)``, ``("gone", number, 0)`` (a picture that a text stands for)."""


@dataclass(frozen=True)
class Turn:
    """One turn, whatever the route calls it.

    Attributes:
        role: ``user``, ``assistant``, ``developer``, ``calls`` (an assistant's, of tools) or ``results``.
        parts: what was said; of ``results`` those of each call, in the order in which they are sent.
        calls: ids of calls, in the same order.
        text: what an assistant answered.
        summary: of a compaction that came with the answer.
    """

    role: str
    parts: tuple[Any, ...] = ()
    calls: tuple[str, ...] = ()
    text: str = ""
    summary: str | None = None


@dataclass(frozen=True)
class Edit:
    """One edit of a history; ``at`` and ``pick`` are taken modulo what there is."""

    kind: str
    at: int
    pick: int


EDITS = ("drop", "to_text", "to_picture", "swap_results", "repeat", "edit_text", "clock", "in_front", "swap_turns")


@dataclass(frozen=True)
class Step:
    """Edits, then a request.

    Attributes:
        track: which of the two conversations.
        turn: what is new: ``user``, ``tools`` (two parallel calls and their results), ``developer`` (and a question), or
            ``again``, which asks as before.
        parts: of what is new.
        leaves: when the client closes its connection: never, before the answer, or in the stream.
        manages: what ``context_management`` asks for.
    """

    turn: str
    parts: tuple[Part, ...]
    edits: tuple[Edit, ...]
    streamed: bool
    track: int
    leaves: Literal["", "before", "stream"]
    manages: Literal["", "results", "pictures", "compact"]
    keep: int


@dataclass(frozen=True)
class History:
    """A program of edits and requests.

    Attributes:
        named: whether the client names the conversation; both tracks have the same name.
        blocks: whether the system prompt comes as blocks with ``cache_control``.
        fresh: whether its pictures were never seen by the server.
        shared: whether the ways to ask share vLLM's prefix cache, as requests without a salt do.
        twins: whether both tracks have the same system prompt.
        first: which of the ways to ask goes first, and so pays for what nothing has seen before.
    """

    route: Route
    named: bool
    blocks: bool
    fresh: bool
    shared: bool
    twins: bool
    first: int
    steps: tuple[Step, ...]


_parts = st.one_of(
    st.tuples(st.just("text"), st.integers(0, len(_WORDS) - 1), st.integers(0, 3)),
    st.tuples(st.just("picture"), st.integers(0, 7), st.just(0)),
)
_edits = st.builds(Edit, st.sampled_from(EDITS), st.integers(0, 9), st.integers(0, 7))
_steps = st.builds(
    Step,
    turn=st.sampled_from(("user", "user", "user", "tools", "tools", "developer", "again")),
    parts=st.lists(_parts, min_size=1, max_size=3).map(tuple),
    edits=st.lists(_edits, max_size=2).map(tuple),
    streamed=st.booleans(),
    track=st.sampled_from((0, 0, 0, 1)),
    leaves=st.sampled_from(("", "", "", "", "", "", "before", "stream")),
    manages=st.sampled_from(("", "", "", "", "", "", "", "", "results", "pictures", "compact")),
    keep=st.integers(0, 3),
)
histories: st.SearchStrategy[History] = st.builds(
    History,
    route=st.sampled_from(("chat", "responses", "messages")),
    named=st.booleans(),
    blocks=st.booleans(),
    fresh=st.booleans(),
    shared=st.sampled_from((False, False, False, True)),
    twins=st.booleans(),
    first=st.integers(0, 2),
    steps=st.lists(_steps, min_size=3, max_size=8).map(tuple),
)


@dataclass(frozen=True)
class Conversation:
    """What a client holds; immutable, so that requests of it can be made again."""

    system: str
    clock: int = 0
    turns: tuple[Turn, ...] = ()

    def extended(self, *turns: Turn) -> Conversation:
        return replace(self, turns=(*self.turns, *turns))

    def edited(self, edit: Edit) -> Conversation:
        """This conversation behind an edit; the same one where there is nothing of the kind."""
        turns = list(self.turns)
        if edit.kind == "clock":
            return replace(self, clock=self.clock + 1)
        if not turns:
            return self
        at = edit.at % len(turns)
        if edit.kind == "drop":
            del turns[at]
        elif edit.kind == "swap_turns":
            other = edit.pick % len(turns)
            turns[at], turns[other] = turns[other], turns[at]
        elif edit.kind == "swap_results":
            pairs = [i for i, turn in enumerate(turns) if turn.role == "results"]
            if pairs:
                at = pairs[edit.at % len(pairs)]
                old = turns[at]
                turns[at] = replace(old, parts=old.parts[::-1], calls=old.calls[::-1])
        elif edit.kind in ("to_text", "to_picture", "edit_text"):
            return self._with_part_changed(edit)
        else:
            pictures = [p for turn in turns for p in _parts_of(turn) if p[0] == "picture"]
            new = ("picture", edit.pick, 0)
            if edit.kind == "repeat" and pictures:
                new = pictures[edit.pick % len(pictures)]
            users = [i for i, turn in enumerate(turns) if turn.role == "user"]
            if users:
                at = users[edit.at % len(users)]
                turns[at] = replace(turns[at], parts=(new, *turns[at].parts))
        return replace(self, turns=tuple(turns))

    def asking(self, step: Step, number: int) -> Conversation:
        """This conversation behind a step's edits, with what is new in the request; ``number`` is the request's."""
        conversation = self
        for edit in step.edits:
            conversation = conversation.edited(edit)
        question = Turn("user", (("text", 1, number),))
        match step.turn:
            case "again":
                turns = conversation.turns
                if turns and turns[-1].role == "assistant":
                    turns = turns[:-1]
                conversation = replace(conversation, turns=turns)
                if turns and turns[-1].role in ("user", "results"):
                    return conversation
                return conversation.extended(question)
            case "tools":
                calls = f"call_{number}a", f"call_{number}b"
                results = step.parts, (("text", 4, number), *step.parts[1:])
                return conversation.extended(Turn("calls", calls=calls), Turn("results", results, calls))
            case "developer":
                rules = tuple(part for part in step.parts if part[0] == "text")
                return conversation.extended(Turn("developer", rules or (("text", 0, number),)), question)
        return conversation.extended(replace(question, parts=(*step.parts, *question.parts)))

    def _with_part_changed(self, edit: Edit) -> Conversation:
        changes: dict[str, tuple[str, Callable[[Part], Part]]] = {
            "to_text": ("picture", lambda part: ("gone", part[1], 0)),
            "to_picture": ("gone", lambda part: ("picture", part[1], 0)),
            "edit_text": ("text", lambda part: ("text", part[1], part[2] + 1 + edit.pick)),
        }
        kind, change = changes[edit.kind]
        count = sum(part[0] == kind for turn in self.turns for part in _parts_of(turn))
        if not count:
            return self
        remaining = edit.at % count

        def changed(part: Part) -> Part:
            nonlocal remaining
            if part[0] != kind:
                return part
            remaining -= 1
            return change(part) if remaining == -1 else part

        return self.mapped(changed)

    def mapped(self, change: Callable[[Part], Part]) -> Conversation:
        """With each part changed, the oldest first."""
        turns = []
        for turn in self.turns:
            if turn.role == "results":
                turn = replace(turn, parts=tuple(tuple(map(change, parts)) for parts in turn.parts))
            elif turn.parts:
                turn = replace(turn, parts=tuple(map(change, turn.parts)))
            turns.append(turn)
        return replace(self, turns=tuple(turns))

    def cleared(self, what: str, keep: int) -> Conversation:
        """As `context_management` leaves it: all but the newest ``keep`` are a text."""
        pictures = sum(part[0] == "picture" for turn in self.turns for part in _parts_of(turn))
        results = sum(len(turn.parts) for turn in self.turns if turn.role == "results")
        if what == "pictures":
            remaining = pictures - keep

            def changed(part: Part) -> Part:
                nonlocal remaining
                if part[0] != "picture":
                    return part
                remaining -= 1
                return ("cleared", 0, 0) if remaining >= 0 else part

            return self.mapped(changed)
        remaining, turns = results - keep, []
        for turn in self.turns:
            if turn.role == "results":
                old = max(0, min(remaining, len(turn.parts)))
                remaining -= len(turn.parts)
                turn = replace(turn, parts=((("cleared", 0, 0),),) * old + turn.parts[old:])
            turns.append(turn)
        return replace(self, turns=tuple(turns))


def _parts_of(turn: Turn) -> Sequence[Part]:
    return [part for parts in turn.parts for part in parts] if turn.role == "results" else turn.parts


@cache
def _png(number: int, tag: int) -> str:
    """Base64 of a picture; pictures of another tag differ in one pixel."""
    frames = world.make_stream(seed=11, n_frames=8)
    pixels = np.array(world.render(frames[number % 8]))
    pixels[0, 0] = tag % 251, tag // 251 % 251, tag // 63001 % 251
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@dataclass(frozen=True)
class Bodies:
    """Makes the bodies of one history's requests.

    Attributes:
        tag: of its pictures.
    """

    route: Route
    blocks: bool
    tag: int

    def part(self, part: Part, role: str = "user") -> dict[str, Any]:
        kind, number, extra = part
        text_type = "text" if self.route != "responses" else "output_text" if role == "assistant" else "input_text"
        if kind != "picture":
            texts = {"text": f"{_WORDS[number % len(_WORDS)]} {extra} ", "gone": f"[screenshot {number}]"}
            return {"type": text_type, "text": texts.get(kind, CLEARED)}
        data = _png(number, self.tag)
        if self.route == "chat":
            return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        if self.route == "responses":
            return {"type": "input_image", "image_url": f"data:image/png;base64,{data}", "detail": "auto"}
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    def parts(self, parts: Sequence[Part], role: str = "user") -> list[dict[str, Any]]:
        return [self.part(part, role) for part in parts]

    def messages(self, turn: Turn) -> list[dict[str, Any]]:
        """A turn as the route's messages or items."""
        return {"chat": self._chat, "responses": self._responses, "messages": self._messages}[self.route](turn)

    def _chat(self, turn: Turn) -> list[dict[str, Any]]:
        if turn.role == "calls":
            function = {"name": "shot", "arguments": "{}"}
            calls = [{"id": name, "type": "function", "function": function} for name in turn.calls]
            return [{"role": "assistant", "content": None, "tool_calls": calls}]
        if turn.role == "results":
            return [
                {"role": "tool", "tool_call_id": name, "content": self.parts(parts)}
                for name, parts in zip(turn.calls, turn.parts, strict=True)
            ]
        return [{"role": turn.role, "content": turn.text or self.parts(turn.parts)}]

    def _responses(self, turn: Turn) -> list[dict[str, Any]]:
        if turn.role == "calls":
            return [
                {"type": "function_call", "call_id": name, "name": "shot", "arguments": "{}"} for name in turn.calls
            ]
        if turn.role == "results":
            return [
                {"type": "function_call_output", "call_id": name, "output": self.parts(parts)}
                for name, parts in zip(turn.calls, turn.parts, strict=True)
            ]
        message = {"role": turn.role, "content": turn.text or self.parts(turn.parts)}
        if turn.summary is None:
            return [message]
        sealed = "ctxwin:" + base64.b64encode(turn.summary.encode()).decode()
        return [{"type": "compaction", "id": "cmp_1", "encrypted_content": sealed}, message]

    def _messages(self, turn: Turn) -> list[dict[str, Any]]:
        if turn.role == "calls":
            calls = [{"type": "tool_use", "id": name, "name": "shot", "input": {}} for name in turn.calls]
            return [{"role": "assistant", "content": calls}]
        if turn.role == "results":
            results = [
                {"type": "tool_result", "tool_use_id": name, "content": self.parts(parts)}
                for name, parts in zip(turn.calls, turn.parts, strict=True)
            ]
            return [{"role": "user", "content": results}]
        role = "system" if turn.role == "developer" else turn.role
        if turn.summary is not None:
            block = {"type": "compaction", "content": turn.summary}
            return [{"role": role, "content": [block, {"type": "text", "text": turn.text}]}]
        return [{"role": role, "content": turn.text or self.parts(turn.parts)}]

    def request(self, conversation: Conversation, *, most: int, stream: bool) -> dict[str, Any]:
        """A whole request."""
        system: Any = f"{conversation.system} It is 12:{conversation.clock:02d}."
        turns = [message for turn in conversation.turns for message in self.messages(turn)]
        if self.blocks and self.route != "responses":
            system = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
        body: dict[str, Any] = {"model": "tiny", "temperature": 0, "stream": stream}
        if self.route == "chat":
            body |= {"messages": [{"role": "system", "content": system}, *turns], "max_tokens": most}
            body |= {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "ignore_eos": True}
            body |= {"stream_options": {"include_usage": True}} if stream else {}
        elif self.route == "responses":
            body |= {"instructions": system, "input": turns, "max_output_tokens": most, "store": False}
            body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        else:
            body |= {"system": system, "messages": turns, "max_tokens": most}
        return body

    def management(self, step: Step) -> dict[str, Any]:
        """The field that asks for what `Step.manages` says."""
        if step.manages == "compact":
            if self.route == "chat":  # which has none
                return {}
            if self.route == "responses":
                return {"context_management": [{"type": "compaction", "compact_threshold": 0}]}
            trigger = {"type": "input_tokens", "value": 0}
            return {"context_management": {"edits": [{"type": "compact_20260112", "trigger": trigger}]}}
        if step.manages == "pictures":
            edit: dict[str, Any] = {"type": "clear_images", "keep": {"type": "images", "value": step.keep}}
        elif step.manages == "results":
            trigger = {"type": "input_tokens", "value": 0}
            keep = {"type": "tool_uses", "value": step.keep}
            edit = {"type": "clear_tool_uses_20250919", "trigger": trigger, "keep": keep}
        else:
            return {}
        return {"context_management": {"edits": [edit]}}

    def summarising(self, body: dict[str, Any], most: int) -> dict[str, Any]:
        """The request that has the model write the summary of another request."""
        name, limit = ("messages", "max_tokens") if self.route == "messages" else ("input", "max_output_tokens")
        turns, kind = list(body[name]), "text" if self.route == "messages" else "input_text"
        if turns[-1].get("role") == "user":
            turns[-1] = {**turns[-1], "content": [*turns[-1]["content"], {"type": kind, "text": INSTRUCTIONS}]}
        else:
            turns.append({"role": "user", "content": INSTRUCTIONS})
        return {**body, name: turns, limit: most, "stream": False}

    def summarised(self, body: dict[str, Any], summary: str) -> dict[str, Any]:
        """A request in which the summary stands for all but the last turn."""
        name, kind = ("messages", "text") if self.route == "messages" else ("input", "input_text")
        *old, last = body[name]
        rules = [turn for turn in old if turn.get("role") in ("system", "developer")]
        parts = last["content"] if last.get("role") == "user" else []
        if any(part["type"] == "tool_result" for part in parts):  # their calls are in the summary
            parts = []
        content: Any = [{"type": kind, "text": HEADING + summary}, *parts]
        return {**body, name: [*rules, {"role": "user", "content": content if parts else HEADING + summary}]}

"""Answers that look things up on the way: a call of `look_up` is answered with what a library finds, and the answer goes on.

After MPIC (section 3.1, dynamic library: the model itself decides during decoding that it needs a reference, which is then
linked): question and answer so far keep the KV that they were computed with, and what is found is placed behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ctxwin.chunk import Chunk
from ctxwin.errors import UnsupportedModel
from ctxwin.window.answer import Answer, BrokenCall, LookUp, ToolCall, Usage
from ctxwin.window.ask import exchange
from ctxwin.window.toolcalls import Reader, Syntax, spelled, template_of

if TYPE_CHECKING:
    from ctxwin.policies.base import LibraryView, Searchable
    from ctxwin.window.ask import OnToken, Question
    from ctxwin.window.window import Window

NAME = "look_up"
MOST, HITS = 4, 4
"""Look-ups of one answer, and passages of each."""


def tool(libraries: Sequence[Searchable]) -> dict[str, Any]:
    """What the model is shown. Raises ValueError where two libraries have one name."""
    names = [library.name for library in libraries]
    if len(set(names)) < len(names):
        raise ValueError(f"libraries must have different names, got {names}")
    words = {"type": "string", "description": "What to look for, in a few words."}
    properties = {"query": words, "library": {"type": "string", "enum": names}}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    description = "Looks something up in a library. What is found is shown to you before you go on."
    return {"type": "function", "function": {"name": NAME, "description": description, "parameters": parameters}}


class LookUps:
    """One answer with its look-ups, in a branch of its own.

    Attributes:
        versions: of the libraries that a window has opened; it goes on reading them. Those opened here are added.
    """

    def __init__(self, question: Question, syntax: Syntax, versions: dict[str, int]) -> None:
        self._question, self._syntax, self.versions = question, syntax, versions
        self._libraries = {library.name: library for library in question.libraries}
        self._views: dict[str, LibraryView] = {}
        self._ended = False  # by who listens

    def answer(
        self, branch: Window, on_token: OnToken | None, stopped: Callable[[], bool]
    ) -> tuple[Answer, list[Chunk]]:
        """The whole answer, and the chunks that it becomes where it is remembered: its parts, and what was found between.

        Raises like `Window.ask`, BudgetExceeded also where it cannot go on behind a look-up; UnsupportedModel where the chat
        template has no turn for what is found.
        """
        before = len(branch.ids)
        parts, done, query = [self._part(branch, [], on_token, stopped)], list[LookUp](), self._question.query
        with ExitStack() as stack:
            talk = branch
            while (remembered := parts[-1].remembered) is not None:
                turn = template_of(branch.engine).tool_turn()
                if talk is branch:  # which must not grow
                    talk = stack.enter_context(closing(branch.fork()))
                    branch.core.take_back(remembered)
                if not self._left(parts):
                    break
                query = turn.tail
                reserve = branch.engine.encode_query(query).tokens + self._left(parts)
                for i, call in enumerate(self._calls(parts[-1].text)):
                    if i:
                        talk.append(Chunk.tokens(branch.engine.template_ids(turn.between)))
                    done.append(self._linked(talk, call, reserve))
                parts.append(self._part(talk, parts, on_token, stopped))
            behind = [placed.chunk for placed in talk.core.state.placed[before:]]
        behind = behind[:-1] if parts[-1].remembered else behind
        return self._whole(parts, done), [*behind, exchange(branch.engine, query, parts[-1].token_ids)[0]]

    def _part(
        self, window: Window, before: Sequence[Answer], on_token: OnToken | None, stopped: Callable[[], bool]
    ) -> Answer:
        """The answer up to its end, or up to look-ups; then it is remembered."""
        question, after, goes_on = self._question, None, False
        if question.libraries:
            turn = template_of(window.engine).tool_turn()
            if not spelled(window.engine, turn.tail):
                raise UnsupportedModel(
                    "the chat template ends tool results with special tokens, which a query cannot hold"
                )
            after, goes_on = turn.opening, len(before) < MOST
        asked = replace(
            question,
            query=turn.tail if before else question.query,
            bare=bool(before),
            sampling=replace(question.sampling, max_tokens=self._left(before)),
            libraries=(),
            tools=(),
            remember=(lambda text: not self._ended and bool(self._calls(text))) if goes_on else False,
            after=after,
        )
        return window.answer(asked, on_token=on_token and self._heard(on_token, before), stopped=stopped)

    def _left(self, parts: Sequence[Answer]) -> int:
        """Tokens that the answer may still have."""
        return self._question.sampling.max_tokens - sum(len(part.token_ids) for part in parts)

    def _calls(self, text: str) -> list[ToolCall]:
        """The look-ups that an answer ends with; none where it calls something else, too, which is its caller's to do."""
        read = [part for part in Reader(self._syntax).read(text, last=True) if not isinstance(part, str)]
        calls = [part for part in read if isinstance(part, ToolCall) and part.name == NAME]
        return calls if len(calls) == len(read) else []

    def _heard(self, on_token: OnToken, before: Sequence[Answer]) -> OnToken:
        reader, shown = Reader(self._syntax), [self._text(part) for part in before]

        def heard(token: int, text: str) -> bool:
            shown.extend(part for part in reader.read(text) if isinstance(part, str))
            self._ended = not on_token(token, "".join(shown))
            return not self._ended

        return heard

    def _linked(self, talk: Window, call: ToolCall, reserve: int) -> LookUp:
        """Places what a call finds, as much as there is room for, or says why there is nothing."""
        name, query = call.arguments.get("library"), call.arguments.get("query")
        library = self._libraries.get(str(name)) or (next(iter(self._libraries.values())) if name is None else None)
        if library is None or not isinstance(query, str) or not query.strip():
            names = ", ".join(self._libraries)
            talk.append(Chunk.text(f"A look-up must have a query and a library out of {names}."))
            return LookUp(str(name), str(query), (), 0)
        if library.name not in self._views:
            view = self._views[library.name] = library.view(self.versions.get(library.name))
            self.versions[library.name] = view.version
        found = self._views[library.name].find(query, HITS, talk.engine)
        kept = []
        for chunk in found:
            state = talk.core.state
            if state.tokens + talk.engine.encode(chunk).tokens + reserve <= state.budget:
                talk.append(chunk)
                kept.append(chunk)
        if not kept:
            talk.append(Chunk.text("There is no room for what was found." if found else "Nothing was found."))
        return LookUp(library.name, query, tuple(chunk.label or "" for chunk in kept), len(found) - len(kept))

    def _whole(self, parts: Sequence[Answer], done: Sequence[LookUp]) -> Answer:
        """The parts as one answer; what was looked up is told beside it, and is no part of its text."""
        last = Reader(self._syntax).read(parts[-1].text, last=True)
        return replace(
            parts[-1],
            text="".join(map(self._text, parts)),
            token_ids=tuple(token for part in parts for token in part.token_ids),
            usage=added([part.usage for part in parts]),
            first_token_logprobs=parts[0].first_token_logprobs,
            tool_calls=tuple(piece for piece in last if isinstance(piece, ToolCall)),
            broken_calls=tuple(piece for piece in last if isinstance(piece, BrokenCall)),
            looked_up=tuple(done),
            remembered=None,
        )

    def _text(self, part: Answer) -> str:
        return "".join(piece for piece in Reader(self._syntax).read(part.text, last=True) if isinstance(piece, str))


def added(usages: Sequence[Usage]) -> Usage:
    """What several requests took together; the prompt is the last one's, the first token the first one's."""
    first, last = usages[0], usages[-1]
    summed = ("computed_tokens", "forwards", "vision_encodes", "bytes_loaded", "answer_tokens", "total_s", "planned_s")
    lists = {f.name: getattr(last, f.name) for f in fields(Usage)}
    lists |= {name: sum(getattr(usage, name) for usage in usages) for name in (*summed, "misses", "fallbacks")}
    return Usage(**{**lists, "ttft_s": first.ttft_s, "exact": all(usage.exact for usage in usages)})

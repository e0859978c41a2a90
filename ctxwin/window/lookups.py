"""Answers that look things up on the way: a call of ``look_up`` is answered with what a library finds, and the answer goes on.

After MPIC (section 3.1, dynamic library: the model itself decides during decoding that it needs a reference, which is then
linked): question and answer so far keep the KV that they were computed with, and what is found is placed behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Protocol

from ctxwin.chunk import Chunk
from ctxwin.errors import UnsupportedModel
from ctxwin.window.answer import Answer, BrokenCall, LookUp, ToolCall, Usage, amend
from ctxwin.window.ask import exchange
from ctxwin.window.toolcalls import Reader, Syntax, is_plain_text, template_of

if TYPE_CHECKING:
    from ctxwin.window.ask import OnToken, Question
    from ctxwin.window.core import WindowCore
    from ctxwin.window.protocols import LibraryView, Searchable

NAME = "look_up"
MOST, HITS = 4, 4
"""Look-ups of one answer, and passages of each."""


class AskableWindow(Protocol):
    """Members of a window that a question with tools or libraries uses; see `ctxwin.Window`."""

    @property
    def core(self) -> WindowCore: ...

    def append(self, chunk: Chunk, /) -> str: ...

    def toggle(self, placement: str, /, *, conditioned: bool) -> None: ...

    def fork(self, system_prompt: str | None = None, /) -> AskableWindow: ...

    def answer(self, question: Question, /, *, on_token: OnToken | None, stopped: Callable[[], bool]) -> Answer: ...

    def close(self) -> None: ...


def tool(libraries: Sequence[Searchable]) -> dict[str, Any]:
    """Return the definition of the look-up tool. Raises ValueError if two libraries share a name."""
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
        self._ended = False  # by the on_token callback

    def answer(
        self, branch: AskableWindow, on_token: OnToken | None, stopped: Callable[[], bool]
    ) -> tuple[Answer, list[Chunk]]:
        """The whole answer, and the chunks that it becomes where it is remembered: its parts, and what was found between.

        Raises like `Window.ask`, BudgetExceeded also where it cannot go on behind a look-up; UnsupportedModel where the chat
        template has no turn for what is found.
        """
        count = len(branch.core.state.placed)
        parts, done, query = [self._part(branch, [], on_token, stopped)], list[LookUp](), self._question.query
        with ExitStack() as stack:
            talk = branch
            while (remembered := parts[-1].remembered) is not None:
                turn = template_of(branch.core.engine).tool_turn()
                if talk is branch:  # which must not grow
                    talk = stack.enter_context(closing(branch.fork()))
                    talk.core.audits.answer_for(branch.core.audits, {})
                    branch.core.take_back(remembered)
                if not self._remaining_tokens(parts):
                    break
                query = turn.tail
                reserve = branch.core.engine.encode_query(query).tokens + self._remaining_tokens(parts)
                for i, call in enumerate(self._calls(parts[-1].text)):
                    if i:
                        talk.append(Chunk.tokens(branch.core.engine.template_ids(turn.between)))
                    done.append(self._place_matches(talk, call, reserve))
                parts.append(self._part(talk, parts, on_token, stopped))
            chunks = [entry.chunk for entry in talk.core.state.placed[count:]]
            branch.core.audits.due = talk.core.audits.due
        chunks = chunks[:-1] if parts[-1].remembered else chunks
        return self._join(parts, done), [*chunks, exchange(branch.core.engine, query, parts[-1].token_ids)[0]]

    def _part(
        self, window: AskableWindow, earlier: Sequence[Answer], on_token: OnToken | None, stopped: Callable[[], bool]
    ) -> Answer:
        """Return the answer up to its end, or up to look-ups; then it is remembered."""
        question, after, goes_on = self._question, None, False
        if question.libraries:
            turn = template_of(window.core.engine).tool_turn()
            if not is_plain_text(window.core.engine, turn.tail):
                raise UnsupportedModel("the chat template ends tool results with special tokens, which no query holds")
            after, goes_on = turn.opening, len(earlier) < MOST
        part_question = replace(
            question, query=turn.tail if earlier else question.query, bare=bool(earlier), libraries=(), tools=(),
            sampling=replace(question.sampling, max_tokens=self._remaining_tokens(earlier)), after=after,
            remember=(lambda text: not self._ended and bool(self._calls(text))) if goes_on else False,
        )  # fmt: skip
        return window.answer(part_question, on_token=on_token and self._relay(on_token, earlier), stopped=stopped)

    def _remaining_tokens(self, parts: Sequence[Answer]) -> int:
        return self._question.sampling.max_tokens - sum(len(part.token_ids) for part in parts)

    def _calls(self, text: str) -> list[ToolCall]:
        """Return the look-ups that an answer ends with; none if it also calls another tool, which its caller must run."""
        read = [part for part in Reader(self._syntax).read(text, last=True) if not isinstance(part, str)]
        calls = [part for part in read if isinstance(part, ToolCall) and part.name == NAME]
        return calls if len(calls) == len(read) else []

    def _relay(self, on_token: OnToken, earlier: Sequence[Answer]) -> OnToken:
        reader, texts = Reader(self._syntax), [self._text(part) for part in earlier]

        def relay(token: int, text: str) -> bool:
            texts.extend(part for part in reader.read(text) if isinstance(part, str))
            self._ended = not on_token(token, "".join(texts))
            return not self._ended

        return relay

    def _place_matches(self, talk: AskableWindow, call: ToolCall, reserve: int) -> LookUp:
        """Place the matches of a call that fit the budget and are not placed yet, or a note that there are none."""
        name, query = call.arguments.get("library"), call.arguments.get("query")
        library = self._libraries.get(str(name)) or (next(iter(self._libraries.values())) if name is None else None)
        if library is None or not isinstance(query, str) or not query.strip():
            names = ", ".join(self._libraries)
            talk.append(Chunk.text(f"A look-up must have a query and a library out of {names}."))
            return LookUp(str(name), str(query), (), 0)
        if library.name not in self._views:
            view = self._views[library.name] = library.view(self.versions.get(library.name) or None)
            self.versions[library.name] = view.version
        matches = self._views[library.name].find(query, HITS, talk.core.engine)
        state = before = talk.core.state
        shown, labels = {entry.chunk_id for entry in state.placed}, list[str]()
        for chunk in matches:
            if chunk.id not in shown:
                if state.tokens + talk.core.engine.encode(chunk).tokens + reserve > state.budget:
                    continue
                talk.append(chunk)
                state = talk.core.state
            labels.append(chunk.label or "")
        left_out = len(matches) - len(labels)
        if state is before:
            note = "What was found is shown above already." if matches else "Nothing was found."
            talk.append(Chunk.text("There is no room for what was found." if left_out else note))
        return LookUp(library.name, query, tuple(labels), left_out)

    def _join(self, parts: Sequence[Answer], done: Sequence[LookUp]) -> Answer:
        """Return the parts as one answer; look-ups are listed beside its text and are no part of it."""
        last = Reader(self._syntax).read(parts[-1].text, last=True)
        return amend(
            parts[-1], text="".join(map(self._text, parts)),
            token_ids=tuple(token for part in parts for token in part.token_ids),
            usage=total_usage([part.usage for part in parts]), first_token_logprobs=parts[0].first_token_logprobs,
            tool_calls=tuple(piece for piece in last if isinstance(piece, ToolCall)),
            broken_calls=tuple(piece for piece in last if isinstance(piece, BrokenCall)), looked_up=tuple(done),
            remembered=None,
        )  # fmt: skip

    def _text(self, part: Answer) -> str:
        return "".join(piece for piece in Reader(self._syntax).read(part.text, last=True) if isinstance(piece, str))


def total_usage(usages: Sequence[Usage]) -> Usage:
    """Return the usage of several requests together: prompt of the last, time to first token of the first, sums of the rest."""
    first, last = usages[0], usages[-1]
    summed = ("computed_tokens", "forwards", "vision_encodes", "bytes_loaded", "answer_tokens", "total_s", "planned_s")
    lists = {f.name: getattr(last, f.name) for f in fields(Usage)}
    lists |= {name: sum(getattr(usage, name) for usage in usages) for name in (*summed, "misses", "fallbacks")}
    return Usage(**{**lists, "ttft_s": first.ttft_s, "exact": all(usage.exact for usage in usages)})

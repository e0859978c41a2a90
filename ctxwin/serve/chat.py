"""Answers to chats whose messages name uploaded chunks.

Each request is a window of its own, so an answer depends on its messages alone; KV is found in the store by provenance,
whichever request computed it. The prompt is the chat template's: system messages in front are the system prompt, a run of user
messages is one open turn in which chunks stand bare, its last text is the query, and an answered query is an exchange.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

from ctxwin.chunk import Chunk, TokensPart
from ctxwin.engines.base import Engine, Sampling, ScoredToken
from ctxwin.errors import AnswerStopped, BudgetExceeded
from ctxwin.fidelity import Fidelity
from ctxwin.serve.completions import ChatRequest, Message, Piece, Reply
from ctxwin.serve.limits import Allowance
from ctxwin.serve.specs import Reference, Text
from ctxwin.serve.uploads import Uploads
from ctxwin.window.ask import Question
from ctxwin.window.stream import TextDelta
from ctxwin.window.window import Window

Spawn = Callable[[Callable[[], Reply]], "Future[Reply]"]
"""Runs work in another thread, as soon as there is one."""


@dataclass(frozen=True)
class _Asked:
    """What every choice of a request has in common. ``heard`` gets the answers as they come, from several threads."""

    query: str
    sampling: Sampling
    stops: tuple[str, ...]
    bare: bool
    heard: Callable[[Piece], None]

    def of(self, window: Window, index: int, begun: Callable[[], None], stopped: Callable[[], bool]) -> Reply:
        """Choice ``index``, of ``window``; ``begun`` is called when its tokens come."""
        stops, seen = TextDelta(self.stops), 0

        def on_token(token: int, text: str) -> bool:
            nonlocal seen
            begun()
            fresh: tuple[ScoredToken, ...] = ()
            if isinstance(token, ScoredToken) and token.index == seen:  # a load that fails late repeats the answer
                fresh, seen = (token,), seen + 1
            new = stops.feed(text)
            if new or fresh:
                self.heard(Piece(index, new, fresh))
            return not stops.stopped

        seed = self.sampling.seed
        sampling = replace(self.sampling, seed=None if seed is None else (seed + index + 2**63) % 2**64 - 2**63)
        question = Question(self.query, sampling, bare=self.bare)
        answer = window.answer(question, on_token=on_token, stopped=stopped)
        rest = stops.feed(answer.text, last=True)
        if rest:
            self.heard(Piece(index, rest))
        long = not stops.stopped and answer.usage.answer_tokens >= sampling.max_tokens
        reply = Reply(index, stops.text, "length" if long else "stop", answer)
        self.heard(Piece(index, finish=reply.finish_reason))
        return reply


@dataclass(frozen=True)
class Chat:
    """Answers chats of one tenant.

    Attributes:
        fidelity: of requests that say nothing.
        defaults: how requests are decoded that say nothing: fields of `Sampling`.
        watch: observes every window that is made.
        spawn: where further choices of a request are made beside the first.
    """

    engine: Engine
    uploads: Uploads
    fidelity: Fidelity
    defaults: Mapping[str, float]
    watch: Callable[[Window], None]
    spawn: Spawn

    def answer(self, request: ChatRequest, heard: Callable[[Piece], None], stopped: Callable[[], bool]) -> list[Reply]:
        """Every choice; ``heard`` gets them as they come. Raises like `Window.ask` and `lay_out`. Blocks."""
        sampling = request.sampling(self.defaults)
        layout = lay_out(self.engine, self.uploads, request.messages)
        given = request.ctxwin.fidelity if request.ctxwin else None
        with ExitStack() as stack:
            window = stack.enter_context(Window(self.engine, layout.system_prompt, fidelity=given or self.fidelity))
            self.watch(window)
            window.extend(layout.chunks)
            sampling = replace(sampling, max_tokens=self._most(request, window, layout.query))
            asked = _Asked(layout.query, sampling, request.stops, bool(layout.chunks), heard)
            branches = [window, *(stack.enter_context(window.fork()) for _ in range(1, request.n or 1))]
            return several(
                lambda i, begun, halted: asked.of(branches[i], i, begun, halted), len(branches), self.spawn, stopped
            )

    def _most(self, request: ChatRequest, window: Window, query: str) -> int:
        """Most tokens of an answer; BudgetExceeded where they have no room."""
        asked = self.engine.encode_query(query).tokens
        left = window.budget - window.tokens - asked
        most = request.most(left, self.defaults)
        if left < most or left < 1:
            raise BudgetExceeded(
                f"the prompt ({window.tokens + asked} tokens) and its answer ({max(most, 1)}) must fit the "
                f"{window.budget} tokens the model takes; send fewer chunks or lower max_tokens",
                needed=window.tokens + asked + max(most, 1),
                budget=window.budget,
            )
        return most


def several(
    one: Callable[[int, Callable[[], None], Callable[[], bool]], Reply],
    count: int,
    spawn: Spawn,
    stopped: Callable[[], bool],
) -> list[Reply]:
    """``count`` choices of one prompt.

    The first runs alone until it ``begun``: what the prompt lacks is computed by then, and the engine's prefix cache has
    it for the others. They run beside it where ``spawn`` has threads, else in this one, so that requests that wait for
    their own choices never wait for each other. The first error stops them all.
    """
    failed = threading.Event()
    others: list[Future[Reply]] = []
    replies: dict[int, Reply] = {}
    errors: list[BaseException] = []

    def make(index: int, begun: Callable[[], None] = lambda: None) -> Reply:
        try:
            if failed.is_set() or stopped():
                raise AnswerStopped("the answer was stopped before it began")  # before anything is computed for nobody
            return one(index, begun, lambda: failed.is_set() or stopped())
        except BaseException:
            failed.set()
            raise

    def begun() -> None:
        if not others:
            others.extend(spawn(partial(make, index)) for index in range(1, count))

    def collect(index: int, result: Callable[[], Reply]) -> None:
        try:
            replies[index] = result()
        except BaseException as error:
            errors.append(error)

    collect(0, partial(make, 0, begun))
    if not errors:
        begun()  # an answer may have no token
    here = set()
    for index, future in reversed([*enumerate(others, start=1)]):
        if future.cancel():  # no thread has come to it: it is done here, unless there is no use in it
            here.add(index)
            collect(index, partial(make, index))
    for index, future in enumerate(others, start=1):
        if index not in here:
            collect(index, future.result)
    if errors:
        ended = AnswerStopped, CancelledError
        raise next((error for error in errors if not isinstance(error, ended)), AnswerStopped("the answer was stopped"))
    return [replies[index] for index in range(count)]


@dataclass
class Layout:
    """A chat as a window takes it. ``query`` may be empty where the messages end in a chunk."""

    system_prompt: str
    chunks: list[Chunk] = field(default_factory=list)
    query: str = ""

    def check_room(self, most: int) -> None:
        """Raises BudgetExceeded at ``most`` chunks, for each has a token: making more takes time and is for nothing."""
        if len(self.chunks) >= most:
            raise BudgetExceeded(
                f"a chat must fit the {most} tokens the model takes, got more chunks than that; send fewer",
                needed=len(self.chunks) + 1,
                budget=most,
            )


def lay_out(engine: Engine, uploads: Uploads, messages: Sequence[Message]) -> Layout:
    """The layout of a chat; ValueError for an order of messages that has none, UnknownUpload, BadMedia."""
    front = 0
    while front < len(messages) and messages[front].role in ("system", "developer"):
        front += 1
    layout = Layout("\n".join(_text(m) for m in messages[:front]))
    text, allowance = "", uploads.allowance()
    for role, run in groupby(messages[front:], lambda m: m.role):
        turn = list(run)
        layout.check_room(engine.spec.max_tokens)
        if role == "user":
            text = _user(uploads, layout, turn, allowance, engine.spec.max_tokens)
        elif role == "assistant":
            layout.chunks.append(_exchange(engine, text, "\n".join(_text(m) for m in turn)))
            text = ""
        else:
            raise ValueError(f"a {role} message must stand in front of all others; put it there, or make it a user's")
    if messages[-1].role != "user":
        raise ValueError(f"the messages must end with the user's, got the {messages[-1].role}'s at the end")
    layout.query = text
    return layout


def _user(uploads: Uploads, layout: Layout, turn: Sequence[Message], allowance: Allowance, most: int) -> str:
    """Adds the chunks of one user turn, ``most`` in all; returns the text at its end."""
    text = ""
    for message in turn:
        parts = message.content
        if isinstance(parts, str):
            parts = [Text(type="text", text=parts)] if parts else []
        if text and parts and isinstance(parts[0], Text) and not text.endswith("\n"):
            text += "\n"  # texts of two messages must not run into each other
        for part in parts:
            if isinstance(part, Text):
                text += part.text
                continue
            if text:
                layout.chunks.append(Chunk.text(text))
                text = ""
            layout.check_room(most)
            if isinstance(part, Reference):
                layout.chunks.append(uploads.find(part.chunk))
            else:
                image = {"type": "image", "image": _data_url(part.image_url.url)}
                layout.chunks.append(uploads.build(image, allowance=allowance))
    return text


def _exchange(engine: Engine, query: str, answer: str) -> Chunk:
    """An answered query, token by token as `Window.remember` gives it."""
    template = engine.template
    if template is None or template.plain:
        ids = engine.encode_exchange(query, engine.text_ids(answer)).token_ids
    else:
        before, after = template.turns("assistant")
        asked = (*engine.text_ids(query), *engine.template_ids(before))
        ids = (*asked, *engine.text_ids(answer), *engine.template_ids(after))
    return Chunk(parts=(TokensPart(ids=tuple(ids)),), label=f"{query} {answer}".strip()[:80])


def _text(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    others = sorted({part.type for part in message.content} - {"text"})
    if others:
        raise ValueError(f"a {message.role} message must hold text only, got {', '.join(others)}")
    return "".join(part.text for part in message.content if isinstance(part, Text))


def _data_url(url: str) -> str:
    if not url.startswith("data:"):
        raise ValueError(
            f"beside chunks an image must be a data: URL, got {url[:60]!r}; upload it with POST /v1/chunks and name its id"
        )
    return url

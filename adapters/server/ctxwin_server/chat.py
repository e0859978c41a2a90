"""Answers to chats whose messages name uploaded chunks.

Each request gets a window of its own, so an answer depends on its messages alone; stored KV is found by provenance, whichever
request computed it. The prompt follows the chat template: leading system messages are the system prompt, consecutive user
messages form one open turn of bare chunks, whose last text is the query, and an answered query is an exchange.
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
from ctxwin.window.ask import Question
from ctxwin.window.stream import TextDelta
from ctxwin.window.window import Window
from ctxwin_server.completions import ChatRequest, Message, Piece, Reply
from ctxwin_server.limits import Allowance
from ctxwin_server.schemas import Reference, Text
from ctxwin_server.uploads import Uploads

Spawn = Callable[[Callable[[], Reply]], "Future[Reply]"]
"""Runs work in another thread, as soon as there is one."""


@dataclass(frozen=True)
class _ChoiceRequest:
    """Parameters that all choices of a request share. ``on_piece`` is called from several threads."""

    query: str
    sampling: Sampling
    stops: tuple[str, ...]
    bare: bool
    on_piece: Callable[[Piece], None]

    def answer(self, window: Window, index: int, begun: Callable[[], None], stopped: Callable[[], bool]) -> Reply:
        """Return choice ``index``, answered by ``window``; ``begun`` is called with every token."""
        stops, scored = TextDelta(self.stops), 0

        def on_token(token: int, text: str) -> bool:
            nonlocal scored
            begun()
            fresh: tuple[ScoredToken, ...] = ()
            if isinstance(token, ScoredToken) and token.index == scored:  # a load that fails late repeats the answer
                fresh, scored = (token,), scored + 1
            new = stops.feed(text)
            if new or fresh:
                self.on_piece(Piece(index, new, fresh))
            return not stops.stopped

        seed = self.sampling.seed
        sampling = replace(self.sampling, seed=None if seed is None else (seed + index + 2**63) % 2**64 - 2**63)
        question = Question(self.query, sampling, bare=self.bare)
        answer = window.answer(question, on_token=on_token, stopped=stopped)
        ending = stops.feed(answer.text, last=True)
        if ending:
            self.on_piece(Piece(index, ending))
        is_truncated = not stops.stopped and answer.usage.answer_tokens >= sampling.max_tokens
        reply = Reply(index, stops.text, "length" if is_truncated else "stop", answer)
        self.on_piece(Piece(index, finish=reply.finish_reason))
        return reply


@dataclass(frozen=True)
class Chat:
    """Answers chats of one tenant.

    Attributes:
        fidelity: default of requests that name none.
        defaults: default sampling of requests: fields of `Sampling`.
        watch: called with every new window, to observe it.
        spawn: runs further choices of a request in parallel with the first.
    """

    engine: Engine
    uploads: Uploads
    fidelity: Fidelity
    defaults: Mapping[str, float]
    watch: Callable[[Window], None]
    spawn: Spawn

    def answer(
        self, request: ChatRequest, on_piece: Callable[[Piece], None], stopped: Callable[[], bool]
    ) -> list[Reply]:
        """Return every choice; ``on_piece`` gets their pieces as they are generated. Blocks.

        Raises as `Window.ask` and `build_layout`.
        """
        sampling = request.sampling(self.defaults)
        layout = build_layout(self.engine, self.uploads, request.messages)
        fidelity = request.ctxwin.fidelity if request.ctxwin else None
        with ExitStack() as stack:
            window = stack.enter_context(Window(self.engine, layout.system_prompt, fidelity=fidelity or self.fidelity))
            self.watch(window)
            window.extend(layout.chunks)
            sampling = replace(sampling, max_tokens=self._answer_limit(request, window, layout.query))
            choice = _ChoiceRequest(layout.query, sampling, request.stops, bool(layout.chunks), on_piece)
            branches = [window, *(stack.enter_context(window.fork()) for _ in range(1, request.n or 1))]
            return answer_choices(
                lambda i, begun, halted: choice.answer(branches[i], i, begun, halted),
                len(branches),
                self.spawn,
                stopped,
            )

    def _answer_limit(self, request: ChatRequest, window: Window, query: str) -> int:
        """Return the most tokens an answer may have; raise BudgetExceeded where they do not fit."""
        query_tokens = self.engine.encode_query(query).tokens
        remaining = window.budget - window.tokens - query_tokens
        limit = request.answer_limit(remaining, self.defaults)
        if remaining < limit or remaining < 1:
            raise BudgetExceeded(
                f"the prompt ({window.tokens + query_tokens} tokens) and its answer ({max(limit, 1)}) must fit the "
                f"{window.budget} tokens the model takes; send fewer chunks or lower max_tokens",
                needed=window.tokens + query_tokens + max(limit, 1),
                budget=window.budget,
            )
        return limit


def answer_choices(
    answer_one: Callable[[int, Callable[[], None], Callable[[], bool]], Reply],
    count: int,
    spawn: Spawn,
    stopped: Callable[[], bool],
) -> list[Reply]:
    """Return ``count`` choices of one prompt.

    The first runs alone until its first token: by then the whole prompt is computed, and the others find it in the engine's
    prefix cache. They run in parallel where ``spawn`` has threads, otherwise in this one, so that requests that wait for
    their own choices never wait for each other. The first error stops them all.
    """
    failed = threading.Event()
    others: list[Future[Reply]] = []
    replies: dict[int, Reply] = {}
    errors: list[BaseException] = []

    def run(index: int, begun: Callable[[], None] = lambda: None) -> Reply:
        try:
            if failed.is_set() or stopped():
                raise AnswerStopped("the answer was stopped before it began")  # before anything is computed in vain
            return answer_one(index, begun, lambda: failed.is_set() or stopped())
        except BaseException:
            failed.set()
            raise

    def begun() -> None:
        if not others:
            others.extend(spawn(partial(run, index)) for index in range(1, count))

    def collect(index: int, result: Callable[[], Reply]) -> None:
        try:
            replies[index] = result()
        except BaseException as error:
            errors.append(error)

    collect(0, partial(run, 0, begun))
    if not errors:
        begun()  # an answer may have no token
    run_here = set()
    for index, future in reversed([*enumerate(others, start=1)]):
        if future.cancel():  # no thread has started it: it runs here, unless the request has failed
            run_here.add(index)
            collect(index, partial(run, index))
    for index, future in enumerate(others, start=1):
        if index not in run_here:
            collect(index, future.result)
    if errors:
        ended = AnswerStopped, CancelledError
        raise next((error for error in errors if not isinstance(error, ended)), AnswerStopped("the answer was stopped"))
    return [replies[index] for index in range(count)]


@dataclass
class Layout:
    """A chat in the form that a window takes. ``query`` is empty where the messages end in a chunk."""

    system_prompt: str
    chunks: list[Chunk] = field(default_factory=list)
    query: str = ""

    def check_room(self, most: int) -> None:
        """Raise BudgetExceeded at ``most`` chunks: each has a token at least, so more cannot fit."""
        if len(self.chunks) >= most:
            raise BudgetExceeded(
                f"a chat must fit the {most} tokens the model takes, got more chunks than that; send fewer",
                needed=len(self.chunks) + 1,
                budget=most,
            )


def build_layout(engine: Engine, uploads: Uploads, messages: Sequence[Message]) -> Layout:
    """Return the layout of a chat. Raises ValueError for an unsupported order of messages, UnknownUpload, BadMedia."""
    front = 0
    while front < len(messages) and messages[front].role in ("system", "developer"):
        front += 1
    layout = Layout("\n".join(_text(m) for m in messages[:front]))
    text, allowance = "", uploads.allowance()
    for role, run in groupby(messages[front:], lambda m: m.role):
        turn = list(run)
        layout.check_room(engine.spec.max_tokens)
        if role == "user":
            text = _add_user_turn(uploads, layout, turn, allowance, engine.spec.max_tokens)
        elif role == "assistant":
            layout.chunks.append(_exchange(engine, text, "\n".join(_text(m) for m in turn)))
            text = ""
        else:
            raise ValueError(f"a {role} message must stand in front of all others; put it there, or make it a user's")
    if messages[-1].role != "user":
        raise ValueError(f"the messages must end with the user's, got the {messages[-1].role}'s at the end")
    layout.query = text
    return layout


def _add_user_turn(uploads: Uploads, layout: Layout, turn: Sequence[Message], allowance: Allowance, most: int) -> str:
    """Add the chunks of one user turn, ``most`` in all; return the text at its end."""
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
    """Return an answered query as a chunk, token by token as `Window.remember` makes it."""
    template = engine.template
    if template is None or template.plain:
        ids = engine.encode_exchange(query, engine.text_ids(answer)).token_ids
    else:
        opening, closing = template.turns("assistant")
        question_ids = (*engine.text_ids(query), *engine.template_ids(opening))
        ids = (*question_ids, *engine.text_ids(answer), *engine.template_ids(closing))
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

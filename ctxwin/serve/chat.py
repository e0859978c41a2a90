"""Answers to chats whose messages name uploaded chunks.

Each request is a window of its own, so an answer depends on its messages alone; KV is found in the store by provenance,
whichever request computed it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from ctxwin.engines.base import Engine, Sampling, ScoredToken
from ctxwin.errors import AnswerStopped, BudgetExceeded
from ctxwin.fidelity import Fidelity
from ctxwin.serve.completions import ChatRequest, Piece, Reply
from ctxwin.serve.layout import lay_out
from ctxwin.serve.uploads import Uploads
from ctxwin.window.ask import Question, until_stop
from ctxwin.window.window import Window

Spawn = Callable[[Callable[[], Reply]], "Future[Reply]"]
"""Runs work in another thread, as soon as there is one."""


class Stops:
    """Cuts an answer at the first of ``stops`` and keeps back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self.text = ""
        self.stopped = False

    def feed(self, whole: str, *, last: bool = False) -> str:
        """What is new and certain in ``whole``, the text so far."""
        if self.stopped:
            return ""
        text = whole if last else whole.rstrip("\ufffd")  # half a character: it changes with the next token
        ready, self.stopped = until_stop(text, self._stops, last=last)
        new = ready[len(self.text) :]
        if new:
            self.text = ready
        return new


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
        stops, seen = Stops(self.stops), 0

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


class Chat:
    """Answers chats of one tenant.

    Args:
        defaults: how requests are decoded that say nothing: fields of `Sampling`.
        watch: observes every window that is made.
        spawn: where further choices of a request are made beside the first.
    """

    def __init__(
        self, engine: Engine, uploads: Uploads, fidelity: Fidelity, defaults: Mapping[str, float],
        watch: Callable[[Window], None], spawn: Spawn,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._uploads = uploads
        self._fidelity = fidelity
        self._defaults = defaults
        self._watch = watch
        self._spawn = spawn

    def answer(self, request: ChatRequest, heard: Callable[[Piece], None], stopped: Callable[[], bool]) -> list[Reply]:
        """Every choice; ``heard`` gets them as they come. Raises like `Window.ask` and `lay_out`. Blocks."""
        sampling = request.sampling(self._defaults)
        layout = lay_out(self._engine, self._uploads, request.messages)
        given = request.ctxwin.fidelity if request.ctxwin else None
        with ExitStack() as stack:
            window = stack.enter_context(Window(self._engine, layout.system_prompt, fidelity=given or self._fidelity))
            self._watch(window)
            window.extend(layout.chunks)
            sampling = replace(sampling, max_tokens=self._most(request, window, layout.query))
            asked = _Asked(layout.query, sampling, request.stops, bool(layout.chunks), heard)
            branches = [window, *(stack.enter_context(window.fork()) for _ in range(1, request.n or 1))]
            return several(
                lambda i, begun, halted: asked.of(branches[i], i, begun, halted), len(branches), self._spawn, stopped
            )

    def _most(self, request: ChatRequest, window: Window, query: str) -> int:
        """Most tokens of an answer; BudgetExceeded where they have no room."""
        asked = self._engine.encode_query(query).tokens
        left = window.budget - window.tokens - asked
        most = request.most(left, self._defaults)
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

    def first() -> Reply:
        made = make(0, begun)
        begun()  # an answer may have no token
        return made

    collect(0, first)
    here = []
    for index, future in reversed([*enumerate(others, start=1)]):
        if future.cancel():  # no thread has come to it: it is done here, unless there is no use in it
            here.append(index)
            if not failed.is_set():
                collect(index, partial(make, index))
    for index, future in enumerate(others, start=1):
        if index not in here:
            collect(index, future.result)
    if errors:
        ended = AnswerStopped, CancelledError
        raise next((error for error in errors if not isinstance(error, ended)), AnswerStopped("the answer was stopped"))
    return [replies[index] for index in range(count)]

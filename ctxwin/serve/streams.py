"""Live streams: frames are pushed into a window as they come, and the window is asked meanwhile.

A stream is an open window with a short queue in front of it. A frame is placed and prefilled on arrival, once the oldest chunks
that are not pinned have left to make room, so that an answer begins after a forward over its question. Where frames come faster
than that, they wait; when more than ``waiting`` do, the oldest of them is dropped, and its sender is told. Answers are given by
forks of the window: frames go on being placed meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from ctxwin.errors import BudgetExceeded, EngineFailed, UnknownChunk, WindowBusy
from ctxwin.hashing import digest
from ctxwin.serve import wire
from ctxwin.serve.errors import TooManyRequests
from ctxwin.serve.fair import Put, Stopped
from ctxwin.serve.operations import Ask, ChunkData
from ctxwin.serve.specs import Body, checked
from ctxwin.window.answer import Answer
from ctxwin.window.ask import Question
from ctxwin.window.stream import TextDelta
from ctxwin.window.window import Window

if TYPE_CHECKING:
    from ctxwin.serve.service import Service, Space

_BUSY_S = 10.0
"""How long a frame waits for the window where another request edits it."""
_TIME = "t="
_Name = Annotated[str, Field(min_length=1, max_length=200)]
_Seconds = Annotated[float, Field(allow_inf_nan=False)]


class LiveOptions(Body):
    """How a connection treats its window: parameters of its URL.

    Attributes:
        reserve_tokens: left free for a question and its answer, as `Window.slide` does it.
        waiting: frames that may wait until they are placed.
        history: chunks that left and can be looked back at; older ones are forgotten by the window.
    """

    reserve_tokens: int = Field(default=64, ge=0)
    waiting: int = Field(default=8, ge=1, le=256)
    history: int = Field(default=256, ge=0, le=2048)


class Push(Body):
    """A chunk to place: a frame as a rule, or a prompt that stays (``pin``). ``time``: when it was taken, in seconds."""

    type: Literal["push"] = "push"
    chunk: ChunkData
    time: _Seconds | None = None


class Recall(Body):
    """Looks back: by placement id, or at the chunk whose time is nearest."""

    type: Literal["recall"]
    id: _Name = "recall"
    placement: str | None = None
    time: _Seconds | None = None


class LiveAsk(Ask):
    """A question. ``now``: over what is placed at this moment; else behind the frames that were pushed before it."""

    type: Literal["ask"]
    id: _Name = "ask"
    now: bool = False


class Stop(Body):
    """Ends the answer to the question called ``id``."""

    type: Literal["stop"]
    id: _Name = "ask"


MESSAGE: TypeAdapter[Any] = TypeAdapter(Annotated[Push | Recall | LiveAsk | Stop, Field(discriminator="type")])


@dataclass(eq=False)
class Frame:
    """Something pushed; ``done`` becomes what its sender is told."""

    push: Push
    files: Mapping[str, bytes]
    options: LiveOptions
    done: asyncio.Future[dict[str, Any]]

    @property
    def pinned(self) -> bool:
        """Whether it must not be dropped."""
        return isinstance(self.push.chunk, dict) and bool(self.push.chunk.get("pin"))


@dataclass(eq=False)
class Live:
    """The stream of one window, whoever feeds it. Belongs to the event loop, but for ``turn``.

    Attributes:
        left: called when nothing waits any more.
        turn: held by whoever edits the window: one frame at a time.
        dropped: frames dropped so far.
    """

    service: Service
    space: Space
    window_id: str
    left: Callable[[Live], None]
    users: int = 0
    dropped: int = 0
    waiting: deque[Frame] = field(default_factory=deque)
    turn: threading.RLock = field(default_factory=threading.RLock)
    _placing: Frame | None = None
    _task: asyncio.Task[None] | None = None

    def push(self, push: Push, files: Mapping[str, bytes], options: LiveOptions) -> asyncio.Future[dict[str, Any]]:
        """Puts a frame behind those that wait; drops the oldest that is not pinned where they are too many."""
        frame = Frame(push, files, options, asyncio.get_running_loop().create_future())
        frame.done.add_done_callback(lambda done: done.exception())  # its sender may have left
        self.waiting.append(frame)
        while len(self.waiting) > options.waiting:
            oldest = next((f for f in self.waiting if not f.pinned), frame)
            self.waiting.remove(oldest)
            self.dropped += 1
            self._count("dropped")
            oldest.done.set_result({"type": "dropped", "dropped": self.dropped})
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._place_all())
        return asyncio.shield(frame.done)

    def under_way(self) -> list[asyncio.Future[Any]]:
        """What was pushed and is not placed yet."""
        frames = [*self.waiting, *([self._placing] if self._placing else [])]
        return [frame.done for frame in frames]

    async def _place_all(self) -> None:
        while self.waiting:
            self._placing = frame = self.waiting.popleft()
            result = "failed"
            try:
                made = await self.service.run(self.space.tenant, self._place, frame)
                result = "placed"
                frame.done.set_result({**made, "waiting": len(self.waiting), "dropped": self.dropped})
            except asyncio.CancelledError:  # the server shuts down
                frame.done.set_exception(EngineFailed("the server is shutting down; try another one"))
            except Exception as error:
                frame.done.set_exception(error)
            self._placing = None
            self._count(result)
        self.left(self)

    def _count(self, result: str) -> None:
        metrics = self.service.metrics
        metrics.labelled(metrics.live_frames, self.space.tenant, result).inc()

    def _place(self, frame: Frame) -> dict[str, Any]:
        """Decodes a frame, makes room for it, places and prefills it. All or nothing, but for the prefill."""
        push, uploads, options = frame.push, self.space.uploads, frame.options
        chunk = uploads.build(push.chunk, frame.files)
        if push.time is not None and not chunk.label:
            chunk = chunk.model_copy(update={"label": f"{_TIME}{push.time!r}"})
        with self.editing() as window:
            begin = time.perf_counter()
            with self.service.quarantine.running(digest("frame", self.space.tenant, chunk.id)):
                placement = window.append(chunk)
                try:
                    evicted = window.slide(reserve_tokens=options.reserve_tokens)
                    if placement in evicted:
                        raise BudgetExceeded(
                            f"a frame must fit beside what is pinned and {options.reserve_tokens} reserved tokens, got a "
                            "frame that does not; unpin something, reserve less, or open the window with a larger budget",
                            needed=window.tokens, budget=window.budget,
                        )  # fmt: skip
                except BudgetExceeded:
                    if placement in window.ids:
                        window.evict(placement)
                    raise
                _forget_beyond(window, options.history)
                computed = window.prefill()
        return {
            "type": "placed", "placement": placement, "evicted": evicted, "computed": computed, "tokens": window.tokens,
            "seconds": round(time.perf_counter() - begin, 4),
        }  # fmt: skip

    @contextmanager
    def editing(self) -> Iterator[Window]:
        """The window, for one thread that edits it; waits for a plain request that does."""
        with self.turn, self.space.windows.using(self.window_id) as window:
            until = time.monotonic() + _BUSY_S
            while True:
                try:
                    with window.core.writing():
                        break
                except WindowBusy:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.005)
            yield window

    def recall(self, asked: Recall, options: LiveOptions) -> dict[str, Any]:
        """Brings a chunk back, makes room for it and computes what has to be."""
        if (asked.placement is None) == (asked.time is None):
            raise ValueError("a recall must have a placement or a time, got both or none")
        with self.editing() as window:
            placement = asked.placement or _nearest(window, asked.time or 0.0)
            before = window.ids
            if placement not in before:
                window.core.state.find(placement)
                window.look_back(placement, reserve_tokens=options.reserve_tokens)
            computed = window.prefill()
            chunk = window.chunk(placement)
            return {
                "type": "recalled", "placement": placement, "time": _time_of(chunk.label),
                "evicted": [p for p in before if p not in window.ids], "computed": computed, "tokens": window.tokens,
            }  # fmt: skip

    def answer(self, asked: LiveAsk, put: Put, stopped: Stopped) -> dict[str, Any]:
        """Answers a question on a fork of the window; on the window itself where it is to be remembered."""
        question = asked.question(self.space.libraries.find)
        with self.editing() as window:
            name = digest(
                "ask", self.space.tenant, asked.model_dump_json(), [p.chunk_id for p in window.core.state.placed]
            )
            if asked.remember:
                self.space.context().check_room(window, asked.most_placed)
                with self.service.quarantine.running(name):
                    return {"type": "answer", "answer": wire.answer_to(spoken(window, question, put, stopped))}
            branch = window.fork()
        with closing(branch), self.service.quarantine.running(name):
            return {"type": "answer", "answer": wire.answer_to(spoken(branch, question, put, stopped))}


class Streams:
    """The streams of one tenant.

    Args:
        most: connections that may be open.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, Live] = {}

    @contextmanager
    def open(self, service: Service, space: Space, window_id: str) -> Iterator[Live]:
        """The stream of a window, while somebody feeds it. Raises TooManyRequests. On the event loop only."""
        if sum(live.users for live in self._known.values()) >= self._most:
            raise TooManyRequests(f"at most {self._most} live connections may be open (--max-windows); close some")
        live = self._known.setdefault(window_id, Live(service, space, window_id, self._drop))
        live.users += 1
        try:
            yield live
        finally:
            live.users -= 1
            self._drop(live)

    def _drop(self, live: Live) -> None:
        if not live.users and not live.under_way():
            self._known.pop(live.window_id, None)

    def turn(self, window_id: str) -> AbstractContextManager[Any]:
        """For plain requests: waits until no frame is being placed in a window. From any thread."""
        live = self._known.get(window_id)
        return nullcontext() if live is None else live.turn


def read_message(
    parse: Callable[[bytes, int | None], Any], raw: bytes, is_picture: bool, max_text: int
) -> tuple[Any, dict[str, bytes]]:
    """A message, and the files beside it: JSON, or a picture, with a line of JSON in front of it or without.

    No format of pictures that is taken begins with a brace. Raises ValueError, TooLarge.
    """
    if not is_picture:
        return checked(MESSAGE.validate_python, parse(raw, max_text)), {}
    head, _, rest = raw.partition(b"\n") if raw[:1] == b"{" else (b"", b"", raw)
    said = parse(head, max_text)
    frame: dict[str, Any] = {"time": said.pop("time")} if "time" in said else {}
    return checked(Push.model_validate, {**frame, "chunk": {"type": "image", "image": {"file": "frame"}, **said}}), {
        "frame": rest
    }


def spoken(window: Window, question: Question, put: Put, stopped: Stopped) -> Answer:
    """The answer to ``question``; its text is put as it is made."""
    delta = TextDelta()

    def say(text: str) -> None:
        if text:
            put(json.dumps({"text": text}).encode())

    def on_token(_: int, text: str) -> bool:
        say(delta.feed(text))
        return True

    answer = window.answer(question, on_token=on_token, stopped=stopped)
    say(delta.feed(answer.text, last=True))
    return answer


def _time_of(label: str | None) -> float | None:
    """The time that a pushed chunk's label holds; the snapshot of a window keeps labels, and nothing else of a stream."""
    try:
        return float(label.removeprefix(_TIME)) if label and label.startswith(_TIME) else None
    except ValueError:
        return None


def _nearest(window: Window, at: float) -> str:
    state = window.core.state
    timed = [
        (abs(when - at), p.id) for p in (*state.evicted, *state.placed) if (when := _time_of(p.chunk.label)) is not None
    ]
    if not timed:
        raise UnknownChunk(f"time must be near a chunk that was pushed with one, got {at:g}; no chunk here has a time")
    return min(timed)[1]


def _forget_beyond(window: Window, most: int) -> None:
    """Drops the oldest evicted chunks, so that an endless stream stays bounded; their KV stays where others use it."""
    with window.core.writing() as state:
        if len(state.evicted) > most:
            window.core.commit(state.edited(evicted=state.evicted[len(state.evicted) - most :]), remember=False)

"""Live streams: frames are pushed into a window as they arrive, and questions are answered meanwhile.

A stream is an open window with a short queue. A frame is placed and prefilled on arrival, once the oldest unpinned chunks have
been evicted to make room, so that an answer begins after a forward over its question alone. Frames that arrive faster wait;
if more than ``waiting`` do, the oldest is dropped, and its sender is informed. Answers come from forks of the window, so that
frames continue to be placed meanwhile.
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
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from ctxwin.errors import BudgetExceeded, EngineFailed, UnknownChunk, WindowBusy
from ctxwin.hashing import digest
from ctxwin.validation import validate
from ctxwin.window import serialization
from ctxwin.window.answer import Answer
from ctxwin.window.ask import Question
from ctxwin.window.stream import TextDelta
from ctxwin.window.window import Window
from ctxwin_chats.bodies import Body, FormBody
from ctxwin_client.errors import TooManyRequests
from ctxwin_server.process.fair import FairPool, Put, Stopped
from ctxwin_server.process.metrics import Metrics
from ctxwin_server.registry.operations import Ask, ChunkData, OperationContext

_BUSY_S = 10.0
"""Seconds for which a frame waits for the window while another request edits it."""
_TIME = "t="
_Name = Annotated[str, Field(min_length=1, max_length=200)]
_Seconds = Annotated[float, Field(allow_inf_nan=False)]


class LiveOptions(FormBody):
    """Options of a connection: parameters of its URL.

    Attributes:
        reserve_tokens: kept free for a question and its answer, as by `Window.slide`.
        waiting: most frames that wait to be placed.
        history: evicted chunks that can be recalled; the window forgets older ones.
    """

    reserve_tokens: int = Field(default=64, ge=0)
    waiting: int = Field(default=8, ge=1, le=256)
    history: int = Field(default=256, ge=0, le=2048)


class Push(Body):
    """A chunk to place: usually a frame, or a prompt that stays (``pin``). ``time``: of the recording, in seconds."""

    type: Literal["push"] = "push"
    chunk: ChunkData
    time: _Seconds | None = None


class Recall(Body):
    """Recall of a chunk, by placement id or by the nearest time."""

    type: Literal["recall"]
    id: _Name = "recall"
    placement: str | None = None
    time: _Seconds | None = None


class LiveAsk(Ask):
    """A question. ``now``: ask over the chunks placed at this moment; otherwise after the frames pushed before it."""

    type: Literal["ask"]
    id: _Name = "ask"
    now: bool = False


class Stop(Body):
    """Request to end the answer to the question ``id``."""

    type: Literal["stop"]
    id: _Name = "ask"


MESSAGE: TypeAdapter[Any] = TypeAdapter(Annotated[Push | Recall | LiveAsk | Stop, Field(discriminator="type")])


@dataclass(eq=False)
class Frame:
    """A pushed chunk; ``record`` writes to the audit log once it is placed, ``done`` gets the reply to its sender."""

    push: Push
    files: Mapping[str, bytes]
    options: LiveOptions
    record: Callable[..., None]
    done: asyncio.Future[dict[str, Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def pinned(self) -> bool:
        """True if the frame must not be dropped."""
        return isinstance(self.push.chunk, dict) and bool(self.push.chunk.get("pin"))


@dataclass(eq=False)
class LiveStream:
    """The stream of one window, shared by its connections. For the event loop only, except ``turn``.

    Attributes:
        turn: lock of the window's edits, one frame at a time.
        dropped: frames dropped so far.
    """

    streams: Streams
    window_id: str
    users: int = 0
    dropped: int = 0
    waiting: deque[Frame] = field(default_factory=deque)
    turn: threading.RLock = field(default_factory=threading.RLock)
    _placing: Frame | None = None
    _task: asyncio.Task[None] | None = None

    def push(self, frame: Frame) -> asyncio.Future[dict[str, Any]]:
        """Queue a frame; if too many wait, drop the oldest that is not pinned."""
        frame.done.add_done_callback(lambda done: done.exception())  # its sender may have left
        self.waiting.append(frame)
        while len(self.waiting) > frame.options.waiting:
            oldest = next((f for f in self.waiting if not f.pinned), frame)
            self.waiting.remove(oldest)
            self.dropped += 1
            self._count("dropped")
            oldest.done.set_result({"type": "dropped", "dropped": self.dropped})
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._place_all())
        return asyncio.shield(frame.done)

    def pending(self) -> list[asyncio.Future[Any]]:
        """Return the futures of frames that are not placed yet."""
        frames = [*self.waiting, *([self._placing] if self._placing else [])]
        return [frame.done for frame in frames]

    async def _place_all(self) -> None:
        while self.waiting:
            self._placing = frame = self.waiting.popleft()
            result = "failed"
            try:
                placement = await self.streams.pool.run(self.streams.tenant, self._place, frame)
                result = "placed"
                frame.done.set_result({**placement, "waiting": len(self.waiting), "dropped": self.dropped})
            except asyncio.CancelledError:  # the server shuts down
                frame.done.set_exception(EngineFailed("the server is shutting down; try another one"))
            except Exception as error:
                frame.done.set_exception(error)
            self._placing = None
            self._count(result)
        self.streams.drop(self)

    def _count(self, result: str) -> None:
        metrics = self.streams.metrics
        metrics.count(metrics.live_frames, self.streams.tenant, result)

    def _place(self, frame: Frame) -> dict[str, Any]:
        """Decode a frame, make room for it, place and prefill it. All or nothing, except for the prefill."""
        push, options = frame.push, frame.options
        chunk = self.streams.context().uploads.build(push.chunk, frame.files)
        if push.time is not None:
            chunk = chunk.model_copy(update={"label": f"{_TIME}{push.time!r} {chunk.label}".rstrip()})
        with self.editing() as window:
            begin = time.perf_counter()
            with self.streams.running(digest("frame", self.streams.tenant, chunk.id)):
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
                frame.record(operation="push")
                window.maintenance.forget_beyond(options.history)
                computed = window.maintenance.prefill()
        return {
            "type": "placed", "placement": placement, "evicted": evicted, "computed": computed, "tokens": window.tokens,
            "seconds": round(time.perf_counter() - begin, 4),
        }  # fmt: skip

    @contextmanager
    def editing(self) -> Iterator[Window]:
        """Lend the window to one thread that edits it, after waiting for plain requests that do."""
        with self.turn, self.streams.context().windows.using(self.window_id) as window:
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

    def recall(self, request: Recall, options: LiveOptions) -> dict[str, Any]:
        """Recall a chunk, make room for it and prefill the window."""
        if (request.placement is None) == (request.time is None):
            raise ValueError("a recall must have a placement or a time, got both or none")
        with self.editing() as window:
            placement = request.placement or _nearest(window, request.time or 0.0)
            previous_ids = window.ids
            if placement not in previous_ids:
                window.core.state.find(placement)
                window.look_back(placement, reserve_tokens=options.reserve_tokens)
            computed = window.maintenance.prefill()
            chunk = window.chunk(placement)
            return {
                "type": "recalled", "placement": placement, "time": _time_of(chunk.label),
                "evicted": [p for p in previous_ids if p not in window.ids], "computed": computed, "tokens": window.tokens,
            }  # fmt: skip

    def answer(self, request: LiveAsk, record: Callable[..., None], put: Put, stopped: Stopped) -> dict[str, Any]:
        """Answer a question on a fork of the window, or on the window itself if the answer is to be remembered."""
        context, running = self.streams.context(), self.streams.running
        keep = partial(context.outputs.put, folder=f"/windows/{self.window_id}/outputs")
        question = request.question(context.libraries.find)
        with self.editing() as window:
            chunks = [p.chunk_id for p in window.core.state.placed]
            name = digest("ask", self.streams.tenant, request.model_dump_json(), chunks)
            if request.remember:
                context.check_room(window, request.most_placed)
                with running(name):
                    answer = stream_answer(window, question, put, stopped)
                record(operation="ask")
                return {"type": "answer", "answer": serialization.answer_to(answer, keep)}
            branch = window.fork()
        with closing(branch), running(name):
            answer = stream_answer(branch, question, put, stopped)
            return {"type": "answer", "answer": serialization.answer_to(answer, keep)}


@dataclass(frozen=True)
class Streams:
    """The streams of one tenant.

    Attributes:
        most: connections that may be open.
        context: returns the context of one call of an operation.
        pool, metrics: of the server.
        running: registers a request as running in the engine within a block; see `ctxwin_server.app.quarantine`.
    """

    tenant: str
    most: int
    context: Callable[[], OperationContext]
    pool: FairPool
    metrics: Metrics
    running: Callable[[str], AbstractContextManager[None]]
    _known: dict[str, LiveStream] = field(default_factory=dict, init=False, repr=False)

    @contextmanager
    def open(self, window_id: str) -> Iterator[LiveStream]:
        """Open the stream of a window within the block. Raises TooManyRequests. On the event loop only."""
        if sum(live.users for live in self._known.values()) >= self.most:
            raise TooManyRequests(f"at most {self.most} live connections may be open (--max-windows); close some")
        live = self._known.setdefault(window_id, LiveStream(self, window_id))
        live.users += 1
        try:
            yield live
        finally:
            live.users -= 1
            self.drop(live)

    def drop(self, live: LiveStream) -> None:
        """Forget a stream without connections and frames."""
        if not live.users and not live.pending():
            self._known.pop(live.window_id, None)

    def turn(self, window_id: str) -> AbstractContextManager[Any]:
        """Return a lock that plain requests take so that no frame is placed meanwhile. From any thread."""
        live = self._known.get(window_id)
        return nullcontext() if live is None else live.turn


def read_message(
    parse: Callable[[bytes, int | None], Any], raw: bytes, is_picture: bool, max_text: int
) -> tuple[Any, dict[str, bytes]]:
    """Parse a message and its files: JSON, or a picture, optionally after one line of JSON.

    No supported picture format begins with a brace. Raises ValueError, TooLarge.
    """
    if not is_picture:
        return validate(MESSAGE.validate_python, parse(raw, max_text)), {}
    head, _, rest = raw.partition(b"\n") if raw[:1] == b"{" else (b"", b"", raw)
    fields = parse(head, max_text)
    frame: dict[str, Any] = {"time": fields.pop("time")} if "time" in fields else {}
    return validate(Push.model_validate, {**frame, "chunk": {"type": "image", "image": {"file": "frame"}, **fields}}), {
        "frame": rest
    }


def stream_answer(window: Window, question: Question, put: Put, stopped: Stopped) -> Answer:
    """Answer ``question``, and put its text as it is generated."""
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
    """Return the time before a pushed chunk's label, the only part of a stream that a window's snapshot keeps."""
    try:
        return float(label.removeprefix(_TIME).partition(" ")[0]) if label and label.startswith(_TIME) else None
    except ValueError:
        return None


def _nearest(window: Window, at: float) -> str:
    state = window.core.state
    times = ((_time_of(p.chunk.label), p.id) for p in (*state.evicted, *state.placed))
    timed: list[tuple[float, str]] = [(abs(when - at), placement) for when, placement in times if when is not None]
    if not timed:
        raise UnknownChunk(f"time must be near a chunk that was pushed with one, got {at:g}; no chunk here has a time")
    return min(timed)[1]

"""`Trace`: operations of windows, written to a file as they happen, for `ctxwin view`; and the reader of such files.

One JSON object a line. The first is ``{"kind": "trace", "format": 1, ...}``; then come ``event`` (an operation, with
all chunks placed after it), ``chunk`` (described once, before the first event that places it) and ``note`` (added to an ask by
a caller). A line is written completely or not at all, so a reader may follow the file while it grows.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from ctxwin.chunk import Chunk, TextPart, TokensPart
from ctxwin.store.lru import LRUCache
from ctxwin.tiny import checkpoint_dir
from ctxwin.view.thumbnail import thumbnail

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.window.events import Event
    from ctxwin.window.state import Placed, State
    from ctxwin.window.window import Window

FORMAT = 1
LONGEST = 2000
"""Maximum characters of a query, an answer or a note."""
_TEXT = 160
_MAX_KEYS = 65536  # cached chunks and windows; a chunk that is no longer cached is described again


class Trace:
    """Records windows to a file that only grows.

    Args:
        path: the file; its folder must exist. An existing file is replaced unless ``append``.
        append: continue the trace of an earlier process; an unfinished last line is dropped.
        thumbnails: keep a small picture of each chunk (about 2 KB). A chunk with ``keep_source=False`` never gets one.
        engine: count its vision encodes and patches from now on instead of from the first watched window.

    Safe to use from several threads. Use as a context manager, or call `close`. Written lines stay: the thumbnail and the
    first words of a chunk forgotten with ``evict(forget=True)`` remain in the file.

    Raises:
        ValueError: ``append`` to a file that is not a trace.
        OSError: a file that cannot be written.

    Cost: one line per operation, written in the operation's own thread; a picture seen for the first time is decoded and
    compressed to a small JPEG.
    """

    def __init__(
        self, path: str | Path, *, append: bool = False, thumbnails: bool = True, engine: Engine | None = None
    ) -> None:
        self.path = Path(path)
        self._thumbnails = thumbnails
        self._lock = threading.Lock()
        # Bounded, as a run may be endless.
        self._numbers: LRUCache[int] = LRUCache(_MAX_KEYS)  # by chunk and label
        self._chunks = self._events = 0
        self._asks: LRUCache[int] = LRUCache(_MAX_KEYS)  # window: its latest ask
        self._last_ask: int | None = None
        self._in_branches: LRUCache[deque[tuple[int, str]]] = LRUCache(_MAX_KEYS)  # parent: its branches' latest asks
        self._counts: WeakKeyDictionary[Engine, tuple[int, ...]] = WeakKeyDictionary()  # at the last event
        self._versions: LRUCache[int] = LRUCache(_MAX_KEYS)  # window: as it was recorded last
        if engine is not None:
            self._counts[engine] = _counts(engine)
        continuing = append and self.path.exists()
        if continuing:
            self._continue()
        self._file = self.path.open("ab" if continuing else "wb", buffering=0)
        self._closed = False
        if not continuing:
            from ctxwin import __version__

            self._write({"kind": "trace", "format": FORMAT, "version": __version__, "time": _now()})

    def watch(self, window: Window) -> None:
        """Record ``window`` and its later forks from now on. Watching a window twice has no effect.

        A restored window continues the one with the same id.
        """
        self._begin(window)
        window.observe(_Recorder(self, window.engine))

    def note(
        self,
        costs: Mapping[str, float] | None = None,
        *,
        window: Window | None = None,
        truth: str | None = None,
        answers: Mapping[str, str] | None = None,
        text: str = "",
        idle_tokens: int = 0,
    ) -> None:
        """Add a note to the latest ask (of ``window``, if given).

        Args:
            costs: tokens that alternatives would have computed for it, by name, e.g. ``{"prefix cache": 310}``.
            truth: the right answer, if known.
            answers: answers of alternatives, by name, e.g. ``{"re-prefill": "red"}``.
            text: for display.
            idle_tokens: computed for the window outside asks since the last note (`Window.maintenance`), which an ask's own
                usage does not include.

        Raises:
            LookupError: nothing has been asked yet.
            ValueError: a cost that is not a finite number.
        """
        costs = dict(costs or {})
        if any(not isinstance(cost, int | float) or not math.isfinite(cost) for cost in costs.values()):
            raise ValueError(f"costs must be finite numbers by name, got {costs!r}")
        with self._lock:
            ask = self._asks.get(window.id) if window else self._last_ask
            if ask is None:
                raise LookupError("a note must follow an ask of a watched window, got none so far; watch() and ask")
            line = {"kind": "note", "of": ask, "costs": costs, "truth": _short(truth or ""), "text": _short(text)}
            line["answers"] = {name: _short(answer) for name, answer in (answers or {}).items()}
            line["idle_tokens"] = idle_tokens
            self._write({key: value for key, value in line.items() if value})

    def close(self) -> None:
        """End the recording; the windows stay usable. Idempotent."""
        with self._lock:
            self._closed = True
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _continue(self) -> None:
        earlier = read_trace(self.path)
        for line in earlier.lines:
            if line["kind"] == "chunk":
                self._chunks = line["n"] + 1
            elif line["kind"] == "event":
                self._events = line["n"] + 1
        with self.path.open("r+b") as file:
            file.truncate(earlier.size)

    def _record(self, engine: Engine, event: Event) -> None:
        with self._lock:
            if self._closed:
                return
            line = self._line(engine, event.op, event.state, event.parent, event.lanes or {})
            line |= {"ids": list(event.ids), "other": event.other, "note": _short(event.note) or None}
            line["seconds"] = round(event.seconds, 6)
            # From the engine: a window counts them only until its next answer, and a window restored for every step has none.
            counts = _counts(engine)
            encodes, *patches = (now - then for now, then in zip(counts, self._counts.get(engine, counts), strict=True))
            line |= {"encodes": encodes or None, "patches": patches if any(patches) else None}
            self._counts[engine] = counts
            if event.audit is not None:
                line["audit_of"] = {name: value for name, value in event.audit.items() if math.isfinite(value)}
            if event.query is not None:
                line["query"] = _short(event.query)
            if event.answer is not None:
                line |= {"answer": _short(event.answer.text), "usage": asdict(event.answer.usage)}
                if event.answer.audit is not None and math.isfinite(event.answer.audit):
                    line["audit"] = event.answer.audit
                self._last_ask = self._events
                self._asks.put(event.window, self._events, 1)
                if event.parent is not None:
                    latest = self._in_branches.get(event.parent) or deque(maxlen=2)
                    latest.append((self._events, event.query or ""))
                    self._in_branches.put(event.parent, latest, 1)
            elif event.op == "disposable":  # its two branches asked the same query
                latest = self._in_branches.get(event.window) or deque()
                self._in_branches.pop(event.window)
                line["tests"] = [n for n, query in latest if query == event.query]
            self._event(line)

    def _begin(self, window: Window) -> None:
        with self._lock:
            self._counts.setdefault(window.engine, _counts(window.engine))
            state = window.snapshot()
            if self._closed or self._versions.get(state.window) == state.version:
                return
            line = self._line(window.engine, "watch", state, window.parent, {})
            model = model_name(window.engine.spec.model)
            self._event(line | {"system_prompt": _short(state.system_prompt), "model": model})

    def _line(
        self, engine: Engine, op: str, state: State, parent: str | None, lanes: Mapping[str, str]
    ) -> dict[str, Any]:
        line: dict[str, Any] = {"kind": "event", "n": self._events, "time": _now(), "window": state.window}
        line |= {"parent": parent, "op": op, "version": state.version}
        line["placed"] = [self._entry(engine, p, lanes.get(p.id)) for p in state.placed]
        return line | {"tokens": state.tokens, "budget": state.budget, "evicted": len(state.evicted)}

    def _event(self, line: dict[str, Any]) -> None:
        self._write({key: value for key, value in line.items() if value is not None})
        self._events += 1
        self._versions.put(line["window"], line["version"], 1)

    def _entry(self, engine: Engine, placed: Placed, lane: str | None) -> dict[str, Any]:
        entry: dict[str, Any] = {"id": placed.id, "chunk": self._number(engine, placed), "tokens": placed.tokens}
        if placed.pinned:
            entry["pinned"] = True
        if not placed.conditioned:
            entry["conditioned"] = False
        if lane is not None:
            entry["lane"] = lane
        if placed.kv is not None and not placed.kv.exact:
            entry["depth"] = placed.kv.depth
        return entry

    def _number(self, engine: Engine, placed: Placed) -> int:
        key = f"{placed.chunk_id} {placed.chunk.label}"
        if (number := self._numbers.get(key)) is not None:
            return number
        number, self._chunks = self._chunks, self._chunks + 1
        line = {"kind": "chunk", "n": number, "id": placed.chunk_id, **_describe(placed.chunk), "tokens": placed.tokens}
        if self._thumbnails and (picture := thumbnail(engine.repo, placed.chunk)):
            line["thumbnail"] = picture
        self._write(line)
        self._numbers.put(key, number, 1)
        return number

    def _write(self, line: dict[str, Any]) -> None:
        raw = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"
        begin = self._file.seek(0, os.SEEK_END)
        try:
            remaining = memoryview(raw)
            while remaining:  # a nearly full disk accepts only a part
                remaining = remaining[self._file.write(remaining) :]
        except OSError:
            self._file.truncate(begin)
            raise


@dataclass(frozen=True)
class _Recorder:
    """The observer of one trace and engine."""

    trace: Trace
    engine: Engine

    def __call__(self, event: Event) -> None:
        self.trace._record(self.engine, event)


def _describe(chunk: Chunk) -> dict[str, Any]:
    text = " ".join(part.text.strip() for part in chunk.parts if isinstance(part, TextPart)).strip()
    if not text and isinstance(chunk.parts[0], TokensPart):
        text = f"{len(chunk.parts[0].ids)} token ids"
    what = chunk.media[0].media if chunk.media else chunk.parts[0].kind
    line: dict[str, Any] = {"what": what, "text": _short(text, _TEXT)}
    if chunk.label:
        line["label"] = _short(chunk.label, _TEXT)
    if chunk.role:
        line["role"] = chunk.role
    if chunk.media:
        line["frames"], *line["size"] = chunk.media[0].shape
        line["media"] = len(chunk.media)
    return line


def _counts(engine: Engine) -> tuple[int, ...]:
    """Return the runs of the vision tower, and the patches formed, served and dropped."""
    counters = engine.repo.counters
    return engine.counters.vision_encodes, counters.patches, counters.patches_served, counters.patches_dropped


def _short(text: str, limit: int = LONGEST) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def model_name(name: str) -> str:
    """Return a model's name for display: the last part of its path or Hub name."""
    return "tiny (bundled)" if Path(name) == checkpoint_dir() else Path(name).name


def _now() -> float:
    return round(time.time(), 3)


@dataclass(frozen=True)
class Recording:
    """A trace read from a file.

    Attributes:
        header: format, version of ctxwin and time of the start (seconds since 1970).
        lines: chunks, events and notes in the order of the file.
        size: bytes of the file up to its last complete line.
    """

    header: dict[str, Any]
    lines: list[dict[str, Any]]
    size: int

    @property
    def chunks(self) -> dict[int, dict[str, Any]]:
        """Chunks by number."""
        return {line["n"]: line for line in self.lines if line["kind"] == "chunk"}

    @property
    def events(self) -> list[dict[str, Any]]:
        """Operations in order, with notes merged into their asks.

        An ask that only tested a chunk (`Window.disposable`) has ``test``: True.
        """
        events = {line["n"]: dict(line) for line in self.lines if line["kind"] == "event"}
        for line in self.lines:
            for n in line.get("tests", ()):
                if n in events:
                    events[n]["test"] = True
            if line["kind"] == "note" and line["of"] in events:
                event = events[line["of"]]
                event |= {key: line[key] for key in ("truth", "text") if key in line}
                for key in ("costs", "answers"):
                    event[key] = event.get(key, {}) | line.get(key, {})
                event["idle_tokens"] = event.get("idle_tokens", 0) + line.get("idle_tokens", 0)
        return list(events.values())


def read_trace(path: str | Path) -> Recording:
    """Read a trace. An unfinished last line, of a run that is still writing or was killed, is omitted.

    Raises:
        ValueError: not a trace, a newer format, or a damaged line, with its number.
        OSError: a file that cannot be read.
    """
    data = Path(path).read_bytes()
    size = data.rfind(b"\n") + 1
    lines = _parse(path, data[:size])
    header = next(lines, None)
    if header is None:
        raise ValueError(
            f"a trace must begin with a line of its format, got {str(path)!r} without a whole line; record a run first"
        )
    return Recording(header, list(lines), size)


def _parse(path: str | Path, data: bytes) -> Iterator[dict[str, Any]]:
    for number, raw in enumerate(data.splitlines(), start=1):
        try:
            line = json.loads(raw)
        except ValueError:
            line = None
        if number == 1:
            _check_header(path, line)
        elif not _is_valid(line):
            raise ValueError(f"line {number} of {str(path)!r} must be a chunk, an event or a note, got {raw[:60]!r}")
        yield line


def _check_header(path: str | Path, line: Any) -> None:
    if not isinstance(line, dict) or line.get("kind") != "trace":
        raise ValueError(
            f"{str(path)!r} must be a trace of ctxwin, got another kind of file; record one with ctxwin.view.trace.Trace"
        )
    if line.get("format") != FORMAT:
        raise ValueError(
            f"format of {str(path)!r} must be {FORMAT}, got {line.get('format')!r}; use the ctxwin that recorded it"
        )


_REQUIRED_KEYS = {
    "chunk": ("n", "what", "tokens"),
    "event": ("n", "time", "window", "op", "version", "placed", "tokens", "budget", "evicted"),
    "note": ("of",),
}
_ASK_KEYS = ("query", "answer", "usage")


def _is_valid(line: Any) -> bool:
    if not isinstance(line, dict) or line.get("kind") not in _REQUIRED_KEYS:
        return False
    needed = _REQUIRED_KEYS[line["kind"]] + (_ASK_KEYS if line.get("op") == "ask" else ())
    return all(key in line for key in needed)

"""What a server allows, and the accounts that requests are charged to before their cost is paid."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ctxwin.errors import BudgetExceeded
from ctxwin.fidelity import Fidelity
from ctxwin.serve.errors import TooLarge, TooManyRequests

_TEXT_PER_TOKEN = 16
"""Characters that a context window must hold for each of its tokens, by default: prose has 4 to 5, indented code 10."""
_SLICE = 1 << 16
"""Bytes of a body that are counted at a time; other threads may go on in between."""
_MEDIA = ("image", "frames", "image_url", "video_url", "input_audio", "file_data", "source")
_NOT_TOKENIZED = {*_MEDIA, "snapshot", "response_format", "json_schema"}
"""Fields whose text never reaches a tokenizer, or has bounds of its own."""
_NAMES = frozenset({"chunk", "id", "type", "role"})
"""Fields that are names where they are plain text."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one server; every one keeps its memory or its time bounded. What is refused names the bound.

    Attributes:
        max_upload_bytes: of one request's body.
        max_body_bytes: of all bodies that are held at once; with tenants, half of it for each.
        max_json_values: values and names in one JSON body, counted by its commas, colons and brackets before it is parsed.
        max_json_depth: levels of one JSON body.
        max_text: characters of one request's text, checked before it is tokenised; None is 16 for each token of context.
        max_pixels: of the media of one request together, decoded (frames x height x width).
        max_frames: pictures and frames of one request: what the vision tower is given does not depend on their size alone.
        max_chunks: of one window, placed and evicted, and of one call.
        max_libraries: of a tenant; max_library_files, max_library_bytes: of one of them, which has at most max_chunks passages.
        max_windows: open windows of a tenant; the least recently used idle one is put aside for a new one.
        max_windows_total: open windows of all tenants; the tenant that has most puts one aside.
        window_ttl_s: seconds after which an idle window is closed; its snapshot stays in the store.
        threads: requests that may be answered at once; tenants that wait share them fairly (`ctxwin.serve.fair`).
        max_waiting: requests of one tenant that wait for their turn.
        decode_seconds, decode_bytes: processor time and memory of decoding one picture or file, in a process of its own.
        max_logprobs: log-probabilities of a plain request for each token, as vLLM's own argument; -1 is no limit.
        fidelity: of windows and chats that say nothing else.
    """

    max_upload_bytes: int = 64 << 20
    max_body_bytes: int = 512 << 20
    max_json_values: int = 300_000
    max_json_depth: int = 200
    max_text: int | None = None
    max_pixels: int = 64 << 20
    max_frames: int = 256
    max_chunks: int = 4096
    max_libraries: int = 32
    max_library_files: int = 1000
    max_library_bytes: int = 1 << 30
    max_windows: int = 256
    max_windows_total: int = 1024
    window_ttl_s: float = 3600.0
    threads: int = 64
    max_waiting: int = 1024
    decode_seconds: float = 10.0
    decode_bytes: int = 3 << 29
    max_logprobs: int = 20
    fidelity: Fidelity = field(default_factory=Fidelity)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name not in ("max_logprobs", "fidelity") and value is not None and not value > 0:
                raise ValueError(f"{name} must be > 0, got {value!r}")

    def text(self, max_tokens: int) -> int:
        """Characters of text that one request may have on an engine that takes ``max_tokens``."""
        return self.max_text or _TEXT_PER_TOKEN * max_tokens

    def parse(self, raw: bytes, max_text: int | None = None) -> Any:
        """The JSON in ``raw``; no body at all is an empty object.

        Args:
            max_text: most characters that may go to a tokenizer; None is no bound.

        Raises:
            TooLarge: too many values or levels, or too much text. ValueError: no JSON.

        Cost: linear. Parsing holds Python's lock, for all threads and the event loop: a body with too many values is not
        parsed. Names cost most.
        """
        if not raw:
            return {}
        values = 0
        for at in range(0, len(raw), _SLICE):
            values += sum(raw.count(mark, at, at + _SLICE) for mark in (b",", b"[", b"{", b":"))
            # Commas of prose are no values, but so many of them are more text than is taken.
            if values > self.max_json_values:
                raise TooLarge(
                    f"a body must have at most {self.max_json_values} JSON values and names (--max-json-values), got more; "
                    "send less at once, or raise it"
                )
        too_deep = TooLarge(f"a body must have at most {self.max_json_depth} levels (max_json_depth), got more")
        try:
            data = json.loads(raw)
        except RecursionError:
            raise too_deep from None
        except ValueError as error:
            raise ValueError(f"the body must be JSON: {error}") from None
        if self._levels(data, max_text) > self.max_json_depth:
            raise too_deep
        return data

    def _levels(self, data: Any, max_text: int | None) -> int:
        """How deep ``data`` is, up to one level more than is taken; raises TooLarge for too much text."""
        text, levels, level = 0, 0, [(data, True)]
        while level and levels <= self.max_json_depth:
            levels += 1
            below: list[tuple[Any, bool]] = []
            for value, counted in level:
                if isinstance(value, str):
                    text += len(value) if counted else 0
                elif isinstance(value, list):
                    below += [(item, counted) for item in value]
                elif isinstance(value, dict):
                    below += [(item, counted and not _is_name(key, item)) for key, item in value.items()]
            if max_text is not None and text > max_text:
                raise TooLarge(
                    f"the text of a request must have at most {max_text} characters (--max-text), got {text} or more; "
                    "send less, or raise it"
                )
            level = below
        return levels


def _is_name(key: str, value: Any) -> bool:
    return key in _NOT_TOKENIZED or (key in _NAMES and isinstance(value, str))


class Allowance:
    """What the media and chunks of one request may still cost: all of them are in memory at the same time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pixels = self._frames = 0

    def take_picture(self, width: int, height: int) -> None:
        """Counts a picture or frame before it is decoded; raises TooLarge beyond a limit."""
        self.take_frames(1, width * height)

    def take_frames(self, frames: int, pixels: int) -> None:
        """Counts ``frames`` frames of ``pixels`` pixels together."""
        self._frames += frames
        self._pixels += pixels
        for what, got, most in (
            ("frames", self._frames, self._limits.max_frames),
            ("pixels", self._pixels, self._limits.max_pixels),
        ):
            if got > most:
                raise TooLarge(
                    f"the media of a request must have at most {most} {what} together (--max-{what}), got {got} or more; "
                    "send them in several requests, scale them down, or raise it"
                )

    def check_chunks(self, count: int) -> None:
        """Raises BudgetExceeded where a window would have ``count`` chunks, evicted ones included."""
        most = self._limits.max_chunks
        if count > most:
            raise BudgetExceeded(
                f"a window must have at most {most} chunks (--max-chunks), evicted ones included, got {count}; evict some "
                "with forget, open a window for them, or raise it",
                needed=count,
                budget=most,
            )


class BodyBytes:
    """Bytes of bodies that are held at once, by tenant and in total. Thread-safe."""

    def __init__(self, total: int, each: int) -> None:
        self._total, self._each = total, each
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, tenant: str, size: int) -> None:
        """Counts ``size`` bytes more; raises TooManyRequests beyond a limit, and then counts nothing."""
        with self._lock:
            if self._held[tenant] + size > self._each or self._held.total() + size > self._total:
                raise TooManyRequests(
                    f"the bodies of requests that run must have at most {self._each} bytes of a tenant and {self._total} in "
                    "all (max_body_bytes); try again when others have ended"
                )
            self._held[tenant] += size

    def give_back(self, tenant: str, size: int) -> None:
        """Counts ``size`` bytes less."""
        with self._lock:
            self._held[tenant] -= size
            if not self._held[tenant]:
                del self._held[tenant]

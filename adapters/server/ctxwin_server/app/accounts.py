"""Bodies of requests, received and parsed within limits, and accounts that requests are charged to before their cost is paid."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ctxwin.errors import EngineFailed
from ctxwin_client.errors import TooLarge, TooManyRequests
from ctxwin_server.protocol.limits import Limits

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope

_SLICE = 1 << 20
"""Bytes of a body that are counted at a time; other threads may go on in between."""
_MEDIA = ("image", "frames", "image_url", "video_url", "input_audio", "file_data", "source")
_NOT_TOKENIZED = {*_MEDIA, "snapshot", "response_format", "json_schema"}
"""Fields whose text never reaches a tokenizer, or has bounds of its own."""
_NAMES = frozenset({"chunk", "id", "type", "role"})
"""Fields that are names where they are plain text."""
_UNNAMED = "a number"  # an item of a list, in messages
_BOUNDED = frozenset({"seed"})
"""Fields of a request for which every route that knows them has bounds of its own, and words for them."""


class Malformed(ValueError):
    """JSON that no route accepts."""


def parse_json(limits: Limits, raw: bytes, max_text: int | None = None) -> Any:
    """Parse the JSON in ``raw``; an empty body is an empty object. ``max_text`` bounds what may reach a tokenizer.

    Raises TooLarge for too many values, levels or characters, Malformed for text that is not Unicode, integers beyond 64 bits,
    NaN and infinities, ValueError for what is no JSON. Cost: linear. Parsing holds Python's lock, for all threads and the event
    loop: a body with too many values is not parsed. Names cost most.
    """
    if not raw:
        return {}
    values, characters = 0, np.frombuffer(raw, np.uint8)
    for at in range(0, len(raw) if len(raw) > limits.max_json_values else 0, _SLICE):  # a value has a byte at least
        values += sum(int(np.count_nonzero(characters[at : at + _SLICE] == mark)) for mark in b",[{:")
        # Commas in text are not values, but so many of them exceed the limit of text.
        if values > limits.max_json_values:
            raise TooLarge(
                f"a body must have at most {limits.max_json_values} JSON values and names (--max-json-values), got more; "
                "send less at once, or raise it"
            )
    too_deep = TooLarge(f"a body must have at most {limits.max_json_depth} levels (max_json_depth), got more")
    try:
        data = decode_json(raw)
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        raise ValueError(f"the body must be JSON: {error}") from None
    if _measure_depth(limits, data, max_text) > limits.max_json_depth:
        raise too_deep
    return data


def decode_json(raw: bytes) -> Any:
    """Return what ``json.loads`` does; a body of screenshots takes msgspec a tenth of its time. Raises ValueError as it does."""
    try:
        return msgspec.json.decode(raw)
    except ValueError:  # such as infinities and UTF-16: json's rules count
        return json.loads(raw)


def encode_body(data: Any) -> bytes:
    """Return JSON of what `parse_json` has returned, changed or not."""
    try:
        return msgspec.json.encode(data)
    except (OverflowError, UnicodeEncodeError):
        return json.dumps(data).encode()


def _measure_depth(limits: Limits, data: Any, max_text: int | None) -> int:
    """Return the depth of ``data``, at most one above the limit; raise TooLarge for too much text, Malformed for bad values."""
    text, levels, level = 0, 0, [(_UNNAMED, data, True)]
    while level and levels <= limits.max_json_depth:
        levels += 1
        below: list[tuple[str, Any, bool]] = []
        for name, value, counted in level:
            kind = type(value)  # json gives no subclasses, and a call for each value takes longer than all else here
            if kind is str:
                if not value.isascii():
                    _check_text(value)
                text += len(value) if counted and name not in _NAMES else 0
            elif kind is list:
                below += [(_UNNAMED, item, counted) for item in value]
            elif kind is dict:
                _check_text("".join(value))
                below += [(key, item, counted and key not in _NOT_TOKENIZED) for key, item in value.items()]
            elif kind is float or (kind is int and not (levels == 2 and name in _BOUNDED)):
                _check_number(name, value)
        if max_text is not None and text > max_text:
            raise TooLarge(
                f"the text of a request must have at most {max_text} characters (--max-text), got {text} or more; "
                "send less, or raise it"
            )
        level = below
    return levels


def _check_text(text: str) -> None:
    """Raise Malformed for half of a surrogate pair, which no tokenizer and no answer can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Malformed("text must be Unicode, got half of a surrogate pair (like \\ud800)") from None


def _check_number(name: str, value: Any) -> None:
    """Raise Malformed for an integer beyond 64 bits, and for NaN and infinity, which no JSON has and no answer can repeat."""
    if isinstance(value, float) and not math.isfinite(value):
        raise Malformed(f"{name[:60]} must be a finite number, got {value}")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise Malformed(f"{name[:60]} must be from -2**63 to 2**64 - 1, got a number of {value.bit_length()} bits")


class BodyBytes:
    """Bytes of all bodies in memory, by tenant and in total. Thread-safe."""

    def __init__(self, total: int, each: int) -> None:
        self._total, self._each = total, each
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, tenant: str, size: int) -> None:
        """Count ``size`` bytes more; raise TooManyRequests, and count nothing, beyond a limit."""
        with self._lock:
            if self._held[tenant] + size > self._each or self._held.total() + size > self._total:
                raise TooManyRequests(
                    f"the bodies of requests that run must have at most {self._each} bytes of a tenant and {self._total} in "
                    "all (max_body_bytes); try again when others have ended"
                )
            self._held[tenant] += size

    def give_back(self, tenant: str, size: int) -> None:
        """Count ``size`` bytes less."""
        with self._lock:
            self._held -= Counter({tenant: size})  # drops what is at zero


class RunningRequests:
    """The requests in progress, those included whose bodies are still being received. Thread-safe.

    Args:
        most: requests of one tenant.

    Attributes:
        draining: whether new requests are refused, since the server shuts down.
    """

    def __init__(self, most: int) -> None:
        self.draining = False
        self._most = most
        self._by_tenant: Counter[str] = Counter()
        self._awaited = 0
        self._changed = threading.Condition()

    @contextmanager
    def one(self, tenant: str, *, awaited: bool = True) -> Iterator[None]:
        """Count a request within the block; raise TooManyRequests beyond the limit, EngineFailed while draining.

        ``awaited``: whether `drain` waits for it; false for sockets, which may stay open forever.
        """
        with self._changed:
            if self.draining:
                raise EngineFailed("the server is shutting down; try another one")
            if self._by_tenant[tenant] >= self._most:
                raise TooManyRequests(
                    f"at most {self._most} requests of a tenant may be under way (--max-concurrency and --max-waiting); try "
                    "again when some have ended"
                )
            self._by_tenant[tenant] += 1
            self._awaited += awaited
        try:
            yield
        finally:
            with self._changed:
                self._by_tenant -= Counter([tenant])  # drops what is at zero
                self._awaited -= awaited
                self._changed.notify_all()

    def drain(self, seconds: float) -> int:
        """Refuse new requests and wait for running ones; return how many still run after ``seconds``. Blocks."""
        with self._changed:
            self.draining = True
            self._changed.wait_for(lambda: not self._awaited, max(0.0, seconds))
            return self._awaited


class Rate:
    """A token bucket of ``most`` a minute, which is full after a minute of rest. Thread-safe.

    An amount larger than the bucket is accepted once it is full, and paid off afterwards.
    """

    def __init__(self, most: float, unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._what, self._clock = most, unit, clock
        self._left, self._at = most, clock()
        self._lock = threading.Lock()

    def take(self, amount: float) -> None:
        """Count ``amount``; raise TooManyRequests, with the seconds to wait, if the bucket does not hold it."""
        with self._lock:
            self._refill()
            lacks = min(amount, self._most) - self._left
            if lacks > 0:
                wait = math.ceil(lacks * 60 / self._most)
                raise TooManyRequests(
                    f"a tenant may send {self._most:g} {self._what} a minute (tenants file); try again in {wait} s",
                    after=wait,
                )
            self._left -= amount

    def charge(self, amount: float) -> None:
        """Count ``amount`` of a request that was accepted already."""
        with self._lock:
            self._refill()
            self._left -= amount

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._most / 60)
        self._at = now


class BodyReader:
    """A request's body or a socket's message while it is received: within a limit, and counted among all bodies in memory.

    Args:
        limit: bytes of the body.
        held: the bodies of all requests; ``tenant``'s are counted.
        quota: charged with every byte.

    Attributes:
        cut_off: whether the client disconnected before the end.
    """

    def __init__(self, limit: int, held: BodyBytes, tenant: str, receive: Receive, quota: Rate | None = None) -> None:
        self._limit, self._held, self._tenant, self._receive, self._quota = limit, held, tenant, receive, quota
        self._size = 0
        self.cut_off = False

    def check_announced(self, length: str) -> None:
        """Raise TooLarge for the length of a body that is too long, which is then not read at all."""
        if length.isdecimal() and (len(length) > 18 or int(length) > self._limit):
            self._refuse(length[:20])

    async def receive(self) -> Message:
        """Return the next message; raise TooLarge or TooManyRequests."""
        message = await self._receive()
        self.count(len(message.get("body", b"")))
        return message

    def count(self, size: int) -> None:
        """Count bytes that have arrived; raise TooLarge or TooManyRequests."""
        if self._size + size > self._limit:
            self._refuse("more")
        self._held.take(self._tenant, size)
        self._size += size
        if self._quota is not None:
            self._quota.charge(size)

    async def read(self) -> bytes:
        """Return the whole body, or what a client had sent when it disconnected."""
        parts: list[bytes] = []
        while True:
            message = await self.receive()
            parts.append(message.get("body", b""))
            self.cut_off = message["type"] != "http.request"
            if self.cut_off or not message.get("more_body", False):
                return b"".join(parts)

    def give_back(self) -> None:
        """Count the body as no longer in memory."""
        self._held.give_back(self._tenant, self._size)

    def _refuse(self, got: str) -> None:
        raise TooLarge(f"a body must have at most {self._limit} bytes (--max-upload-bytes), got {got}")


def replace_body(scope: Scope, receive: Receive, raw: bytes) -> tuple[list[tuple[bytes, bytes]], Receive]:
    """Return the headers of a request whose body is ``raw`` instead, and a ``receive`` that returns it as a whole first."""
    headers = [(k, v) for k, v in scope["headers"] if k.lower() not in (b"content-length", b"transfer-encoding")]
    messages: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive_body() -> Message:
        return messages.pop() if messages else await receive()

    return [*headers, (b"content-length", str(len(raw)).encode())], receive_body

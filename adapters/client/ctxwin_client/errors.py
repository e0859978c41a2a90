"""Errors over HTTP: our exceptions as a status with OpenAI's ``{"error": {...}}``, and back to exceptions in the client."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

from ctxwin.errors import (
    BadMedia,
    BudgetExceeded,
    ChunkUnavailable,
    CtxwinError,
    EngineFailed,
    NameTaken,
    ReadOnlyWindow,
    StaleOwner,
    StoreFull,
    StoreUnavailable,
    UnknownChunk,
    UnknownFile,
    UnknownVersion,
    UnsupportedModel,
    WindowBusy,
)


class UnknownWindow(CtxwinError, KeyError):
    """A window id that this tenant does not have."""


class UnknownUpload(CtxwinError, KeyError):
    """A chunk id that this tenant has not uploaded, or that has left the store."""


class UnknownLibrary(CtxwinError, KeyError):
    """A library that this tenant neither has nor may read."""


class TooLarge(CtxwinError, ValueError):
    """A body or a picture beyond the server's limits."""


class TooManyWindows(CtxwinError, RuntimeError):
    """Every window that may be open is in use."""


class TooManyRequests(CtxwinError, RuntimeError):
    """More requests than the server accepts at once from this tenant; ``after``: seconds until a retry, if known."""

    def __init__(self, message: str, *, after: int | None = None) -> None:
        super().__init__(message)
        self.after = after


class MemoryShort(CtxwinError, RuntimeError):
    """A request refused because the server is short of memory; ``after``: seconds until a retry makes sense."""

    after = 5


class Quarantined(CtxwinError, RuntimeError):
    """A request that ended the engine, and would end it again."""


class Unauthorized(CtxwinError, PermissionError):
    """A request without a valid API key, where one is required."""


class NotAllowed(CtxwinError, PermissionError):
    """A request that this server does not accept from a tenant."""


@dataclass(frozen=True)
class Kind:
    """HTTP form of one class of errors.

    Attributes:
        code: value of ``error.code``; the client maps it back to ``error``.
    """

    error: type[Exception]
    status: int
    code: str
    type: str = "invalid_request_error"


KINDS = (
    Kind(BudgetExceeded, 422, "budget_exceeded"),
    Kind(UnknownUpload, 404, "unknown_upload", "not_found_error"),
    Kind(UnknownWindow, 404, "unknown_window", "not_found_error"),
    Kind(UnknownChunk, 404, "unknown_chunk", "not_found_error"),
    Kind(UnknownVersion, 404, "unknown_version", "not_found_error"),
    Kind(UnknownLibrary, 404, "unknown_library", "not_found_error"),
    Kind(UnknownFile, 404, "unknown_file", "not_found_error"),
    Kind(NameTaken, 409, "name_taken", "invalid_request_error"),
    Kind(ChunkUnavailable, 410, "chunk_unavailable", "not_found_error"),
    Kind(WindowBusy, 409, "window_busy", "conflict_error"),
    Kind(StaleOwner, 409, "stale_owner", "conflict_error"),
    Kind(Quarantined, 409, "quarantined", "conflict_error"),
    Kind(ReadOnlyWindow, 409, "read_only_window", "conflict_error"),
    Kind(TooLarge, 413, "too_large"),
    Kind(TooManyWindows, 429, "too_many_windows", "rate_limit_error"),
    Kind(TooManyRequests, 429, "too_many_requests", "rate_limit_error"),
    Kind(MemoryShort, 503, "memory_short", "server_error"),
    Kind(StoreFull, 507, "store_full", "server_error"),
    Kind(StoreUnavailable, 503, "store_unavailable", "server_error"),
    Kind(Unauthorized, 401, "invalid_api_key", "authentication_error"),
    Kind(NotAllowed, 403, "not_allowed", "permission_error"),
    Kind(BadMedia, 400, "bad_media"),
    Kind(UnsupportedModel, 400, "unsupported_model"),
    Kind(EngineFailed, 503, "engine_failed", "server_error"),
    Kind(LookupError, 404, "not_found", "not_found_error"),
    Kind(ValueError, 400, "invalid_value"),
    Kind(TypeError, 400, "invalid_value"),
    Kind(AssertionError, 500, "broken_invariant", "server_error"),
)
"""The first match counts, so subclasses come before their bases."""
_INTERNAL = Kind(Exception, 500, "internal_error", "server_error")


def kind_of(error: BaseException) -> Kind:
    """Return the `Kind` of ``error``."""
    return next((kind for kind in KINDS if isinstance(error, kind.error)), _INTERNAL)


def to_body(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body in OpenAI's shape. Unexpected errors do not show their message."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        error = StoreFull("a disk or the shared memory of the server is full; make room there, then try again")
    kind = kind_of(error)
    # Python's own LookupErrors are bugs of ours; their messages are keys and indices.
    ours = isinstance(error, CtxwinError | ValueError | TypeError | AssertionError)
    if kind is _INTERNAL or not ours:
        kind, message = _INTERNAL, "the server failed on this request; its log says why"
    else:
        message = str(error) or type(error).__name__
    fields: dict[str, Any] = {"message": message, "type": kind.type, "param": None, "code": kind.code}
    if isinstance(error, BudgetExceeded):
        fields |= {"needed": error.needed, "budget": error.budget}
    return kind.status, {"error": fields}


def from_body(error: Any) -> Exception | None:
    """Return the exception that ``{"message": ..., "code": ...}`` describes; None if it is not one of ours.

    Invalid API keys are left to the official client's own error.
    """
    if not isinstance(error, dict) or not isinstance(error.get("code"), str):
        return None
    kind = next((kind for kind in KINDS if kind.code == error["code"]), None)
    if kind is None or kind.error is Unauthorized:
        return None
    message = str(error.get("message", ""))
    if kind.error is BudgetExceeded:
        return BudgetExceeded(message, needed=int(error.get("needed", 0)), budget=int(error.get("budget", 0)))
    return kind.error(message)

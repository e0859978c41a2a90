"""Errors over HTTP: status and code of each of our exceptions, and the exception that a server's error stands for."""

from dataclasses import dataclass
from typing import Any

from ctxwin import errors


class UnknownWindow(errors.CtxwinError, KeyError):
    """A window id that this tenant does not have."""


class UnknownUpload(errors.CtxwinError, KeyError):
    """A chunk id that this tenant has not uploaded, or that has left the store."""


class UnknownLibrary(errors.CtxwinError, KeyError):
    """A library that this tenant neither has nor may read."""


class TooLarge(errors.CtxwinError, ValueError):
    """A body or a picture beyond the server's limits."""


class TooManyWindows(errors.CtxwinError, RuntimeError):
    """Every window that may be open is in use."""


class TooManyRequests(errors.CtxwinError, RuntimeError):
    """More requests than the server accepts at once from this tenant; ``after``: seconds until a retry, if known."""

    def __init__(self, message: str, *, after: int | None = None) -> None:
        super().__init__(message)
        self.after = after


class MemoryShort(errors.CtxwinError, RuntimeError):
    """A request refused because the server is short of memory; ``after``: seconds until a retry makes sense."""

    after = 5


class Quarantined(errors.CtxwinError, RuntimeError):
    """A request that ended the engine, and would end it again."""


class Unauthorized(errors.CtxwinError, PermissionError):
    """A request without a valid API key, where one is required."""


class NotAllowed(errors.CtxwinError, PermissionError):
    """A request that this server does not accept from a tenant."""


@dataclass(frozen=True)
class Kind:
    """HTTP form of one class of errors; the client maps ``code`` back to ``error``."""

    error: type[Exception]
    status: int
    code: str
    type: str = "invalid_request_error"


KINDS = (
    Kind(errors.BudgetExceeded, 422, "budget_exceeded"),
    Kind(UnknownUpload, 404, "unknown_upload", "not_found_error"),
    Kind(UnknownWindow, 404, "unknown_window", "not_found_error"),
    Kind(errors.UnknownChunk, 404, "unknown_chunk", "not_found_error"),
    Kind(errors.UnknownVersion, 404, "unknown_version", "not_found_error"),
    Kind(UnknownLibrary, 404, "unknown_library", "not_found_error"),
    Kind(errors.UnknownFile, 404, "unknown_file", "not_found_error"),
    Kind(errors.NameTaken, 409, "name_taken", "invalid_request_error"),
    Kind(errors.OutputGone, 404, "output_gone", "not_found_error"),
    Kind(errors.ChunkUnavailable, 410, "chunk_unavailable", "not_found_error"),
    Kind(errors.WindowBusy, 409, "window_busy", "conflict_error"),
    Kind(errors.StaleOwner, 409, "stale_owner", "conflict_error"),
    Kind(Quarantined, 409, "quarantined", "conflict_error"),
    Kind(errors.ReadOnlyWindow, 409, "read_only_window", "conflict_error"),
    Kind(TooLarge, 413, "too_large"),
    Kind(TooManyWindows, 429, "too_many_windows", "rate_limit_error"),
    Kind(TooManyRequests, 429, "too_many_requests", "rate_limit_error"),
    Kind(MemoryShort, 503, "memory_short", "server_error"),
    Kind(errors.MissingExtra, 501, "missing_extra", "server_error"),
    Kind(errors.StoreFull, 507, "store_full", "server_error"),
    Kind(errors.StoreUnavailable, 503, "store_unavailable", "server_error"),
    Kind(Unauthorized, 401, "invalid_api_key", "authentication_error"),
    Kind(NotAllowed, 403, "not_allowed", "permission_error"),
    Kind(errors.BadMedia, 400, "bad_media"),
    Kind(errors.UnsupportedModel, 400, "unsupported_model"),
    Kind(errors.EngineFailed, 503, "engine_failed", "server_error"),
    Kind(LookupError, 404, "not_found", "not_found_error"),
    Kind(ValueError, 400, "invalid_value"),
    Kind(TypeError, 400, "invalid_value"),
    Kind(AssertionError, 500, "broken_invariant", "server_error"),
)
"""The first match counts, so subclasses come before their bases."""


def from_body(error: Any) -> Exception | None:
    """Return the exception that ``{"message": ..., "code": ...}`` describes; None for an invalid key's and others' errors."""
    kind = next((kind for kind in KINDS if isinstance(error, dict) and kind.code == error.get("code")), None)
    if kind is None or kind.error is Unauthorized:
        return None
    message = str(error.get("message", ""))
    if kind.error is errors.BudgetExceeded:
        return errors.BudgetExceeded(message, needed=int(error.get("needed", 0)), budget=int(error.get("budget", 0)))
    return kind.error(message)

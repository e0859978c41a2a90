"""Errors that reach a user; each also is the nearest built-in, so callers can catch either."""


class CtxwinError(Exception):
    """Base of every error raised on purpose by ctxwin."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument; our messages are sentences.
        return str(self.args[0]) if self.args else type(self).__name__


class UnknownChunk(CtxwinError, KeyError):
    """A placement id that this window version does not hold."""


class BudgetExceeded(CtxwinError, ValueError):
    """More tokens are needed than the window's budget allows.

    Attributes:
        needed: tokens that the call needs.
        budget: tokens that the window may use.
    """

    def __init__(self, message: str, *, needed: int, budget: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.budget = budget


class UnknownVersion(CtxwinError, LookupError):
    """A version that its window no longer keeps, or never had."""


class ChunkUnavailable(CtxwinError, LookupError):
    """A chunk's content is gone and there is no source to rebuild it from."""


class UnsupportedModel(CtxwinError, ValueError):
    """The model has a property under which cached KV cannot be moved; the message names it."""


class StoreCorrupt(CtxwinError, ValueError):
    """A stored blob failed its checks. Never reaches a user: it is a miss, counted and logged."""


class StaleOwner(CtxwinError, RuntimeError):
    """A server tried to write a version of a window that another server has taken over."""


class StoreUnavailable(CtxwinError, OSError):
    """A shared store did not answer, so data that a request requires in it could not be written."""


class StoreFull(CtxwinError, OSError):
    """The store, or the disk or shared memory below it, is full, or read only."""


class OutputGone(CtxwinError, LookupError):
    """A stage output that waits no longer, or never did."""


class UnknownFile(CtxwinError, KeyError):
    """A file that its library does not have, or no longer has."""


class NameTaken(CtxwinError, ValueError):
    """A name that is already in use."""


class WindowBusy(CtxwinError, RuntimeError):
    """A second writer entered a window while the first one was still in it."""


class ReadOnlyWindow(CtxwinError, RuntimeError):
    """An edit was tried on an old version of a window."""


class EngineFailed(CtxwinError, RuntimeError):
    """The engine could not answer a request; the window is as it was before the call."""


class BadMedia(CtxwinError, ValueError):
    """An image or video that cannot be decoded, or holds nothing."""


class MissingExtra(CtxwinError, ModuleNotFoundError):
    """An optional dependency is not installed; the message names the ``pip`` command that installs it."""


class AnswerStopped(CtxwinError, RuntimeError):
    """An answer was stopped by its caller; the window is unchanged."""

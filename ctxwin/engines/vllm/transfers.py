"""What one vLLM request shall load and capture, and where an engine and its connector exchange it.

vLLM carries only a small string from the caller to the connector (``kv_transfer_params``); everything else waits under
that handle. Inside one process the tensors wait in an `Exchange`; for vLLM's other processes they lie in files, see
`ctxwin.engines.vllm.spool`. Both sides speak of the same `Transfer`.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    import torch

    from ctxwin.engines.vllm.paged import PagedKV
    from ctxwin.kv.layout import KVSpec, SpanKV
    from ctxwin.kv.patch import Patch

PARAM = "ctxwin"
"""Key of the handle inside ``kv_transfer_params``, and of the exchange's name inside the connector's extra config."""
_HANDLE = re.compile(r"[0-9a-f]{32}")


def new_handle() -> str:
    """A name for one transfer that no client of a server can guess."""
    return secrets.token_hex(16)


def is_handle(name: object) -> TypeGuard[str]:
    """Whether ``name`` can be a handle at all; over HTTP anything may arrive."""
    return isinstance(name, str) and _HANDLE.fullmatch(name) is not None


@dataclass(frozen=True)
class Placed:
    """A span that the connector loads.

    Attributes:
        begin: index of its first token within the prompt.
        span: its KV, in any frame.
        start: position of its origin in this prompt; the keys are relocated there on the way in.
        patch: reconditions the span on the way in; None: it is served as it is.
        id: stable name of the span; "" for KV that has none and is handed over for one request only.
        patch_id: stable name of the patch; likewise.
    """

    begin: int
    span: SpanKV
    start: int
    patch: Patch | None = None
    id: str = ""
    patch_id: str = ""

    @property
    def end(self) -> int:
        return self.begin + self.span.tokens


@dataclass(frozen=True)
class Job:
    """What vLLM's scheduler has to know of a transfer.

    Attributes:
        covered: prompt tokens that the loads cover.
        blank: prompt tokens up to the end of the last medium that carries no embeddings, because its KV will be loaded;
            these can not be computed.
        captures: token ranges ``[begin, end)`` to read back when the request finishes, by name; an ``end`` of None is
            the last token whose KV was computed.
        own: prompt token from which on nobody else finds the blocks; those in front may be hit by requests that know
            nothing of ctxwin. See `spaces.Space`.
        exact: whether a forward gives what is loaded.
    """

    covered: int = 0
    blank: int = 0
    captures: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    own: int = 0
    exact: bool = False

    def wanted(self, hit: int, prompt: int, block: int) -> int:
        """Tokens to load behind a prefix hit of ``hit`` tokens; vLLM computes the last prompt token in any case.

        Exact KV that would fill less than a block is computed together with what is new: that costs less than a load
        in the background, and an append to a warm window reloads nothing.
        """
        count = max(0, min(self.covered, prompt - 1) - hit)
        if self.exact and 0 < count < block and hit >= max(1, self.blank):
            return 0
        return count

    def background(self, hit: int) -> bool:
        """Whether what is loaded behind a prefix hit of ``hit`` tokens must be there before anybody can find it."""
        return hit < self.own


@dataclass
class Transfer:
    """One request: its instructions, and what became of them.

    Attributes:
        loads: spans that cover one contiguous prefix of the prompt, in order.
        captures, blank, own, exact: see `Job`.
        embeddings: vision embeddings ``[tokens, width]`` for vLLM's EC connector, by multimodal identifier.
        local_tokens: prompt tokens that vLLM's own prefix cache served.
        planned_tokens: prompt tokens that vLLM's scheduler counts on the connector to write.
        loaded_tokens: prompt tokens that it wrote, as far as the connector runs in this process.
        bytes_loaded: bytes of KV that the connector wrote.
        captured: ``(k, v)`` of each capture, ``[layers, tokens, heads, dim]``, keys as they lie in the cache.
        error: why a load or a capture failed; the request's answer must then be thrown away.
    """

    loads: tuple[Placed, ...] = ()
    captures: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    blank: int = 0
    own: int = 0
    exact: bool = False
    embeddings: dict[str, torch.Tensor] = field(default_factory=dict)
    local_tokens: int = 0
    planned_tokens: int = 0
    loaded_tokens: int = 0
    bytes_loaded: int = 0
    captured: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    error: BaseException | None = None

    @property
    def covered(self) -> int:
        """Prompt tokens that the loads cover."""
        return self.loads[-1].end if self.loads else 0

    @property
    def job(self) -> Job:
        return Job(self.covered, self.blank, self.captures, self.own, self.exact)


class Exchange:
    """The transfers of one engine whose connector runs in this process, and the paged cache they go to.

    Attributes:
        name: under which the connector finds it.
        kv: layout of the model's KV.
        paged: access to the engine's cache; set once the engine is up.
    """

    def __init__(self, name: str, kv: KVSpec) -> None:
        self.name = name
        self.kv = kv
        self.paged: PagedKV | None = None
        self._transfers: dict[str, Transfer] = {}
        self._lock = threading.Lock()

    def add(self, transfer: Transfer) -> str:
        """Registers a transfer; returns its handle."""
        handle = new_handle()
        with self._lock:
            self._transfers[handle] = transfer
        return handle

    def get(self, handle: str) -> Transfer | None:
        """None for a handle that is not (or no longer) registered."""
        with self._lock:
            return self._transfers.get(handle)

    def remove(self, handle: str) -> None:
        with self._lock:
            self._transfers.pop(handle, None)

    def collect(self, handle: str, transfer: Transfer, finished: bool) -> None:
        """Brings what the connector reported into ``transfer``; it is there already."""

    def __len__(self) -> int:
        """Transfers that have not been removed."""
        with self._lock:
            return len(self._transfers)

    def close(self) -> None:
        """Forgets the exchange; its transfers become unreachable. Idempotent."""
        with _lock:
            _exchanges.pop(self.name, None)
        self.paged = None


_exchanges: dict[str, Exchange] = {}
_lock = threading.Lock()


def open_exchange(kv: KVSpec) -> Exchange:
    """A new exchange, to be closed with `Exchange.close`."""
    exchange = Exchange(f"{os.getpid()}-{secrets.token_hex(4)}", kv)
    with _lock:
        _exchanges[exchange.name] = exchange
    return exchange


def find_exchange(name: str) -> Exchange:
    """The exchange of that name.

    Raises:
        RuntimeError: there is none in this process, which means that vLLM runs the connector in another one.
    """
    with _lock:
        exchange = _exchanges.get(name)
    if exchange is None:
        raise RuntimeError(
            f"the ctxwin KV connector must run in the process of its engine, but process {os.getpid()} holds no "
            f"exchange {name!r}; open the engine with processes='multi' where vLLM runs in processes of its own"
        )
    return exchange

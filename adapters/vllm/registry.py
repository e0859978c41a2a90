"""What one vLLM request shall load and capture, shared by an engine and its connector inside one process.

vLLM carries only a small string from the caller to the connector (``kv_transfer_params``); the tensors wait here under
that handle. Tensors never leave the process, so neither are they copied nor can they be mangled on the way.
"""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ctxwin.adapters.vllm.paged import PagedKV
    from ctxwin.kv import KVSpec, SpanKV

PARAM = "ctxwin"
"""Key of the handle inside ``kv_transfer_params``, and of the exchange's name inside the connector's extra config."""


@dataclass(frozen=True)
class Placed:
    """A span that the connector loads.

    Attributes:
        begin: index of its first token within the prompt.
        span: its KV, in any frame.
        start: position of its origin in this prompt; the keys are relocated there on the way in.
    """

    begin: int
    span: SpanKV
    start: int

    @property
    def end(self) -> int:
        return self.begin + self.span.tokens


@dataclass
class Transfer:
    """One request: its instructions, and what became of them.

    Attributes:
        loads: spans that cover one contiguous prefix of the prompt, in order.
        captures: token ranges ``[begin, end)`` to read back when the request finishes, by name; an ``end`` of None is
            the last token whose KV was computed.
        local_tokens: prompt tokens that vLLM's own prefix cache served.
        planned_tokens: prompt tokens that vLLM's scheduler counts on the connector to write.
        loaded_tokens: prompt tokens that it wrote.
        bytes_loaded: bytes of KV that the connector wrote.
        captured: ``(k, v)`` of each capture, ``[layers, tokens, heads, dim]``, keys as they lie in the cache.
        error: why a load or a capture failed; the request's answer must then be thrown away.
    """

    loads: tuple[Placed, ...] = ()
    captures: dict[str, tuple[int, int | None]] = field(default_factory=dict)
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


class Exchange:
    """The transfers of one engine, and the paged cache they go to.

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
        self._serial = itertools.count()
        self._lock = threading.Lock()

    def add(self, transfer: Transfer) -> str:
        """Registers a transfer; returns its handle, unique in this process."""
        with self._lock:
            handle = f"{self.name}/{next(self._serial)}"
            self._transfers[handle] = transfer
        return handle

    def get(self, handle: str) -> Transfer:
        """Raises KeyError for a handle that is not (or no longer) registered."""
        with self._lock:
            return self._transfers[handle]

    def remove(self, handle: str) -> None:
        with self._lock:
            self._transfers.pop(handle, None)


_exchanges: dict[str, Exchange] = {}
_lock = threading.Lock()
_names = itertools.count()


def open_exchange(kv: KVSpec) -> Exchange:
    """A new exchange, to be closed with `close_exchange`."""
    with _lock:
        exchange = Exchange(f"{os.getpid()}-{next(_names)}", kv)
        _exchanges[exchange.name] = exchange
    return exchange


def close_exchange(exchange: Exchange) -> None:
    """Forgets an exchange; its transfers become unreachable. Idempotent."""
    with _lock:
        _exchanges.pop(exchange.name, None)


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
            f"exchange {name!r}; run vLLM with VLLM_ENABLE_V1_MULTIPROCESSING=0, tensor_parallel_size=1 and "
            "pipeline_parallel_size=1"
        )
    return exchange

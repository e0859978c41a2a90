"""Transport within one process: transfers are kept in a dictionary, and their tensors are passed by reference."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable

from ctxwin.kv.kernels import SpanSlice
from ctxwin.kv.layout import KVSpec
from ctxwin_vllm.transport import base
from ctxwin_vllm.transport.base import Endpoint, LoadSpec, RequestMeta, SaveSpec, Transfer, Transport

_STEPS = 4
"""Steps of vLLM within which a reserved transfer is looked for: the next one, or one behind steps that run already."""
_log = logging.getLogger("ctxwin.engines")
_open: dict[str, LocalTransport] = {}


class LocalTransport(Transport, Endpoint):
    """Both sides of the transport of an engine whose connector runs in this process.

    Attributes:
        paged: access to the engine's cache, as `states`, `draft_model` and `outputs`; the engine sets them once vLLM is up.
        step: has vLLM take a step; set by the engine, too.
    """

    step: Callable[[], object]
    in_memory = True

    def __init__(self, kv: KVSpec) -> None:
        Transport.__init__(self)
        Endpoint.__init__(self)
        self.kv = kv
        self.source = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._transfers: dict[str, Transfer] = {}  # each operation on it is atomic
        self._awaited: set[str] = set()  # reserved transfers that are not added yet
        self._ended: dict[str, tuple[SaveSpec, threading.Event]] = {}  # what `read_ended` has still to read
        _open[self.source] = self

    def reserve(self) -> str:
        self._awaited.add(handle := base.new_handle(reserved=True))
        return handle

    def add(self, transfer: Transfer, handle: str = "") -> str:
        handle = handle or base.new_handle()
        self._transfers[handle] = transfer
        self._awaited.discard(handle)
        return handle

    def collect(self, handle: str, transfer: Transfer, finished: bool) -> None:
        """Wait until a transfer was read, also one that was added behind the answer; the connector reports into it itself."""
        for _ in range(_STEPS if finished and base.is_reserved(handle) else 0):
            if handle in self._ended or not transfer.captures.keys() - transfer.captured:
                break
            self.step()
        if finished and (ended := self._ended.get(handle)) is not None:
            ended[1].wait()
        if transfer.reads is not None:
            transfer.reads.synchronize()
        if finished and base.is_reserved(handle) and transfer.captures.keys() - transfer.captured:
            transfer.error = transfer.error or RuntimeError("the request ended long before its transfer was added")

    def remove(self, handle: str) -> None:
        self._transfers.pop(handle, None)
        self._awaited.discard(handle)

    def __len__(self) -> int:
        return len(self._transfers)

    def close(self) -> None:
        _open.pop(self.source, None)
        self.paged = self.states = self.draft_model = None
        if self.outputs is not None:
            self.outputs.close()

    def request_meta(self, handle: str) -> RequestMeta | None:
        return self._transfers.get(handle)

    def awaits(self, handle: str) -> bool:
        return handle in self._awaited

    def report_hit(self, handle: str, local: int, planned: int) -> None:
        if (transfer := self._transfers.get(handle)) is not None:
            # Called again after a preemption: earlier loads are gone, or are a hit now.
            transfer.local_tokens, transfer.planned_tokens, transfer.loaded_tokens = local, planned, 0

    def fail(self, handle: str, error: BaseException) -> None:
        if (transfer := self._transfers.get(handle)) is not None:
            transfer.error = error

    def parts(self, handle: str, begin: int, end: int) -> list[SpanSlice]:
        transfer = self._transfers.get(handle)
        if transfer is None:
            raise LookupError("the transfer was removed")
        slices, ahead = [], transfer.expected_hit
        for i, first, last in base.overlaps((s.tokens for s in transfer.loads), begin - ahead, end - ahead):
            segment = transfer.loads[i]
            assert segment.span is not None
            slices.append(SpanSlice(segment.span, segment.start, segment.patch, first, last, segment.approximate))
        return slices

    def finish_load(self, load: LoadSpec, nbytes: int) -> None:
        if (transfer := self._transfers.get(load.handle)) is not None:
            transfer.bytes_loaded += nbytes
            transfer.loaded_tokens = load.end - load.begin

    def read_now(self, save: SaveSpec, meta: RequestMeta) -> bool:
        self._ended[save.handle] = save, threading.Event()
        return True

    def read_ended(self) -> None:
        """Read the captures of requests that have ended; called between steps, behind the tokens of the last one and before
        their blocks are given to others."""
        for handle, (save, read) in list(self._ended.items()):
            transfer = self._transfers.get(handle)
            try:
                if transfer is not None and transfer.error is None:
                    for name in save.ranges:
                        transfer.take(name, self.read(save, name))
                    transfer.reads = self.paged and self.paged.loads.event()
            except Exception as error:
                assert transfer is not None
                transfer.error = error
                _log.warning("reading spans back from the paged cache failed: %s", error)
            finally:
                del self._ended[handle]
                read.set()


def find(source: str) -> LocalTransport:
    """Return the open transport of that name. Raises RuntimeError where vLLM runs the connector in another process."""
    transport = _open.get(source)
    if transport is None:
        raise RuntimeError(
            f"the ctxwin KV connector must run in the process of its engine, but process {os.getpid()} holds no "
            f"transport {source!r}; open the engine with processes='multi' where vLLM runs in processes of its own"
        )
    return transport

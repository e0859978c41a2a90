"""Copies of spans in the device's memory, from which later loads are written without crossing from the host again.

A window that slides loads the same survivors at every step. Where their spans are resident, a slide is one kernel from memory
of the device into paged blocks: no byte of KV moves through the host.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ctxwin.kv.kernels.parts import ResidentKV, SpanSlice
from ctxwin.kv.kernels.staging import Field, Staging
from ctxwin.kv.layout import SpanKV, SpanOrigin
from ctxwin.kv.merge import merge
from ctxwin.kv.rows import Pair

RESIDENT_BYTES = "CTXWIN_RESIDENT_BYTES"
"""Environment variable: bytes of a GPU's memory for copies of spans, 0 for none; by default a quarter of what is left free."""
_STAGED_BYTES = 32 << 20  # of page-locked memory that a copy goes through, twice
OnDrop = Callable[[], object] | None
_log = logging.getLogger("ctxwin.engines")


@dataclass(frozen=True)
class Selection:
    """What an answer keeps of the KV of its prompt.

    Attributes:
        slots: int64 ``[n]``; of the ``merged`` ones where there are any.
        merged: number of slots that the whole is merged to first, by ``sums`` as in `ctxwin.kv.merge.merge`; 0 for none.
    """

    slots: torch.Tensor
    merged: int = 0
    sums: torch.Tensor | None = None

    def apply(self, k: torch.Tensor, v: torch.Tensor, first: int = 0) -> Pair:
        """Return the selected slots of the KV of layers from ``first`` on."""
        if self.sums is not None:
            whole = SpanKV(k, v, torch.arange(k.shape[1]).expand(3, -1), 0)
            span = merge(whole, self.sums[first : first + len(k)], self.merged)
            k, v = span.k, span.v
        slots = self.slots.to(k.device)
        return k.index_select(1, slots), v.index_select(1, slots)


@dataclass
class _Entry:
    kv: ResidentKV
    origin: weakref.ref[SpanOrigin]
    on_drop: OnDrop


class ResidentSpans:
    """The copies of one device, least recently used last to be kept; thread-safe.

    A copy is found by its span's origin and goes with it, so it can never be taken for KV of another span, and nothing that has
    been forgotten stays behind in the device's memory.

    Args:
        device: where they lie.
        layers: the layers that are served there.
        max_bytes: bound on the copies; None is `resident_bytes` by the time of the first one.

    Attributes:
        nbytes: bytes of the copies.
        copied_bytes: bytes that have crossed from the host so far.
    """

    def __init__(self, device: torch.device, layers: range, max_bytes: int | None = None) -> None:
        self.max_bytes, self.nbytes, self.copied_bytes = max_bytes, 0, 0
        self._device, self._layers = device, layers
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._gone: list[int] = []  # appended to by finalizers, which may run in any thread at any time
        self._lock = threading.Lock()

    def attach(self, parts: Sequence[SpanSlice], heads: slice | None = None) -> list[SpanSlice]:
        """Return ``parts`` with their copies, made now where they are missing and there is room beside those of this load.

        Nothing is evicted that the same load reads: of a window that is larger than the bound, a part stays resident.
        ``heads`` are those of the parts' KV heads that are served there, None for all of them. Raises LookupError for a span
        whose KV was in its copy alone (its tensors are on ``meta``), which is gone.

        Cost: one copy from the host of each span that was not resident, on the device's current stream.
        """
        with self._lock:
            self._drop_gone()
            required = {id(part.span.origin) for part in parts}
            for key in required & self._entries.keys():
                self._entries.move_to_end(key)
            return [replace(part, resident=self._copy(part.span, heads or slice(None), required)) for part in parts]

    def keep(self, origin: SpanOrigin, k: torch.Tensor, v: torch.Tensor, on_drop: OnDrop = None) -> bool:
        """Keep a span's KV as it was read on the device, until ``on_drop`` is called; return False if there is no room. O(1)."""
        with self._lock:
            self._drop_gone()
            kv = ResidentKV(k, v, self._layers.start)
            if has_room := self._has_room(kv.nbytes, set()):
                self._keep(origin, kv, on_drop)
            return has_room

    def get(self, origin: SpanOrigin) -> ResidentKV | None:
        """Return a span's copy, None where there is none."""
        with self._lock:
            entry = self._entries.get(id(origin))
            return None if entry is None else entry.kv

    def clear(self) -> None:
        """Free all copies."""
        with self._lock:
            for key in list(self._entries):
                self._drop(key)

    def _copy(self, span: SpanKV, heads: slice, required: set[int]) -> ResidentKV | None:
        if (entry := self._entries.get(id(span.origin))) is not None:
            return entry.kv
        if span.k.is_meta:
            raise LookupError("the copy of a span on the device has given way to others")
        (first, last, _), layers = heads.indices(span.k.shape[2]), self._layers
        rows = len(layers) * span.tokens * (last - first)
        nbytes = rows * sum(x.shape[3] * x.element_size() for x in (span.k, span.v))
        if not nbytes or not self._has_room(nbytes, required):
            return None
        try:
            cut = (slice(layers.start, layers.stop), slice(None), slice(first, last))
            kv = ResidentKV(self._upload(span.k[cut]), self._upload(span.v[cut]), layers.start)
        except torch.OutOfMemoryError:
            _log.warning("no memory of %s is left for copies of spans beyond %d bytes", self._device, self.nbytes)
            self.max_bytes = self.nbytes
            return None
        self._keep(span.origin, kv)
        self.copied_bytes += nbytes
        return kv

    def _has_room(self, nbytes: int, required: set[int]) -> bool:
        """Return True if there is room for ``nbytes``, behind evicting what is not ``required``."""
        if self.max_bytes is None:  # only now, when vLLM has taken what it needs, CUDA graphs included
            self.max_bytes = resident_bytes(self._device)
        for old in [key for key in self._entries if key not in required]:
            if self.nbytes + nbytes <= self.max_bytes:
                break
            self._drop(old)
        return self.nbytes + nbytes <= self.max_bytes

    def _keep(self, origin: SpanOrigin, kv: ResidentKV, on_drop: OnDrop = None) -> None:
        key = id(origin)
        self._entries[key] = _Entry(kv, weakref.ref(origin, lambda _: self._gone.append(key)), on_drop)
        self.nbytes += kv.nbytes

    def _upload(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``rows`` on the device, through page-locked memory where it is a GPU's."""
        if self._device.type == "cpu":
            return rows.clone(memory_format=torch.contiguous_format)
        resident = torch.empty(rows.shape, dtype=rows.dtype, device=self._device)
        if rows.is_pinned() and rows.is_contiguous():  # as it was read back
            return resident.copy_(rows, non_blocking=True)
        at_once = max(1, min(len(rows), _STAGED_BYTES // max(1, rows[0].nbytes)))
        staging = Staging([Field((at_once, *rows.shape[1:]), rows.dtype)], self._device)
        for at in range(0, len(rows), at_once):
            part = rows[at : at + at_once]
            staging.open()[0][: len(part)].copy_(part)
            resident[at : at + len(part)].copy_(staging.send(1)[0][: len(part)])
        return resident

    def _drop_gone(self) -> None:
        while self._gone:
            self._drop(self._gone.pop())

    def _drop(self, key: int) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self.nbytes -= entry.kv.nbytes
            if entry.on_drop is not None:
                entry.on_drop()


def resident_bytes(device: torch.device) -> int:
    """Return the bound on copies of spans on ``device``, see `RESIDENT_BYTES`; 0 on a processor, whose memory is the host's.

    Raises ValueError where the variable is no number of bytes.
    """
    if named := os.environ.get(RESIDENT_BYTES, "").strip():
        if not named.isdecimal():
            raise ValueError(f"{RESIDENT_BYTES} must be a number of bytes, got {named!r}")
        return int(named)
    return torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else 0

"""How KV crosses between the host and where it is computed: a layer at once, while the one before is at work, and back.

Spans lie in pageable memory, part by part. Copied to a GPU as they are, every tensor would be a transfer of its own for
which the processor waits. So a layer is put together in page-locked memory and crosses at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

_ALIGN = 128  # bytes; what a kernel may assume of a tensor's address
_RING = 2  # buffers on the host: one is filled while the other crosses


@dataclass(frozen=True)
class Field:
    """One tensor of every layer, by shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


class Staging:
    """The tensors of a layer side by side in one buffer of the device, filled anew for each layer.

    Everything happens on the device's current stream: a layer's copy waits for whatever was queued to read the one
    before. On the processor itself the tensors are written where they are read, and nothing is copied.

    Args:
        fields: in the order in which they lie.
        device: where they are read.

    Cost: memory for one layer on a GPU and two, page-locked, on the host.
    """

    def __init__(self, fields: Sequence[Field], device: torch.device) -> None:
        offsets, at = [], 0
        for field in fields:
            offsets.append(at)
            at += -(-field.nbytes // _ALIGN) * _ALIGN
        self._gpu = device.type != "cpu"
        here = torch.empty(at, dtype=torch.uint8, device=device)
        hosts = [torch.empty(at, dtype=torch.uint8, pin_memory=True) for _ in range(_RING)] if self._gpu else [here]
        self._ends = [o + field.nbytes for o, field in zip(offsets, fields, strict=True)]
        self._raw, self._hosts = here, hosts
        self.tensors = _views(here, fields, offsets)
        self._views = [_views(host, fields, offsets) for host in hosts]
        # The copy out of a buffer must have ended before it is filled again.
        event: Any = torch.cuda.Event
        self._copied: list[Any] = [event() if self._gpu else None for _ in hosts]
        self._turn = 0

    def open(self) -> list[torch.Tensor]:
        """Tensors on the host to fill for the next layer, in the order of the fields; then `send`."""
        self._turn = (self._turn + 1) % len(self._hosts)
        if self._gpu:
            self._copied[self._turn].synchronize()  # at once where nothing was recorded yet
        return self._views[self._turn]

    def send(self, count: int) -> list[torch.Tensor]:
        """The first ``count`` tensors on the device; the others keep what they held. Does not wait for the copy."""
        if self._gpu:
            end = self._ends[count - 1]
            self._raw[:end].copy_(self._hosts[self._turn][:end], non_blocking=True)
            self._copied[self._turn].record(torch.cuda.current_stream(self._raw.device))
        return self.tensors


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on ``device``; the copy is queued on the current stream, and not waited for."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=device.type != "mps")


def to_host(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values on the host, in page-locked memory where they come from a GPU: pageable takes ten times as long.

    Cost: one copy, waited for; behind one on the device, unless they lie side by side. The memory is of torch's pool.
    """
    if k.device.type != "cuda":
        return k.to("cpu"), v.to("cpu")
    same_storage = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    beside = same_storage and v.data_ptr() == k.data_ptr() + k.nbytes
    if beside and k.is_contiguous() and v.is_contiguous():
        flat = k.as_strided((k.numel() + v.numel(),), (1,))
    else:
        flat = torch.cat([k.flatten(), v.flatten()])
    host = torch.empty(flat.shape, dtype=k.dtype, pin_memory=True).copy_(flat, non_blocking=True)
    torch.cuda.current_stream(k.device).synchronize()
    return host[: k.numel()].view(k.shape), host[k.numel() :].view(v.shape)


def _views(raw: torch.Tensor, fields: Sequence[Field], offsets: Sequence[int]) -> list[torch.Tensor]:
    return [raw[o : o + f.nbytes].view(f.dtype).view(f.shape) for o, f in zip(offsets, fields, strict=True)]

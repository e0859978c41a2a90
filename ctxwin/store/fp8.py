"""Lossless 8-bit records of KV that a quantised cache has already rounded to eight bits.

A span holds KV in the model's dtype, which serves and moves it. Where every number of a tensor is representable in an 8-bit
format, the record keeps those bits and the name of the dtype, and the same numbers are read back, to the bit. This is so for
spans read from caches whose scales are 1, the default without calibration; other tensors are stored as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

_FORMATS: Final = ("float8_e4m3fn", "float8_e5m2")
_DTYPES: Final = ("float64", "float32", "float16", "bfloat16")
_WIDE: Final = "wide"


def pack_fp8(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Pack the tensors of a record into eight bits where that is lossless.

    Returns:
        The tensors, and the entries that the record's header must have for `unpack_fp8`.

    Cost: a look at the first numbers of each tensor; where they fit, two passes over it.
    """
    packed, wide = {}, {}
    for name, tensor in tensors.items():
        small = _small(tensor)
        packed[name] = tensor if small is None else small
        if small is not None:
            wide[name] = str(tensor.dtype).removeprefix("torch.")
    return packed, {_WIDE: wide} if wide else {}


def is_packed(header: Mapping[str, Any]) -> bool:
    """Return True if a record's header says that some of its tensors were packed."""
    return _WIDE in header


def unpack_fp8(tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Undo `pack_fp8`. Raises KeyError, TypeError or ValueError for a header that does not fit the tensors."""
    dtypes = {name: _dtype(dtype) for name, dtype in dict(header.get(_WIDE, {})).items()}
    return dict(tensors) | {name: tensors[name].to(dtype) for name, dtype in dtypes.items()}


def _small(tensor: torch.Tensor) -> torch.Tensor | None:
    import torch

    if tensor.element_size() == 1 or not tensor.numel():
        return None
    first = tensor.reshape(-1)[: tensor.shape[-1]] if tensor.is_contiguous() else tensor[:1]
    for kind in (getattr(torch, name) for name in _FORMATS):
        if all(torch.equal(part.to(kind).to(tensor.dtype), part) for part in (first, tensor)):
            return tensor.to(kind)
    return None


def _dtype(name: str) -> torch.dtype:
    import torch

    if name not in _DTYPES:
        raise ValueError(f"a dtype must be one of {', '.join(_DTYPES)}, got {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype

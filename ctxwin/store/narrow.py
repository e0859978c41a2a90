"""KV that a quantised cache rounded to eight bits is stored in eight.

A span holds what such a cache says in the model's dtype, which is what serves and moves it. Where every number of a tensor is one
of an 8-bit format, the record keeps those bits and the name of the dtype: the same numbers come back, to the bit. That holds for
spans as they were read from caches whose scales are 1, as without calibrated ones; others are stored as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

_FORMATS: Final = ("float8_e4m3fn", "float8_e5m2")
_DTYPES: Final = ("float64", "float32", "float16", "bfloat16")
_WIDE: Final = "wide"


def narrowed(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a record, in eight bits where that loses nothing, and what its header must say of them.

    Cost: a look at the first numbers of each tensor; where they fit, two passes over it.
    """
    found, wide = {}, {}
    for name, tensor in tensors.items():
        small = _small(tensor)
        found[name] = tensor if small is None else small
        if small is not None:
            wide[name] = str(tensor.dtype).removeprefix("torch.")
    return found, {_WIDE: wide} if wide else {}


def widened(tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What `narrowed` was given. Raises KeyError, TypeError or ValueError for a header that does not fit."""
    found, dtypes = dict(tensors), {name: _dtype(said) for name, said in dict(header.get(_WIDE, {})).items()}
    return found | {name: found[name].to(dtype) for name, dtype in dtypes.items()}


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
    found: torch.dtype = getattr(torch, name)
    return found

"""Factors in few bits: each direction of each layer takes the bits that lose the least energy for their bytes.

Reverse water-filling over the spectra of all layers (Cover and Thomas, Elements of Information Theory, section 10.3.3), with
the errors of a uniform quantizer: a Lagrangian weighs the energy that a direction loses at so many bits against its bytes. On
natural text that restores more than factors in bfloat16 of four times the bytes (`evals/results/released.md`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch

LEAST_BITS, MOST_BITS = 2, 8
GROUP = 64
"""Numbers that share a scale."""
_SCALE_BITS = 16
_LOST = {0: 1.0, 2: 0.26, 3: 0.076, 4: 0.022, 5: 0.006, 6: 0.0015, 7: 0.00037, 8: 0.00009}
"""Share of a direction's energy that is lost at so many bits: twice the mean square error of `_codes` on Gaussian numbers."""
_CLIPS = (1.0, 0.92, 0.84, 0.76, 0.68, 0.6, 0.52, 0.44)
"""Shares of a group's largest number that are tried as the range of its codes."""
_NAMES = ("bits", "codes", "scales")


@dataclass(frozen=True, eq=False)
class QuantizedFactors:
    """Left and right factors of n layers, m directions each, in 2 to 8 bits a number.

    Attributes:
        bits: uint8 ``[n, m]``, bits of each direction's numbers; 0 where a layer has fewer directions.
        codes: uint8 ``[bytes]``: by ascending number of bits, the codes of the left factors, then of the right ones.
        scales: bfloat16 ``[groups]``, steps between codes in the same order; a group is `GROUP` numbers of one direction.
    """

    bits: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor

    @cached_property
    def ranks(self) -> list[int]:
        """Number of leading directions of each layer behind which none has bits."""
        order = torch.arange(1, self.bits.shape[1] + 1)
        return [int(row.max()) if row.numel() else 0 for row in (self.bits > 0) * order]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return its tensors by name, for a codec."""
        return {name: getattr(self, name) for name in _NAMES}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Rebuild it from its tensors. Raises ValueError where one is missing."""
        if missing := [name for name in _NAMES if name not in tensors]:
            raise ValueError(f"tensors must hold {', '.join(_NAMES)}, got none named {', '.join(missing)}")
        return cls(*(tensors[name] for name in _NAMES))

    def factors(self, tokens: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors, ``left [n, tokens, m]`` and ``right [n, m, width]``, zero where there is no direction.

        Raises ValueError where codes or scales are not as many as the bits ask for.
        """
        n, m = self.bits.shape
        left, right = torch.zeros(n, m, tokens, dtype=dtype), torch.zeros(n, m, width, dtype=dtype)
        codes, scales = self.codes.numpy(), self.scales
        for bits in range(LEAST_BITS, MOST_BITS + 1):
            at = self.bits == bits
            for side in (left, right):
                count, length = int(at.sum()), int(side.shape[-1])
                groups = -(-length // GROUP)
                used = -(-count * length * bits // 8)
                if used > len(codes) or count * groups > len(scales):
                    raise ValueError("codes and scales must be as many as bits say, got fewer; form the patch again")
                steps = scales[: count * groups].float().view(count, groups).repeat_interleave(GROUP, 1)[:, :length]
                numbers = torch.from_numpy(_unpack(codes[:used], bits, count * length)).view(count, length)
                side[at] = ((numbers.float() - (2 ** (bits - 1) - 0.5)) * steps).to(dtype)
                codes, scales = codes[used:], scales[count * groups :]
        if len(codes) or len(scales):
            raise ValueError("codes and scales must be as many as bits ask for, got more; form the patch again")
        return left.transpose(1, 2).contiguous(), right


def quantize(matrices: Sequence[torch.Tensor], budget: int) -> QuantizedFactors:
    """Return factors of matrices ``[T, W]``, one a layer, in at most ``budget`` bytes.

    Cost: an eigendecomposition of ``[min(T, W), min(T, W)]`` and two products a layer.
    """
    x = torch.stack(list(matrices)).to("cpu", torch.float32)
    tokens, width = x.shape[1:]
    tall = tokens > width
    # Exact whatever the accuracy of the eigenvectors, as long as they are orthonormal.
    vectors = torch.linalg.eigh(x.mT @ x if tall else x @ x.mT)[1].flip(-1)
    left, right = (x @ vectors, vectors.mT) if tall else (vectors, vectors.mT @ x)
    values = (left.norm(dim=1) if tall else right.norm(dim=2)).clamp_min(torch.finfo(torch.float32).tiny)
    root = values.sqrt()
    sides = (left / root[:, None], right * root[..., None]) if tall else (left * root[:, None], right / root[..., None])
    bits = _allocate(values, tokens, width, budget)
    bits = bits[:, : int((bits > 0).any(0).sum())].contiguous()
    kept = int(bits.shape[1])
    rows = sides[0].mT[:, :kept].contiguous(), sides[1][:, :kept].contiguous()
    codes: list[np.ndarray] = []
    scales: list[torch.Tensor] = []
    for number in range(LEAST_BITS, MOST_BITS + 1):
        for side in rows:
            numbers, steps = _codes(side[bits == number], number)
            codes.append(_pack(numbers, number))
            scales.append(steps.flatten())
    return QuantizedFactors(bits, torch.from_numpy(np.concatenate(codes)), torch.cat(scales))


def _allocate(values: torch.Tensor, tokens: int, width: int, budget: int) -> torch.Tensor:
    """Return the bits of each direction, uint8 ``[n, m]``: those that lose the least energy for their bytes, up to ``budget``."""
    groups = -(-tokens // GROUP) - (-width // GROUP)
    choices = torch.tensor(list(_LOST), dtype=torch.uint8)
    lost = values.double().square()[..., None] * torch.tensor(list(_LOST.values()), dtype=torch.float64)
    prices = choices.double() * (tokens + width) / 8 + (choices > 0) * groups * _SCALE_BITS / 8  # bytes

    def choose(weight: float) -> torch.Tensor:
        return (lost + float(2.0**weight) * prices).argmin(-1)

    def fits(chosen: torch.Tensor) -> bool:
        directions = int((chosen > 0).any(0).sum())
        overhead = len(chosen) * directions + 2 * len(choices)  # `bits` itself, and codes that fill no whole byte
        return float(prices[chosen].sum()) + overhead <= budget

    largest = float(lost.max().clamp_min(torch.finfo(torch.float32).tiny).log2())
    low, high = largest - 60, largest + 1
    if fits(choose(low)):
        return choices[choose(low)]
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(choose(middle)) else (middle, high)
    return choices[choose(high)]


def _codes(rows: torch.Tensor, bits: int) -> tuple[np.ndarray, torch.Tensor]:
    """Return the codes of rows ``[r, length]``, uint8 ``[r * length]``, and the steps of their groups ``[r, groups]``."""
    length, levels = rows.shape[-1], 2**bits
    groups = torch.nn.functional.pad(rows, (0, -length % GROUP)).view(len(rows), -(-length // GROUP), GROUP)
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for clip in _CLIPS:
        step = (2 * clip * largest / (levels - 1)).to(torch.bfloat16)
        code = (groups / step.float()).floor().clamp(-levels // 2, levels // 2 - 1)
        error = ((code + 0.5) * step.float() - groups).square().sum(-1, keepdim=True)
        if best is None:
            best = code, step, error
        else:
            better = error < best[2]
            best = tuple(torch.where(better, new, old) for new, old in zip((code, step, error), best, strict=True))  # type: ignore[assignment]
    assert best is not None
    numbers = (best[0] + levels // 2).to(torch.uint8).flatten(-2)[:, :length]
    return numbers.flatten().numpy(), best[1][..., 0]


def _pack(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Return numbers under ``2 ** bits`` as bytes, the first bit first."""
    return np.packbits((numbers[:, None] >> np.arange(bits - 1, -1, -1, dtype=np.uint8)) & 1)


def _unpack(data: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Undo `_pack` of ``count`` numbers."""
    eights = -(-count // 8)  # eight numbers are so many whole bytes as a number has bits
    words = np.zeros((eights, 8), dtype=np.uint8)
    filled = np.zeros(eights * bits, dtype=np.uint8)
    filled[: len(data)] = data
    words[:, 8 - bits :] = filled.reshape(eights, bits)
    word, numbers = words.view(">u8")[:, 0].astype(np.uint64), words
    for i in range(8):
        numbers[:, i] = (word >> np.uint64(bits * (7 - i))) & np.uint64(2**bits - 1)
    return numbers.reshape(-1)[:count]

"""Rotary positions: the engine's own angles, and the turn that takes keys from one place to another.

RoPE composes, ``R(d) R(p0) = R(p0 + d)`` (Kamera, section 3), but engines round: they multiply float32 positions by
float32 frequencies and round the product. Turning by ``d * inv_freq`` therefore misses the engine's own keys by up to
5e-5 (theta 1e4, 8k positions). Turning each token by the *difference of the two rounded angles* does not: what is left
is one float32 multiply-add.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from ctxwin.kv.layout import KVSpec, RopeSpec

Shift = tuple[torch.Tensor, int, int]
"""Positions ``[3, T]`` relative to an origin, on the CPU, and the origin's old and new position."""
TABLE_BYTES = 64 << 20
"""Most bytes of tables of `rotation_table` that are kept."""
# Numbers that are turned at once.
_BLOCK = 1 << 18
_tables: OrderedDict[Any, tuple[torch.Tensor, int]] = OrderedDict()  # with their bytes, the least recently used first
_lock = threading.Lock()


def axes(rope: RopeSpec) -> torch.Tensor:
    """Return the position row (0 = t, 1 = h, 2 = w) that drives each frequency: int64 ``[rotary_dim / 2]``.

    Raises ValueError where the sections do not fit the frequencies.
    """
    count = len(rope.inv_freq)
    rows = torch.zeros(count, dtype=torch.int64)
    if rope.sections is None:
        return rows
    if rope.mrope_interleaved:
        if len(rope.sections) != 3:
            raise ValueError(f"interleaved M-RoPE must have 3 sections, got {rope.sections}")
        for row in (1, 2):
            rows[row : rope.sections[row] * 3 : 3] = row
        return rows
    if sum(rope.sections) != count:
        raise ValueError(f"sections must add up to rotary_dim / 2 = {count}, got {rope.sections}")
    return (torch.arange(len(rope.sections)) % 3).repeat_interleave(torch.tensor(rope.sections))


def angles(rope: RopeSpec, positions: torch.Tensor) -> torch.Tensor:
    """The angles that the engine turns by at ``positions``, with its own float32 rounding.

    Args:
        rope: how positions become angles.
        positions: integers ``[3, T]``: (t, h, w) of each token, absolute.

    Returns:
        float64 ``[T, rotary_dim / 2]`` on the device of ``positions``, each a float32 value exactly, so that a
        difference of two is exact too.

    Raises:
        ValueError: positions of another shape, or sections that do not fit. TypeError: positions that are not integers.
    """
    if positions.ndim != 2 or positions.shape[0] != 3:
        raise ValueError(f"positions must be [3, T], got {list(positions.shape)}")
    if positions.dtype.is_floating_point or positions.dtype == torch.bool:
        raise TypeError(f"positions must be integers, got {positions.dtype}")
    inv_freq, rows = _frequencies(rope, positions.device)
    return (positions.to(torch.float32)[rows].T * inv_freq).to(torch.float64)


@lru_cache(maxsize=64)
def _frequencies(rope: RopeSpec, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return frequencies and `axes` on ``device``, where to send them again would make a load wait for the forward before it."""
    return torch.tensor(rope.inv_freq, dtype=torch.float32, device=device), axes(rope).to(device)


def turn(rope: RopeSpec, k: torch.Tensor, delta_angles: torch.Tensor) -> torch.Tensor:
    """Rotates the first ``rotary_dim`` dimensions of ``k``; the others pass through.

    Cosine and sine are taken in float64 and applied in float32 (float64 for float64 keys); the result is rounded once,
    to the dtype of ``k``. YaRN's magnitude stands on the keys already and cancels in a difference.

    Args:
        rope: pairing and rotary width.
        k: ``[..., T, H, D]``.
        delta_angles: ``[T, rotary_dim / 2]``, the new angles minus the old.

    Returns:
        A new tensor of the shape and dtype of ``k``. Cost: one read and one write of ``k``.

    Raises:
        ValueError: shapes that do not fit.
    """
    half = rope.rotary_dim // 2
    if k.ndim < 3 or k.shape[-1] < rope.rotary_dim:
        raise ValueError(f"k must be [..., T, H, D >= {rope.rotary_dim}], got {list(k.shape)}")
    if tuple(delta_angles.shape) != (k.shape[-3], half):
        raise ValueError(f"delta_angles must be {[k.shape[-3], half]}, got {list(delta_angles.shape)}")
    compute = torch.float64 if k.dtype == torch.float64 else torch.float32
    delta = delta_angles.to(device=k.device, dtype=torch.float64).unsqueeze(-2)
    cos, sin = delta.cos().to(compute), delta.sin().to(compute)
    if rope.pairing == "half":
        first, second = slice(0, half), slice(half, rope.rotary_dim)
    else:
        first, second = slice(0, rope.rotary_dim, 2), slice(1, rope.rotary_dim, 2)
    out = torch.empty_like(k)
    # A few layers at a time: temporaries that stay in cache, not tens of megabytes of fresh pages.
    whole, turned = (k, out) if k.ndim > 3 else (k.unsqueeze(0), out.unsqueeze(0))
    size = max(1, _BLOCK // max(1, whole[:1].numel()))
    for old, new in zip(torch.split(whole, size), torch.split(turned, size), strict=True):
        x, y = old[..., first].to(compute), old[..., second].to(compute)
        new[..., first] = (x * cos - y * sin).to(k.dtype)
        new[..., second] = (y * cos + x * sin).to(k.dtype)
        new[..., rope.rotary_dim :] = old[..., rope.rotary_dim :]
    return out


def shift_angles(rope: RopeSpec, positions: torch.Tensor, old: int, new: int) -> torch.Tensor:
    """Angles that take tokens at ``positions`` from frame ``old`` to frame ``new``: float64 ``[T, rotary_dim / 2]``.

    t, h and w move together, by the engine's start position (Kamera, Fig. 2b).
    """
    return angles(rope, positions + new) - angles(rope, positions + old)


def rotation_table(
    rope: RopeSpec, shifts: Sequence[Shift], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Cosine and sine of `shift_angles` of spans one behind the other: ``[T, 2, rotary_dim / 2]``, rounded to ``dtype``.

    Kept for later calls that are given the same, so it must not be written to. Cost: a hash of the positions; else a pass
    over the angles.
    """
    from ctxwin.kv.kernels.staging import to_device

    device = torch.device(device)
    # What one stream queued, another one must not read.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    moves = tuple((positions.numpy().tobytes(), old, new) for positions, old, new in shifts)
    key = rope, dtype, device, stream, moves
    with _lock:
        if key in _tables:
            _tables.move_to_end(key)
            return _tables[key][0]
    both = [to_device(torch.cat([shift[0] + shift[side] for shift in shifts], dim=1), device) for side in (1, 2)]
    delta = angles(rope, both[1]) - angles(rope, both[0])
    table = torch.stack([delta.cos(), delta.sin()], dim=1).to(dtype)
    with _lock:
        size = table.nbytes + sum(len(move[0]) for move in moves)
        _tables[key] = table, max(size, TABLE_BYTES // 256)  # few enough to be added up
        while sum(size for _, size in _tables.values()) > TABLE_BYTES:
            _tables.popitem(last=False)
    return table


class Move:
    """Turns a model's keys from frame ``old`` to frame ``new``, each layer by its own frequencies.

    Args:
        spec: layout of the model.
        positions: int64 ``[3, T]``, relative to the origin.

    Cost: one pass over the angles for each kind of layers.
    """

    def __init__(self, spec: KVSpec, positions: torch.Tensor, old: int, new: int) -> None:
        self._kinds = [(kind, shift_angles(kind.rope, positions, old, new)) for kind in spec.alike]
        self._kind_of = {layer: pair for pair in self._kinds for layer in pair[0].layers}

    def layer(self, i: int, k: torch.Tensor) -> torch.Tensor:
        """Layer ``i``'s keys ``[T, H, D]``, turned: a new tensor; see `turn`."""
        kind, delta = self._kind_of[i]
        if not kind.head_dim:
            return turn(kind.rope, k, delta)
        return turn(kind.rope, k.reshape(len(k), -1, kind.head_dim), delta).view(k.shape)

    def all(self, k: torch.Tensor) -> torch.Tensor:
        """All layers' keys ``[L, T, H, D]``, turned: a new tensor."""
        if len(self._kinds) == 1:
            return turn(self._kinds[0][0].rope, k, self._kinds[0][1])
        out = torch.empty_like(k)
        for i in self._kind_of:
            out[i] = self.layer(i, k[i])
        return out

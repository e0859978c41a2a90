"""States of recurrent layers, and chunks as maps on them.

Gated DeltaNet goes from token to token by ``S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T`` (arXiv 2412.06464). Over a
chunk that is linear: ``S_end = M S_start + N``, with ``M`` the product of its transitions and ``N`` the state behind it from
nothing. The layers have no positions, so a chunk's map is the same wherever it stands, and the state of a window is composed of
its chunks' maps by small matrix products. The convolution in front of the rule reaches back a few tokens: what stood there when
a chunk was computed stays in its map.

Composed states are exact to rounding behind the same antecedents, and an approximation behind others: what a chunk absorbed lies
in its ``N``. The transition is never inverted to take a chunk out; its condition grows to 1e4 within tens of tokens.

HYPIC (arXiv 2607.01299) composes the operators and zero-start states of chunks computed alone, and recomputes a seam. A patch
says instead what that lacks: `lacking`, the deficit of the outgoing state behind the antecedents, cut by `factors` to a few
directions that a layer's heads share, is added to ``N`` (`reconditioned`), so ``S_end = M S_start + N + dS``. It is as good as
``M S_start`` is right: behind the antecedents it was formed behind, in their order, wherever they stand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

States = Mapping[str, "torch.Tensor"]
"""Of recurrent layers, behind a span's last token: ``LAYER.conv`` (last inputs, ``[channels, kernel]``) and ``LAYER.recurrent``
(``[heads, k, v]``). Where its map is kept, also ``LAYER.map`` (M, ``[heads, k, k]``) and ``LAYER.own`` (N, ``[heads, k, v]``).
vLLM's are as its kernels lay them out, but for ``LAYER.recurrent`` where maps are kept."""


_PREFIX: Final = "state."
_BLOCK: Final = 64
"""Tokens whose transitions are multiplied at once."""


class _Placed(Protocol):
    """What stands in a prompt, a segment or a part of one."""

    @property
    def approximate(self) -> bool: ...


_T = TypeVar("_T", bound=_Placed)


def named(states: States) -> dict[str, torch.Tensor]:
    """States as tensors of a record, beside others."""
    return {_PREFIX + name: state for name, state in states.items()}


def states_in(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The states among a record's tensors, see `named`."""
    return {name.removeprefix(_PREFIX): t for name, t in tensors.items() if name.startswith(_PREFIX)}


def has_maps(states: States) -> bool:
    """Whether a span's maps are kept beside the states behind it."""
    return any(name.endswith(".map") for name in states)


def composed(front: States, chunk: States) -> dict[str, torch.Tensor]:
    """The states behind a chunk that stands behind ``front``, from its map; nothing in front is zeros. Cost: a product each."""
    made = {}
    for name, state in chunk.items():
        layer, _, kind = name.partition(".")
        if kind == "conv":
            made[name] = state
        elif kind == "own":
            before, behind = front.get(f"{layer}.recurrent"), f"{layer}.recurrent"
            made[behind] = state if before is None else chunk[f"{layer}.map"].to(before) @ before + state.to(before)
    return made


def lacking(want: States, front: States, alone: States) -> dict[str, torch.Tensor]:
    """What states composed of a chunk's map behind ``front`` lack of ``want``.

    Args:
        want: the states behind the chunk's last token in a forward behind its antecedents.
        front: the states in front of it, as they are served.
        alone: states and map of the chunk that the patch will stand on.

    Returns:
        ``LAYER.recurrent [heads, k, v]``, the deficit; ``LAYER.conv``, what is wanted itself.
    """
    made: dict[str, torch.Tensor] = {}
    for name, state in composed(front, alone).items():
        made[name] = want[name].float() - state.float() if name.endswith(".recurrent") else want[name]
    return made


def factors(
    lack: Mapping[str, torch.Tensor], rank: int | None, share: float | None, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The best few directions of `lacking`, which a layer's heads share: ``LAYER.left [k, m]``, ``LAYER.right [heads, m, v]``.

    ``LAYER.conv`` stays as it is: a few inputs of the convolution.

    Args:
        lack: by name.
        rank: directions of each layer; None with no ``share``: all.
        share: instead of ``rank``: the most that keep within this share of the states' own numbers.
        dtype: of what is kept. Cost: an SVD of ``[k, heads * v]`` a layer.
    """
    from ctxwin.kv.lowrank import truncated_svd

    made: dict[str, torch.Tensor] = {}
    for name, each in lack.items():
        layer, _, kind = name.partition(".")
        if kind == "conv":
            made[name] = each.to(dtype)
            continue
        heads, width, values = each.shape
        kept = min(width, heads * values)
        if share is not None:
            kept = min(kept, int(share * each.numel() / (width + heads * values)))
        elif rank is not None:
            kept = min(kept, rank)
        left, right = truncated_svd(each.permute(1, 0, 2).reshape(width, heads * values), kept)
        made[f"{layer}.left"] = left.to(dtype)
        made[f"{layer}.right"] = right.reshape(kept, heads, values).transpose(0, 1).contiguous().to(dtype)
    return made


def reconditioned(states: States, patch: States) -> dict[str, torch.Tensor]:
    """The map of a chunk with what a patch adds to its ``N``, without the states behind it. Cost: a product a layer."""
    made = dict(states)
    for name, part in patch.items():
        layer, _, kind = name.partition(".")
        if kind == "conv":
            made[name] = part.to(made[name])
        elif kind == "left":
            own, _ = made[f"{layer}.own"], made.pop(f"{layer}.recurrent")
            made[f"{layer}.own"] = own + part.to(own) @ patch[f"{layer}.right"].to(own)
    return made


def since_exact(parts: Sequence[_T]) -> Sequence[_T]:
    """The parts whose states or maps the state behind all of them is made of: the last one that is exact, and what follows."""
    exact = [i for i, part in enumerate(parts) if not part.approximate]
    return parts[exact[-1] :] if exact else parts


def transition(keys: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """M of a run of tokens: the product of ``a_t (I - b_t k_t k_t^T)``, the last one leftmost.

    Args:
        keys: ``[T, heads, k]``, normalised.
        log_decay: ``[T, heads]``, the logarithm of ``a_t``.
        beta: ``[T, heads]``.

    Returns:
        float32 ``[heads, k, k]``, float64 for float64 keys. Cost: two products ``k x k`` a head and 64 tokens.
    """
    import torch

    dtype = torch.promote_types(keys.dtype, torch.float32)
    k, g, b = keys.to(dtype).transpose(0, 1), log_decay.to(dtype).T, beta.to(dtype).T
    made = torch.eye(k.shape[-1], dtype=dtype, device=k.device).expand(k.shape[0], -1, -1)
    for at in range(0, k.shape[1], _BLOCK):
        here, scale = k[:, at : at + _BLOCK], b[:, at : at + _BLOCK, None]
        total = g[:, at : at + _BLOCK].cumsum(1)
        # What each token takes off the state is less what those in front of it have taken off: a triangular system.
        between = (total[:, :, None] - total[:, None]).tril(-1).exp()
        taken = (scale * (here @ here.mT) * between).tril(-1)
        right = scale * total.exp()[..., None] * here
        solved = torch.linalg.solve_triangular(taken, right, upper=False, unitriangular=True)
        rest = (here * (total[:, -1:] - total).exp()[..., None]).mT @ solved
        made = total[:, -1:, None].exp() * made - rest @ made
    return made.contiguous()

"""States of recurrent layers, and chunks as maps on them.

Gated DeltaNet updates its state by ``S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T`` at each token (arXiv 2412.06464).
Over a chunk the update is linear: ``S_end = M S_start + N``, where ``M`` is the product of its transitions and ``N`` the state
after it from a zero start. The layers have no positions, so a chunk's map is the same at any position, and the state of a window
is composed from its chunks' maps by small matrix products. The convolution before the rule reaches back a few tokens: those that
preceded a chunk when it was computed stay in its map.

Composed states are exact to rounding after the same antecedents, and an approximation after others, because ``N`` contains what
the chunk absorbed from them. The transition is never inverted to remove a chunk; its condition number reaches 1e4 within tens of
tokens.

HYPIC (arXiv 2607.01299) composes the operators and zero-start states of chunks computed alone, and recomputes a seam. A patch
corrects the composed state instead: `state_deficit`, the error of the outgoing state after the antecedents, is cut by `factors`
to a few directions that a layer's heads share and added to ``N`` (`recondition_states`), so ``S_end = M S_start + N + dS``. It is
right where ``M S_start`` is: after the antecedents that it was formed with, in their order, at any position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

States = Mapping[str, "torch.Tensor"]
"""States of recurrent layers after a span's last token: ``LAYER.conv`` (last inputs, ``[channels, kernel]``) and
``LAYER.recurrent`` (``[heads, k, v]``). Where its map is kept, also ``LAYER.map`` (M, ``[heads, k, k]``) and ``LAYER.own`` (N,
``[heads, k, v]``). vLLM's have the layout of its kernels, except ``LAYER.recurrent`` where maps are kept."""


_PREFIX: Final = "state."
_BLOCK: Final = 64
"""Number of tokens whose transitions are multiplied at once."""


class _Part(Protocol):
    """A segment of a prompt, or a part of one."""

    @property
    def approximate(self) -> bool: ...


_T = TypeVar("_T", bound=_Part)


def named(states: States) -> dict[str, torch.Tensor]:
    """Name states as tensors of a record, beside others."""
    return {_PREFIX + name: state for name, state in states.items()}


def states_in(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the states among a record's tensors; the inverse of `named`."""
    return {name.removeprefix(_PREFIX): t for name, t in tensors.items() if name.startswith(_PREFIX)}


def has_maps(states: States) -> bool:
    """Return True if a span's maps are kept beside the states after it."""
    return any(name.endswith(".map") for name in states)


def compose_states(front: States, chunk: States) -> dict[str, torch.Tensor]:
    """Return the states after a chunk that follows ``front``, from its map; states absent from ``front`` are zero.

    Cost: a product per layer.
    """
    composed = {}
    for name, state in chunk.items():
        layer, _, kind = name.partition(".")
        if kind == "conv":
            composed[name] = state
        elif kind == "own":
            recurrent = f"{layer}.recurrent"
            start = front.get(recurrent)
            composed[recurrent] = state if start is None else chunk[f"{layer}.map"].to(start) @ start + state.to(start)
    return composed


def state_deficit(want: States, front: States, alone: States) -> dict[str, torch.Tensor]:
    """Return the difference of ``want`` from the states composed from a chunk's map after ``front``.

    Args:
        want: the states after the chunk's last token in a forward after its antecedents.
        front: the states before the chunk, as they are served.
        alone: states and map of the chunk that the patch will be added to.

    Returns:
        ``LAYER.recurrent [heads, k, v]``, the deficit; ``LAYER.conv``, that of ``want`` itself.
    """
    lack: dict[str, torch.Tensor] = {}
    for name, state in compose_states(front, alone).items():
        lack[name] = want[name].float() - state.float() if name.endswith(".recurrent") else want[name]
    return lack


def factors(
    lack: Mapping[str, torch.Tensor], rank: int | None, share: float | None, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Factorise a `state_deficit` over a few directions that a layer's heads share.

    Returns ``LAYER.left [k, m]`` and ``LAYER.right [heads, m, v]``. ``LAYER.conv``, a few inputs of the convolution, is returned
    as it is.

    Args:
        lack: the deficit, by name.
        rank: directions per layer; None without ``share``: all.
        share: instead of ``rank``: as many directions as fit in this share of the states' own size.
        dtype: of the factors.

    Cost: an SVD of ``[k, heads * v]`` per layer.
    """
    from ctxwin.kv.lowrank import truncated_svd

    patch: dict[str, torch.Tensor] = {}
    for name, tensor in lack.items():
        layer, _, kind = name.partition(".")
        if kind == "conv":
            patch[name] = tensor.to(dtype)
            continue
        heads, width, values = tensor.shape
        directions = min(width, heads * values)
        if share is not None:
            directions = min(directions, int(share * tensor.numel() / (width + heads * values)))
        elif rank is not None:
            directions = min(directions, rank)
        left_factor, right = truncated_svd(tensor.permute(1, 0, 2).reshape(width, heads * values), directions)
        patch[f"{layer}.left"] = left_factor.to(dtype)
        patch[f"{layer}.right"] = right.reshape(directions, heads, values).transpose(0, 1).contiguous().to(dtype)
    return patch


def recondition_states(states: States, patch: States) -> dict[str, torch.Tensor]:
    """Add a patch to the ``N`` of a chunk's map and drop its own outgoing states. Cost: a product per layer."""
    patched = dict(states)
    for name, part in patch.items():
        layer, _, kind = name.partition(".")
        if kind == "conv":
            patched[name] = part.to(patched[name])
        elif kind == "left":
            offset, _ = patched[f"{layer}.own"], patched.pop(f"{layer}.recurrent")
            patched[f"{layer}.own"] = offset + part.to(offset) @ patch[f"{layer}.right"].to(offset)
    return patched


def since_exact(parts: Sequence[_T]) -> Sequence[_T]:
    """Return the parts that determine the state after all of them: the last exact one, and those after it."""
    exact = [i for i, part in enumerate(parts) if not part.approximate]
    return parts[exact[-1] :] if exact else parts


def transition(keys: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """Return M of a run of tokens: the product of ``a_t (I - b_t k_t k_t^T)``, the last one leftmost.

    Args:
        keys: ``[T, heads, k]``, normalised.
        log_decay: ``[T, heads]``, the logarithm of ``a_t``.
        beta: ``[T, heads]``.

    Returns:
        float32 ``[heads, k, k]``, float64 for float64 keys.

    Cost: two ``k x k`` products per head and 64 tokens.
    """
    import torch

    dtype = torch.promote_types(keys.dtype, torch.float32)
    k, g, b = keys.to(dtype).transpose(0, 1), log_decay.to(dtype).T, beta.to(dtype).T
    product = torch.eye(k.shape[-1], dtype=dtype, device=k.device).expand(k.shape[0], -1, -1)
    for at in range(0, k.shape[1], _BLOCK):
        here, scale = k[:, at : at + _BLOCK], b[:, at : at + _BLOCK, None]
        total = g[:, at : at + _BLOCK].cumsum(1)
        # Each token removes from the state only what earlier ones have not removed yet: a triangular system.
        between = (total[:, :, None] - total[:, None]).tril(-1).exp()
        removed = (scale * (here @ here.mT) * between).tril(-1)
        right = scale * total.exp()[..., None] * here
        solved = torch.linalg.solve_triangular(removed, right, upper=False, unitriangular=True)
        update = (here * (total[:, -1:] - total).exp()[..., None]).mT @ solved
        product = total[:, -1:, None].exp() * product - update @ product
    return product.contiguous()

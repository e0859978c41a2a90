"""Hooks on vLLM's recurrent layers that capture the transition M of a chunk (`ctxwin.kv.states`).

vLLM has no seam for it. All code that looks into its Gated DeltaNet layers is here, and runs only on the versions in `HOOKED`.
A run of tokens goes through the chunk rule, a single later token through the decoding rule. Both receive the keys after the
convolution, and decay and step size or the terms they are made of. On a CPU the rules are two functions of
``vllm._custom_ops``, on a GPU each layer's ``chunk_gated_delta_rule`` and a function of the layers' module. The GPU side was
written by reading vLLM; no GPU has run it.

M is accumulated in float32 from the rule's arguments. N is the state after a chunk minus M times the state before it. So a chunk
that is composed where it was computed gives back vLLM's own state, whatever its kernels round.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ctxwin.engines import vllm_support as versions
from ctxwin.errors import UnsupportedModel
from ctxwin.kv.states import transition

HOOKED = ("0.32", "0.33")  # minor versions of vLLM whose recurrent layers were read, and are hooked in the tests
_Gates = Callable[[dict[str, Any]], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
_UNHOOKED = "_ctxwin_unhooked"


def check_version() -> None:
    """Raise UnsupportedModel on a vLLM whose recurrent layers were not read."""
    build = versions.installed()
    version = "none" if build is None else build[1]
    if versions.minor_of(version) not in HOOKED:
        raise UnsupportedModel(
            f"position_free=True needs vLLM {' or '.join(HOOKED)}, whose recurrent layers can be hooked, got {version}; open the "
            "model without it, or as hf:MODEL"
        )


@dataclass
class _Capture:
    """A capture of one request's tokens in one layer.

    Attributes:
        remaining: tokens that are still to come.
        initial: the state before the first, as the kernels lay it out.
        transition: of the tokens so far.
    """

    remaining: int
    initial: torch.Tensor | None = None
    transition: torch.Tensor | None = None


class Transitions:
    """Transitions of the captured chunks through one engine's recurrent layers.

    Args:
        layers: vLLM's. The memory of the states and the block identify a state: layers that share memory never share a block.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        check_version()
        self._captures: dict[tuple[int, int], _Capture] = {}
        _open.update((layer.kv_cache[1].data_ptr(), self) for layer in layers)
        if layers[0].kv_cache[1].device.type == "cpu":
            _hook_cpu()
        else:
            _hook_gpu(layers)

    def capture(self, states: torch.Tensor, block: int, tokens: int) -> None:
        """Capture the next ``tokens`` tokens of the sequence whose state is in ``block``; drop any earlier capture there.

        0 captures nothing more.
        """
        self._captures.pop((states.data_ptr(), block), None)
        if tokens:
            self._captures[states.data_ptr(), block] = _Capture(tokens)

    def take(self, states: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Remove a capture and return (M, the state before it); None if tokens of it are missing."""
        capture = self._captures.pop((states.data_ptr(), block), None)
        if capture is None or capture.remaining or capture.initial is None or capture.transition is None:
            return None
        return capture.transition, capture.initial

    @property
    def idle(self) -> bool:
        """True if there is no capture, under way or complete."""
        return not self._captures

    def pending(self, pointer: int, blocks: torch.Tensor) -> dict[int, _Capture]:
        """Return the unfinished captures of a batch whose sequences have these blocks, by index of the sequence.

        Cost: O(1) where there are no captures.
        """
        if not self._captures:
            return {}
        captures = ((i, self._captures.get((pointer, block))) for i, block in enumerate(blocks.tolist()))
        return {i: capture for i, capture in captures if capture is not None and capture.remaining > 0}


_open: weakref.WeakValueDictionary[int, Transitions] = weakref.WeakValueDictionary()  # by the memory of states


def _run_captured(
    call: Callable[[], Any],
    kwargs: dict[str, Any],
    states: torch.Tensor,
    blocks: torch.Tensor,
    initial: Callable[[int], torch.Tensor],
    gates: _Gates,
) -> Any:
    """Call a rule and extend the captures of its sequences.

    ``states`` are those of all blocks, ``blocks`` each sequence's; ``initial`` returns the state before its tokens.
    ``gates`` returns keys ``[T, heads, k]`` (normalised), log decay and step size ``[T, heads]`` of all tokens of a call.
    """
    transitions = _open.get(states.data_ptr())
    pending = {} if transitions is None else transitions.pending(states.data_ptr(), blocks)
    for i, capture in pending.items():
        capture.initial = initial(i).clone() if capture.initial is None else capture.initial
    output = call()
    if pending:
        keys, decay, beta = gates(kwargs)
        bounds = kwargs["cu_seqlens"].tolist()
        for i, capture in pending.items():
            rows = slice(bounds[i], bounds[i + 1])
            factor = transition(keys[rows], decay[rows], beta[rows])
            capture.transition = factor if capture.transition is None else factor @ capture.transition
            capture.remaining -= bounds[i + 1] - bounds[i]
    return output


def _keys(keys: torch.Tensor, heads: int, normalise: bool) -> torch.Tensor:
    """Return keys ``[1, T, key heads, k]`` repeated for the value heads that share them, ``[T, heads, k]``."""
    rows = keys[0].float()
    if normalise:
        rows = rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)
    return rows.repeat_interleave(heads // rows.shape[1], dim=1)


def _chunk_gates(kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys = kwargs["key"] if "key" in kwargs else kwargs["k"]
    decay, beta = (kwargs[name].flatten(0, -2).float() for name in ("g", "beta"))
    return _keys(keys, beta.shape[-1], kwargs["use_qk_l2norm_in_kernel"]), decay, beta


def _decode_gates(kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    step = torch.nn.functional.softplus(kwargs["a"].float() + kwargs["dt_bias"].float())
    decay, beta = -kwargs["A_log"].float().exp() * step, kwargs["b"].float().sigmoid()
    return _keys(kwargs["k"], beta.shape[-1], kwargs["use_qk_l2norm_in_kernel"]), decay, beta


def _hook(module: Any, name: str, states_name: str, blocks_name: str, gates: _Gates) -> None:
    """Put captures around the calls of a module's rule, which takes states and blocks under these names. Idempotent.

    The states of fresh sequences are zeros.
    """
    plain = getattr(module, name)
    if hasattr(plain, _UNHOOKED):
        return

    def rule(*args: Any, **kwargs: Any) -> Any:
        # On a GPU the decode rule gets the blocks of all sequences of a step, and bounds of those that decode.
        states, blocks = kwargs[states_name], kwargs[blocks_name][: len(kwargs["cu_seqlens"]) - 1]
        call = functools.partial(plain, *args, **kwargs)
        return _run_captured(call, kwargs, states, blocks, lambda i: states[blocks[i]], gates)

    setattr(rule, _UNHOOKED, plain)
    setattr(module, name, rule)


def _hook_cpu() -> None:
    import vllm._custom_ops as ops

    _hook(ops, "chunk_gated_delta_rule_cpu", "initial_state", "initial_state_indices", _chunk_gates)
    decode = "fused_sigmoid_gating_delta_rule_update_cpu"
    _hook(ops, decode, "initial_state_source", "initial_state_indices", _decode_gates)


def _hook_gpu(layers: Sequence[Any]) -> None:
    for layer in layers:
        layer.enable_packed_recurrent_decode = False  # its fused kernel calls no rule that could be hooked
        layer.chunk_gated_delta_rule._forward_method = _hooked_layer(layer)
        module = sys.modules[type(layer).__module__]
        decode = "fused_sigmoid_gating_delta_rule_update"
        _hook(module, decode, "initial_state", "ssm_state_indices", _decode_gates)


def _hooked_layer(layer: Any) -> Callable[..., Any]:
    """Return a layer's hooked chunk rule for a GPU, which receives the states of its sequences in their order."""
    plain = layer.chunk_gated_delta_rule._forward_method

    def rule(**kwargs: Any) -> Any:
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):  # a warm-up
            return plain(**kwargs)
        blocks, initial = metadata[layer.prefix].prefill_state_indices, kwargs["initial_state"]
        call = functools.partial(plain, **kwargs)
        return _run_captured(call, kwargs, layer.kv_cache[1], blocks, lambda i: initial[i], _chunk_gates)

    return rule

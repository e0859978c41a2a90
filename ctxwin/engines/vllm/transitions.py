"""What vLLM's recurrent layers hand to their rule, heard on the way: the transition M of a chunk (`ctxwin.kv.states`).

vLLM has no seam for it, so all that looks into its Gated DeltaNet layers is here, and is used on the versions in `HEARD` only.
A run of tokens goes through the chunk rule, a single token behind others through the rule of decoding. Both are given the keys
behind the convolution, and decay and step size or what they are made of. On a processor they are two functions of
``vllm._custom_ops``, on a GPU each layer's ``chunk_gated_delta_rule`` and a function of the layers' module; that side was
written by reading vLLM, and no GPU has run it.

M is multiplied up in float32 of what the rule was given; N is what the state behind a chunk has beyond M times the one in front.
So a chunk that is composed where it was computed gives back the state that vLLM had there, whatever its kernels round.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ctxwin.engines.vllm.lifecycle import versions
from ctxwin.errors import UnsupportedModel
from ctxwin.kv.states import transition

HEARD = ("0.31", "0.32")
"""Minor versions of vLLM whose recurrent layers were read, and are heard in the tests."""
_Gates = Callable[[dict[str, Any]], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
_MARK = "_ctxwin_plain"


def check_version() -> None:
    """Raises UnsupportedModel on a vLLM whose recurrent layers were not read."""
    found = versions.installed()
    version = "none" if found is None else found[1]
    if versions.minor_of(version) not in HEARD:
        raise UnsupportedModel(
            f"position_free=True needs vLLM {' or '.join(HEARD)}, whose recurrent layers can be heard, got {version}; open the "
            "model without it, or as hf:MODEL"
        )


@dataclass
class _Hearing:
    """One request's tokens in one layer.

    Attributes:
        left: tokens that are still to come.
        front: the state in front of the first, as the kernels lay it out.
        through: the transition of those that came.
    """

    left: int
    front: torch.Tensor | None = None
    through: torch.Tensor | None = None


class Transitions:
    """Of one engine's recurrent layers, for the chunks that are captured.

    Args:
        layers: vLLM's. The memory of their states and the block tell whose a state is: layers that share memory never share a
            block.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        check_version()
        self._heard: dict[tuple[int, int], _Hearing] = {}
        _open.update((layer.kv_cache[1].data_ptr(), self) for layer in layers)
        if layers[0].kv_cache[1].device.type == "cpu":
            _attend_to_processor()
        else:
            _attend_to_gpu(layers)

    def hear(self, states: torch.Tensor, block: int, tokens: int) -> None:
        """Hears the next ``tokens`` tokens of the sequence whose state is in ``block``, and forgets what was heard there.

        0 hears no more.
        """
        self._heard.pop((states.data_ptr(), block), None)
        if tokens:
            self._heard[states.data_ptr(), block] = _Hearing(tokens)

    def take(self, states: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(M, the state in front) of what was heard, once; None where there are tokens that were not."""
        found = self._heard.pop((states.data_ptr(), block), None)
        if found is None or found.left or found.front is None or found.through is None:
            return None
        return found.through, found.front

    @property
    def idle(self) -> bool:
        """Whether nothing is heard, nor waits to be taken."""
        return not self._heard

    def waiting(self, pointer: int, blocks: torch.Tensor) -> dict[int, _Hearing]:
        """What is heard of a batch whose sequences have these blocks, by the index of the sequence. Cost: O(1) for nothing."""
        if not self._heard:
            return {}
        found = ((i, self._heard.get((pointer, block))) for i, block in enumerate(blocks.tolist()))
        return {i: hearing for i, hearing in found if hearing is not None and hearing.left > 0}


_open: weakref.WeakValueDictionary[int, Transitions] = weakref.WeakValueDictionary()  # by the memory of states


@dataclass(frozen=True)
class _Rule:
    """How one of vLLM's rules is called, by names of its arguments.

    Attributes:
        states: of all blocks; those of fresh sequences are zeros.
        blocks: the block of each sequence.
        gates: keys ``[T, heads, k]`` (normalised), log decay and step size ``[T, heads]`` of all of its tokens.
    """

    states: str
    blocks: str
    gates: _Gates

    def telling(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """The rule ``plain``, whose calls are heard."""

        def rule(*args: Any, **given: Any) -> Any:
            states, blocks = given[self.states], given[self.blocks]
            call = functools.partial(plain, *args, **given)
            return _heard(call, given, states, blocks, lambda i: states[blocks[i]], self.gates)

        setattr(rule, _MARK, plain)
        return rule


def _heard(
    call: Callable[[], Any],
    given: dict[str, Any],
    states: torch.Tensor,
    blocks: torch.Tensor,
    front: Callable[[int], torch.Tensor],
    gates: _Gates,
) -> Any:
    """Calls a rule; see `_Rule`. ``front``: the state in front of a sequence, by its index."""
    listener = _open.get(states.data_ptr())
    waiting = {} if listener is None else listener.waiting(states.data_ptr(), blocks)
    for i, hearing in waiting.items():
        hearing.front = front(i).clone() if hearing.front is None else hearing.front
    made = call()
    if waiting:
        keys, decay, beta = gates(given)
        bounds = given["cu_seqlens"].tolist()
        for i, hearing in waiting.items():
            here = slice(bounds[i], bounds[i + 1])
            through = transition(keys[here], decay[here], beta[here])
            hearing.through = through if hearing.through is None else through @ hearing.through
            hearing.left -= bounds[i + 1] - bounds[i]
    return made


def _keys(keys: torch.Tensor, heads: int, normalise: bool) -> torch.Tensor:
    """Keys ``[1, T, key heads, k]`` for each of the value heads, which share them in order."""
    found = keys[0].float()
    if normalise:
        found = found * torch.rsqrt(found.square().sum(-1, keepdim=True) + 1e-6)
    return found.repeat_interleave(heads // found.shape[1], dim=1)


def _of_run(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys = given["key"] if "key" in given else given["k"]
    decay, beta = (given[name].flatten(0, -2).float() for name in ("g", "beta"))
    return _keys(keys, beta.shape[-1], given["use_qk_l2norm_in_kernel"]), decay, beta


def _of_token(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    step = torch.nn.functional.softplus(given["a"].float() + given["dt_bias"].float())
    decay, beta = -given["A_log"].float().exp() * step, given["b"].float().sigmoid()
    return _keys(given["k"], beta.shape[-1], given["use_qk_l2norm_in_kernel"]), decay, beta


def _attend(module: Any, name: str, rule: _Rule) -> None:
    """Puts a heard rule in the place of a module's own, once."""
    plain = getattr(module, name)
    if not hasattr(plain, _MARK):
        setattr(module, name, rule.telling(plain))


def _attend_to_processor() -> None:
    import vllm._custom_ops as ops

    _attend(ops, "chunk_gated_delta_rule_cpu", _Rule("initial_state", "initial_state_indices", _of_run))
    token = _Rule("initial_state_source", "initial_state_indices", _of_token)
    _attend(ops, "fused_sigmoid_gating_delta_rule_update_cpu", token)


def _attend_to_gpu(layers: Sequence[Any]) -> None:
    import sys

    for layer in layers:
        layer.enable_packed_recurrent_decode = False  # its one kernel tells nobody
        layer.chunk_gated_delta_rule._forward_method = _telling_layer(layer)
        module = sys.modules[type(layer).__module__]
        _attend(
            module, "fused_sigmoid_gating_delta_rule_update", _Rule("initial_state", "ssm_state_indices", _of_token)
        )


def _telling_layer(layer: Any) -> Callable[..., Any]:
    """A layer's chunk rule on a GPU, which is given the states of its sequences in their order."""
    plain = layer.chunk_gated_delta_rule._forward_method

    def rule(**given: Any) -> Any:
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):  # a warm-up
            return plain(**given)
        blocks, front = metadata[layer.prefix].prefill_state_indices, given["initial_state"]
        call = functools.partial(plain, **given)
        return _heard(call, given, layer.kv_cache[1], blocks, lambda i: front[i], _of_run)

    return rule

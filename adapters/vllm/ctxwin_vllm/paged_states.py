"""States of a hybrid's recurrent layers in vLLM's paged cache.

Without prefix caching a request has one block in each group of recurrent layers, which holds the states after the last computed
token. So a state is read when its request has ended, a chunk whose states are captured ends its request's prompt, and a load
writes the states after its last span. States are kept as the worker lays them out, which differs between CPUs and GPUs.

Where chunks' maps on the states are kept as well, a load may compose the states of chunks (`ctxwin.kv.states`). The recurrent
states are then kept as matrices ``[heads, k, v]`` in float32.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ctxwin.errors import UnsupportedModel
from ctxwin.kv.kernels import SpanSlice
from ctxwin.kv.states import States, compose_states, recondition_states, since_exact
from ctxwin_vllm.transitions import Transitions

_KINDS = ("conv", "recurrent")


class PagedStates:
    """The recurrent layers of one engine's cache.

    Args:
        layers: all layers by name, as in ``compilation_config.static_forward_context``.
        groups: the names of each group of layers that share a block table, as in vLLM's ``KVCacheConfig``.
        maps: whether chunks' maps are read as well.

    Raises:
        UnsupportedModel: layers whose states are not a convolution's inputs and a matrix a head.
    """

    def __init__(self, layers: Mapping[str, Any], groups: Sequence[Sequence[str]], maps: bool = False) -> None:
        caches, recurrent = {}, []
        for group, names in enumerate(groups):
            for name in names:
                cache = getattr(layers[name], "kv_cache", None)
                if not isinstance(cache, tuple):
                    continue
                if [state.ndim for state in cache] != [3, 4]:
                    shapes = [tuple(state.shape[1:]) for state in cache]
                    raise UnsupportedModel(f"the states of {name!r} must be Gated DeltaNet's, got shapes {shapes}")
                number = next(int(part) for part in name.split(".") if part.isdigit())
                caches[number] = group, cache
                recurrent.append(layers[name])
        self._layers = dict(sorted(caches.items()))
        self._transitions = Transitions(recurrent) if maps else None

    def capture(self, blocks: Sequence[int], tokens: int) -> None:
        """Capture the map of the chunk that the request with these blocks computes next; `read` returns it.

        Args:
            blocks: the request's block in each group.
            tokens: of the chunk; 0 drops a capture that will not be read.
        """
        for group, (_, cache) in self._layers.values() if self._transitions is not None else ():
            assert self._transitions is not None
            self._transitions.capture(cache, blocks[group], tokens)

    @torch.inference_mode()
    def read(self, blocks: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return copies of the states in one request's blocks, by name (`ctxwin.kv.states`), on the cache's device.

        Args:
            blocks: the request's block in each group.
        """
        states = {
            f"{number}.{kind}": state[blocks[group]].clone()
            for number, (group, cache) in self._layers.items()
            for kind, state in zip(_KINDS, cache, strict=True)
        }
        return states if self._transitions is None else states | self._maps(blocks, states)

    def _maps(self, blocks: Sequence[int], states: States) -> dict[str, torch.Tensor]:
        """Return the recurrent states as matrices, with the captured maps; without any maps if one is incomplete."""
        assert self._transitions is not None
        tensors, complete = {}, True
        for number, (group, (_, cache)) in self._layers.items():
            name = f"{number}.recurrent"
            tensors[name] = _matrix(states[name], cache.device).float().contiguous()
            capture = self._transitions.take(cache, blocks[group])
            complete = complete and capture is not None
            if capture is not None:
                transition, initial = capture
                offset = tensors[name].to(transition) - transition @ _matrix(initial, cache.device).float()
                tensors |= {f"{number}.map": transition, f"{number}.own": offset}
        return tensors if complete else {name: state for name, state in tensors.items() if name.endswith(".recurrent")}

    @torch.inference_mode()
    def states_after(self, parts: Sequence[SpanSlice]) -> States:
        """Return the states after consecutive spans.

        Raises LookupError where the states after an earlier span are missing. Cost: one product a layer for each approximate
        span after the last exact one.
        """
        first, *rest = since_exact(parts)
        states: States = first.span.states
        if rest or first.approximate:
            if not states:
                raise LookupError("a span before others must hold the states after it, got none")
            device = next(iter(self._layers.values()))[1][1].device
            states = compose_states({}, _map_of(first)) if first.approximate else states
            states = {name: state.to(device) for name, state in states.items()}
            for part in rest:
                states = compose_states(states, _map_of(part))
        return states

    @torch.inference_mode()
    def write(self, blocks: Sequence[int], states: Mapping[str, torch.Tensor]) -> int:
        """Write states into a request's blocks; return their bytes.

        Raises LookupError where a layer's state is missing, ValueError for another shape or dtype; nothing is written then.
        """
        pairs = []
        for number, (group, cache) in self._layers.items():
            for kind, paged in zip(_KINDS, cache, strict=True):
                state = states.get(f"{number}.{kind}")
                if state is None:
                    raise LookupError(f"a span must hold the {kind} state after it of layer {number}, got none")
                target = paged[blocks[group]]
                if self._transitions is not None and kind == "recurrent":
                    target = _matrix(target, paged.device)
                    state = state.to(target.dtype)
                if state.shape != target.shape or state.dtype != target.dtype:
                    raise ValueError(
                        f"the {kind} state of layer {number} must be {target.dtype} {tuple(target.shape)}, got {state.dtype} "
                        f"{tuple(state.shape)}"
                    )
                pairs.append((target, state))
        for target, state in pairs:
            target.copy_(state)
        return sum(state.nbytes for _, state in pairs)


def _matrix(state: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a view ``[heads, k, v]`` of a state as the worker on ``device`` lays it out, with shape ``[heads, v, k]``.

    CPU kernels read its memory as ``[heads, k, v]`` whatever the shape; GPU kernels follow the shape.
    """
    heads, v, k = state.shape
    return state.view(heads, k, v) if device.type == "cpu" else state.mT


def _map_of(part: SpanSlice) -> States:
    """Return the map of a loaded span, its patch included."""
    return part.span.states if part.patch is None else recondition_states(part.span.states, part.patch.states)

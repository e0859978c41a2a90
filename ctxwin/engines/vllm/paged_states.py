"""States of a hybrid's recurrent layers in vLLM's paged cache.

Without prefix caching a request has one block in each group of recurrent layers, and in it the states behind the last token
that was computed. So a state is read when its request has ended, and a chunk whose states are wanted ends a request's prompt;
what a load brings are the states behind its last span. They are kept as the worker lays them out, which differs between
processors and GPUs.

Where chunks' maps on the states are kept as well, a load may compose the states of chunks (`ctxwin.kv.states`), for which the
recurrent ones are kept as matrices ``[heads, k, v]`` in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ctxwin.engines.vllm.transitions import Transitions
from ctxwin.errors import UnsupportedModel
from ctxwin.kv.kernels import Part
from ctxwin.kv.states import States, composed, reconditioned, since_exact

_KINDS = ("conv", "recurrent")


class PagedStates:
    """The recurrent layers of one engine's cache.

    Args:
        layers: all layers by name, as in ``compilation_config.static_forward_context``.
        groups: the names of each group of layers that share a block table, as in vLLM's ``KVCacheConfig``.
        maps: whether chunks' maps are read, too.

    Raises UnsupportedModel for layers whose states are not a convolution's inputs and a matrix a head.
    """

    def __init__(self, layers: Mapping[str, Any], groups: Sequence[Sequence[str]], maps: bool = False) -> None:
        found, recurrent = {}, []
        for group, names in enumerate(groups):
            for name in names:
                cache = getattr(layers[name], "kv_cache", None)
                if not isinstance(cache, tuple):
                    continue
                if [state.ndim for state in cache] != [3, 4]:
                    shapes = [tuple(state.shape[1:]) for state in cache]
                    raise UnsupportedModel(f"the states of {name!r} must be Gated DeltaNet's, got shapes {shapes}")
                number = next(int(part) for part in name.split(".") if part.isdigit())
                found[number] = group, cache
                recurrent.append(layers[name])
        self._layers = dict(sorted(found.items()))
        self._transitions = Transitions(recurrent) if maps else None

    def hear(self, blocks: Sequence[int], tokens: int) -> None:
        """Expects a chunk of so many tokens to be computed next by the request that has these blocks: `read` gives its map.

        0 tokens: what was expected there will not be read.
        """
        for group, (_, cache) in self._layers.values() if self._transitions is not None else ():
            assert self._transitions is not None
            self._transitions.hear(cache, blocks[group], tokens)

    @torch.inference_mode()
    def read(self, blocks: Sequence[int]) -> dict[str, torch.Tensor]:
        """The states in one request's blocks, by name (`ctxwin.kv.states`), copied to the processor.

        Args:
            blocks: the request's block in each group.
        """
        made = {
            f"{number}.{kind}": state[blocks[group]].to("cpu", copy=True)
            for number, (group, cache) in self._layers.items()
            for kind, state in zip(_KINDS, cache, strict=True)
        }
        return made if self._transitions is None else made | self._maps(blocks, made)

    def _maps(self, blocks: Sequence[int], behind: States) -> dict[str, torch.Tensor]:
        """The recurrent states as matrices, with the maps of what was heard; without any where a part of it was not."""
        assert self._transitions is not None
        made, whole = {}, True
        for number, (group, (_, cache)) in self._layers.items():
            name = f"{number}.recurrent"
            made[name] = _matrix(behind[name], cache.device).float().contiguous()
            heard = self._transitions.take(cache, blocks[group])
            whole = whole and heard is not None
            if heard is not None:
                through, front = heard
                own = made[name].to(through) - through @ _matrix(front, cache.device).float()
                made |= {f"{number}.map": through.to("cpu"), f"{number}.own": own.to("cpu")}
        return made if whole else {name: state for name, state in made.items() if name.endswith(".recurrent")}

    @torch.inference_mode()
    def behind(self, parts: Sequence[Part]) -> States:
        """The states behind spans that stand in a row. Cost: a product a layer for each approximate one behind the last exact."""
        first, *rest = since_exact(parts)
        states: States = first.span.states
        if rest or first.approximate:
            if not states:
                raise LookupError("a span in front of others must hold the states behind it, got none")
            device = next(iter(self._layers.values()))[1][1].device
            states = composed({}, _map_of(first)) if first.approximate else states
            states = {name: state.to(device) for name, state in states.items()}
            for part in rest:
                states = composed(states, _map_of(part))
        return states

    @torch.inference_mode()
    def write(self, blocks: Sequence[int], states: Mapping[str, torch.Tensor]) -> int:
        """Puts states into a request's blocks; returns their bytes.

        Raises LookupError where a layer's is missing, ValueError for one of another shape or dtype; nothing is written then.
        """
        pairs = []
        for number, (group, cache) in self._layers.items():
            for kind, held in zip(_KINDS, cache, strict=True):
                state = states.get(f"{number}.{kind}")
                if state is None:
                    raise LookupError(f"a span must hold the {kind} state behind it of layer {number}, got none")
                into = held[blocks[group]]
                if self._transitions is not None and kind == "recurrent":
                    into = _matrix(into, held.device)
                    state = state.to(into.dtype)
                if state.shape != into.shape or state.dtype != into.dtype:
                    raise ValueError(
                        f"the {kind} state of layer {number} must be {into.dtype} {tuple(into.shape)}, got {state.dtype} "
                        f"{tuple(state.shape)}"
                    )
                pairs.append((into, state))
        for into, state in pairs:
            into.copy_(state)
        return sum(state.nbytes for _, state in pairs)


def _matrix(state: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A state as the worker on ``device`` lays it out, ``[heads, v, k]`` by its shape, as ``[heads, k, v]``; a view.

    A processor's kernels take the memory for ``[heads, k, v]`` whatever the shape says, those of GPUs do not.
    """
    heads, v, k = state.shape
    return state.view(heads, k, v) if device.type == "cpu" else state.mT


def _map_of(part: Part) -> States:
    """The map of what is loaded, with what its patch adds."""
    return part.span.states if part.patch is None else reconditioned(part.span.states, part.patch.states)

"""States of a hybrid's recurrent layers in vLLM's paged cache.

Without prefix caching a request has one block in each group of recurrent layers, and in it the states behind the last token
that was computed. So a state is read when its request has ended, and a chunk whose states are wanted ends a request's prompt;
what a load brings are the states behind its last span. They are kept as the worker lays them out, which differs between
processors and GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ctxwin.errors import UnsupportedModel

_KINDS = ("conv", "recurrent")


class PagedStates:
    """The recurrent layers of one engine's cache.

    Args:
        layers: all layers by name, as in ``compilation_config.static_forward_context``.
        groups: the names of each group of layers that share a block table, as in vLLM's ``KVCacheConfig``.

    Raises UnsupportedModel for layers whose states are not a convolution's inputs and a matrix a head.
    """

    def __init__(self, layers: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> None:
        found = {}
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
        self._layers = dict(sorted(found.items()))

    @torch.inference_mode()
    def read(self, blocks: Sequence[int]) -> dict[str, torch.Tensor]:
        """The states in one request's blocks, by name (`ctxwin.kv.states`), copied to the processor.

        Args:
            blocks: the request's block in each group.
        """
        return {
            f"{number}.{kind}": state[blocks[group]].to("cpu", copy=True)
            for number, (group, cache) in self._layers.items()
            for kind, state in zip(_KINDS, cache, strict=True)
        }

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
                if state.shape != into.shape or state.dtype != into.dtype:
                    raise ValueError(
                        f"the {kind} state of layer {number} must be {into.dtype} {tuple(into.shape)}, got {state.dtype} "
                        f"{tuple(state.shape)}"
                    )
                pairs.append((into, state))
        for into, state in pairs:
            into.copy_(state)
        return sum(state.nbytes for _, state in pairs)

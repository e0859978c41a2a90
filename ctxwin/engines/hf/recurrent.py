"""Recurrent layers on transformers: reading and setting their states, and capturing a chunk's map (`ctxwin.kv.states`)."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ctxwin.kv.states import States

_RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
_captured: ContextVar[list[tuple[torch.Tensor, torch.Tensor]] | None] = ContextVar("captured", default=None)


def states_of(cache: Any) -> dict[str, torch.Tensor]:
    """Copy the states of a cache's recurrent layers."""
    states = {}
    for i, layer in enumerate(cache.layers):
        for name in ("conv", "recurrent"):
            state = getattr(layer, f"{name}_states", {}).get(0)
            if state is not None:
                states[f"{i}.{name}"] = state[0].clone()
    return states


def set_states(cache: Any, states: States) -> None:
    """Set the states of a cache's recurrent layers, as a forward over their tokens would have left them."""
    for name, state in states.items():
        number, _, kind = name.partition(".")
        layer, full = cache.layers[int(number)], state[None]
        if kind == "conv":
            layer.lazy_initialization(conv_states=full)
            layer.conv_states[0].copy_(full)
            layer.has_previous_state[0] = True
        elif kind == "recurrent":
            layer.lazy_initialization(recurrent_states=full)
            layer.recurrent_states[0].copy_(full)


def install_hooks(decoder: Any) -> None:
    """Wrap the rules of a decoder's recurrent layers for `capture_maps`: once for each modelling module.

    Outside `capture_maps` a wrapped rule behaves as before.
    """
    for layer in decoder.layers:
        rule = getattr(layer, "linear_attn", None)
        module = None if rule is None else sys.modules[type(rule).__module__]
        for name in _RULES if module is not None else ():
            plain = getattr(module, name)
            if not hasattr(plain, "_ctxwin_plain"):
                setattr(module, name, _capturing(plain))


def _capturing(plain: Callable[..., Any]) -> Callable[..., Any]:
    def rule(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any) -> Any:
        output = plain(query, key, value, *args, **options)
        calls = _captured.get()
        if calls is not None:
            heads, width = value.shape[-2], key.shape[-1]
            nothing = value.new_zeros(*value.shape[:-1], width)
            eye = torch.eye(width, device=key.device).expand(1, heads, -1, -1).contiguous()
            # With zero values the rule maps the identity to the product of its transitions.
            initial = options.get("initial_state")
            options |= {"initial_state": eye, "output_final_state": True}
            _, through = plain(query, key, nothing, *args, **options)
            offset = output[1] if initial is None else output[1] - through.to(initial) @ initial
            calls.append((through[0].float(), offset[0].float()))
        return output

    rule._ctxwin_plain = plain  # type: ignore[attr-defined]
    return rule


@contextmanager
def capture_maps(layers: tuple[int, ...]) -> Iterator[dict[str, torch.Tensor]]:
    """Capture the maps of the tokens of one forward within the context: a dict by name, filled at the end.

    Args:
        layers: indices of the recurrent layers.

    Cost: a second run of each layer's rule.
    """
    maps: dict[str, torch.Tensor] = {}
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    token = _captured.set(calls)
    try:
        yield maps
    finally:
        _captured.reset(token)
        for layer, (through, offset) in zip(layers, calls, strict=False):
            maps |= {f"{layer}.map": through, f"{layer}.own": offset}

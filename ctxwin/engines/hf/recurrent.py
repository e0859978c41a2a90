"""Recurrent layers on transformers: reading and setting their states, and hearing a chunk's map on them (`ctxwin.kv.states`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ctxwin.kv.states import States

_RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
_heard: ContextVar[list[tuple[torch.Tensor, torch.Tensor]] | None] = ContextVar("heard", default=None)


def states_of(cache: Any) -> dict[str, torch.Tensor]:
    """A copy of the states of a cache's recurrent layers."""
    found = {}
    for i, layer in enumerate(cache.layers):
        for name in ("conv", "recurrent"):
            held = getattr(layer, f"{name}_states", {}).get(0)
            if held is not None:
                found[f"{i}.{name}"] = held[0].clone()
    return found


def set_states(cache: Any, states: States) -> None:
    """Puts states into a cache's recurrent layers, as a forward over all that they are of would have."""
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


def attend_to(decoder: Any) -> None:
    """Lets `hearing` hear the recurrent layers of a decoder; once a modelling module, and nothing changes for others."""
    for layer in decoder.layers:
        rule = getattr(layer, "linear_attn", None)
        module = None if rule is None else sys.modules[type(rule).__module__]
        for name in _RULES if module is not None else ():
            plain = getattr(module, name)
            if not hasattr(plain, "_ctxwin_plain"):
                setattr(module, name, _telling(plain))


def _telling(plain: Callable[..., Any]) -> Callable[..., Any]:
    def rule(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any) -> Any:
        made = plain(query, key, value, *args, **options)
        calls = _heard.get()
        if calls is not None:
            heads, width = value.shape[-2], key.shape[-1]
            nothing = value.new_zeros(*value.shape[:-1], width)
            eye = torch.eye(width, device=key.device).expand(1, heads, -1, -1).contiguous()
            # With no values the rule takes the identity to the product of its transitions.
            _, through = plain(
                query, key, nothing, *args, **{**options, "initial_state": eye, "output_final_state": True}
            )
            before = options.get("initial_state")
            own = made[1] if before is None else made[1] - through.to(before) @ before
            calls.append((through[0].float(), own[0].float()))
        return made

    rule._ctxwin_plain = plain  # type: ignore[attr-defined]
    return rule


@contextmanager
def hearing(layers: tuple[int, ...]) -> Iterator[dict[str, torch.Tensor]]:
    """The maps of the tokens that go through one forward meanwhile, by name; filled when it ends.

    Args:
        layers: indices of the recurrent layers. Cost: a second run of each layer's rule.
    """
    maps: dict[str, torch.Tensor] = {}
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    token = _heard.set(calls)
    try:
        yield maps
    finally:
        _heard.reset(token)
        for layer, (through, own) in zip(layers, calls, strict=False):
            maps |= {f"{layer}.map": through, f"{layer}.own": own}

"""Whether a model's keys turn from place to place as its config says, measured where vLLM runs it.

A worker runs its model over a few tokens at two places, outside vLLM's steps and with attention switched off, and looks at
what each attention layer is handed for its cache. With no attention, a layer's KV depends on nothing but token and
position, so each layer of every rank is checked on its own. No block, request or statistic of vLLM is touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ctxwin.engines.vllm import internals
from ctxwin.engines.vllm.drafter import DrafterKV
from ctxwin.engines.vllm.paged import PagedKV
from ctxwin.errors import UnsupportedModel
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.relocate import check_relocation
from ctxwin.kv.rows import to_rows

TOKENS = 16
"""Tokens that are computed at two places."""
FAR = 997
"""The second place, or the last at which the tokens fit the model's context."""


def refusal(
    model: Any,
    config: Any,
    paged: PagedKV,
    given: Mapping[str, Any] = MappingProxyType({}),
    drafter: Any = None,
    drafted: DrafterKV | None = None,
) -> str:
    """Why KV of a model, or of its drafter, cannot be moved; "" where it can.

    Args:
        model: vLLM's, in the process that calls.
        config: its ``VllmConfig``.
        paged: its cache, whose layout is what the model's config says.
        given: what a stage of a pipeline is handed by the one before, as arguments of its model.
        drafter: what proposes drafts (`internals.drafter_of`).
        drafted: the drafter's cache, where it keeps KV.

    Cost: two forwards over `TOKENS` tokens, 10 to 100 ms; nothing else runs on the worker meanwhile.
    """
    far = max(1, min(FAR, int(config.model_config.max_model_len) - TOKENS))
    try:
        check_relocation(paged.kv, lambda start: _computed(model, config, paged, start, given), far)
        if drafted is not None:
            theirs = drafted.paged
            check_relocation(
                theirs.kv, lambda start: _computed(drafter.model, config, theirs, start, given, drafter), far
            )
    except UnsupportedModel as error:
        return str(error)
    except Exception as error:  # of whatever a model does with tokens that belong to no request
        return f"whether its KV can be moved could not be measured ({type(error).__name__}: {error})"
    return ""


@torch.inference_mode()
def _computed(
    model: Any, config: Any, paged: PagedKV, start: int, given: Mapping[str, Any], drafter: Any = None
) -> SpanKV:
    """KV of tokens from all over the vocabulary, the first of them at ``start``, as it would go into the cache.

    Those of a drafter begin one further on (MTP blanks what stands at 0), behind hidden states of nothing in particular.
    """
    from vllm.forward_context import set_forward_context

    steps, kind = torch.arange(TOKENS), config.model_config
    if drafter is not None:
        kind = config.speculative_config.draft_model_config
        if config.speculative_config.method != "draft_model":
            rows = torch.randn(TOKENS, drafter.hidden_size, generator=torch.Generator().manual_seed(0))
            given = {"hidden_states": rows.to(paged.device, kind.dtype)}
    # Three different axes, else a wrong order of sections would not show.
    places = torch.stack([steps, steps // 2, steps % 5] if kind.uses_mrope else [steps] * 3) + (drafter is not None)
    ids = int(config.model_config.get_vocab_size()) * (2 * steps + 1) // (2 * TOKENS)
    at = places + start if kind.uses_mrope else places[0] + start
    if config.lora_config is not None:
        internals.use_no_adapter(model, TOKENS)
    with _overheard(paged) as heard, set_forward_context(None, config, num_tokens=TOKENS, skip_compiled=True):
        model(input_ids=ids.to(paged.device), positions=at.to(paged.device), **given)
    pairs = []
    for i, (heads, k_dim, v_dim) in enumerate(paged.shapes):
        k, v = heard[i]
        pairs.append((k.reshape(TOKENS, heads, k_dim), v.reshape(TOKENS, heads, v_dim)))
    k, v = to_rows(paged.kv, pairs)
    return SpanKV(k.cpu(), v.cpu(), places, start)


@contextlib.contextmanager
def _overheard(paged: PagedKV) -> Iterator[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """(k, v) that each attention layer is called with, by index; meanwhile they answer zeros and touch no cache."""
    heard: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def listen(index: int, layer: Any) -> None:
        latent = hasattr(layer, "kv_lora_rank")  # see `paged`: c_KV is our content channel, k_pe the rope channel

        def forward(query: Any, key: Any, value: Any, output_shape: Any = None, **_: Any) -> torch.Tensor:
            if key is not None:  # else it reads the cache of another layer
                heard[index] = (value.clone(), key.clone()) if latent else (key.clone(), value.clone())
            shape = output_shape or (TOKENS, layer.num_heads * layer.head_size_v)
            made: torch.Tensor = query.new_zeros(shape)
            return made

        layer.forward = forward

    try:
        for index, layer in enumerate([*paged.layers, *paged.readers]):
            listen(index, layer)
        yield heard
    finally:
        for layer in [*paged.layers, *paged.readers]:
            layer.__dict__.pop("forward", None)

"""A check, where vLLM runs the model, that its keys rotate from place to place as its config says.

A worker runs its model over a few tokens at two places, outside vLLM's steps and with attention switched off, and records
the keys and values that each attention layer receives for its cache. Without attention, a layer's KV depends on token and
position alone, so each layer of every rank is checked on its own. No block, request or statistic of vLLM is touched.
"""

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from ctxwin.errors import UnsupportedModel
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.relocate import check_relocation
from ctxwin.kv.rows import to_rows
from ctxwin_vllm import internals
from ctxwin_vllm.draft_model import DraftModelKV
from ctxwin_vllm.paged import PagedKV

TOKENS = 16  # tokens that are computed at two places
FAR = 997  # the second place, or the last at which the tokens fit the model's context


def refusal(
    model: Any,
    config: Any,
    paged: PagedKV,
    inputs: Mapping[str, Any] = MappingProxyType({}),
    draft_model: Any = None,
    draft_kv: DraftModelKV | None = None,
) -> str:
    """Return why KV of a model, or of its draft model, cannot be moved; "" where it can.

    Args:
        model: vLLM's, in the process that calls.
        config: its ``VllmConfig``.
        paged: its cache, laid out as the model's config says.
        inputs: outputs of the previous stage of a pipeline, as arguments of the model.
        draft_model: the proposer of drafts (`internals.draft_model_of`).
        draft_kv: the draft model's cache, where it keeps KV.

    Cost: two forwards over `TOKENS` tokens, 10 to 100 ms; nothing else runs on the worker meanwhile.
    """
    far = max(1, min(FAR, int(config.model_config.max_model_len) - TOKENS))
    try:
        check_relocation(paged.kv, lambda start: _compute(model, config, paged, start, inputs), far)
        if draft_kv is not None:
            options: dict[str, Any] = {"inputs": inputs, "draft_model": draft_model}
            drafted = partial(_compute, draft_model.model, config, draft_kv.paged, **options)
            check_relocation(draft_kv.paged.kv, drafted, far)
    except UnsupportedModel as error:
        return str(error)
    except Exception as error:  # models may fail in any way on tokens that belong to no request
        return f"whether its KV can be moved could not be measured ({type(error).__name__}: {error})"
    return ""


@torch.inference_mode()
def _compute(
    model: Any, config: Any, paged: PagedKV, start: int, inputs: Mapping[str, Any], draft_model: Any = None
) -> SpanKV:
    """Return KV of tokens from all over the vocabulary, the first at ``start``, as it would go into the cache.

    Tokens of a draft model begin one position later (MTP blanks position 0), with random hidden states as input.
    """
    from vllm.forward_context import set_forward_context

    steps, kind = torch.arange(TOKENS), config.model_config
    if draft_model is not None:
        kind = config.speculative_config.draft_model_config
        if config.speculative_config.method != "draft_model":
            rows = torch.randn(TOKENS, draft_model.hidden_size, generator=torch.Generator().manual_seed(0))
            inputs = {"hidden_states": rows.to(paged.device, kind.dtype)}
    # Three different axes, else a wrong order of sections would not show.
    places = torch.stack([steps, steps // 2, steps % 5] if kind.uses_mrope else [steps] * 3) + (draft_model is not None)
    ids = int(config.model_config.get_vocab_size()) * (2 * steps + 1) // (2 * TOKENS)
    at = places + start if kind.uses_mrope else places[0] + start
    if config.lora_config is not None:
        internals.use_no_adapter(model, TOKENS)
    with _captured_kv(paged) as captured, set_forward_context(None, config, num_tokens=TOKENS, skip_compiled=True):
        model(input_ids=ids.to(paged.device), positions=at.to(paged.device), **inputs)
    pairs = []
    for i, (heads, k_dim, v_dim) in enumerate(paged.shapes):
        k, v = captured[i]
        pairs.append((k.reshape(TOKENS, heads, k_dim), v.reshape(TOKENS, heads, v_dim)))
    k, v = to_rows(paged.kv, pairs)
    return SpanKV(k.cpu(), v.cpu(), places, start)


@contextlib.contextmanager
def _captured_kv(paged: PagedKV) -> Iterator[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Capture (k, v) that each attention layer is called with, by index; layers return zeros and touch no cache."""
    captured: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def hook(index: int, layer: Any) -> None:
        latent = hasattr(layer, "kv_lora_rank")  # see `paged`: c_KV is our content channel, k_pe the rope channel

        def forward(query: Any, key: Any, value: Any, output_shape: Any = None, **_: Any) -> torch.Tensor:
            if key is not None:  # else the layer reads another layer's cache
                captured[index] = (value.clone(), key.clone()) if latent else (key.clone(), value.clone())
            shape = output_shape or (TOKENS, layer.num_heads * layer.head_size_v)
            zeros: torch.Tensor = query.new_zeros(shape)
            return zeros

        layer.forward = forward

    try:
        for index, layer in enumerate([*paged.layers, *paged.sharing_layers]):
            hook(index, layer)
        yield captured
    finally:
        for layer in [*paged.layers, *paged.sharing_layers]:
            layer.__dict__.pop("forward", None)

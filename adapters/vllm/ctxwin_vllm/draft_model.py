"""KV of speculative drafters: it is kept with the spans of the tokens that it is of, and written back with them.

A drafter that is a model (EAGLE, EAGLE3, MTP, a small model) attends to the whole prompt through layers of its own, which share
the blocks of the model's. Where a span is loaded the drafter computes nothing, so without its KV it would see nothing there.
Answers never depend on it, since vLLM checks each draft; only the share of accepted drafts does.

A span holds the drafter's keys before their rotation and its values, a row a token, beside its own KV (`SpanKV.outputs`), under
the draft model's identity. They are in no frame, so a span that is moved, cut or joined needs no care for them; no patch
reaches them. A span without them (another engine's, a merged one) is served all the same, with zeros in the drafter's slots.

EAGLE and MTP mix the next token into the KV of a token: that of a span's last token stays as computed before its first
successor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from ctxwin.engines.outputs import DRAFTER
from ctxwin.errors import UnsupportedModel
from ctxwin.hashing import digest
from ctxwin.kv.config import kv_spec_from_config
from ctxwin.kv.kernels import SpanSlice
from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.rope import angles, turn
from ctxwin_vllm.paged import PagedKV
from ctxwin_vllm.ranks import own_heads

METHODS = ("draft_model", "eagle", "eagle3", "mtp")
"""vLLM's methods of speculative decoding whose drafters keep KV as `DraftModelKV` understands it."""


def draft_model_spec(speculative: Any, kv: KVSpec) -> KVSpec | None:
    """Return the layout of a draft model's KV; None where there is no draft model, or one without KV.

    ``speculative`` is vLLM's ``SpeculativeConfig``, ``kv`` the layout of the model that it drafts for.

    Raises:
        UnsupportedModel: keys that cannot be turned, or weights without an identity. Cost: reading the drafter's weights once
        for their digest.
    """
    from ctxwin.engines.encoding.checkpoint import local_folder, weights_digest

    method = getattr(speculative, "method", None)
    if method not in METHODS:
        return None
    model = speculative.draft_model_config
    config = model.hf_config
    if method == "mtp":  # layers like the model's own, from its own checkpoint
        return replace(kv, layers=int(config.n_predict), identity=digest("mtp", kv.identity))
    head_config = getattr(config, "model", None) or config  # vLLM wraps that of an EAGLE head
    kv = kv_spec_from_config(head_config, "", str(model.dtype).removeprefix("torch."), "vllm")
    return replace(kv, identity=digest("drafter", method, asdict(kv), weights_digest(local_folder(model.model))))


def unrotated_rows(kv: KVSpec, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return rows for `SpanKV.outputs` from a draft model's KV as cached.

    Args:
        kv: the drafter's layout.
        k, v: ``[layers, T, heads, dim]``.
        positions: int64 ``[3, T]``, absolute.

    Returns:
        Keys rotated back to position 0 and values, ``[T, layers, heads, dim]``; nothing where they are not finite. Cost: one read
        and one write of ``k``.
    """
    if not (bool(k.isfinite().all()) and bool(v.isfinite().all())):
        return {}  # answers do not depend on them
    plain = turn(kv.rope, k.cpu(), -angles(kv.rope, positions))
    rows = plain.transpose(0, 1).contiguous(), v.cpu().transpose(0, 1).contiguous()
    return dict(zip(_names(kv), rows, strict=True))


class DraftModelKV:
    """A draft model's KV in the paged cache of one worker, the ``rank`` of a tensor-parallel group of ``size``.

    ``layers`` are the drafter's, by name, ``kv`` its layout (all heads).

    Raises UnsupportedModel where its cache is not laid out as its config says.
    """

    def __init__(self, layers: Mapping[str, Any], kv: KVSpec, block_size: int, rank: int = 0, size: int = 1) -> None:
        self.kv = kv
        self.heads = own_heads(kv.heads, rank, size)
        rank_kv = replace(kv, heads=self.heads.stop - self.heads.start)
        try:
            self.paged = PagedKV(layers, rank_kv, block_size)
            self.paged.resident = None
        except UnsupportedModel as error:
            raise UnsupportedModel(f"the drafter's KV cannot be kept: {error}; leave out speculative_config") from error

    def slices(self, parts: Sequence[SpanSlice]) -> list[SpanSlice]:
        """Return the draft model's KV of the tokens of ``parts``, rotated to their positions; zeros where there is none."""
        return [SpanSlice(self._span(part), part.start) for part in parts]

    def _span(self, part: SpanSlice) -> SpanKV:
        cut, kv = part.span.slice(part.begin, part.stop), self.kv
        keys, values = (cut.outputs.get(name) for name in _names(kv))
        if keys is None or values is None:
            dtype, shape = getattr(torch, kv.dtype), (kv.layers, cut.tokens, kv.heads)
            k, v = (torch.zeros(*shape, dim, dtype=dtype) for dim in (kv.k_dim, kv.v_dim))
        else:
            k = turn(kv.rope, keys.transpose(0, 1), angles(kv.rope, cut.positions + part.start))
            v = values.transpose(0, 1).contiguous()
        return SpanKV(k, v, cut.positions, part.start)


def split(layers: Mapping[str, Any], count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the layers in vLLM's forward context into the model's and its draft model's, by name.

    A drafter's layers are named ``draft_model....``, or count on from the ``count`` layers of the model.
    """
    draft = {name: layer for name, layer in layers.items() if _is_draft(name, count)}
    return {name: layer for name, layer in layers.items() if name not in draft}, draft


def _is_draft(name: str, count: int) -> bool:
    parts = name.split(".")
    return parts[0] == "draft_model" or any(part.isdigit() and int(part) >= count for part in parts)


def _names(kv: KVSpec) -> tuple[str, str]:
    return f"{DRAFTER}{kv.identity}.keys", f"{DRAFTER}{kv.identity}.values"

"""KV of speculative drafters: it is kept with the spans of the tokens that it is of, and written back with them.

A drafter that is a model (EAGLE, EAGLE3, MTP, a small model) attends to the whole prompt through layers of its own, which share
the blocks of the model's. Where a span is loaded the drafter computes nothing, so without its KV it would see nothing there.
Answers never depend on it, since vLLM checks each draft: what is at stake is how many drafts are right.

A span holds the drafter's keys before their rotation and its values, a row a token, beside its own KV (`SpanKV.outputs`), under
a name that says whose they are. They are in no frame, so a span that is moved, cut or joined needs no care for them; no patch
reaches them. A span without them (another engine's, a merged one) is served all the same, with zeros in the drafter's slots.

EAGLE and MTP mix into the KV of a token what follows it: that of a span's last token stays as it was behind its first
neighbour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from ctxwin.engines.outputs import DRAFTER
from ctxwin.engines.vllm.paged import PagedKV
from ctxwin.engines.vllm.ranks import own_heads
from ctxwin.errors import UnsupportedModel
from ctxwin.hashing import digest
from ctxwin.kv.config import kv_spec_from_config
from ctxwin.kv.kernels import Part
from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.rope import angles, turn

METHODS = ("draft_model", "eagle", "eagle3", "mtp")
"""vLLM's methods of speculative decoding whose drafters keep KV as `DrafterKV` understands it."""


def drafter_spec(speculative: Any, kv: KVSpec) -> KVSpec | None:
    """The layout of a drafter's KV; None where there is no drafter, or one without KV.

    Args:
        speculative: vLLM's ``SpeculativeConfig``, or None.
        kv: layout of the model that it drafts for.

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
    own = getattr(config, "model", None) or config  # vLLM wraps that of an EAGLE head
    found = kv_spec_from_config(own, "", str(model.dtype).removeprefix("torch."), "vllm")
    return replace(found, identity=digest("drafter", method, asdict(found), weights_digest(local_folder(model.model))))


def unturned(kv: KVSpec, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows for `SpanKV.outputs`, from a drafter's KV as it lay in the cache.

    Args:
        kv: the drafter's layout.
        k, v: ``[layers, T, heads, dim]``.
        positions: int64 ``[3, T]``, absolute.

    Returns:
        Keys turned back to position 0 and values, ``[T, layers, heads, dim]``; nothing where they are not finite. Cost: one read
        and one write of ``k``.
    """
    if not (bool(k.isfinite().all()) and bool(v.isfinite().all())):
        return {}  # answers do not depend on them
    plain = turn(kv.rope, k.cpu(), -angles(kv.rope, positions))
    rows = plain.transpose(0, 1).contiguous(), v.cpu().transpose(0, 1).contiguous()
    return dict(zip(_names(kv), rows, strict=True))


class DrafterKV:
    """A drafter's KV in the paged cache of one worker.

    Args:
        layers: of the drafter, by name.
        kv: its layout (all heads).
        block_size: tokens in a block.
        rank, size: of the tensor-parallel group.
        alone: as of `PagedKV`.

    Raises UnsupportedModel where its cache is not laid out as its config says.
    """

    def __init__(
        self, layers: Mapping[str, Any], kv: KVSpec, block_size: int, rank: int = 0, size: int = 1, alone: bool = False
    ) -> None:
        self.kv = kv
        self.heads = own_heads(kv.heads, rank, size)
        own = replace(kv, heads=self.heads.stop - self.heads.start)
        try:
            self.paged = PagedKV(layers, own, block_size, alone=alone)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"the drafter's KV cannot be kept: {error}; leave out speculative_config") from error

    def placed(self, parts: Sequence[Part]) -> list[Part]:
        """The drafter's KV of the tokens that ``parts`` serve, turned to where they are served; zeros where there is none."""
        return [Part(self._span(part), part.start) for part in parts]

    def _span(self, part: Part) -> SpanKV:
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
    """The model's and its drafter's of the layers in vLLM's forward context, by name.

    A drafter's layers are named ``draft_model....``, or count on from the ``count`` layers of the model.
    """
    theirs = {name: layer for name, layer in layers.items() if _is_drafters(name, count)}
    return {name: layer for name, layer in layers.items() if name not in theirs}, theirs


def _is_drafters(name: str, count: int) -> bool:
    parts = name.split(".")
    return parts[0] == "draft_model" or any(part.isdigit() and int(part) >= count for part in parts)


def _names(kv: KVSpec) -> tuple[str, str]:
    return f"{DRAFTER}{kv.identity}.keys", f"{DRAFTER}{kv.identity}.values"

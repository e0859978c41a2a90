"""What the transformers engine needs of a model: loading it, its position rule, and choosing tokens from logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ctxwin.engines.base import MediaSpan, Sampling, ScoredToken
from ctxwin.engines.encoding.checkpoint import Checkpoint
from ctxwin.errors import EngineFailed, UnsupportedModel
from ctxwin.kv.config import thinker
from ctxwin.kv.merge import RECENT, attention_sums


@dataclass(frozen=True)
class Inputs:
    """What a decoder is fed for a run of tokens.

    Attributes:
        embeds: input embeddings ``[T, hidden]``, vision embeddings in their places.
        pictures: int64 ``[T]``: which picture a token is of, if its tokens see those behind them; -1 for all others. None for
            a model where none do.
        ids: int64 ``[T]``, the pad token in the place of vision embeddings: what a model that has embeddings for every layer
            looks up.
        deep: ``[D, T, hidden]``, added to the hidden states behind each of the first D decoder layers; zeros at text
            tokens (DeepStack, arXiv 2406.04334, as in Qwen3-VL). None for a model that adds nothing there.
    """

    embeds: torch.Tensor
    deep: torch.Tensor | None = None
    pictures: torch.Tensor | None = None
    ids: torch.Tensor | None = None


def load(checkpoint: Checkpoint, device: str, dtype: str) -> tuple[torch.device, Any]:
    """The device and the model on it, ready for inference; ValueError where torch cannot use the device."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    loader: Any = AutoModelForCausalLM if checkpoint.media is None else AutoModelForImageTextToText
    if (
        checkpoint.media is not None and checkpoint.media.audio is not None
    ):  # of a folder that speaks, too, the thinker alone
        loader = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(checkpoint.config)]
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:  # an unknown device, or one that torch was not built for
        raise ValueError(f"device must be one that torch can use, got {device!r}: {error}") from error
    given = {"config": checkpoint.config, "dtype": getattr(torch, dtype), "use_safetensors": True}
    try:
        model = loader.from_pretrained(checkpoint.path, attn_implementation="sdpa", **given)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        model = loader.from_pretrained(checkpoint.path, attn_implementation="eager", **given)  # gpt-oss has sinks
    return place, model.to(place).eval()


def positions(model: Any, token_ids: Sequence[int], media: Sequence[MediaSpan]) -> tuple[np.ndarray, int]:
    """The model's own position rule: int64 ``[3, T]``, and where a text token behind would stand.

    ``get_rope_index`` where the model has one (M-RoPE); else every token is one step, pictures' too.

    The latter is learned by placing one text token more: behind a video, transformers goes on from the height and width
    of its grid, not from its last moment.
    """
    count = len(token_ids)
    rule = getattr(model.base_model, "get_rope_index", None)
    if not media or rule is None:
        return np.tile(np.arange(count, dtype=np.int64), (3, 1)), count
    if hasattr(model, "audio_tower"):
        return _heard_positions(rule, token_ids, media)
    kinds = torch.zeros(1, count + 1, dtype=torch.int64)
    for m in media:
        kinds[0, m.offset : m.offset + m.tokens] = 1 if m.modality == "image" else 2
    images = [m.grid_thw for m in media if m.modality == "image"]
    videos = [m for m in media if m.modality == "video"]
    seconds = [m.seconds_per_grid for m in videos]
    placed, _ = rule(
        torch.tensor([[*token_ids, 0]]),
        mm_token_type_ids=kinds,
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor([m.grid_thw for m in videos]) if videos else None,
        second_per_grid_ts=torch.tensor(seconds) if videos and None not in seconds else None,
    )
    places = placed[:, 0].numpy().astype(np.int64)
    return np.ascontiguousarray(places[:, :-1]), int(places[0, -1])


def _heard_positions(rule: Any, token_ids: Sequence[int], media: Sequence[MediaSpan]) -> tuple[np.ndarray, int]:
    """`positions` by the rule of the Omni models, which take all videos of a prompt with their sound, or all without."""
    videos = [m for m in media if m.modality == "video"]
    sizes = {k: [m.grid_thw for m in media if m.modality == k] for k in ("image", "video", "audio")}
    sound = {m.sound for m in videos}
    if len(sound) > 1:
        raise UnsupportedModel(
            "a message must hold videos with their sound or without, got both; make them chunks apart"
        )
    ids = torch.tensor([[*token_ids, 0]])
    placed, _ = rule(
        ids,
        attention_mask=torch.ones_like(ids),
        image_grid_thw=torch.tensor(sizes["image"]) if sizes["image"] else None,
        video_grid_thw=torch.tensor(sizes["video"]) if videos else None,
        audio_seqlens=torch.tensor([frames for _, _, frames in sizes["audio"]]),
        second_per_grids=torch.tensor([m.seconds_per_grid for m in videos]) if videos else None,
        use_audio_in_video=True in sound,
    )
    places = placed[:, 0].numpy()
    if not np.array_equal(places, places.astype(np.int64)):  # Qwen3-Omni's are not rounded in transformers
        raise UnsupportedModel(
            f"the model places frames {videos[0].seconds_per_grid:g} s apart between positions; choose an fps that its positions "
            "a second divide, such as 1 or 2"
        )
    return np.ascontiguousarray(places[:, :-1]).astype(np.int64), int(places[0, -1])


def masks(
    model: Any, past: int, new: int, window: int | None, pictures: torch.Tensor | None = None, everywhere: bool = True
) -> Any:
    """Which of ``past + new`` slots each of the last ``new`` sees, as the decoder takes it.

    Args:
        window: of sliding layers, which counts backwards only; None for a model without.
        pictures: see `Inputs`.
        everywhere: whether that holds in all layers, not only in those that slide.

    Explicit, since transformers would otherwise guess packed sequences from positions that jump.
    """
    made = torch.ones(new, past + new, dtype=torch.bool, device=model.device).tril(past)[None, None]
    near = made.clone()
    if pictures is not None:
        near[..., past:] |= (pictures[:, None] == pictures) & (pictures >= 0)
    made = near if everywhere else made
    near = near if window is None else near & ~torch.ones_like(made).tril(past - window)
    if model.config._attn_implementation == "eager":
        low = torch.finfo(model.dtype).min
        made, near = (
            torch.zeros(m.shape, dtype=model.dtype, device=m.device).masked_fill_(~m, low) for m in (made, near)
        )
    if window is None and everywhere:
        return made
    types = getattr(model.config.get_text_config(), "layer_types", None)
    return {"full_attention": made, "sliding_attention": near} if types else near


def deep_layers(config: Any) -> int:
    """Behind how many decoder layers the model adds vision features; 0 for most."""
    return len(getattr(getattr(thinker(config), "vision_config", None), "deepstack_visual_indexes", None) or ())


def inputs(words: torch.Tensor, seen: Sequence[tuple[list[int], torch.Tensor]], deep: int, whole: bool) -> Inputs:
    """Puts stored vision embeddings among word embeddings.

    Args:
        words: ``[T, hidden]``; changed in place.
        seen: (its tokens, their stored embeddings ``[tokens, hidden * (1 + deep)]``) by item: what goes in at the bottom,
            then what is added behind each of the first layers.
        deep: number of those layers.
        whole: whether tokens of an item see those behind them.

    Raises:
        EngineFailed: stored embeddings of another shape.
    """
    tokens, hidden = int(words.shape[0]), int(words.shape[1])
    added = words.new_zeros(deep, tokens, hidden) if deep else None
    pictures = torch.full((tokens,), -1, device=words.device) if whole and seen else None
    for number, (places, stored) in enumerate(seen):
        if pictures is not None:
            pictures[places] = number
        want = (len(places), hidden * (1 + deep))
        if tuple(stored.shape) != want:
            raise EngineFailed(f"stored vision embeddings must be {[*want]}, got {[*stored.shape]}")
        parts = torch.split(stored.to(words), hidden, dim=1)
        words[places] = parts[0]
        if added is not None:
            for layer, part in enumerate(parts[1:]):
                added[layer, places] = part
    return Inputs(words, added, pictures)


GREEDY = 1e-5
"""Temperatures below are 0, as for vLLM: logits divided by less are no numbers."""


def sample(logits: torch.Tensor, temperature: float, generator: torch.Generator | None) -> int:
    """One token id from ``logits [vocab]``: the most likely one at temperature 0."""
    if temperature < GREEDY:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))


def warped(logits: torch.Tensor, sampling: Sampling, answer: Sequence[int]) -> torch.Tensor:
    """``logits [vocab]`` with penalties for the ``answer`` so far, and -inf for tokens that must not be drawn.

    In vLLM's order: penalties, temperature, min_p, top_k, top_p; the temperature itself is left to `sample`.
    """
    if answer and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = torch.bincount(torch.tensor([int(i) for i in answer]), minlength=logits.numel()).to(logits)
        logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    if sampling.temperature < GREEDY or (sampling.top_p, sampling.top_k, sampling.min_p) == (1, 0, 0):
        return logits
    probs = (logits / sampling.temperature).softmax(-1)
    allowed = probs >= sampling.min_p * probs.max()
    order = torch.where(allowed, probs, 0).argsort(descending=True, stable=True)
    if sampling.top_k > 0:
        allowed[order[sampling.top_k :]] = False
    if sampling.top_p < 1:
        kept = torch.where(allowed, probs, 0)[order]
        before = kept.cumsum(0) - kept
        allowed[order[before >= sampling.top_p * kept.sum()]] = False
    return logits.masked_fill(~allowed, -torch.inf)


def scored(token: int, index: int, logits: torch.Tensor, best: int) -> ScoredToken:
    """A token drawn from ``logits [vocab]`` with its own log-probability and the ``best`` ones'."""
    return ScoredToken(token, index, float(logits.log_softmax(-1)[token]), top_logprobs(logits, best))


def rows(logits: torch.Tensor, answer: Sequence[int], best: int) -> list[dict[int, float]]:
    """What `Engine.forced_logprobs` says of an answer, from ``logits [len(answer) + 1, vocab]``."""
    found = logits.log_softmax(-1)
    own: list[dict[int, float]] = [{int(token): float(found[i, token])} for i, token in enumerate(answer)]
    return [top_logprobs(row, best) | extra for row, extra in zip(found, [*own, {}], strict=True)]


def drop_slot(cache: Any, head: int) -> None:
    """Drops the slot in front of the newest 25, none of the first ``head``: algorithm 1. Cost: a copy of the cache."""
    count = int(cache.get_seq_length())
    out = min(max(count - 1 - RECENT, head, 1), count - 1)
    for layer in cache.layers:
        for name in ("keys", "values"):
            held = getattr(layer, name)
            setattr(layer, name, torch.cat([held[:, :, :out], held[:, :, out + 1 :]], dim=2))


@contextmanager
def listening(decoder: Any, count: int) -> Iterator[dict[int, torch.Tensor]]:
    """Attention that the last ``count`` slots get from forwards over as many tokens, by layer: see `attention_sums`."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    sums: dict[int, torch.Tensor] = {}

    def listen(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> Any:
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        got = attention_sums(query[0].transpose(0, 1), key[0].transpose(0, 1), scale)
        sums[module.layer_idx] = sums.get(module.layer_idx, 0) + got[-count:].cpu()
        return sdpa_attention_forward(module, query, key, *args, **options)

    AttentionInterface.register(_LISTENING, listen)
    configs = {id(layer.self_attn.config): layer.self_attn.config for layer in decoder.layers}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = _LISTENING
        yield sums
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


_LISTENING = "ctxwin_listening"


def top_logprobs(logits: torch.Tensor, count: int) -> dict[int, float]:
    """Log-probabilities by token id, best first; all of them where ``count`` is -1."""
    best = logits.log_softmax(-1).topk(logits.numel() if count < 0 else min(count, logits.numel()))
    return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))

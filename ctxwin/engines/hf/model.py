"""Model functions of the transformers engine: loading, the position rule, attention masks, and sampling from logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ctxwin.engines.encoding.checkpoint import Checkpoint
from ctxwin.engines.results import ScoredToken
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import MediaSpan
from ctxwin.errors import AnswerStopped, EngineFailed, UnsupportedModel
from ctxwin.kv.config import text_backbone
from ctxwin.kv.merge import attention_sums, bucket_means, buckets_of


@dataclass(frozen=True)
class Inputs:
    """Decoder inputs for a run of tokens.

    Attributes:
        embeds: input embeddings ``[T, hidden]``, vision embeddings in their places.
        pictures: int64 ``[T]``: number of a token's picture, if the picture's tokens see later ones; -1 for all others. None
            for a model where none do.
        ids: int64 ``[T]``, with the pad token in place of vision embeddings, for models with per-layer embeddings.
        deep: ``[D, T, hidden]``, added to the hidden states after each of the first D decoder layers; zeros at text tokens
            (DeepStack, arXiv 2406.04334, as in Qwen3-VL). None for a model that adds nothing there.
    """

    embeds: torch.Tensor
    deep: torch.Tensor | None = None
    pictures: torch.Tensor | None = None
    ids: torch.Tensor | None = None


def load(checkpoint: Checkpoint, device: str, dtype: str) -> tuple[torch.device, Any]:
    """Load the model for inference and return its device and itself; ValueError where torch cannot use the device."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    loader: Any = AutoModelForCausalLM if checkpoint.media is None else AutoModelForImageTextToText
    # Of an Omni folder, which also holds a talker, only the text backbone.
    if checkpoint.media is not None and checkpoint.media.audio is not None:
        loader = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(checkpoint.config)]
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:  # an unknown device, or one that torch was not built for
        raise ValueError(f"device must be one that torch can use, got {device!r}: {error}") from error
    options = {"config": checkpoint.config, "dtype": getattr(torch, dtype), "use_safetensors": True}
    try:
        model = loader.from_pretrained(checkpoint.path, attn_implementation="sdpa", **options)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        model = loader.from_pretrained(checkpoint.path, attn_implementation="eager", **options)  # gpt-oss has sinks
    return place, model.to(place).eval()


def positions(model: Any, token_ids: Sequence[int], media: Sequence[MediaSpan]) -> tuple[np.ndarray, int]:
    """Apply the model's own position rule: int64 ``[3, T]``, and the position of a text token that would follow.

    The rule is ``get_rope_index`` where the model has one (M-RoPE); else every token is one step, pictures' too.

    The following position is found by placing one more text token: after a video, transformers continues from the height
    and width of its grid, not from its last frame.
    """
    count = len(token_ids)
    rule = getattr(model.base_model, "get_rope_index", None)
    if not media or rule is None:
        return np.tile(np.arange(count, dtype=np.int64), (3, 1)), count
    if "audio_seqlens" in inspect.signature(rule).parameters:  # of the Omni models; their tower moves between versions
        return _sound_positions(rule, token_ids, media)
    kinds = torch.zeros(1, count + 1, dtype=torch.int64)
    for m in media:
        kinds[0, m.offset : m.offset + m.tokens] = 1 if m.modality == "image" else 2
    images = [m.grid_thw for m in media if m.modality == "image"]
    videos = [m for m in media if m.modality == "video"]
    seconds = [m.seconds_per_grid for m in videos]
    axes, _ = rule(
        torch.tensor([[*token_ids, 0]]),
        mm_token_type_ids=kinds,
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor([m.grid_thw for m in videos]) if videos else None,
        second_per_grid_ts=torch.tensor(seconds) if videos and None not in seconds else None,
    )
    places = axes[:, 0].numpy().astype(np.int64)
    return np.ascontiguousarray(places[:, :-1]), int(places[0, -1])


def _sound_positions(rule: Any, token_ids: Sequence[int], media: Sequence[MediaSpan]) -> tuple[np.ndarray, int]:
    """Apply the rule of the Omni models, which take all videos of a prompt with their sound, or all without."""
    videos = [m for m in media if m.modality == "video"]
    sizes = {k: [m.grid_thw for m in media if m.modality == k] for k in ("image", "video", "audio")}
    sound = {m.sound for m in videos}
    if len(sound) > 1:
        raise UnsupportedModel("a message must hold videos with their sound or without, got both; make two chunks")
    ids = torch.tensor([[*token_ids, 0]])
    axes, _ = rule(
        ids,
        attention_mask=torch.ones_like(ids),
        image_grid_thw=torch.tensor(sizes["image"]) if sizes["image"] else None,
        video_grid_thw=torch.tensor(sizes["video"]) if videos else None,
        audio_seqlens=torch.tensor([frames for _, _, frames in sizes["audio"]]),
        second_per_grids=torch.tensor([m.seconds_per_grid for m in videos]) if videos else None,
        use_audio_in_video=True in sound,
    )
    places = axes[:, 0].numpy()
    if not np.array_equal(places, places.astype(np.int64)):  # transformers does not round Qwen3-Omni's
        raise UnsupportedModel(
            f"the model places frames {videos[0].seconds_per_grid:g} s apart between positions; choose an fps that its positions "
            "a second divide, such as 1 or 2"
        )
    return np.ascontiguousarray(places[:, :-1]).astype(np.int64), int(places[0, -1])


def masks(
    model: Any,
    past: int,
    new: int,
    window: int | None,
    pictures: torch.Tensor | None = None,
    everywhere: bool = True,
    gaps: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Any:
    """Return the attention masks of ``new`` tokens behind ``past`` cached slots, as the decoder takes them.

    They are explicit because transformers would otherwise infer packed sequences from positions that jump.

    Args:
        window: window of the sliding layers, which counts backwards only; None for a model without.
        pictures: see `Inputs`.
        everywhere: whether pictures see later tokens in all layers, not only in those that slide.
        gaps: where the new tokens stand among the cached ones: the slot of each, and that of the first one of its run. They see
            the cached slots in front of their run, and of the new tokens those of their run.
    """
    device = model.device
    at, begin = (torch.arange(past, past + new), torch.full((new,), past)) if gaps is None else gaps
    at, begin, slots = at.to(device), begin.to(device), torch.arange(past, device=device)
    mask = torch.cat([slots < begin[:, None], (begin[:, None] == begin) & (at <= at[:, None])], dim=1)[None, None]
    near = mask.clone()
    if pictures is not None:
        near[..., past:] |= (pictures[:, None] == pictures) & (pictures >= 0)
    mask = near if everywhere else mask
    near = near if window is None else near & (at[:, None] - torch.cat([slots, at]) < window)
    if model.config.get_text_config()._attn_implementation == "eager":
        low = torch.finfo(model.dtype).min
        mask, near = (torch.zeros_like(m, dtype=model.dtype).masked_fill_(~m, low) for m in (mask, near))
    if window is None and everywhere:
        return mask
    types = getattr(model.config.get_text_config(), "layer_types", None)
    return {"full_attention": mask, "sliding_attention": near} if types else near


def deep_layers(config: Any) -> int:
    """Return the number of decoder layers after which the model adds vision features; 0 for most."""
    return len(getattr(getattr(text_backbone(config), "vision_config", None), "deepstack_visual_indexes", None) or ())


def inputs(words: torch.Tensor, media: Sequence[tuple[list[int], torch.Tensor]], deep: int, whole: bool) -> Inputs:
    """Insert stored vision embeddings into word embeddings.

    Args:
        words: ``[T, hidden]``; changed in place.
        media: (its tokens, their stored embeddings ``[tokens, hidden * (1 + deep)]``) by item: the input embeddings, then
            those added after each of the first layers.
        deep: number of those layers.
        whole: whether tokens of an item see later ones.

    Raises:
        EngineFailed: stored embeddings of another shape.
    """
    tokens, hidden = int(words.shape[0]), int(words.shape[1])
    added = words.new_zeros(deep, tokens, hidden) if deep else None
    pictures = torch.full((tokens,), -1, device=words.device) if whole and media else None
    for number, (places, stored) in enumerate(media):
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
"""Temperatures below this count as 0, as in vLLM: logits divided by less overflow."""


def sample(logits: torch.Tensor, temperature: float, generator: torch.Generator | None) -> int:
    """Sample a token id from ``logits [vocab]``: the most likely one at temperature 0."""
    if temperature < GREEDY:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))


def filter_logits(logits: torch.Tensor, sampling: Sampling, answer: Sequence[int]) -> torch.Tensor:
    """Apply penalties for the ``answer`` so far to ``logits [vocab]``, and set excluded tokens to -inf.

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
        probs_in_order = torch.where(allowed, probs, 0)[order]
        preceding = probs_in_order.cumsum(0) - probs_in_order
        allowed[order[preceding >= sampling.top_p * probs_in_order.sum()]] = False
    return logits.masked_fill(~allowed, -torch.inf)


def score_token(token: int, index: int, logits: torch.Tensor, best: int) -> ScoredToken:
    """Return a token with its log-probability under ``logits [vocab]`` and those of the ``best`` most likely ones."""
    return ScoredToken(token, index, float(logits.log_softmax(-1)[token]), top_logprobs(logits, best))


def score_answer(logits: torch.Tensor, answer: Sequence[int], best: int) -> list[dict[int, float]]:
    """Return the rows of `Engine.forced_logprobs` for one answer, from ``logits [len(answer) + 1, vocab]``."""
    scores = logits.log_softmax(-1)
    answer_rows: list[dict[int, float]] = [{int(token): float(scores[i, token])} for i, token in enumerate(answer)]
    return [top_logprobs(row, best) | extra for row, extra in zip(scores, [*answer_rows, {}], strict=True)]


def select_slots(cache: Any, slots: Sequence[int]) -> None:
    """Keep these slots only. Cost: a copy of the cache."""
    index = torch.tensor(slots)
    for layer in cache.layers:
        for name in ("keys", "values"):
            cached = getattr(layer, name)
            setattr(layer, name, cached.index_select(2, index.to(cached.device)))


def merge_slots(cache: Any, attended: torch.Tensor, count: int) -> None:
    """Merge the cache to ``count`` slots by the attention ``[L, S]`` that they got. Cost: a pass over the cache."""
    for layer, buckets in zip(cache.layers, buckets_of(attended, count), strict=True):
        for name in ("keys", "values"):
            cached = getattr(layer, name)
            setattr(layer, name, bucket_means(cached[None], buckets[None].to(cached.device), count)[0])


@contextmanager
def capture_attention(decoder: Any, count: int) -> Iterator[dict[int, torch.Tensor]]:
    """Capture the attention that the last ``count`` slots receive within the context, by layer: see `attention_sums`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    sums: dict[int, torch.Tensor] = {}

    def hook(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> Any:
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        got = attention_sums(query[0].transpose(0, 1), key[0].transpose(0, 1), scale)
        sums[module.layer_idx] = sums.get(module.layer_idx, 0) + got[-count:].cpu()
        return sdpa_attention_forward(module, query, key, *args, **options)

    with _attention_override(decoder, hook):
        yield sums


@contextmanager
def _attention_override(decoder: Any, attend: Callable[..., Any]) -> Iterator[None]:
    """Replace the attention function of ``decoder`` by one of `transformers.AttentionInterface`'s form."""
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENDING, attend)
    configs = _attention_configs(decoder)
    previous = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = _ATTENDING
        yield
    finally:
        for config, name in zip(configs, previous, strict=True):
            config._attn_implementation = name


def _attention_configs(decoder: Any) -> list[Any]:
    """Return the configs that select the attention of ``decoder``'s layers, each once; recurrent layers have none."""
    layers = getattr(decoder, "layers", ())  # other decoders are refused later, by `check_relocation`
    modules = (getattr(layer, "self_attn", None) for layer in layers)
    return list({id(m.config): m.config for m in modules if m is not None and hasattr(m, "config")}.values())


def use_eager_if_needed(decoder: Any, probe: Callable[[], object]) -> bool:
    """Switch ``decoder`` to eager attention where its layers need more than torch's fused attention supports.

    `torch.nn.functional.scaled_dot_product_attention` neither caps attention logits (Gemma 2) nor has sinks (gpt-oss), and
    transformers silently calls it without them.

    Args:
        probe: runs a forward of some tokens.

    Returns:
        True if fused attention would have ignored an option.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if all(config._attn_implementation != "sdpa" for config in _attention_configs(decoder)):
        return False
    options: set[str] = set()

    def attend(module: Any, *args: Any, **keywords: Any) -> Any:
        options.update(n for n, value in keywords.items() if value is not None and not n.startswith("output_"))
        return sdpa_attention_forward(module, *args, **keywords)

    with _attention_override(decoder, attend):
        probe()
    if not options - _FUSED_OPTIONS:
        return False
    for config in _attention_configs(decoder):
        config._attn_implementation = "eager"
    return True


_ATTENDING = "ctxwin_attending"
_FUSED_OPTIONS = {"dropout", "scaling", "is_causal", "position_bias", "sliding_window"}
_FUSED_OPTIONS |= {"position_ids", "use_cache", "logits_to_keep"}
"""Options of a layer's attention that fused attention honours, or that masks and positions already express."""


def top_logprobs(logits: torch.Tensor, count: int) -> dict[int, float]:
    """Return log-probabilities by token id, highest first; all of them where ``count`` is -1."""
    best = logits.log_softmax(-1).topk(logits.numel() if count < 0 else min(count, logits.numel()))
    return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))


@contextmanager
def stopping(decoder: Any, stopped: Callable[[], bool] | None) -> Iterator[None]:
    """Poll ``stopped`` before each of the decoder's layers; once it is true, their forward raises AnswerStopped."""

    def check(*_: Any) -> None:
        if stopped is not None and stopped():
            raise AnswerStopped("the engine is wanted for other work")

    check()
    layers = () if stopped is None else getattr(decoder, "layers", ())
    hooks = [layer.register_forward_pre_hook(check) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

"""Inputs of vLLM requests: positions, vision embeddings, and prompts with embeddings instead of pixels."""

import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from ctxwin.engines.hf.model import deep_layers
from ctxwin.engines.segments import Encoded, MediaSpan, Segment
from ctxwin.errors import EngineFailed, UnsupportedModel
from ctxwin.hashing import digest
from ctxwin.kv.config import text_backbone
from ctxwin_vllm.internals import embeddings_item, media_items, sound_length
from ctxwin_vllm.vision import takes_pixels_only


@dataclass(frozen=True)
class Rendered:
    """A prompt for vLLM.

    Attributes:
        prompt: an engine input, the form that vLLM's own renderer hands to the engine.
        placeholder_tokens: first tokens of the prompt that cannot be computed, because a medium among them carries no embeddings.
        embeddings: embeddings that the encoder cache's connector must find, by multimodal identifier.
    """

    prompt: dict[str, Any]
    placeholder_tokens: int = 0
    embeddings: dict[str, torch.Tensor] = field(default_factory=dict)


def join(encoded: Sequence[Encoded]) -> tuple[list[int], list[MediaSpan]]:
    """Join parts: their token ids in order, and their media with offsets within all tokens.

    A medium that several parts share is named once.
    """
    ids: list[int] = []
    media: dict[int, MediaSpan] = {}
    for part in encoded:
        for span in part.media:
            media.setdefault(span.offset + len(ids), replace(span, offset=span.offset + len(ids)))
        ids += part.token_ids
    return ids, list(media.values())


def is_closed(medium: MediaSpan) -> bool:
    """Return True for a medium whose end models look for as they count positions: sound, and a video whose times are text."""
    stamped = medium.modality == "video" and medium.seconds_per_grid is None
    return stamped or medium.sound or medium.modality == "audio"


def cut_medium(
    prefix: Sequence[Encoded], suffix: Sequence[Encoded], model: Any, marked: bool, whole_media: bool
) -> tuple[MediaSpan, MediaSpan, Encoded] | None:
    """Return the medium that the end of ``prefix`` cuts, its shortened form for vLLM, and the tokens that must follow; else None.

    Models count positions by whole rows of a picture and whole frames of a video, and some look for the token that closes a
    medium (``marked``: of every kind). So the prompt goes on to the end of the row or frame, which makes a smaller medium with
    the same positions, or to the end of a video with its sound; a sound alone becomes a shorter one. Where nothing needs that
    (``whole_media``) the whole medium may reach beyond it.
    """
    ids, media = join(prefix)
    last = max(media, key=lambda m: m.offset + m.tokens, default=None)
    last_sound = max((m for m in media if m.sound), key=lambda m: m.offset, default=None)
    sound_follows = last_sound is not None and last_sound.modality == "video"  # its sound begins after the prefix
    if last is None or (last.offset + last.tokens <= len(ids) and not sound_follows):
        return None
    following, following_media = join(suffix)
    if sound_follows or last.sound:
        return last, last, _rest_of_sound(len(ids), last, following, following_media)
    if not whole_media and not is_closed(last):
        return None
    inside, (frames, height, width) = len(ids) - last.offset, last.grid_thw
    each = last.tokens // frames
    merge = math.isqrt(height * width // each)
    row = width // max(1, merge)
    if last.modality == "audio":
        count, grid = inside, (frames, height, sound_length(model, inside))
    elif not merge:  # one axis of positions
        return last, replace(last, tokens=inside), Encoded("", (), np.zeros((3, 0), dtype=np.int64), 0)
    elif inside <= each:
        count = -(-inside // row) * row
        grid = (1, count // row * merge, width)
    else:
        count = -(-inside // each) * each
        grid = (count // each, height, width)
    closed = marked or (last.modality == "video" and is_closed(last))
    rest = following[: count - inside] + following[last.tokens - inside :][: int(closed)]
    places = np.zeros((3, len(rest)), dtype=np.int64)
    return last, replace(last, tokens=count, grid_thw=grid), Encoded("", tuple(rest), places, len(rest))


def _rest_of_sound(at: int, last: MediaSpan, following: Sequence[int], media: Sequence[MediaSpan]) -> Encoded:
    """Return the tokens after ``at`` of the sound ``last``, or of a video and its sound, and of the marks that close them."""
    end = max(0, last.offset + last.tokens - at)
    new = tuple(m for m in media if 0 <= m.offset <= end and m.sound)
    rest = following[: max([end, *(m.offset + m.tokens for m in new)]) + 1 + last.sound]
    return Encoded("", tuple(rest), np.zeros((3, len(rest)), dtype=np.int64), len(rest), new)


class Inputs:
    """Builder of inputs for one started engine's model; holds no state of requests. Thread-safe.

    Args:
        config: vLLM's ``ModelConfig``.
        renderer: its renderer, whose processor names the fields of media.
        model: the model, or `internals.bare_model` of its class: only its rule of positions is used.
        files: whether embeddings reach vLLM as files, through its encoder-cache connector, and not inside requests.

    Attributes:
        takes_pixels_only: see `vision.takes_pixels_only`.
        takes_audio: True if the model takes audio.
        marked: whether it looks for the tokens around its media.
        secret: known to this vLLM alone; part of every name in its caches that clients must not be able to guess.
        prefix: what the names of media begin with, and no client's name.
    """

    def __init__(self, config: Any, renderer: Any, model: Any, *, files: bool = False) -> None:
        self._config = config
        self._uses_mrope = bool(config.uses_mrope)  # which looks through the model's config every time
        self._files = files
        self.secret = secrets.token_hex(32)
        self.prefix = digest("prefix", self.secret)[:16]
        self.model = model
        self.multimodal = bool(config.is_multimodal_model)
        self.takes_pixels_only = takes_pixels_only(config.hf_config)
        self.takes_audio = hasattr(text_backbone(config.hf_config), "audio_config") and self.multimodal
        self.marked = text_backbone(config.hf_config).model_type == "qwen3_omni_moe_thinker"
        self._placeholders: dict[Any, Any] = {}
        self._processor: Any = renderer.get_mm_processor() if self.multimodal else None

    def name(self, key: str, tenant: str = "") -> str:
        """Return the name of a medium inside vLLM, from its content, its tenant and the secret, so that no client can use it.

        Under a known name a plain request could send other content, which would then be served to windows.
        """
        return self.prefix + _media_digest(self.secret, tenant, key)

    def close(self) -> None:
        """Release the model, whose weights would otherwise live as long as any caller."""
        self.model = self._processor = None

    def positions(self, token_ids: Sequence[int], media: Sequence[MediaSpan]) -> tuple[np.ndarray, int]:
        """Return positions of a prompt as the model itself counts them.

        Returns:
            int64 ``[3, T]`` from 0 (three equal rows without M-RoPE), and the position of a text token that would
            follow. Cost: O(T), no forward.
        """
        if self.model is None:
            raise EngineFailed("the engine is closed; open a new one")
        count = len(token_ids)
        if not self._uses_mrope or (not media and self._counts_text):
            return np.tile(np.arange(count, dtype=np.int64), (3, 1)), count
        features = [self._feature(span, None) for span in media]
        positions, delta = self.model.get_mrope_input_positions(list(token_ids), features)
        rows = np.asarray(positions, dtype=np.int64)
        if rows.shape != (3, count):
            raise UnsupportedModel(f"the model must give positions [3, {count}], got {list(rows.shape)}")
        return rows, count + int(delta)

    @cached_property
    def _counts_text(self) -> bool:
        """True if the model gives text the positions 0, 1, 2, ... in all rows, as M-RoPE has it: it is asked once."""
        positions, delta = self.model.get_mrope_input_positions([0] * 8, [])
        return not int(delta) and bool((np.asarray(positions) == np.arange(8)).all())

    def end_at(self, segments: Sequence[Segment], end: int, whole_media: bool) -> tuple[list[Segment], Encoded | None]:
        """Return the segments before ``end``, and the tokens that must follow them where ``end`` cuts a medium.

        A prompt may end in most media, which then reach beyond it, unless they must be whole (`Core.whole_media`).
        """
        prefix = list(segments[:end])
        encoded = [segment.encoded for segment in segments]
        medium_cut = cut_medium(encoded[:end], encoded[end:], self.model, self.marked, whole_media)
        if medium_cut is None:
            return prefix, None
        (medium, cut, rest), begin = medium_cut, 0
        for i, segment in enumerate(prefix):
            at = medium.offset - begin
            media = tuple(replace(cut, offset=at) if m.offset == at else m for m in segment.encoded.media)
            prefix[i] = replace(segment, encoded=replace(segment.encoded, media=media))
            begin += segment.encoded.tokens
        return prefix, rest if rest.tokens else None

    def prompt(
        self,
        token_ids: Sequence[int],
        media: Sequence[MediaSpan],
        embed: Callable[[str], torch.Tensor],
        salt: str,
        covered: int = 0,
        tenant: str = "",
        marks: Mapping[int, str] | None = None,
        tail: int | None = None,
        cached_embedding: Callable[[str], torch.Tensor | None] = lambda _: None,
    ) -> Rendered:
        """Return a rendered engine input, the form that vLLM's own renderer passes to the engine.

        vLLM's processor and tower never run: media carry their embeddings, or (``files``) only the shape from which
        positions follow, and their embeddings are named beside the prompt.

        Args:
            token_ids: placeholders expanded.
            media: with offsets within ``token_ids``. One may have fewer tokens than embeddings (`cut_medium`), or reach beyond
                the end: vLLM takes the first embeddings.
            embed: embeddings by key.
            salt: separates prefix-cache entries; "" for none.
            covered: leading tokens whose KV will be loaded. The embeddings of media among them are not read, and need not
                exist any more; zeros replace them, safely, because a missing load is detected.
            tenant: owner of the embeddings; no tenant hits another's entry in vLLM's encoder cache.
            marks: marks that separate the blocks from a medium on, by the medium's offset; see `cache_namespace`.
            tail: token from which on covered tokens may be computed instead; None: nowhere. See
                `transport.RequestMeta.tokens_to_load`.
            cached_embedding: returns embeddings in memory by key, for the media that reach into the tail.
        """
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems

        if not media:
            return Rendered(dict(tokens_input(list(token_ids), cache_salt=salt or None)))
        loadable = min(covered, len(token_ids) - 1)  # vLLM always computes the last token
        features: list[Any] = []
        placeholder_tokens = 0
        embeddings: dict[str, torch.Tensor] = {}
        for span in sorted(media, key=lambda m: m.offset):
            end = span.offset + span.tokens
            if end > loadable:
                rows: torch.Tensor | None = embed(span.key)
            else:
                rows = None if tail is None or end <= tail else cached_embedding(span.key)
            placeholder_tokens = max(end, placeholder_tokens) if rows is None else placeholder_tokens
            mark = (marks or {}).get(span.offset, "")
            places, indices = span.placeholders(0, span.tokens)
            if not places:
                continue  # text tokens of the medium alone
            if rows is not None and rows.shape[0] != len(places):
                # vLLM sizes an entry of its encoder cache by the tokens of the first request for it.
                span, rows = replace(span, key=f"{span.key}#{span.tokens}"), rows[indices]
            feature = self._feature(span, rows, tenant)
            if rows is not None and self._files:
                embeddings[feature.identifier] = rows
            if mark:
                feature.identifier = f"{feature.identifier}@{mark}"
            features.append(feature)
        items, hashes, ranges = (defaultdict[str, list[Any]](list) for _ in range(3))
        for feature in features:
            items[feature.modality].append(feature.data)
            hashes[feature.modality].append(feature.identifier)
            ranges[feature.modality].append(feature.mm_position)
        kwargs = MultiModalKwargsItems(dict(items))
        prompt = mm_input(list(token_ids), kwargs, dict(hashes), dict(ranges), cache_salt=salt or None)
        return Rendered(dict(prompt), placeholder_tokens, embeddings)

    def _feature(self, span: MediaSpan, embeddings: torch.Tensor | None, tenant: str = "") -> Any:
        """Return one media item as vLLM describes it; without embeddings it serves positions and covered media only."""
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

        places, _ = span.placeholders(0, span.tokens)
        if embeddings is not None and embeddings.shape[0] != len(places):
            raise ValueError(f"{span.key} must hold {len(places)} embeddings, got {embeddings.shape[0]}")
        if embeddings is not None and not self._files:
            item = self._item(span, embeddings)
        else:
            shape = (span.modality, span.grid_thw, span.seconds_per_grid, len(places), span.sound)
            if shape not in self._placeholders:  # a handful of shapes in a stream of frames, and a millisecond each
                deep = 0 if span.modality == "audio" else deep_layers(self._config.hf_config)
                width = self._config.get_inputs_embeds_size() * (1 + deep)
                zeros = torch.zeros(1).expand(len(places), width)
                self._placeholders[shape] = self._item(span, None if self._files else zeros)
            item = self._placeholders[shape]
        # Qwen3-VL looks for each temporal group's opening token within the item, which embeds to itself; Qwen3-Omni for the one
        # that opens a video's sound.
        stamped = span.seconds_per_grid is None or (span.sound and self.marked)
        ahead = int(span.modality == "video" and stamped and not self.takes_pixels_only)
        place = PlaceholderRange(offset=span.offset, length=span.tokens)
        if ahead or len(places) < span.tokens:
            embedded = torch.zeros(ahead + span.tokens, dtype=torch.bool)
            embedded[[ahead + i for i in places]] = True
            place = PlaceholderRange(offset=span.offset - ahead, length=len(embedded), is_embed=embedded)
        name = self.name(span.key, tenant)
        return MultiModalFeatureSpec(data=item, modality=span.modality, identifier=name, mm_position=place)

    def _item(self, span: MediaSpan, embeddings: torch.Tensor | None) -> Any:
        """Return the fields of one item; without embeddings only those that determine positions."""
        if self._processor is None:
            raise UnsupportedModel(f"{self._config.model} takes no {span.modality}s: it is a text model")
        if self.takes_pixels_only:
            # vLLM's cache cannot determine the size of an item without fields, and its engine ends.
            grid = {"image_grid_thw": torch.tensor([span.grid_thw])} if self._uses_mrope else {}
            return embeddings_item(span.modality, torch.zeros(0) if embeddings is None else embeddings, **grid)
        if span.modality == "audio":
            data = {"audio_feature_lengths": torch.tensor([span.grid_thw[2]])}
        else:
            data = {f"{span.modality}_grid_thw": torch.tensor([span.grid_thw], dtype=torch.int64)}
        if span.modality == "video" and span.seconds_per_grid is not None:
            data["second_per_grid_ts"] = torch.tensor([span.seconds_per_grid])
        if span.modality == "video" and span.sound:
            data["use_audio_in_video"] = torch.tensor([True])
        if self.takes_audio:  # vLLM's own models take no embeddings of sound, and those of one picture for many
            return embeddings_item(span.modality, embeddings, **data)
        if embeddings is not None:
            data[f"{span.modality}_embeds"] = embeddings
        items = media_items(self._processor, data)
        if span.modality not in items:
            raise UnsupportedModel(f"{type(self.model).__name__} takes no {span.modality} embeddings")
        return items[span.modality][0]


@lru_cache(maxsize=4096)
def _media_digest(secret: str, tenant: str, key: str) -> str:
    return digest("media", secret, tenant, key)

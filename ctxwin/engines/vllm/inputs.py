"""What vLLM needs around a request: positions, vision embeddings, and prompts with embeddings instead of pixels."""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ctxwin.engines.base import Encoded, MediaSpan
from ctxwin.engines.hf.model import deep_layers
from ctxwin.engines.vllm.internals import given_item, media_items
from ctxwin.engines.vllm.vision import hands_on
from ctxwin.errors import EngineFailed, UnsupportedModel
from ctxwin.hashing import digest
from ctxwin.kv.config import thinker


@dataclass(frozen=True)
class Rendered:
    """A prompt for vLLM.

    Attributes:
        prompt: an engine input, the form that vLLM's own renderer hands to the engine.
        blank: its first tokens that can not be computed, because a medium among them carries no embeddings.
        embeddings: what the encoder cache's connector has to find, by multimodal identifier.
    """

    prompt: dict[str, Any]
    blank: int = 0
    embeddings: dict[str, torch.Tensor] = field(default_factory=dict)


def joined(encoded: Sequence[Encoded]) -> tuple[list[int], list[MediaSpan]]:
    """Token ids of all parts in order, and their media with offsets within the whole.

    A medium that several parts share is named once.
    """
    ids: list[int] = []
    media: dict[int, MediaSpan] = {}
    for part in encoded:
        for span in part.media:
            media.setdefault(span.offset + len(ids), replace(span, offset=span.offset + len(ids)))
        ids += part.token_ids
    return ids, list(media.values())


def cut_medium(
    front: Sequence[Encoded], behind: Sequence[Encoded], marked: bool = False
) -> tuple[MediaSpan, MediaSpan, Encoded] | None:
    """The medium that the end of ``front`` cuts, what vLLM is told of it, and what has to stand behind; None without one.

    Models count positions by whole rows of a picture and whole frames of a video, some look for the token that closes it
    (``marked``: all of them). So the prompt goes on to the end of the row or frame, which is a smaller medium with the same
    positions; to the end of what is heard. With one axis of positions a picture may end anywhere.
    """
    ids, media = joined(front)
    last = max(media, key=lambda m: m.offset + m.tokens, default=None)
    heard = max((m for m in media if m.sound), key=lambda m: m.offset, default=None)
    unheard = heard is not None and heard.modality == "video"  # its sound begins behind the end
    if last is None or (last.offset + last.tokens <= len(ids) and not unheard):
        return None
    following, held = joined(behind)
    if unheard or last.sound or last.modality == "audio":
        return last, last, _rest_heard(len(ids), last, following, held)
    inside, (frames, height, width) = len(ids) - last.offset, last.grid_thw
    each = last.tokens // frames
    merge = math.isqrt(height * width // each)
    row = width // merge
    if inside <= each:
        count = -(-inside // row) * row
        grid = (1, count // row * merge, width)
    else:
        count = -(-inside // each) * each
        grid = (count // each, height, width)
    closed = marked or (last.modality == "video" and last.seconds_per_grid is None)
    rest = following[: count - inside] + following[last.tokens - inside :][: int(closed)]
    places = np.zeros((3, len(rest)), dtype=np.int64)
    return last, replace(last, tokens=count, grid_thw=grid), Encoded("", tuple(rest), places, len(rest))


def _rest_heard(at: int, last: MediaSpan, following: Sequence[int], held: Sequence[MediaSpan]) -> Encoded:
    """The rest of the sound ``last``, or of a video and its sound, behind ``at``, and the marks that close them."""
    end = max(0, last.offset + last.tokens - at)
    new = tuple(m for m in held if 0 <= m.offset <= end and m.sound)
    rest = following[: max([end, *(m.offset + m.tokens for m in new)]) + 1 + last.sound]
    return Encoded("", tuple(rest), np.zeros((3, len(rest)), dtype=np.int64), len(rest), new)


class Inputs:
    """What one started engine's model makes of a prompt; holds no state of requests. Thread-safe.

    Args:
        config: vLLM's ``ModelConfig``.
        renderer: its renderer, whose processor names the fields of media.
        model: the model, or `internals.bare_model` of its class: only its rule of positions is used.
        files: whether embeddings reach vLLM as files, through its encoder-cache connector, and not inside requests.

    Attributes:
        hands_on: see `vision.hands_on`. ``ends_anywhere``: whether a picture may be cut, as with one axis of positions.
        hears: whether the model hears.
        marked: whether it looks for the tokens around its media.
        secret: known to this vLLM alone; part of every name in its caches that clients must not be able to guess.
    """

    def __init__(self, config: Any, renderer: Any, model: Any, *, files: bool = False) -> None:
        self._config = config
        self._files = files
        self.secret = secrets.token_hex(32)
        self.model = model
        self.multimodal = bool(config.is_multimodal_model)
        self.hands_on = hands_on(config.hf_config)
        self.ends_anywhere = self.hands_on and not config.uses_mrope
        self.hears = hasattr(thinker(config.hf_config), "audio_config") and self.multimodal
        self.marked = thinker(config.hf_config).model_type == "qwen3_omni_moe_thinker"
        self._blank: dict[Any, Any] = {}
        self._processor: Any = renderer.get_mm_processor() if self.multimodal else None

    def name(self, key: str, tenant: str = "") -> str:
        """The name of a medium inside vLLM, from its content, its tenant and the secret, so that no client can use it.

        Under a known name a plain request could send other content, which windows would then be served.
        """
        return digest("media", self.secret, tenant, key)

    def close(self) -> None:
        """Lets go of the model, whose weights would live as long as any of its callers."""
        self.model = self._processor = None

    def positions(self, token_ids: Sequence[int], media: Sequence[MediaSpan]) -> tuple[np.ndarray, int]:
        """Positions of a prompt as the model itself counts them.

        Returns:
            int64 ``[3, T]`` from 0 (three equal rows without M-RoPE), and the position of a text token that would
            follow. Cost: O(T), no forward.
        """
        if self.model is None:
            raise EngineFailed("the engine is closed; open a new one")
        count = len(token_ids)
        if not self._config.uses_mrope:
            return np.tile(np.arange(count, dtype=np.int64), (3, 1)), count
        if not count:
            return np.zeros((3, 0), dtype=np.int64), 0
        features = [self._feature(span, None) for span in media]
        found, delta = self.model.get_mrope_input_positions(list(token_ids), features)
        rows = np.asarray(found, dtype=np.int64)
        if rows.shape != (3, count):
            raise UnsupportedModel(f"the model must give positions [3, {count}], got {list(rows.shape)}")
        return rows, count + int(delta)

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
        at_hand: Callable[[str], torch.Tensor | None] = lambda _: None,
    ) -> Rendered:
        """A rendered engine input, the form that vLLM's own renderer hands to the engine.

        vLLM's processor and tower never run: media carry their embeddings, or (``files``) only the shape from which
        positions follow, and their embeddings are named beside the prompt.

        Args:
            token_ids: placeholders expanded.
            media: with offsets within ``token_ids``. One may have fewer tokens than embeddings (`cut_medium`), or, with one
                axis of positions, reach beyond the end: vLLM takes the first embeddings.
            embed: embeddings by key.
            salt: separates prefix-cache entries; "" for none.
            covered: tokens in front whose KV will be loaded. The embeddings of media among them are not read, and need
                not exist any more; zeros stand in, safely, because a load that does not happen is noticed.
            tenant: whose embeddings these are: no tenant hits another's entry in vLLM's encoder cache.
            marks: what tells the blocks from a medium on apart, by the medium's offset; see `prefix_space`.
            tail: token from which on covered tokens may be computed instead, see `transport.Job.wanted`; None: nowhere.
            at_hand: embeddings that cost nothing, by key, for the media that reach into the tail.
        """
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems

        if not media:
            return Rendered(dict(tokens_input(list(token_ids), cache_salt=salt or None)))
        known = min(covered, len(token_ids) - 1)  # vLLM always computes the last token
        features: list[Any] = []
        blank = 0
        embeddings: dict[str, torch.Tensor] = {}
        for span in sorted(media, key=lambda m: m.offset):
            end = span.offset + span.tokens
            if end > known:
                found: torch.Tensor | None = embed(span.key)
            else:
                found = None if tail is None or end <= tail else at_hand(span.key)
            blank = max(end, blank) if found is None else blank
            mark = (marks or {}).get(span.offset, "")
            if self.ends_anywhere:
                span = replace(span, tokens=min(span.tokens, len(token_ids) - span.offset))
            seen, rows = span.seen(0, span.tokens)
            if not seen:
                continue  # only words of it
            if found is not None and found.shape[0] != len(seen):
                # vLLM counts the room of an entry of its encoder cache by the tokens of whoever asks first.
                span, found = replace(span, key=f"{span.key}#{span.tokens}"), found[rows]
            feature = self._feature(span, found, tenant)
            if found is not None and self._files:
                embeddings[feature.identifier] = found
            if mark:
                feature.identifier = f"{feature.identifier}@{mark}"
            features.append(feature)
        items, hashes, places = (defaultdict[str, list[Any]](list) for _ in range(3))
        for feature in features:
            items[feature.modality].append(feature.data)
            hashes[feature.modality].append(feature.identifier)
            places[feature.modality].append(feature.mm_position)
        kwargs = MultiModalKwargsItems(dict(items))
        made = mm_input(list(token_ids), kwargs, dict(hashes), dict(places), cache_salt=salt or None)
        return Rendered(dict(made), blank, embeddings)

    def _feature(self, span: MediaSpan, embeddings: torch.Tensor | None, tenant: str = "") -> Any:
        """One media item as vLLM describes it; without embeddings it is good for positions and covered media only."""
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

        places, _ = span.seen(0, span.tokens)
        if embeddings is not None and embeddings.shape[0] != len(places):
            raise ValueError(f"{span.key} must hold {len(places)} embeddings, got {embeddings.shape[0]}")
        if embeddings is not None and not self._files:
            item = self._item(span, embeddings)
        else:
            shape = (span.modality, span.grid_thw, span.seconds_per_grid, len(places), span.sound)
            if shape not in self._blank:  # a handful of shapes in a stream of frames, and a millisecond each
                deep = 0 if span.modality == "audio" else deep_layers(self._config.hf_config)
                width = self._config.get_inputs_embeds_size() * (1 + deep)
                zeros = torch.zeros(1).expand(len(places), width)
                self._blank[shape] = self._item(span, None if self._files else zeros)
            item = self._blank[shape]
        # Qwen3-VL looks for each temporal group's opening token within the item, which embeds to itself; Qwen3-Omni for the one
        # that opens a video's sound.
        stamped = span.seconds_per_grid is None or (span.sound and self.marked)
        ahead = int(span.modality == "video" and stamped and not self.hands_on)
        place = PlaceholderRange(offset=span.offset, length=span.tokens)
        if ahead or len(places) < span.tokens:
            embedded = torch.zeros(ahead + span.tokens, dtype=torch.bool)
            embedded[[ahead + i for i in places]] = True
            place = PlaceholderRange(offset=span.offset - ahead, length=len(embedded), is_embed=embedded)
        name = self.name(span.key, tenant)
        return MultiModalFeatureSpec(data=item, modality=span.modality, identifier=name, mm_position=place)

    def _item(self, span: MediaSpan, embeddings: torch.Tensor | None) -> Any:
        """The fields of one item; without embeddings only those that positions follow from."""
        if self._processor is None:
            raise UnsupportedModel(f"{self._config.model} takes no {span.modality}s: it is a text model")
        if self.hands_on:
            # Of an item without fields vLLM's cache cannot tell the size, and its engine ends.
            grid = {"image_grid_thw": torch.tensor([span.grid_thw])} if self._config.uses_mrope else {}
            return given_item(span.modality, torch.zeros(0) if embeddings is None else embeddings, **grid)
        if span.modality == "audio":
            data = {"audio_feature_lengths": torch.tensor([span.grid_thw[2]])}
        else:
            data = {f"{span.modality}_grid_thw": torch.tensor([span.grid_thw], dtype=torch.int64)}
        if span.modality == "video" and span.seconds_per_grid is not None:
            data["second_per_grid_ts"] = torch.tensor([span.seconds_per_grid])
        if span.modality == "video" and span.sound:
            data["use_audio_in_video"] = torch.tensor([True])
        if self.hears:  # vLLM's own models take no embeddings of sound, and those of one picture for many
            return given_item(span.modality, embeddings, **data)
        if embeddings is not None:
            data[f"{span.modality}_embeds"] = embeddings
        items = media_items(self._processor, data)
        if span.modality not in items:
            raise UnsupportedModel(f"{type(self.model).__name__} takes no {span.modality} embeddings")
        return items[span.modality][0]

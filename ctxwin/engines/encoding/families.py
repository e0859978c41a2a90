"""Vision families: how their processors treat pixels, where a model's files do not say so.

A *grid* (t, h, w) counts patches before merging. Qwen's and Kimi's processors give it with the pixels; InternVL's cut a
picture into square tiles of a fixed size, which count as the first axis here. SmolVLM's and Idefics3's grid says how many tiles
there are, and their rows and columns (0 and 0 for a single one). LLaVA-NeXT's gives the tiles and the picture's own pixels,
LLaVA's of a video the frames and their pixels, DeepSeek-OCR 2's the picture and its tiles, and their sides in pixels (the larger
DeepSeek-VL's the picture in two sizes).
That of sound is (1, 1, frames of its spectrogram).

LLaVA-OneVision's processor cuts the only picture of a prompt into tiles, DeepSeek-VL2's cuts up to two, and both take each of
several uncut. A chunk must not depend on its neighbours, so every picture is taken uncut, as one of several; on vLLM too, whose
own processor cuts LLaVA-OneVision's always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ctxwin.errors import BadMedia, UnsupportedModel
from ctxwin.kv.config import text_backbone, text_config

if TYPE_CHECKING:
    import numpy as np
    import torch

Grid = tuple[int, int, int]
"""Patches before merging: (t, h, w)."""


@dataclass(frozen=True)
class Family:
    """One family of vision models.

    Attributes:
        video: a video has tokens of its own; without, its frames are pictures.
        stamps: every temporal group of a video is its time as text, then tokens with a grid of their own (Qwen3-VL).
        tiles: a picture is cut into tiles and a thumbnail, and the tower takes no grid (InternVL, SmolVLM).
        marks: a picture's tokens are those its processor writes: they include words, as breaks after its rows (Mistral 3), marks
            of its tiles (SmolVLM) or opening and closing marks (Gemma 3), or their number follows from no grid (LLaVA).
        square: every picture is scaled to one size, whatever its own (Gemma 3).
        listed: a picture's patches come as a list, padded to one length, with the position of each (Gemma 4).
        bidirectional: in which layers tokens of a picture see later ones: "" none, "all" (Gemma 3), "sliding" (Gemma 4's larger
            models).
        sound: it takes audio, and its files hold a speaking part beside the text backbone (`text_backbone`). The processor is
            called as a whole, since its settings for videos and sound differ from those of its parts.
    """

    video: bool = False
    stamps: bool = False
    tiles: bool = False
    marks: bool = False
    square: bool = False
    listed: bool = False
    bidirectional: Literal["", "all", "sliding"] = ""
    sound: bool = False


FAMILIES = {
    "qwen2_vl": Family(video=True),
    "qwen2_5_vl": Family(video=True),
    "qwen3_vl": Family(video=True, stamps=True),
    "qwen3_vl_moe": Family(video=True, stamps=True),
    "qwen3_5": Family(video=True, stamps=True),
    "qwen3_5_moe": Family(video=True, stamps=True),
    "internvl": Family(tiles=True),
    "qianfan_ocr": Family(tiles=True),
    "kimi_k25": Family(),
    "kimi_vl": Family(),
    "glm4v": Family(),
    "glm4v_moe": Family(),
    "glm_ocr": Family(),
    "paddleocr_vl": Family(),
    "mistral3": Family(marks=True),
    "smolvlm": Family(tiles=True, marks=True),
    "idefics3": Family(tiles=True, marks=True),
    "gemma3": Family(marks=True, square=True, bidirectional="all"),
    "deepseek_ocr2": Family(marks=True),
    "deepseek_vl": Family(marks=True),
    "deepseek_vl_v2": Family(marks=True),
    "deepseek_vl_hybrid": Family(marks=True),
    "llava": Family(marks=True),
    "llava_next": Family(marks=True),
    "llava_next_video": Family(video=True, marks=True),
    "llava_onevision": Family(video=True, marks=True),
    "gemma4": Family(marks=True, listed=True, bidirectional="sliding"),
    "qwen2_5_omni_thinker": Family(video=True, sound=True),
    "qwen3_omni_moe_thinker": Family(video=True, sound=True),
}
"""By ``model_type``. Pictures of other families may depend on each other, or bring other inputs."""
REFUSED = {
    "minicpmv4_6": "its processor numbers the pictures of a prompt",
    "minicpmv4_7": "its processor numbers the pictures of a prompt",
    "paligemma": "every token before the answer attends both ways",
}
"""Reasons why some known families cannot be served."""
_IN_TWO_SIZES = {"deepseek_ocr2": "pixel_values_local", "deepseek_vl_hybrid": "high_res_pixel_values"}
"""Further pixels of families whose towers take a picture in two sizes, by the name that their processors give them."""
_SEVERAL = 2
"""Number of pictures reported to LLaVA-OneVision's processor: with more than one it leaves each uncut; DeepSeek-VL2's: with one
more."""


def family_of(config: Any) -> Family | None:
    """Return the family of a vision model, None for a text model; raise UnsupportedModel for an unknown or refused one."""
    config = text_backbone(config)
    kind = str(config.model_type)
    if not hasattr(config, "vision_config"):
        if text_config(config) is not config:
            raise UnsupportedModel(f"the model {kind!r} takes more than text and pictures, which no chunk can hold")
        return None
    if kind in REFUSED:
        raise UnsupportedModel(f"the vision model {kind!r} cannot be served: {REFUSED[kind]}")
    if kind not in FAMILIES:
        raise UnsupportedModel(f"a vision model must be one of {', '.join(FAMILIES)}, got {kind!r}")
    return FAMILIES[kind]


def bidirectional_layers(config: Any) -> str:
    """Return the layers in which tokens of a picture see later ones; see `Family`.

    A config may switch it off, by vLLM's own name for the setting; Gemma 4's configs declare it.
    """
    family = FAMILIES.get(str(config.model_type))
    if family is None or not getattr(config, "is_mm_prefix_lm", True):
        return ""
    declared = getattr(text_config(config), "use_bidirectional_attention", None) == "vision"
    return family.bidirectional if declared or family.bidirectional != "sliding" else ""


def patches_per_token(config: Any, image_processor: Any) -> int:
    """Return how many patches of the grid become one token; not for a family with marks."""
    if kernel := getattr(image_processor, "merge_kernel_size", None):  # Kimi-VL's
        return int(kernel[0]) * int(kernel[1])
    ratio = getattr(config, "downsample_ratio", None)
    side = int(image_processor.merge_size) if ratio is None else round(1 / ratio)
    return side * side


def picture_text(config: Any, processor: Any, grid: Grid) -> str:
    """Return the processor's text for one picture, of a family with marks."""
    import numpy as np

    count, high, wide = grid
    if str(config.model_type) == "deepseek_vl_v2":  # neither of these processors has a method for one picture
        rows = -(-high // int(processor.downsample_ratio))
        return str(processor.image_token) * (count * rows * (rows + 1) + 1)
    if str(config.model_type) == "deepseek_ocr2":
        return str(processor._expand_image_tokens([str(processor.image_token)], [count - 1])[0])
    cell, side = _cell(config), int(getattr(config.vision_config, "image_size", 1))
    tile = np.empty((1, 3, side, side), dtype=np.uint8)  # LLaVA's processors read its shape
    processed = {"image_sizes": [(high * cell, wide * cell)], "rows": [[high]], "cols": [[wide]], "num_crops": [0]}
    pooled = int(getattr(config.vision_config, "pooling_kernel_size", 1)) ** 2
    processed["num_soft_tokens_per_image"] = [high * wide // pooled]
    return str(processor.replace_image_token(processed | {"pixel_values": [tile], "batch_num_images": [_SEVERAL]}, 0))


def video_tokens(processor: Any, grid: Grid) -> int:
    """Return how many tokens the processor writes for one video, of a family with marks."""
    import numpy as np

    count, high, wide = grid
    frames = np.empty((count, 3, high, wide), dtype=np.uint8)  # processors may read its shape
    return str(processor.replace_video_token({"pixel_values_videos": [frames]}, 0)).count(str(processor.video_token))


def is_clip(config: Any, pixels: torch.Tensor) -> bool:
    """Return True for the frames of a LLaVA video ``[F, 3, H, W]``: pictures of those families have one more axis."""
    family = FAMILIES[str(config.model_type)]
    return family.video and family.marks and pixels.dim() == 4


def run_tower(model: Any, family: Family, config: Any, pixels: torch.Tensor, grids: torch.Tensor) -> Any:
    """Run the vision tower of transformers' model on the output of `process_images` or `process_video`."""
    import torch

    if is_clip(config, pixels):
        return model.get_video_features(pixels[None], return_dict=True)
    # DeepSeek-VL's is within.
    images = getattr(model, "get_image_features", None) or model.base_model.get_image_features
    if further := _IN_TWO_SIZES.get(str(config.model_type)):
        count, side, tile = (int(n) for n in grids[0])
        first, rest = pixels[: 3 * side**2], pixels[3 * side**2 :]
        others: dict[str, Any] = {further: rest.view(-1, 3, tile, tile)} if count > 1 else {}
        if others and further == "pixel_values_local":
            others["num_local_patches"] = [count - 1]
        return images(first.view(1, 3, side, side), **others, return_dict=True)
    options: dict[str, Any] = {}
    if str(config.model_type) == "mistral3" and (least := int(config.spatial_merge_size)):
        sides = [int(side) // least for side in grids[0, 1:]]
        if not all(sides):
            raise BadMedia(f"a picture must have {least * _cell(config)} pixels a side for this model; enlarge it")
        if sides == [1, 1]:  # of one token alone transformers' model loses an axis
            sizes = torch.cat([grids, grids])[:, 1:] * _cell(config)
            features = images(torch.cat([pixels, pixels]), image_sizes=sizes, return_dict=True)
            features.pooler_output = features.pooler_output[:1]
            return features
    if family.listed:
        options = {"image_position_ids": patch_places(grids, int(pixels.shape[-2]))}
    elif not family.marks and not family.tiles:
        options = {"image_grid_thw": grids}
    elif family.marks and not family.tiles and not family.square and _has_sizes(config):
        options = {"image_sizes": grids[:, 1:] * _cell(config)}
    if str(config.model_type) == "llava_onevision":
        options["batch_num_images"] = [_SEVERAL]
    return images(pixels, **options, return_dict=True)


def _cell(config: Any) -> int:
    """Return the side in pixels of one unit of the grid, of a family with marks."""
    return 1 if str(config.model_type).startswith("llava_next") else int(config.vision_config.patch_size)


def _has_sizes(config: Any) -> bool:
    """Return True if the tower takes pictures of any size; else each has the size of the tower's images."""
    kind = str(config.model_type)
    return kind != "deepseek_vl" and (kind != "llava" or str(config.vision_config.model_type) == "pixtral")


def patch_places(grids: torch.Tensor, count: int) -> torch.Tensor:
    """Return the column and row of each listed patch, row by row: int64 ``[n, count, 2]``.

    Padding up to ``count`` is at -1.
    """
    import torch

    places = torch.full((len(grids), count, 2), -1, device=grids.device)
    for row, (_, high, wide) in zip(places, grids.tolist(), strict=True):
        numbers = torch.arange(high * wide, device=grids.device)
        row[: high * wide] = torch.stack([numbers % wide, numbers // wide], dim=1)
    return places


def process_images(
    family: Family, config: Any, processor: Any, pictures: Sequence[Any], frames: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pixels of all pictures as the tower takes them, and their grids ``[n, 3]``.

    Args:
        family: the family of ``config``.
        config: the model's config.
        processor: the model's image processor.
        pictures: PIL images; a single one of a family with marks.
        frames: whether they are the frames of a video, which are one tile each.
    """
    import torch

    if family.square:
        pixels = processor(images=list(pictures), return_tensors="pt", do_pan_and_scan=False)["pixel_values"]
        side = int(config.vision_config.image_size) // int(config.vision_config.patch_size)
        return pixels, torch.tensor([[1, side, side]] * len(pixels))
    if further := _IN_TWO_SIZES.get(str(config.model_type)):
        processed = processor(images=list(pictures), return_tensors="pt")
        parts = [processed[name] for name in ("pixel_values", further) if name in processed]
        side, tile = (int(part.shape[-1]) for part in (parts[0], parts[-1]))
        return torch.cat([part.flatten() for part in parts]), torch.tensor([[sum(map(len, parts)), side, tile]])
    if str(config.model_type) == "deepseek_vl_v2":
        several = [*pictures] * (_SEVERAL + 1)
        pixels = processor(text=processor.image_token * len(several), images=several)["pixel_values"][:2]
        side = int(pixels.shape[-1]) // int(processor.patch_size)
        return pixels, torch.tensor([[len(pixels), side, side]])
    if family.listed:
        processed = processor(images=list(pictures), return_tensors="pt")
        wide, high = (processed["image_position_ids"].amax(dim=1) + 1).unbind(dim=1)
        return processed["pixel_values"], torch.stack([torch.ones_like(high), high, wide], dim=1)
    if family.marks:
        uncut = str(config.model_type) == "llava_onevision"
        options = {"return_row_col_info": True} if family.tiles else {}
        if family.tiles and frames:
            options["do_image_splitting"] = False
        images = [[*pictures] * _SEVERAL] if uncut else list(pictures)
        processed = processor(images=images, return_tensors="pt", **options)
        pixels = processed["pixel_values"][:1]
        if family.tiles:
            return pixels, torch.tensor([[pixels.shape[1], processed["rows"][0][0], processed["cols"][0][0]]])
        high, wide = processed["image_sizes"][0] if _has_sizes(config) and not uncut else pixels.shape[-2:]
        tiles, cell = pixels.shape[1] if pixels.dim() == 5 else 1, _cell(config)
        return pixels, torch.tensor([[tiles, int(high) // cell, int(wide) // cell]])
    if not family.tiles:
        processed = processor(images=list(pictures), return_tensors="pt")
        if "image_grid_hws" in processed:  # Kimi-VL's
            sizes = torch.as_tensor(processed["image_grid_hws"])
            return processed["pixel_values"], torch.cat([torch.ones_like(sizes[:, :1]), sizes], dim=1)
        return processed["pixel_values"], processed["image_grid_thw"]
    # InternVL's own processor requests tiles from its image processor whatever that one's settings say.
    processed = processor(images=list(pictures), crop_to_patches=not frames, return_tensors="pt")
    pixels = processed["pixel_values"]
    high, wide = config.vision_config.patch_size
    tiles = [int(n) for n in processed["num_patches"]]
    grids = [(n, int(pixels.shape[-2]) // high, int(pixels.shape[-1]) // wide) for n in tiles]
    return pixels, torch.tensor(grids, dtype=torch.int64)


def process_video(family: Family, processor: Any, frames: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pixels of a video ``[F, H, W, 3]`` as the tower takes them, and its grid ``[1, 3]``.

    Args:
        family: the model's family.
        processor: the model's processor of all media.
        frames: the last one is repeated until the temporal patch divides their number.

    LLaVA's pixels are ``[F, 3, H, W]``.
    """
    import numpy as np
    import torch

    short = -len(frames) % frames_per_group(processor.video_processor)
    filled = np.concatenate([frames, np.repeat(frames[-1:], short, axis=0)]) if short else frames
    options: dict[str, Any] = {"videos": [torch.tensor(filled).permute(0, 3, 1, 2)]}
    options |= {"do_sample_frames": False, "return_tensors": "pt"}
    options |= {"text": processor.video_token} if family.sound else {}
    processed = (processor if family.sound else processor.video_processor)(**options)
    if "video_grid_thw" in processed:
        return processed["pixel_values_videos"], processed["video_grid_thw"]
    clip = processed["pixel_values_videos"][0]
    return clip, torch.tensor([[len(clip), *clip.shape[-2:]]])


def frames_per_group(processor: Any) -> int:
    """Return how many frames of a video the tower takes together, given a video processor."""
    return int(getattr(processor, "temporal_patch_size", 1))


def process_audio(processor: Any, samples: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the spectrogram ``[bins, frames]`` of mono samples at the processor's rate, and its grid ``[1, 3]``.

    Raises BadMedia for sound that the processor would cut, or that is too short.
    """
    import torch

    processed = processor(text=processor.audio_token, audio=[samples], return_tensors="pt")
    features = processed["input_features"][0][:, processed["feature_attention_mask"][0].bool()]
    extractor = processor.feature_extractor
    count, step, rate = features.shape[1], extractor.hop_length, extractor.sampling_rate
    if (count + 1) * step < len(samples):
        raise BadMedia(
            f"the model hears at most {count * step / rate:g} s at once, got {len(samples) / rate:g} s; cut it by start and end"
        )
    if processor.tokenizer.convert_tokens_to_ids(processor.audio_token) not in processed["input_ids"][0].tolist():
        raise BadMedia(f"the sound must be long enough to make a token, got {len(samples) / rate:g} s")
    return features, torch.tensor([[1, 1, count]])


def interleaved(config: Any, processor: Any, grid: Grid, seconds: float, sound_tokens: int) -> str:
    """Return the processor's text for a video with its sound: both ordered by time, within the marks of both.

    Args:
        config: the model's config.
        processor: the model's processor.
        grid: grid of the video.
        seconds: length of a temporal step.
        sound_tokens: number of tokens of the sound.

    Raises BadMedia for frames so far apart, or between whole positions, that engines would not order both alike.
    """
    import numpy as np

    together = getattr(config, "seconds_per_chunk", None)  # Qwen2.5-Omni's: seconds of one medium, then of the other
    if seconds > together if together else seconds * config.position_id_per_seconds % 1:
        raise BadMedia(f"a video with sound must have an fps such as 1 or 2, got frames in steps of {seconds:g} s")
    begin, end = processor.vision_bos_token, processor.vision_eos_token
    pace = {
        "position_id_per_seconds": config.position_id_per_seconds,
        "seconds_per_chunk": getattr(config, "seconds_per_chunk", 2.0),
    }
    if hasattr(processor, "replace_video_with_audio_token"):  # newer versions of transformers
        video = {"video_grid_thw": [np.array(grid)], "video_second_per_grid": [seconds]}
        sound = {"num_audio_tokens": [sound_tokens]}
        return f"{begin}{processor.replace_video_with_audio_token(video, 0, sound, 0, **pace)}{end}"
    (text,) = processor.replace_multimodal_special_tokens(
        [begin + processor.video_token + end],
        iter([sound_tokens]),
        iter(()),
        iter([np.array(grid)]),
        video_second_per_grid=iter([seconds]),
        use_audio_in_video=True,
        **pace,
    )
    return str(text)


def stamps(count: int, fps: float, patch: int) -> list[str]:
    """Return the text before each temporal group of a video: the mean time of a group's first and last frame.

    Args:
        count: number of sampled frames, the first at 0 s.
        fps: frames per second.
        patch: frames per group; the last group is filled by repeating the last frame.
    """
    times = [min(i, count - 1) / fps for i in range(count + -count % patch)]
    return [f"<{(times[i] + times[i + patch - 1]) / 2:.1f} seconds>" for i in range(0, len(times), patch)]

"""Vision families: what their processors make of pixels, where a model's files do not say so.

A *grid* (t, h, w) counts patches before merging. Qwen's and Kimi's processors give it with the pixels; InternVL's cut a
picture into square tiles of a fixed size, which count as the first axis here. SmolVLM's and Idefics3's grid says how many tiles
there are, and their rows and columns (0 and 0 for a single one). LLaVA-NeXT's gives the tiles and the picture's own pixels,
LLaVA-OneVision's of a video the frames and their pixels, DeepSeek-OCR 2's the picture and its tiles, and their sides in pixels.
That of sound is (1, 1, frames of its spectrogram).

LLaVA-OneVision's processor cuts a picture into tiles where a prompt has no other, and takes it whole where it has several. A
chunk must not depend on its neighbours, so every picture is taken whole, as one of several; on vLLM too, whose own processor
always cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ctxwin.errors import BadMedia, UnsupportedModel
from ctxwin.kv.config import text_config, thinker

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
        marks: a picture's tokens are what its processor writes: words stand among them, as breaks behind its rows (Mistral 3),
            marks of its tiles (SmolVLM) or what opens and closes it (Gemma 3), or their number follows from no grid (LLaVA).
        square: every picture is scaled to one size, whatever its own (Gemma 3).
        listed: a picture's patches come as a list, filled up to one length, with the place of each (Gemma 4).
        both_ways: in which layers tokens of a picture see those behind them: "" none, "all" (Gemma 3), "sliding" (Gemma 4's
            larger models).
        sound: it hears, and its files hold a thinker beside what speaks (`thinker`): the processor as a whole is asked, since its
            settings for videos and sound are not those of its parts.
    """

    video: bool = False
    stamps: bool = False
    tiles: bool = False
    marks: bool = False
    square: bool = False
    listed: bool = False
    both_ways: Literal["", "all", "sliding"] = ""
    sound: bool = False


FAMILIES = {
    "qwen2_vl": Family(video=True),
    "qwen2_5_vl": Family(video=True),
    "qwen3_vl": Family(video=True, stamps=True),
    "qwen3_vl_moe": Family(video=True, stamps=True),
    "qwen3_5": Family(video=True, stamps=True),
    "qwen3_5_moe": Family(video=True, stamps=True),
    "internvl": Family(tiles=True),
    "kimi_k25": Family(),
    "glm4v": Family(),
    "glm4v_moe": Family(),
    "glm_ocr": Family(),
    "paddleocr_vl": Family(),
    "mistral3": Family(marks=True),
    "smolvlm": Family(tiles=True, marks=True),
    "idefics3": Family(tiles=True, marks=True),
    "gemma3": Family(marks=True, square=True, both_ways="all"),
    "deepseek_ocr2": Family(marks=True),
    "llava": Family(marks=True),
    "llava_next": Family(marks=True),
    "llava_onevision": Family(video=True, marks=True),
    "gemma4": Family(marks=True, listed=True, both_ways="sliding"),
    "qwen2_5_omni_thinker": Family(video=True, sound=True),
    "qwen3_omni_moe_thinker": Family(video=True, sound=True),
}
"""By ``model_type``. Pictures of other families may depend on each other, or bring other inputs."""
REFUSED = {
    "minicpmv4_6": "its processor numbers the pictures of a prompt",
    "minicpmv4_7": "its processor numbers the pictures of a prompt",
    "paligemma": "everything in front of the answer attends both ways",
}
"""Why some known ones cannot be served."""
_SEVERAL = 2
"""Pictures that LLaVA-OneVision is told a prompt has: of more than one it takes each whole."""


def family_of(config: Any) -> Family | None:
    """The family of a vision model, None for a text model; UnsupportedModel for one that is not known, or does not fit."""
    config = thinker(config)
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


def both_ways(config: Any) -> str:
    """In which layers of a model tokens of a picture see those behind them; see `Family`.

    A config may say that they do not, by vLLM's own name for it; Gemma 4's say whether they do.
    """
    family = FAMILIES.get(str(config.model_type))
    if family is None or not getattr(config, "is_mm_prefix_lm", True):
        return ""
    told = getattr(text_config(config), "use_bidirectional_attention", None) == "vision"
    return family.both_ways if told or family.both_ways != "sliding" else ""


def patches_per_token(config: Any, image_processor: Any) -> int:
    """How many patches of the grid become one token; not for a family with marks."""
    ratio = getattr(config, "downsample_ratio", None)
    side = int(image_processor.merge_size) if ratio is None else round(1 / ratio)
    return side * side


def picture_text(config: Any, processor: Any, grid: Grid) -> str:
    """What the processor writes for one picture, of a family with marks."""
    import numpy as np

    count, high, wide = grid
    if str(config.model_type) == "deepseek_ocr2":  # its processor has no method for one picture
        return str(processor._expand_image_tokens([str(processor.image_token)], [count - 1])[0])
    cell, side = _cell(config), int(getattr(config.vision_config, "image_size", 1))
    tile = np.empty((1, 3, side, side), dtype=np.uint8)  # LLaVA's look at its shape
    made = {"image_sizes": [(high * cell, wide * cell)], "rows": [[high]], "cols": [[wide]], "num_crops": [0]}
    made["num_soft_tokens_per_image"] = [
        high * wide // int(getattr(config.vision_config, "pooling_kernel_size", 1)) ** 2
    ]
    return str(processor.replace_image_token(made | {"pixel_values": [tile], "batch_num_images": [_SEVERAL]}, 0))


def video_tokens(processor: Any, grid: Grid) -> int:
    """How many tokens the processor writes for one video, of a family with marks."""
    frames = [None] * grid[0]
    return str(processor.replace_video_token({"pixel_values_videos": [frames]}, 0)).count(str(processor.video_token))


def is_clip(config: Any, pixels: torch.Tensor) -> bool:
    """Whether these are the frames of a LLaVA-OneVision video ``[F, 3, H, W]``: its pictures have one axis more."""
    return str(config.model_type) == "llava_onevision" and pixels.dim() == 4


def run_tower(model: Any, family: Family, config: Any, pixels: torch.Tensor, grids: torch.Tensor) -> Any:
    """What the vision tower of transformers' model gives, see `process_images` and `process_video`."""
    if is_clip(config, pixels):
        return model.get_video_features(pixels[None], return_dict=True)
    if str(config.model_type) == "deepseek_ocr2":
        count, side, tile = (int(n) for n in grids[0])
        whole, tiles = pixels[: 3 * side**2], pixels[3 * side**2 :]
        cut = (
            {"pixel_values_local": tiles.view(-1, 3, tile, tile), "num_local_patches": [count - 1]} if count > 1 else {}
        )
        return model.get_image_features(whole.view(1, 3, side, side), **cut, return_dict=True)
    given: dict[str, Any] = {}
    if family.listed:
        given = {"image_position_ids": patch_places(grids, int(pixels.shape[-2]))}
    elif not family.marks and not family.tiles:
        given = {"image_grid_thw": grids}
    elif family.marks and not family.tiles and not family.square and _has_sizes(config):
        given = {"image_sizes": grids[:, 1:] * _cell(config)}
    if str(config.model_type) == "llava_onevision":
        given["batch_num_images"] = [_SEVERAL]
    return model.get_image_features(pixels, **given, return_dict=True)


def _cell(config: Any) -> int:
    """Pixels on a side of what a grid of a family with marks counts."""
    return 1 if str(config.model_type) == "llava_next" else int(config.vision_config.patch_size)


def _has_sizes(config: Any) -> bool:
    """Whether the tower takes pictures of any size; else each is as large as the tower's images."""
    return str(config.model_type) != "llava" or str(config.vision_config.model_type) == "pixtral"


def patch_places(grids: torch.Tensor, count: int) -> torch.Tensor:
    """Column and row of each patch of pictures whose patches are listed, row by row: int64 ``[n, count, 2]``.

    Those that fill a list up to ``count`` stand at -1.
    """
    import torch

    places = torch.full((len(grids), count, 2), -1, device=grids.device)
    for made, (_, high, wide) in zip(places, grids.tolist(), strict=True):
        numbers = torch.arange(high * wide, device=grids.device)
        made[: high * wide] = torch.stack([numbers % wide, numbers // wide], dim=1)
    return places


def process_images(
    family: Family, config: Any, processor: Any, pictures: Sequence[Any], frames: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels of all pictures as the tower takes them, and their grids ``[n, 3]``.

    Args:
        family: of ``config``.
        config: the model's.
        processor: its image processor.
        pictures: PIL images; a single one of a family with marks.
        frames: whether they are the frames of a video, which are one tile each.
    """
    import torch

    if family.square:
        pixels = processor(images=list(pictures), return_tensors="pt", do_pan_and_scan=False)["pixel_values"]
        side = int(config.vision_config.image_size) // int(config.vision_config.patch_size)
        return pixels, torch.tensor([[1, side, side]] * len(pixels))
    if str(config.model_type) == "deepseek_ocr2":
        made = processor(images=list(pictures), return_tensors="pt")
        shown = [made["pixel_values"], *([made["pixel_values_local"]] if "pixel_values_local" in made else [])]
        side, tile = (int(part.shape[-1]) for part in (shown[0], shown[-1]))
        return torch.cat([part.flatten() for part in shown]), torch.tensor([[sum(map(len, shown)), side, tile]])
    if family.listed:
        made = processor(images=list(pictures), return_tensors="pt")
        wide, high = (made["image_position_ids"].amax(dim=1) + 1).unbind(dim=1)
        return made["pixel_values"], torch.stack([torch.ones_like(high), high, wide], dim=1)
    if family.marks:
        whole = str(config.model_type) == "llava_onevision"
        given = [[*pictures] * _SEVERAL] if whole else list(pictures)
        made = processor(images=given, return_tensors="pt", **_uncut(family, frames))
        pixels = made["pixel_values"][:1]
        if family.tiles:
            return pixels, torch.tensor([[pixels.shape[1], made["rows"][0][0], made["cols"][0][0]]])
        high, wide = made["image_sizes"][0] if _has_sizes(config) and not whole else pixels.shape[-2:]
        tiles, cell = pixels.shape[1] if pixels.dim() == 5 else 1, _cell(config)
        return pixels, torch.tensor([[tiles, int(high) // cell, int(wide) // cell]])
    if not family.tiles:
        made = processor(images=list(pictures), return_tensors="pt")
        return made["pixel_values"], made["image_grid_thw"]
    # InternVL's own processor asks its image processor for tiles whatever that one's settings say.
    made = processor(images=list(pictures), crop_to_patches=not frames, return_tensors="pt")
    pixels = made["pixel_values"]
    high, wide = config.vision_config.patch_size
    tiles = [int(n) for n in made["num_patches"]]
    grids = [(n, int(pixels.shape[-2]) // high, int(pixels.shape[-1]) // wide) for n in tiles]
    return pixels, torch.tensor(grids, dtype=torch.int64)


def _uncut(family: Family, frames: bool) -> dict[str, Any]:
    if not family.tiles:
        return {}
    return {"return_row_col_info": True} | ({"do_image_splitting": False} if frames else {})


def process_video(family: Family, processor: Any, frames: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels of a video ``[F, H, W, 3]`` as the tower takes them, and its grid ``[1, 3]``.

    Args:
        family: of the model.
        processor: the model's, of all media.
        frames: the last one is repeated until the temporal patch divides their number.

    LLaVA-OneVision's is ``[F, 3, H, W]``.
    """
    import numpy as np
    import torch

    short = -len(frames) % frames_per_group(processor.video_processor)
    filled = np.concatenate([frames, np.repeat(frames[-1:], short, axis=0)]) if short else frames
    given: dict[str, Any] = {"videos": [torch.from_numpy(np.ascontiguousarray(filled)).permute(0, 3, 1, 2)]}
    given |= {"do_sample_frames": False, "return_tensors": "pt"}
    made = processor(text=processor.video_token, **given) if family.sound else processor.video_processor(**given)
    if "video_grid_thw" in made:
        return made["pixel_values_videos"], made["video_grid_thw"]
    clip = made["pixel_values_videos"][0]
    return clip, torch.tensor([[len(clip), *clip.shape[-2:]]])


def frames_per_group(processor: Any) -> int:
    """How many frames of a video the tower takes together; of a video processor."""
    return int(getattr(processor, "temporal_patch_size", 1))


def process_audio(processor: Any, samples: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The spectrogram ``[bins, frames]`` of mono samples at the processor's rate, and its grid ``[1, 3]``.

    Raises BadMedia for sound that the processor would cut, or that is too short.
    """
    import torch

    made = processor(text=processor.audio_token, audio=[samples], return_tensors="pt")
    features = made["input_features"][0][:, made["feature_attention_mask"][0].bool()]
    count, step, rate = (
        features.shape[1],
        processor.feature_extractor.hop_length,
        processor.feature_extractor.sampling_rate,
    )
    if (count + 1) * step < len(samples):
        raise BadMedia(
            f"the model hears at most {count * step / rate:g} s at once, got {len(samples) / rate:g} s; cut it by start and end"
        )
    if processor.tokenizer.convert_tokens_to_ids(processor.audio_token) not in made["input_ids"][0].tolist():
        raise BadMedia(f"the sound must be long enough to make a token, got {len(samples) / rate:g} s")
    return features, torch.tensor([[1, 1, count]])


def interleaved(config: Any, processor: Any, grid: Grid, seconds: float, heard: int) -> str:
    """What the processor writes for a video with its sound: both by time, within the marks of both.

    Args:
        config: the model's.
        processor: the model's.
        grid: of the video.
        seconds: a temporal step.
        heard: tokens of the sound.

    Raises BadMedia for frames so far apart, or between whole positions, that engines would not order both alike.
    """
    import numpy as np

    together = getattr(config, "seconds_per_chunk", None)  # Qwen2.5-Omni's: so many of one, then of the other
    if seconds > together if together else seconds * config.position_id_per_seconds % 1:
        raise BadMedia(f"a video with sound must have an fps such as 1 or 2, got frames in steps of {seconds:g} s")
    (text,) = processor.replace_multimodal_special_tokens(
        [processor.vision_bos_token + processor.video_token + processor.vision_eos_token],
        iter([heard]),
        iter(()),
        iter([np.array(grid)]),
        video_second_per_grid=iter([seconds]),
        use_audio_in_video=True,
        position_id_per_seconds=config.position_id_per_seconds,
        seconds_per_chunk=getattr(config, "seconds_per_chunk", 2.0),
    )
    return str(text)


def stamps(count: int, fps: float, patch: int) -> list[str]:
    """What stands in front of the temporal groups of a video: the mean time of a group's first and last frame.

    Args:
        count: frames sampled, the first at 0 s.
        fps: frames a second.
        patch: frames a group; the last group is filled by repeating the last frame.
    """
    times = [min(i, count - 1) / fps for i in range(count + -count % patch)]
    return [f"<{(times[i] + times[i + patch - 1]) / 2:.1f} seconds>" for i in range(0, len(times), patch)]

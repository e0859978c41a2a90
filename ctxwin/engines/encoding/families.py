"""Vision families: what their processors make of pixels, where a model's files do not say so.

A *grid* (t, h, w) counts patches before merging. Qwen's and Kimi's processors give it with the pixels; InternVL's cut a
picture into square tiles of a fixed size, which count as the first axis here. SmolVLM's and Idefics3's grid says how many tiles
there are, and their rows and columns (0 and 0 for a single one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ctxwin.errors import UnsupportedModel
from ctxwin.kv.config import text_config

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
        marks: within a picture stand tokens that are words: breaks behind its rows (Mistral 3), marks of its tiles (SmolVLM),
            what opens and closes it (Gemma 3).
        square: every picture is scaled to one size, whatever its own (Gemma 3).
        both_ways: in which layers tokens of a picture see those behind them: "" none, "all" (Gemma 3).
    """

    video: bool = False
    stamps: bool = False
    tiles: bool = False
    marks: bool = False
    square: bool = False
    both_ways: Literal["", "all"] = ""


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
    "mistral3": Family(marks=True),
    "smolvlm": Family(tiles=True, marks=True),
    "idefics3": Family(tiles=True, marks=True),
    "gemma3": Family(marks=True, square=True, both_ways="all"),
}
"""By ``model_type``. Pictures of other families may depend on each other, or bring other inputs."""
REFUSED = {
    "llava_onevision": "it cuts a picture into tiles only where the prompt has no other, so a picture is no chunk",
    "paligemma": "everything in front of the answer attends both ways",
}
"""Why some known ones cannot be served."""


def family_of(config: Any) -> Family | None:
    """The family of a vision model, None for a text model; UnsupportedModel for one that is not known, or does not fit."""
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

    A config may say that they do not, by vLLM's own name for it.
    """
    family = FAMILIES.get(str(config.model_type))
    return family.both_ways if family is not None and getattr(config, "is_mm_prefix_lm", True) else ""


def patches_per_token(config: Any, image_processor: Any) -> int:
    """How many patches of the grid become one token; not for a family with marks."""
    ratio = getattr(config, "downsample_ratio", None)
    side = int(image_processor.merge_size) if ratio is None else round(1 / ratio)
    return side * side


def picture_text(config: Any, processor: Any, grid: Grid) -> str:
    """What the processor writes for one picture, of a family with marks."""
    _, high, wide = grid
    patch = int(config.vision_config.patch_size)
    return str(
        processor.replace_image_token(
            {"image_sizes": [(high * patch, wide * patch)], "rows": [[high]], "cols": [[wide]], "num_crops": [0]}, 0
        )
    )


def tower_inputs(family: Family, config: Any, grids: torch.Tensor) -> dict[str, Any]:
    """What ``get_image_features`` of transformers takes beside the pixels."""
    if not family.marks:
        return {} if family.tiles else {"image_grid_thw": grids}
    return {} if family.tiles or family.square else {"image_sizes": grids[:, 1:] * int(config.vision_config.patch_size)}


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
    if family.marks:
        made = processor(images=list(pictures), return_tensors="pt", **_uncut(family, frames))
        pixels = made["pixel_values"]
        if not family.tiles:
            patch = int(config.vision_config.patch_size)
            return pixels, torch.tensor([[1, h // patch, w // patch] for h, w in made["image_sizes"]])
        return pixels, torch.tensor([[pixels.shape[1], made["rows"][0][0], made["cols"][0][0]]])
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


def process_video(processor: Any, frames: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels of a video ``[F, H, W, 3]`` as the tower takes them, and its grid ``[1, 3]``.

    The last frame is repeated until the temporal patch divides their number.
    """
    import numpy as np
    import torch

    short = -len(frames) % int(processor.temporal_patch_size)
    filled = np.concatenate([frames, np.repeat(frames[-1:], short, axis=0)]) if short else frames
    video = torch.from_numpy(np.ascontiguousarray(filled)).permute(0, 3, 1, 2)
    made = processor(videos=[video], do_sample_frames=False, return_tensors="pt")
    return made["pixel_values_videos"], made["video_grid_thw"]


def stamps(count: int, fps: float, patch: int) -> list[str]:
    """What stands in front of the temporal groups of a video: the mean time of a group's first and last frame.

    Args:
        count: frames sampled, the first at 0 s.
        fps: frames a second.
        patch: frames a group; the last group is filled by repeating the last frame.
    """
    times = [min(i, count - 1) / fps for i in range(count + -count % patch)]
    return [f"<{(times[i] + times[i + patch - 1]) / 2:.1f} seconds>" for i in range(0, len(times), patch)]

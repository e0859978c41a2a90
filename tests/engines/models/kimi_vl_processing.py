"""Kimi-VL's processor as a published folder brings it along: code that is copied into the folder, and runs on demand only."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor

IMAGE = "<|media_pad|>"


class KimiVLImageProcessor(BaseImageProcessor):
    """Patches of pictures that are scaled down to a number of them, and padded to whole tokens."""

    model_input_names: ClassVar = ["pixel_values", "image_grid_hws"]

    def __init__(self, patch_size: int = 14, in_token_limit: int = 4096, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.patch_size = patch_size
        self.in_token_limit = in_token_limit
        self.merge_kernel_size = [2, 2]

    def __call__(self, images: Any, **kwargs: Any) -> BatchFeature:
        pixels, grids = zip(*map(self._patches, images if isinstance(images, list) else [images]), strict=True)
        return BatchFeature({"pixel_values": torch.cat(pixels), "image_grid_hws": torch.tensor(grids)})

    def _patches(self, image: Image.Image) -> tuple[torch.Tensor, tuple[int, int]]:
        side = self.patch_size
        patches = (image.width // side) * (image.height // side)
        if patches > self.in_token_limit:
            scale = math.sqrt(self.in_token_limit / patches)
            image = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.BICUBIC)
        high, wide = (-(-size // (2 * side)) * 2 for size in (image.height, image.width))
        padded = Image.new("RGB", (wide * side, high * side))
        padded.paste(image.convert("RGB"))
        scaled = torch.from_numpy(np.asarray(padded, dtype=np.float32) / 127.5 - 1)
        cut = scaled.view(high, side, wide, side, 3).permute(0, 2, 4, 1, 3)
        return cut.reshape(high * wide, 3, side, side), (high, wide)


class KimiVLProcessor(ProcessorMixin):
    """As many placeholders for a picture as it has tokens."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token = IMAGE
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, images: Any = None, text: Any = None, **kwargs: Any) -> BatchFeature:
        seen = self.image_processor(images) if images else BatchFeature()
        texts = [text] if isinstance(text, str) else list(text)
        counts = iter([int(grid.prod()) // 4 for grid in seen.get("image_grid_hws", ())])
        for i, each in enumerate(texts):
            first, *others = each.split(IMAGE)
            texts[i] = first + "".join(IMAGE * next(counts, 1) + other for other in others)
        kwargs = {k: v for k, v in kwargs.items() if k in ("return_tensors", "add_special_tokens")}
        return BatchFeature({**self.tokenizer(texts, **kwargs), **seen})

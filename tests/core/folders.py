"""Folders that look like models."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file


def model_in(folder: Path, value: float = 0.0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.full((2,), value)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder

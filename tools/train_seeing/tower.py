"""Stage 2: a vision tower and LLaVA's projector, which learn to write the vectors of stage 1 from pixels."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from ctxwin.tiny.sprites import GRID
from train_seeing.model import NEW_ROWS, PATCH, SIDE, WIDTH, config_of
from train_seeing.vocabulary import Vocabulary, tokenizer_of
from train_seeing.words import Reader
from train_tiny.checkpoint import load_checkpoint, save_checkpoint
from train_tiny.tokenizer import transformers
from train_tiny.train import vision_batch

PLACES = SIDE // PATCH
HEAD, GAIN = 64, 0.7
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of CLIP's image processor."""


def look_at_own_cell(vision_tower: torch.nn.Module) -> None:
    """Initialise a tower so that every patch attends to the four patches of its cell; otherwise that takes it long to learn.

    The first 64 numbers of a place's embedding name its cell, the next 32 its corner, and queries and keys begin as the former.
    """
    generator = torch.Generator().manual_seed(0)
    cell = torch.randn(GRID, GRID, HEAD, generator=generator)[:, None, :, None].expand(-1, 2, -1, 2, -1)
    corner = 0.5 * torch.randn(2, 2, HEAD // 2, generator=generator)[None, :, None].expand(GRID, -1, GRID, -1, -1)
    rest = torch.zeros(GRID, 2, GRID, 2, WIDTH - HEAD - HEAD // 2)
    places = torch.cat([cell, corner, rest], -1).reshape(PLACES**2, WIDTH)
    with torch.no_grad():
        embeddings: Any = vision_tower.embeddings
        embeddings.position_embedding.weight.copy_(torch.cat([torch.zeros(1, WIDTH), places]))
        embeddings.patch_embedding.weight[:HEAD] = 0
        for layer in vision_tower.encoder.layers:  # type: ignore[union-attr]
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.copy_((GAIN * torch.eye(HEAD, WIDTH)).repeat(WIDTH // HEAD, 1))


class Tower(torch.nn.Module):
    """The parts of LLaVA between pixels and the language model, under the names that its checkpoint has."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        tokenizer = tokenizer_of(folder)
        config = config_of(folder, tokenizer)
        whole = transformers().LlavaModel(config)
        self.vision_tower, self.multi_modal_projector = whole.vision_tower, whole.multi_modal_projector
        look_at_own_cell(self.vision_tower)
        self.vision_tower.encoder.layers[-1].requires_grad_(False)  # LLaVA reads no further than the layer before
        self.vision_tower.post_layernorm.requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the vectors of pictures uint8 [B, 224, 224, 3]: [B, 256, W]."""
        mean, std = (torch.tensor(v, device=pixels.device) for v in (MEAN, STD))
        scaled = ((pixels / 255 - mean) / std).permute(0, 3, 1, 2)
        hidden = self.vision_tower.pre_layrnorm(self.vision_tower.embeddings(scaled))
        for layer in self.vision_tower.encoder.layers[:-1]:
            hidden = layer(hidden, attention_mask=None)
        vectors: Tensor = self.multi_modal_projector(hidden[:, 1:])
        return vectors


def losses(vectors: Tensor, labels: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, list[float]]:
    """Return the loss, and the share of slots whose nearest vector is the right one, by kind.

    Args:
        vectors: of the tower, [B, 256, W].
        labels: shape, appearance and mark of each cell, [B, 64, 3].
        vocabulary: of stage 1.
    """
    cells = vectors.reshape(-1, GRID, 2, GRID, 2, vectors.shape[-1]).transpose(2, 3).flatten(0, 2)  # [cells, 2, 2, W]
    shape, appearance, mark = labels.flatten(0, 1).unbind(-1)
    v = vocabulary
    total, right = vectors.new_zeros(()), []
    for slot, table, label in (
        (cells[:, 0, 0], v.marks + v.above, mark), (cells[:, 0, 1], v.appearances, appearance),
        (cells[:, 1, 0], v.marks + v.below, mark), (cells[:, 1, 1], v.shapes, shape),
    ):  # fmt: skip
        centre = table.mean(0)
        spread = (table - centre).square().sum(-1).mean()
        distance = torch.cdist(slot, table).square() / spread
        error = (slot - table[label]).square().sum(-1).mean() / spread
        total = total + functional.cross_entropy(-4 * distance, label) + error
        right.append((distance.argmin(-1) == label).float().mean().item())
    return total, right


def main() -> None:
    """Train for a number of steps, resuming, and write the weights of both stages."""
    parser = argparse.ArgumentParser(prog="python tools/train_seeing tower", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the language model")
    parser.add_argument("--words", type=Path, required=True, help="folder of stage 1")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    vocabulary = Reader(options.model).vocabulary
    if load_checkpoint(options.words, dict(vocabulary.state_dict())) is None:
        parser.error(f"--words must be a folder of stage 1, got {options.words}")
    vocabulary.requires_grad_(False)
    tower = Tower(options.model)
    trained = [p for p in tower.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    tensors = dict(tower.state_dict())
    saved = load_checkpoint(options.out, tensors)
    if saved:
        saved.restore(optimizer)
    begun, recent = time.monotonic(), list[list[float]]()
    for step in range(saved.state["step"] if saved else 0, options.steps):
        pixels, labels = vision_batch(np.random.default_rng((1, step)), options.batch)
        loss, right = losses(tower(pixels.float()), labels, vocabulary)
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(1, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / options.steps))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        recent.append([loss.item(), *right])
        if (step + 1) % 25 == 0 or step + 1 == options.steps:
            means = np.mean(recent, 0)
            print(
                step + 1,
                "loss {:.3f} mark {:.3f} color {:.3f} mark {:.3f} shape {:.3f}".format(*means),
                f"{time.monotonic() - begun:.0f} s",
                flush=True,
            )
            recent.clear()
            save_checkpoint(options.out, tensors, optimizer, {"step": step + 1})
    weights = {f"model.{name}": tensor for name, tensor in tower.state_dict().items()}
    weights[NEW_ROWS] = vocabulary.new_rows()
    save_file(
        {name: t.detach().bfloat16().contiguous() for name, t in weights.items()}, options.out / "seeing.safetensors"
    )


if __name__ == "__main__":
    main()

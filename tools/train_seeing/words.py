"""Stage 1: the vocabulary of the pictures, through the frozen language model.

Each draw shows frames and asks several questions, each of which sees the frames and itself only, so one forward serves all. The
loss is the cross entropy of the answer's word and of the token that ends it. The frames hold few things at first.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ctxwin.tiny.sprites import N_MARKS
from ctxwin.tiny.world import Frame, Question, questions_for, sample_frames
from train_seeing.vocabulary import Vocabulary, tokenizer_of
from train_tiny.checkpoint import load_checkpoint, save_checkpoint
from train_tiny.tokenizer import HEADERS, LABELS

PAIRS = (4, 6, 8, 10, 12, 16, 20, 24)
"""Marked things of a draw before whole frames are shown; the next number comes when nine answers of ten are right."""
QUESTIONS = 16


class Reader:
    """The frozen language model with a vocabulary in front of it."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        self.device, self.tokenizer = device, tokenizer_of(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
        self.body: Any = model.model.eval().requires_grad_(False).to(device)
        self.embeddings = model.get_input_embeddings().weight.detach().float().to(device)
        self.vocabulary = Vocabulary(self.embeddings.cpu(), self.tokenizer).to(device)

    def text(self, text: str) -> Tensor:
        """Return the embeddings of a text in which new tokens may stand, [T, W]."""
        ids = torch.tensor(self.tokenizer.encode(text, add_special_tokens=False), device=self.device)
        old = len(self.embeddings)
        new = self.vocabulary.new_rows()[(ids - old).clamp(min=0)]
        return torch.where((ids < old)[:, None], self.embeddings[ids.clamp(max=old - 1)], new)

    def answers(self, context: Tensor, questions: list[Question]) -> tuple[Tensor, Tensor]:
        """Return the loss and, per question, whether the answer's word has the highest score; ``context`` [T, W]."""
        parts, positions, owner, labels = [context], [torch.arange(len(context))], [torch.zeros(len(context))], []
        places, end = [], self.tokenizer.convert_tokens_to_ids("<|end|>")
        for number, question in enumerate(questions, 1):
            word = self.tokenizer.encode(f" {question.answer}", add_special_tokens=False)[0]
            rows = self.text(f"{question.text} {question.answer}")
            begin = sum(map(len, parts))
            parts.append(rows)
            positions.append(len(context) + torch.arange(len(rows)))
            owner.append(torch.full((len(rows),), float(number)))
            places += [begin + len(rows) - 2, begin + len(rows) - 1]
            labels += [word, end]
        index, of = torch.arange(sum(map(len, parts))), torch.cat(owner)
        visible = (index[:, None] >= index[None]) & ((of[None] == 0) | (of[:, None] == of[None]))
        hidden = self.body(
            inputs_embeds=torch.cat(parts)[None].bfloat16(),
            position_ids=torch.cat(positions)[None].to(self.device),
            attention_mask=visible[None, None].to(self.device),
            use_cache=False,
        ).last_hidden_state[0, places]
        rows = torch.cat([self.embeddings, self.vocabulary.new_rows()]).bfloat16()
        scores = (hidden @ rows.T).float()
        target = torch.tensor(labels, device=self.device)
        return functional.cross_entropy(scores, target), (scores.argmax(-1) == target)[0::2]


def draw(rng: np.random.Generator, frames: int, marks: int) -> tuple[tuple[Frame, ...], list[Question]]:
    """Draw frames and questions about one of them each: any shape, colours of legends, "grey" without a legend."""
    while True:
        roles = ["legend" if rng.random() < 0.6 else "scene" for _ in range(frames)]
        drawn = sample_frames(rng, roles, marks_per_frame=min(marks, N_MARKS // frames), faded=0.3)  # type: ignore[arg-type]
        if questions := questions_for(drawn, QUESTIONS, rng, ("single_hop", "unbound")):
            return drawn, questions


def context_of(reader: Reader, rng: np.random.Generator, frames: tuple[Frame, ...], pairs: int | None) -> Tensor:
    """Return the vectors of a context: a system prompt, and frames with or without labels.

    ``pairs``: only marked cells and a few others stand for a frame, which makes early steps cheap.
    """
    parts: list[Tensor] = [reader.vocabulary.prompt]
    if rng.random() < 0.7:
        parts.append(reader.text(f"{HEADERS[rng.integers(len(HEADERS))]}\n"))
    labelled = rng.random() < 0.3
    for number, frame in enumerate(frames):
        if labelled:
            parts.append(reader.text(LABELS[rng.integers(len(LABELS))].format(s=number)))
        vectors = reader.vocabulary.picture(frame)
        if pairs is not None:
            marked = frame.mark >= 0
            shown = marked | (rng.random(marked.shape) < 0.5 * marked.mean())
            slots = np.repeat(np.repeat(shown, 2, 0), 2, 1).ravel()
            vectors = vectors[torch.from_numpy(slots).to(vectors.device)]
        parts.append(vectors)
    return torch.cat([*parts, reader.text("\n")] if rng.random() < 0.5 else parts)


def main() -> None:
    """Train until time is up, resuming from the checkpoint in the folder."""
    parser = argparse.ArgumentParser(prog="python tools/train_seeing words", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the language model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--final", action="store_true", help="let the rate fall to zero over these minutes")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    reader = Reader(options.model, options.device)
    optimizer = torch.optim.AdamW(reader.vocabulary.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
    tensors = dict(reader.vocabulary.state_dict())
    saved = load_checkpoint(options.out, tensors)
    step, level = (saved.state["step"], saved.state["level"]) if saved else (0, 0)
    if saved:
        saved.restore(optimizer)
    begun, recent = time.monotonic(), list[tuple[float, float]]()
    while (spent := (time.monotonic() - begun) / 60 / options.minutes) < 1:
        rng = np.random.default_rng((0, step))
        rate = options.rate * min(1, (step + 1) / 20) * ((1 - spent) if options.final else 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for _ in range(options.batch):
            whole = level >= len(PAIRS)
            count = int(rng.choice([1, 1, 2, 3, 4])) if whole else 1
            frames, questions = draw(rng, count, int(rng.integers(8, 41)) if whole else PAIRS[level])
            context = context_of(reader, rng, frames, None if whole else PAIRS[level])
            loss, right = reader.answers(context, questions)
            (loss / options.batch).backward()
            recent.append((loss.item(), right.float().mean().item()))
        torch.nn.utils.clip_grad_norm_(reader.vocabulary.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 10 == 0:
            loss_mean, right_mean = np.mean(recent, 0)
            print(
                f"{step} level {level} loss {loss_mean:.3f} right {right_mean:.3f}",
                f"{60 * options.minutes * spent:.0f} s",
                flush=True,
            )
            recent.clear()
            save_checkpoint(options.out, tensors, optimizer, {"step": step, "level": level})
            if right_mean > 0.9 and level < len(PAIRS):
                level += 1


if __name__ == "__main__":
    main()

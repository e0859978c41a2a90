"""Check a trained checkpoint on held-out contexts: `python tools/train_tiny check --weights DIR --n 320`.

Three ways to come by the key-value cache of the frames: `reprefill` (one forward over the whole context), `blind`
(each frame prefilled alone after the header, keys rotated into place) and `patch` (blind plus a low-rank
approximation of what conditioning changed). The figures stand in MODEL_CARD.md; the evals of the library measure the
same on its own engines.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ctxwin.tiny import checkpoint_dir
from ctxwin.tiny.world import TASKS, Item, Task, make_item, render
from train_tiny.data import PICTURE, Vocabulary, place, through_clip
from train_tiny.forward import Span, decode, encode_pictures, rotate_span
from train_tiny.tokenizer import header_text, query_text, transformers

ARMS = ("reprefill", "blind", "patch")
HELD_OUT = 1_000_000
"""Seeds of held-out items start here; training draws from (seed, stage, step) triples instead."""


class Reader:
    """A checkpoint, loaded in float32, that reads contexts piece by piece."""

    def __init__(self, weights: Path) -> None:
        library = transformers()
        self.model = library.Qwen2_5_VLForConditionalGeneration.from_pretrained(weights, dtype=torch.float32).eval()
        self.text: Any = self.model.model.language_model
        self.vocabulary = Vocabulary(library.AutoTokenizer.from_pretrained(weights))

    def prefill(
        self, pieces: Sequence[str | None], pictures: Tensor, start: int = 0, past: Span | None = None
    ) -> tuple[Span, Tensor, int, Tensor]:
        """One forward.

        Returns the span, its positions [1, 3, T], the next position, and the last token's logits [vocab].

        Args:
            pieces: Texts and pictures, in order.
            pictures: Embeddings of the pictures, [N, 64, hidden].
            start: Position of the first token.
            past: Rotated keys and values in front.
        """
        ids, positions, following = place(self.vocabulary, pieces, start)
        tokens, where = torch.from_numpy(ids)[None], torch.from_numpy(positions)[None]
        words = self.text.embed_tokens.weight
        x = functional.embedding(tokens, words).masked_scatter((tokens == self.vocabulary.image)[..., None], pictures)
        front = 0 if past is None else past[0][0].shape[2]
        mask = torch.ones(len(ids), front + len(ids), dtype=torch.bool).tril(front)
        hidden, span = decode(self.text, x, where, mask, past)
        return span, where, following, hidden[0, -1] @ words.t()


def _join(spans: Sequence[Span]) -> Span:
    layers = zip(*spans, strict=True)
    return [(torch.cat([k for k, _ in layer], 2), torch.cat([v for _, v in layer], 2)) for layer in layers]


def _cut(span: Span, begin: int, end: int) -> Span:
    return [(k[:, :, begin:end], v[:, :, begin:end]) for k, v in span]


def patched(blind: Span, conditioned: Span, rank: int) -> Span:
    """Blind keys and values plus the deficit cut to a rank: one SVD over layers 1 and up, keys and values side by side.

    Both spans must be rotated to the same positions. Layer 0 is untouched: it never depends on what stands in front.
    """
    pairs = zip(blind[1:], conditioned[1:], strict=True)
    deficit = [c - b for low, high in pairs for b, c in zip(low, high, strict=True)]
    matrix = torch.cat([d[0].transpose(0, 1).flatten(1) for d in deficit], 1)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    reduced = ((u[:, :rank] * s[:rank]) @ v[:rank]).chunk(len(deficit), 1)
    shape = blind[0][0].shape
    parts = [part.view(shape[2], shape[1], shape[3]).transpose(0, 1)[None] for part in reduced]
    layers = [(k + dk, v + dv) for (k, v), dk, dv in zip(blind[1:], parts[::2], parts[1::2], strict=True)]
    return [blind[0], *layers]


@torch.no_grad()
def answers(
    reader: Reader, item: Item, header: str, labels: bool, decoded: bool, rank: int, seed: int
) -> dict[str, Tensor]:
    """First-token logits of the item's first question under every arm."""
    pixels = [render(frame) for frame in item.frames]
    if decoded:
        pixels = through_clip(pixels, np.random.default_rng(seed))
    pictures = encode_pictures(reader.model.model.visual, torch.from_numpy(np.stack(pixels)))
    chunks: list[list[str | None]] = [[f"t={2 * i} s\n", PICTURE] if labels else [PICTURE] for i in range(len(pixels))]
    opening, nothing = header_text(header), pictures[:0]
    head, _, first, _ = reader.prefill([opening], nothing)
    whole, where, following, _ = reader.prefill([opening, *(piece for chunk in chunks for piece in chunk)], pictures)
    rotated_head = rotate_span(reader.text, head, where[:, :, : head[0][0].shape[2]])
    alone = [reader.prefill(c, pictures[i : i + 1], first, rotated_head)[0] for i, c in enumerate(chunks)]
    caches = {
        "reprefill": rotate_span(reader.text, whole, where),
        "blind": rotate_span(reader.text, _join([head, *alone]), where),
    }
    bounds = np.cumsum([span[0][0].shape[2] for span in (head, *alone)])
    spans = [_cut(caches["blind"], 0, int(bounds[0]))]
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        spans.append(patched(_cut(caches["blind"], begin, end), _cut(caches["reprefill"], begin, end), rank))
    caches["patch"] = _join(spans)
    query = [query_text(item.questions[0].text)]
    return {arm: reader.prefill(query, nothing, following, cache)[3] for arm, cache in caches.items()}


@dataclass
class Tally:
    """Sums over the items of one cell."""

    n: int = 0
    right: float = 0.0
    kl: float = 0.0


def check(
    reader: Reader,
    n: int,
    tasks: Sequence[Task] = TASKS,
    frames: Sequence[int] = (2, 3, 4, 5, 6),
    *,
    header: str = "You watch a camera.",
    labels: bool = True,
    decoded: bool = False,
    rank: int = 8,
    conflict: float = 0.8,
    faded: float = 0.3,
) -> dict[str, dict[str, Any]]:
    """Accuracy and mean KL to re-prefill of every arm, per task and number of frames ("all" pools them).

    `n` is the number of items a cell; `conflict` and `faded` are those of `sample_frames`.
    """
    cells: dict[str, dict[str, Tally]] = {}
    for task in tasks:
        for count in frames:
            if task == "order" and count < 3:
                continue
            for index in range(n):
                seed = HELD_OUT + 10_000 * count + index
                item = make_item(seed, task, count, conflict=conflict, faded=faded)
                logits = answers(reader, item, header, labels, decoded, rank, seed)
                word = item.questions[0].answer
                truth = reader.vocabulary.encode(word)[0]
                reference = logits["reprefill"].log_softmax(-1)
                for arm in ARMS:
                    kl = functional.kl_div(logits[arm].log_softmax(-1), reference, log_target=True, reduction="sum")
                    for cell in (f"{task}/{count}", f"{task}/all"):
                        tally = cells.setdefault(cell, {}).setdefault(arm, Tally())
                        tally.n, tally.right = tally.n + 1, tally.right + float(logits[arm].argmax() == truth)
                        tally.kl += float(kl)
    return {
        cell: {"n": arms["blind"].n}
        | {arm: {"accuracy": round(t.right / t.n, 4), "kl": round(t.kl / t.n, 4)} for arm, t in arms.items()}
        for cell, arms in cells.items()
    }


def main() -> None:
    """Command line of the check; prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python tools/train_tiny check", description="Check a checkpoint")
    parser.add_argument("--weights", type=Path, default=checkpoint_dir())
    parser.add_argument("--n", type=int, default=320, help="items per task and number of frames")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--frames", type=int, nargs="+", default=[2, 3, 4, 5, 6])
    parser.add_argument("--decoded", action="store_true", help="read the frames from a video file")
    parser.add_argument("--header", default="You watch a camera.")
    parser.add_argument("--no-labels", action="store_true")
    parser.add_argument("--tasks", choices=TASKS, nargs="+", default=TASKS)
    parser.add_argument("--conflict", type=float, default=0.8, help="share of items in which legends disagree")
    parser.add_argument("--faded", type=float, default=0.3, help="share of scene things drawn in a tint")
    options = parser.parse_args()
    figures = check(
        Reader(options.weights),
        options.n,
        options.tasks,
        options.frames,
        header=options.header,
        labels=not options.no_labels,
        decoded=options.decoded,
        rank=options.rank,
        conflict=options.conflict,
        faded=options.faded,
    )
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")

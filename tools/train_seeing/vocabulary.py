"""Vectors that a picture is made of, and the tokens that the language model gets in addition.

A picture of 8 x 8 cells has 16 x 16 vectors, four to a cell, in reading order: mark and colour above, mark and shape below. So
the answer to a question that ends with a mark stands right behind that mark in the picture, where pretrained models look first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ctxwin.tiny.sprites import COLORS, N_APPEARANCES, N_MARKS, N_SHAPES, SHAPES
from ctxwin.tiny.world import Frame

IMAGE, END = "<image>", "<|end|>"
MARKS = tuple(f" {mark:02d}?" for mark in range(N_MARKS))
"""Numbers with their question mark: a question ends in one token, which the model has to find again."""
OPENING = (
    "<|im_start|>", "Here", " is", " a", " list", " of", " things", " with", " their", " color", " and", " shape", ":", "\n",
)  # fmt: skip
PROMPT = tuple(f"<|see{place}|>" for place in range(len(OPENING)))
"""A learnt prompt in front of everything, which begins as the embeddings of `OPENING`."""
NEW_TOKENS = (IMAGE, END, *PROMPT, *MARKS)
TINTS = (" pale", " light", " faint", " faded")
TEMPLATE = (
    f"{''.join(PROMPT)}"
    "{% for message in messages %}{% if message.role == 'system' %}"
    "{% if message.content is string %}{{ message.content }}{% else %}{{ message.content[0].text }}{% endif %}{{ '\\n' }}"
    "{% elif message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type in ('image', 'image_url') %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% if message.role == 'assistant' %}<|end|>{{ '\\n' }}{% endif %}{% endfor %}"
)
"""A completion rather than a chat: the answer follows the last word of the question."""


def tokenizer_of(folder: Path) -> Any:
    """Return the language model's tokenizer with the new tokens behind its own."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    first = len(tokenizer)
    tokenizer.add_tokens([IMAGE, END, *PROMPT], special_tokens=True)
    tokenizer.add_tokens(list(MARKS))
    tokenizer.eos_token = END
    if tokenizer.convert_tokens_to_ids(list(NEW_TOKENS)) != list(range(first, first + len(NEW_TOKENS))):
        raise ValueError(f"{folder} must hold a tokenizer without the new tokens")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Vocabulary(nn.Module):
    """The learnt vectors, float32, all of the language model's width.

    Attributes:
        marks: of each mark in a question, [100, W], and in a picture, where the last stands for none, [101, W].
        above, below: added to a mark in front of a colour and of a shape, [W].
        appearances, shapes: [13, W] and [8, W].
        end: the row of the token that ends an answer, [W].
        prompt: the rows of `PROMPT`, [14, W].
    """

    def __init__(self, embeddings: Tensor, tokenizer: Any) -> None:
        super().__init__()

        def rows(words: Sequence[str]) -> nn.Parameter:
            ids = [tokenizer.encode(word, add_special_tokens=False)[0] for word in words]
            return nn.Parameter(embeddings[torch.tensor(ids)].clone())

        nouns = rows([f" {noun}" for noun in _NOUNS.split()])
        if len(nouns) < N_MARKS:
            raise ValueError(f"{N_MARKS} nouns are needed, got {len(nouns)}")
        self.question = nn.Parameter(nouns[:N_MARKS].detach().clone())
        self.marks = nn.Parameter(torch.cat([nouns[:N_MARKS], rows(["."])]).detach().clone())
        self.above = nn.Parameter(0.3 * rows(["color"])[0].detach())
        self.below = nn.Parameter(0.3 * rows(["shape"])[0].detach())
        self.appearances = rows([*(f" {c}" for c in COLORS), *TINTS])
        self.shapes = rows([f" {s}" for s in SHAPES])
        self.end = nn.Parameter(rows(["<|im_end|>"])[0].detach())
        self.prompt = rows(OPENING)
        if (len(self.appearances), len(self.shapes)) != (N_APPEARANCES, N_SHAPES):
            raise ValueError("the world has other colours or shapes than this vocabulary")

    def picture(self, frame: Frame) -> Tensor:
        """Return the vectors of a frame, [256, W]."""
        mark = torch.from_numpy(np.where(frame.mark < 0, N_MARKS, frame.mark))
        marks, color, shape = self.marks[mark], self.appearances[frame.appearance], self.shapes[frame.shape]
        upper = torch.stack([marks + self.above, color], 2)
        lower = torch.stack([marks + self.below, shape], 2)
        return torch.stack([upper, lower], 1).reshape(-1, marks.shape[-1])

    def new_rows(self) -> Tensor:
        """Return the embeddings of `NEW_TOKENS`, [T, W]; a picture's token is replaced, so its row is zero."""
        return torch.cat([torch.zeros_like(self.end)[None], self.end[None], self.prompt, self.question])


_NOUNS = (
    "table chair river mountain garden window bottle pencil paper bridge forest castle engine market school church "
    "hospital island village captain doctor teacher farmer soldier king queen prince horse tiger lion rabbit snake "
    "eagle whale shark dragon apple banana lemon cherry tomato potato carrot onion bread butter cheese sugar coffee "
    "juice water wine salt pepper honey silver copper iron steel glass stone wood leather cotton wool silk rubber "
    "plastic clock mirror lamp candle basket blanket pillow curtain carpet shelf drawer closet kitchen bedroom "
    "bathroom attic hammer nail saw rope chain anchor sail ship train truck bicycle airplane rocket satellite "
    "telescope camera radio phone computer keyboard "
)
"""Where the vectors of marks begin: words that the model tells apart."""

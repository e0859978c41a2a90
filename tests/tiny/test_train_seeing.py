"""The trainer of the model that sees: both stages name the same vector for a patch, and the template a prompt that they know."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from jinja2 import Environment

from ctxwin.tiny.sprites import N_MARKS
from ctxwin.tiny.world import Frame, sample_frames
from train_seeing.model import WEIGHTS
from train_seeing.tower import losses
from train_seeing.vocabulary import NEW_TOKENS, PROMPT, TEMPLATE, Vocabulary


class Words:
    """A tokenizer of whole words, in the order in which they come."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def encode(self, word: str, **_: Any) -> list[int]:
        return [self.known.setdefault(word, len(self.known))]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    vectors = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    return Vocabulary(vectors, Words()).requires_grad_(False)


@pytest.fixture(scope="module")
def frames() -> tuple[Frame, ...]:
    return sample_frames(np.random.default_rng(0), ["legend", "scene"], marks_per_frame=20)


def labels_of(frame: Frame) -> torch.Tensor:
    mark = np.where(frame.mark < 0, N_MARKS, frame.mark)
    return torch.from_numpy(np.stack([frame.shape, frame.appearance, mark], -1).reshape(1, 64, 3))


def test_a_perfect_tower_has_no_loss(vocabulary: Vocabulary, frames: tuple[Frame, ...]) -> None:
    for frame in frames:
        vectors = vocabulary.picture(frame)[None]
        loss, right = losses(vectors, labels_of(frame), vocabulary)
        assert right == [1.0] * 4 and loss < 1
        loss, right = losses(vectors.flip(1), labels_of(frame), vocabulary)
        assert max(right) < 1.0 and loss > 4, "every patch counts"


def test_a_marks_answer_stands_right_behind_it(vocabulary: Vocabulary, frames: tuple[Frame, ...]) -> None:
    frame = frames[0]
    grid = vocabulary.picture(frame).unflatten(0, (16, 16))
    for row, column in np.argwhere(frame.mark >= 0):
        mark = vocabulary.marks[frame.mark[row, column]]
        color, shape = (
            vocabulary.appearances[frame.appearance[row, column]],
            vocabulary.shapes[frame.shape[row, column]],
        )
        assert torch.equal(grid[2 * row, 2 * column], mark + vocabulary.above)
        assert torch.equal(grid[2 * row, 2 * column + 1], color)
        assert torch.equal(grid[2 * row + 1, 2 * column], mark + vocabulary.below)
        assert torch.equal(grid[2 * row + 1, 2 * column + 1], shape)


def test_new_rows_are_as_many_as_new_tokens(vocabulary: Vocabulary) -> None:
    assert vocabulary.new_rows().shape == (len(NEW_TOKENS), 32)


def test_the_template_writes_what_was_trained() -> None:
    render = Environment().from_string(TEMPLATE).render
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "color of 17?"}]}
    system = {"role": "system", "content": "You watch a camera."}
    start = "".join(PROMPT)
    assert render(messages=[user], add_generation_prompt=True) == f"{start}<image>color of 17?"
    turns = [system, user, {"role": "assistant", "content": " red"}, {"role": "user", "content": "shape of 17?"}]
    expected = f"{start}You watch a camera.\n<image>color of 17? red<|end|>\nshape of 17?"
    assert render(messages=turns, add_generation_prompt=True) == expected


def test_the_weights_are_small() -> None:
    assert WEIGHTS.stat().st_size < 25e6

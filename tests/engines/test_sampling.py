"""Sampling of the transformers engine: what may be drawn, penalties, seeds; and the defaults of chats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ctxwin import Chunk, Window
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.hf.model import filter_logits
from ctxwin.engines.sampling import Sampling
from ctxwin.tiny import checkpoint_dir
from langchain_ctxwin.decoding import ChatDecoding


@pytest.fixture(scope="module")
def vague() -> Iterator[Window]:
    """A window over text that leaves the model unsure of everything."""
    with HFEngine(checkpoint_dir()) as engine, Window(engine, "h") as window:
        window.append(Chunk.text("a story that goes on "))
        yield window


def drawn(window: Window, **options: Any) -> list[str]:
    """Eight choices at a high temperature."""
    answer = window.ask("go on", 12, **{"temperature": 2.0, "seed": 5, "n": 8, **options})
    return [one.text for one in (answer, *answer.others)]


@pytest.mark.parametrize(
    "only",
    [{"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-6}, {"temperature": 5e-324, "top_p": 0.9}],
)
def test_one_token_to_draw_from_is_greedy(vague: Window, only: dict[str, Any]) -> None:
    assert set(drawn(vague, **only)) == {vague.ask("go on", 12).text}


def test_a_seed_gives_the_same_answers_again(vague: Window) -> None:
    once, again, other = (drawn(vague, seed=seed) for seed in (5, 5, 6))
    assert once == again != other and once[1:] == other[:-1]  # a choice's seed is the one before it and one
    assert len(set(once)) > 1 and drawn(vague, top_k=-1) == drawn(vague, top_k=0) == once


def test_what_may_be_drawn_is_what_transformers_allows() -> None:
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    torch.manual_seed(0)
    for top_p, top_k, min_p in ((0.7, 0, 0.0), (1.0, 5, 0.0), (1.0, 0, 0.2), (0.5, 9, 0.05)):
        logits = 3 * torch.randn(50)
        expected = logits[None] / 0.8
        for wanted, warper in (
            (min_p > 0, MinPLogitsWarper(min_p)),
            (top_k > 0, TopKLogitsWarper(max(top_k, 1))),
            (top_p < 1, TopPLogitsWarper(top_p)),
        ):
            expected = warper(None, expected) if wanted else expected
        made = filter_logits(logits, Sampling(temperature=0.8, top_p=top_p, top_k=top_k, min_p=min_p), [])
        assert torch.equal(made.isfinite(), expected[0].isfinite()) and 1 <= made.isfinite().sum() < 50
        assert torch.equal(made[made.isfinite()], logits[made.isfinite()])


def test_penalties_count_what_the_answer_has() -> None:
    logits = torch.zeros(4)
    made = filter_logits(logits, Sampling(presence_penalty=0.5, frequency_penalty=0.25), [1, 1, 3])
    assert made.tolist() == [0.0, -1.0, 0.0, -0.75]


def test_chats_that_say_nothing_take_the_defaults() -> None:
    defaults = {"temperature": 0.1, "top_p": 0.8, "repetition_penalty": 1.05, "top_k": 20, "max_tokens": 7}
    made = ChatDecoding().sampling(defaults)
    assert (made.temperature, made.top_p, made.repetition_penalty, made.top_k) == (0.1, 0.8, 1.05, 20)
    assert ChatDecoding().sampling({}) == Sampling(temperature=1.0)
    said = ChatDecoding(temperature=0, top_p=1, top_k=-1, repetition_penalty=1).sampling(defaults)
    assert (said.temperature, said.top_p, said.repetition_penalty, said.top_k) == (0, 1, 1, -1)
    for wrong in ({"n": 2, "temperature": 0}, {"n": 129}, {"top_logprobs": 3}, {"stop": ["x"] * 17}):
        with pytest.raises(
            ValueError, match=next(iter(wrong)) if "top_logprobs" not in wrong else "logprobs must be true"
        ):
            ChatDecoding(**wrong).sampling({})

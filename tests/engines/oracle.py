"""Transformers' own path from a whole prompt to an answer: an oracle that shares no code with the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from engines.conformance import QUERY, laid


def real_answer(
    folder: Path, ids: list[int], attention: str | None = None, **media: Any
) -> tuple[list[int], torch.Tensor]:
    """Ids and first-token log-probabilities of transformers' own generate on the whole prompt.

    ``attention``: transformers' implementation of it; None: its default.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    loader = AutoModelForImageTextToText if media else AutoModelForCausalLM
    model = loader.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **media,
    )  # fmt: skip
    new = [i for i in out.sequences[0, len(ids) :].tolist() if i != 2]
    return new, out.logits[0][0].log_softmax(-1)


def teacher_forced(engine: HFEngine, layout: Sequence[Segment], query: Encoded, answer: Sequence[int]) -> torch.Tensor:
    """Log-probabilities before each answer token given the earlier ones, float32 ``[len(answer), vocab]``, one forward each."""
    rows = []
    for count in range(len(answer)):
        behind = np.tile(np.arange(query.advance, query.advance + count, dtype=np.int64), (3, 1))
        positions = np.concatenate([query.positions, behind], axis=1)
        asked = Encoded("", (*query.token_ids, *answer[:count]), positions, query.advance + count)
        rows.append(engine.logits(layout, asked).log_softmax(-1))
    return torch.stack(rows)


def assert_answers(
    engine: HFEngine, encoded: list[Encoded], want: tuple[list[int], torch.Tensor], tolerance: float = 1e-5
) -> None:
    query = engine.encode_query(QUERY)
    got = engine.generate(laid(encoded), query, Sampling(max_tokens=6, logprobs=-1))
    assert got.token_ids == want[0]
    logprobs = torch.tensor([got.logprobs[i] for i in range(len(want[1]))])
    assert float((logprobs - want[1]).abs().max()) <= tolerance

"""Asking behind a memory: the next token, an answer, and how an arm's distribution follows re-prefill's answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ctxwin.engines.base import Encoded
from ctxwin.evals.decoder import Decoder, Memory, concatenated

if TYPE_CHECKING:
    from ctxwin.evals.decoder import Watch


class Policy(ABC):
    """Drops KV while an answer is generated. One instance serves one answer of one item."""

    @property
    def watch(self) -> Watch | None:
        """Sees the attention weights of every pass; None does without."""
        return None

    @abstractmethod
    def prompted(self, memory: Memory) -> Memory:
        """What is kept of header, placed chunks and question, before the first token is chosen."""

    @abstractmethod
    def stepped(self, memory: Memory) -> Memory:
        """What is kept after the KV of one generated token came in behind."""


@dataclass
class Continuation:
    """An answer as it was generated or forced.

    Attributes:
        token_ids: the tokens, without the ending one.
        logits: float32 ``[n, vocab]``, what each token (and the end) was chosen from.
        peak_bytes: most bytes of KV held at once.
    """

    token_ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    peak_bytes: int = 0


def continue_(
    decoder: Decoder,
    memory: Memory,
    query: Encoded,
    begin: int,
    *,
    max_tokens: int = 1,
    forced: Sequence[int] | None = None,
    policy: Policy | None = None,
) -> Continuation:
    """Asks ``query`` behind a memory of one item.

    Args:
        decoder: the model.
        memory: header and placed chunks.
        query: the question.
        begin: its position.
        max_tokens: most tokens to generate, greedily.
        forced: tokens to follow instead of the model's own choice; ``logits`` then has one row each.
        policy: drops KV on the way.

    Cost: one pass over the question and one a token.
    """
    ends = decoder.engine._checkpoint.eos
    watch = None if policy is None else policy.watch
    made = Continuation()
    held, hidden = decoder.append(decoder.tokens([query], begin), memory, watch)
    made.peak_bytes = held.nbytes
    if policy is not None:
        held = policy.prompted(held)
    at = begin + query.advance
    count = max_tokens if forced is None else len(forced)
    for step in range(count):
        made.logits.append(decoder.logits(hidden[:, -1:])[0, 0])
        token = int(made.logits[-1].argmax()) if forced is None else int(forced[step])
        if forced is None and token in ends:
            return made
        made.token_ids.append(token)
        if step + 1 == count:
            break
        held, hidden = decoder.append(decoder.tokens([_word(token)], at + step), held, watch)
        made.peak_bytes = max(made.peak_bytes, held.nbytes)
        if policy is not None:
            held = policy.stepped(held)
    return made


def forced_logits(
    decoder: Decoder, memory: Memory, query: Encoded, begin: int, answer: Sequence[int], policy: Policy | None = None
) -> Tensor:
    """Logits before each token of ``answer`` given the earlier ones, float32 ``[len(answer), vocab]``.

    One pass over question and answer where nothing is dropped on the way, else one a token.
    Raises ValueError for an empty answer.
    """
    if not answer:
        raise ValueError("the answer must hold at least one token, got none")
    if policy is not None:
        return torch.stack(continue_(decoder, memory, query, begin, forced=answer, policy=policy).logits)
    asked = decoder.tokens([query], begin)
    words = [decoder.tokens([_word(token)], begin + query.advance + i) for i, token in enumerate(answer[:-1])]
    row = concatenated([asked, *words])
    _, hidden = decoder.append(row, memory)
    return decoder.logits(hidden[:, -len(answer) :])[0]


def _word(token: int) -> Encoded:
    return Encoded("", (token,), np.zeros((3, 1), dtype=np.int64), 1)

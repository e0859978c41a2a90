"""Questions behind a memory, in batches: greedy answers, and what is said along a given answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from ctxwin.engines.base import Encoded
from ctxwin.evals.decoder import Decoder, Memory, concatenated


class Asker:
    """Asks one question an item.

    Args:
        decoder: the model.
        max_tokens: longest answer.
    """

    def __init__(self, decoder: Decoder, max_tokens: int) -> None:
        self.decoder = decoder
        self.max_tokens = max_tokens
        self._ends = decoder.engine._checkpoint.eos

    def greedy(self, memory: Memory, texts: Sequence[str], begin: int) -> list[list[int]]:
        """Answers by item, the ending token included where the model ends by itself: what `forced` then follows.

        Cost: one pass over the questions of each length, and one a token.
        """
        answers: list[list[int]] = [[] for _ in texts]
        for some, encoded in self._by_length(texts):
            held, hidden = self.decoder.append(self.decoder.tokens(encoded, begin), _of(memory, some))
            at = begin + encoded[0].advance
            for step in range(self.max_tokens):
                tokens = self.decoder.logits(hidden[:, -1:])[:, 0].argmax(-1).tolist()
                for b, token in zip(some, tokens, strict=True):
                    if not answers[b] or answers[b][-1] not in self._ends:
                        answers[b].append(int(token))
                if step + 1 == self.max_tokens or all(answers[b][-1] in self._ends for b in some):
                    break
                fed = self.decoder.tokens([_words([token]) for token in tokens], at + step)
                held, hidden = self.decoder.append(fed, held)
        return answers

    def forced(
        self, memory: Memory, texts: Sequence[str], begin: int, answers: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Log-probabilities float64 ``[n, vocab]`` by item, from which each of its n answer tokens was chosen.

        Cost: one pass over the questions of each length with their answers behind.
        """
        found: list[Tensor | None] = [None] * len(texts)
        for some, encoded in self._by_length(texts):
            longest = max(len(answers[b]) for b in some)
            asked = self.decoder.tokens(encoded, begin)
            if longest > 1:
                # What stands behind an item's own answer is not seen by what is read, so that any token fills up.
                rows = [[*answers[b], *[0] * longest][: longest - 1] for b in some]
                asked = concatenated(
                    [asked, self.decoder.tokens([_words(row) for row in rows], begin + encoded[0].advance)]
                )
            _, hidden = self.decoder.append(asked, _of(memory, some))
            logits = self.decoder.logits(hidden[:, -longest:])
            for b, row in zip(some, logits, strict=True):
                found[b] = row[: len(answers[b])].double().log_softmax(-1)
        return [row for row in found if row is not None]

    def text(self, answer: Sequence[int]) -> str:
        """An answer's text, without its end."""
        return self.decoder.engine.decode([t for t in answer if t not in self._ends]).strip()

    def _by_length(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[Encoded]]]:
        encoded = [self.decoder.query(text) for text in texts]
        for length in sorted({e.tokens for e in encoded}):
            some = [b for b, e in enumerate(encoded) if e.tokens == length]
            yield some, [encoded[b] for b in some]


def divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other) in nats, float64 ``[n]``, of log-probabilities ``[n, vocab]``."""
    return (reference.exp() * (reference - other)).nan_to_num(0.0).sum(-1).clamp_min(0.0)


def _of(memory: Memory, items: Sequence[int]) -> Memory:
    return memory if len(items) == memory.items else Memory(memory.k[:, list(items)], memory.v[:, list(items)])


def _words(ids: Sequence[int]) -> Encoded:
    positions = np.tile(np.arange(len(ids), dtype=np.int64), (3, 1))
    return Encoded("", tuple(int(i) for i in ids), positions, len(ids))

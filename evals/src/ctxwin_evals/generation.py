"""Generation from a memory: the next token, an answer, and an arm's distribution along re-prefill's answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ctxwin.engines.segments import Encoded
from ctxwin_evals.decoder import Decoder, Held, Memory, concatenated
from ctxwin_evals.elastic import Keeper, Policy


class Reading:
    """A batch of items of one shape that is asked and answered, one pass at a time.

    Args:
        decoder: the model.
        memory: system prompt and placed chunks.
        policy: drops KV on the way.

    ``held`` is the KV, question and answer so far included; ``at`` the position of the next token.
    """

    def __init__(self, decoder: Decoder, memory: Memory, policy: Policy | None = None) -> None:
        self.decoder = decoder
        self.held = Held(memory)
        self.at = 0
        self._keeper = None if policy is None else Keeper(policy)
        self._last = torch.empty(0)

    def ask(self, queries: Sequence[Encoded], begin: int) -> None:
        """One pass over a question an item, all of one length, at position ``begin``."""
        self._pass(queries, begin)
        self.at = begin + queries[0].advance
        if self._keeper is not None:
            self._keeper.prompted(self.held)

    def feed(self, tokens: Sequence[int]) -> None:
        """One pass over one more token an item."""
        self._pass([_word(token) for token in tokens], self.at)
        self.at += 1
        if self._keeper is not None:
            self._keeper.stepped(self.held)

    def logits(self) -> Tensor:
        """Logits of the next token, float32 ``[B, vocab]``, on the CPU."""
        return self.decoder.logits(self._last)[:, 0]

    def _pass(self, rows: Sequence[Encoded], start: int) -> None:
        tokens = self.decoder.tokens(rows, start)
        first_slot = self.held.slots
        memory = self.held.grow(tokens.count)
        watch = None if self._keeper is None else self._keeper.watch
        with torch.inference_mode():
            slots = torch.arange(first_slot, self.held.slots)
            self._last = self.decoder.run(tokens, memory, slots, watch=watch)[:, -1:]


@dataclass
class Continuation:
    """An answer as it was generated or forced.

    Attributes:
        token_ids: the tokens, without the ending one.
        logits: float32 ``[n, vocab]``, what each token (and the end) was chosen from.
        end: the token that ended it; None where it was cut at its longest, or forced.
    """

    token_ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    end: int | None = None

    @property
    def whole(self) -> list[int]:
        """The tokens, the ending one included."""
        return self.token_ids if self.end is None else [*self.token_ids, self.end]


def generate(
    decoder: Decoder,
    memory: Memory,
    queries: Sequence[Encoded],
    begin: int,
    *,
    max_tokens: int = 1,
    forced: Sequence[Sequence[int]] | None = None,
    policy: Policy | None = None,
) -> list[Continuation]:
    """Ask one question an item given a memory (system prompt and placed chunks), all of one length, at position ``begin``.

    Answers are greedy, or follow ``forced`` tokens, as many for each item, with a row of ``logits`` each. A ``policy`` drops KV.

    Cost: one pass over the questions and one for each token, until every item has ended.
    """
    ends = decoder.engine.ends
    continuations = [Continuation() for _ in queries]
    reading = Reading(decoder, memory, policy)
    reading.ask(queries, begin)
    count = max_tokens if forced is None else len(forced[0])
    for step in range(count):
        logits = reading.logits()
        chosen = logits.argmax(-1).tolist() if forced is None else [int(row[step]) for row in forced]
        for one, row, token in zip(continuations, logits, chosen, strict=True):
            if one.end is not None:
                continue
            one.logits.append(row)
            if forced is None and token in ends:
                one.end = token
            else:
                one.token_ids.append(token)
        if all(one.end is not None for one in continuations):
            break
        if step + 1 < count:
            reading.feed(chosen)
    return continuations


def forced_logits(
    decoder: Decoder,
    memory: Memory,
    queries: Sequence[Encoded],
    begin: int,
    answers: Sequence[Sequence[int]],
    policy: Policy | None = None,
) -> list[Tensor]:
    """Logits before each token of an item's answer given the earlier ones, float32 ``[len(answer), vocab]`` each.

    One pass over questions (all of one length) and answers where nothing is dropped on the way, else one for each token.
    Raises ValueError for an empty answer.
    """
    if not all(answers):
        raise ValueError("the answer must hold at least one token, got none")
    if policy is not None:
        continuations = generate(decoder, memory, queries, begin, forced=answers, policy=policy)
        return [torch.stack(one.logits) for one in continuations]
    longest = max(map(len, answers))
    parts = [decoder.tokens(queries, begin)]
    for i in range(longest - 1):
        # Nothing that is read sees the slots after an item's own answer, so any token may pad them.
        words = [_word(answer[i] if i < len(answer) else 0) for answer in answers]
        parts.append(decoder.tokens(words, begin + queries[0].advance + i))
    _, hidden = decoder.append(concatenated(parts), memory)
    logits = decoder.logits(hidden[:, -longest:])
    return [row[: len(answer)] for row, answer in zip(logits, answers, strict=True)]


def _word(token: int) -> Encoded:
    return Encoded("", (token,), np.zeros((3, 1), dtype=np.int64), 1)

"""How well answers follow a thinned-out cache: perplexity and ROUGE-L over KV budgets (Elastic Cache, figure 2).

Perplexity (equation 4) is of given answers, teacher-forced; ROUGE-L F1 (equation 5) is of greedy answers, against the full
cache's own greedy answer (section 4.1). Where an exchange has several turns, questions are forced and answers alternate
with them; only answers count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch

from ctxwin.evals.arms.compress import attention_of, thinned
from ctxwin.evals.decoder import Decoder, Memory
from ctxwin.evals.elastic import METHODS, Policy
from ctxwin.evals.generation import Reading
from ctxwin.evals.group import Group
from ctxwin.evals.metrics import rouge_l
from ctxwin.evals.patching import Patcher
from ctxwin.evals.stats import bootstrap_mean, bootstrap_ratio

from .ablations import ABLATIONS
from .exchanges import Exchange, Script, script

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

BATCH = 32
FULL = "full"
POLICIES = METHODS | ABLATIONS
Moment = Literal["prompt", "window"]


@dataclass(frozen=True)
class QualitySettings:
    """What is measured.

    Attributes:
        methods: of `METHODS` and `ABLATIONS`.
        budgets: KV budgets, 0..1.
        moment: ``prompt``: the paper's, behind the first question; ``window``: the chunks, before it.
        system_prompt: system prompt.
        max_tokens: longest generated answer; answers of several turns are as long as the given ones.
    """

    methods: tuple[str, ...] = tuple(METHODS)
    budgets: tuple[float, ...] = (1.0, 0.8, 0.6, 0.5, 0.4, 0.2)
    moment: Moment = "prompt"
    system_prompt: str = "You watch a camera."
    max_tokens: int = 128

    def __post_init__(self) -> None:
        unknown = [m for m in self.methods if m not in POLICIES]
        if unknown or not self.methods:
            raise ValueError(f"methods must be of {', '.join(POLICIES)}, got {', '.join(unknown) or 'none'}")
        for name, values in (("methods", self.methods), ("budgets", self.budgets)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} must be named once each, got {', '.join(map(str, values))}")
        if not self.budgets or any(not 0 <= b <= 1 for b in self.budgets):
            raise ValueError(f"budgets must be numbers 0..1, got {list(self.budgets)}")
        if self.moment not in ("prompt", "window"):
            raise ValueError(f"moment must be prompt or window, got {self.moment!r}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")


@dataclass(frozen=True)
class Read:
    """One exchange under one cache.

    Attributes:
        nll: summed negative log-likelihood of the given answers in nats.
        tokens: how many tokens they have.
        answers: generated, one a turn.
        slots: most KV slots held at once behind the prompt, by layer.
    """

    nll: float
    tokens: int
    answers: tuple[str, ...]
    slots: int


@dataclass
class _Batch:
    """Exchanges of one shape."""

    decoder: Decoder
    settings: QualitySettings
    exchanges: Sequence[Exchange]
    scripts: Sequence[Script]
    group: Group = field(init=False)

    def __post_init__(self) -> None:
        items = [exchange.item(b) for b, exchange in enumerate(self.exchanges)]
        self.group = Group(self.decoder, items, Patcher(self.decoder.spec), self.settings.system_prompt)

    @cached_property
    def exact(self) -> Memory:
        """Header and placed chunks."""
        return self.group.memory(self.group.exact)

    def read(self, method: str, budget: float) -> list[Read]:
        """Each exchange, its answers forced and then generated."""
        memory, policy = self._served(method, budget)
        nll, _ = self._forced(memory, policy)
        answers, slots = self._generated(memory, policy)
        counts = [sum(map(len, s.answers)) for s in self.scripts]
        return [Read(n, c, a, slots) for n, c, a in zip(nll, counts, answers, strict=True)]

    def _served(self, method: str, budget: float) -> tuple[Memory, Policy | None]:
        if method == FULL:
            return self.exact, None
        kind: type[Policy] = POLICIES[method]
        if self.settings.moment == "prompt":
            return self.exact, kind(budget, attention_of(self.group, kind.attention))
        kept, policy = thinned(kind, budget, self.group)
        lead = self.group.behind_system_prompt(len(self.group))
        return Memory(torch.cat([lead.k, kept.k], 3), torch.cat([lead.v, kept.v], 3)), policy

    def _asked(self, memory: Memory, policy: Policy | None) -> Reading:
        reading = Reading(self.decoder, memory, policy)
        reading.ask([self.decoder.query(e.turns[0].prompt) for e in self.exchanges], self.group.begin)
        return reading

    def _forced(self, memory: Memory, policy: Policy | None) -> tuple[list[float], Reading]:
        """Negative log-likelihood of the given answers, token after token."""
        reading = self._asked(memory, policy)
        nll = torch.zeros(len(self.exchanges), dtype=torch.float64)
        for turn in range(len(self.scripts[0].answers)):
            last = turn + 1 == len(self.scripts[0].answers)
            for at in range(len(self.scripts[0].answers[turn])):
                tokens = [s.answers[turn][at] for s in self.scripts]
                chosen = torch.tensor(tokens)[:, None]
                nll -= reading.logits().double().log_softmax(-1).gather(1, chosen)[:, 0]
                if not last or at + 1 < len(self.scripts[0].answers[turn]):
                    reading.feed(tokens)
            if not last:
                self._on(reading, turn)
        return nll.tolist(), reading

    def _generated(self, memory: Memory, policy: Policy | None) -> tuple[list[tuple[str, ...]], int]:
        """Greedy answers, and the most slots held behind the prompt."""
        reading = self._asked(memory, policy)
        ends = self.decoder.engine.ends
        made: list[list[str]] = [[] for _ in self.exchanges]
        turns, slots = len(self.scripts[0].answers), reading.held.slots
        for turn in range(turns):
            # Several turns are batched, so their answers are as long as the given ones.
            limit = self.settings.max_tokens if turns == 1 else len(self.scripts[0].answers[turn])
            rows: list[list[int]] = [[] for _ in self.exchanges]
            for at in range(limit):
                chosen = [int(x) for x in reading.logits().argmax(-1)]
                if turns == 1 and all(c in ends or set(row) & ends for c, row in zip(chosen, rows, strict=True)):
                    break
                for row, token in zip(rows, chosen, strict=True):
                    row.append(token)
                if turn + 1 < turns or at + 1 < limit:
                    reading.feed(chosen)
                    slots = max(slots, reading.held.slots)
            for texts, row in zip(made, rows, strict=True):
                texts.append(self._text(row))
            if turn + 1 < turns:
                slots = max(slots, self._on(reading, turn))
        return [tuple(texts) for texts in made], slots

    def _on(self, reading: Reading, turn: int) -> int:
        """Feeds the end of a turn and the next question; the most slots held meanwhile."""
        most = 0
        for at in range(len(self.scripts[0].between[turn])):
            reading.feed([s.between[turn][at] for s in self.scripts])
            most = max(most, reading.held.slots)
        return most

    def _text(self, row: Sequence[int]) -> str:
        """A generated answer, up to its end."""
        ends = self.decoder.engine.ends
        stop = next((i for i, token in enumerate(row) if token in ends), len(row))
        text: str = self.decoder.engine.decode(row[:stop])
        return text.strip()


def measure_quality(
    engine: HFEngine,
    exchanges: Sequence[Exchange],
    settings: QualitySettings,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Reads every exchange under every method and budget.

    Returns ``{"config", "full": cell, "methods": {method: {budget: cell}}}``; a cell holds ``ppl``, ``rouge_l``, ``same``
    (share of turns answered as by the full cache), ``right`` (as given) and ``kv_share`` (most slots held behind the
    prompt over the full cache's), with intervals of 95 % over exchanges. ``progress`` is called with the number of
    exchanges that were read.

    Cost: two passes a token of every exchange, method and budget.
    """
    decoder = Decoder(engine)
    settings_of = [(FULL, 1.0), *((m, b) for m in settings.methods for b in settings.budgets)]
    found: dict[tuple[str, float], list[Read]] = {key: [] for key in settings_of}
    order: list[Exchange] = []
    for part in _batches(engine, exchanges):
        batch = _Batch(decoder, settings, [e for e, _ in part], [s for _, s in part])
        order += batch.exchanges
        for method, budget in settings_of:
            found[method, budget] += batch.read(method, budget)
            progress(len(part))
    full = found[FULL, 1.0]
    cells = {key: _cell(order, reads, full) for key, reads in found.items()}
    return {
        "config": {**asdict(settings), "exchanges": len(order), "answer_tokens": sum(r.tokens for r in full)},
        "full": cells[FULL, 1.0],
        "methods": {m: {f"{b:g}": cells[m, b] for b in settings.budgets} for m in settings.methods},
        "answers": [
            {"name": e.name, "given": [t.answer for t in e.turns], "full": list(full[i].answers)}
            | {f"{m}:{b:g}": list(found[m, b][i].answers) for m in settings.methods for b in settings.budgets}
            for i, e in enumerate(order)
        ],
    }


def _batches(engine: HFEngine, exchanges: Sequence[Exchange]) -> Iterator[list[tuple[Exchange, Script]]]:
    """Exchanges that are fed alike. Answers of one token can share passes, longer ones may end anywhere: each alone."""
    shapes: dict[object, list[tuple[Exchange, Script]]] = {}
    for i, exchange in enumerate(exchanges):
        made = script(engine, exchange)
        kinds = tuple(engine.encode(c).positions.tobytes() for c in exchange.load())
        first = engine.encode_query(exchange.turns[0].prompt).tokens
        alone = i if any(len(a) > 1 for a in made.answers) or len(made.answers) == 1 else -1
        shapes.setdefault((made.shape, kinds, first, alone), []).append((exchange, made))
    for same in shapes.values():
        for at in range(0, len(same), BATCH):
            yield same[at : at + BATCH]


def _cell(exchanges: Sequence[Exchange], reads: Sequence[Read], full: Sequence[Read]) -> dict[str, Any]:
    names = [e.name for e in exchanges]
    nll, tokens = [r.nll for r in reads], [r.tokens for r in reads]
    rouge = [rouge_l(" ".join(f.answers), " ".join(r.answers)) for r, f in zip(reads, full, strict=True)]
    turns = sum(len(r.answers) for r in reads)
    same = sum(a == b for r, f in zip(reads, full, strict=True) for a, b in zip(r.answers, f.answers, strict=True))
    right = sum(
        a == t.answer for r, e in zip(reads, exchanges, strict=True) for a, t in zip(r.answers, e.turns, strict=True)
    )
    loss_ci = bootstrap_ratio(nll, tokens, names)
    return {
        "ppl": math.exp(math.fsum(nll) / sum(tokens)),
        "ppl_ci95": None if loss_ci is None else [math.exp(x) for x in loss_ci],
        "rouge_l": math.fsum(rouge) / len(rouge),
        "rouge_l_ci95": _listed(bootstrap_mean(rouge, names)),
        "same": same / turns,
        "right": right / turns,
        "kv_share": sum(r.slots for r in reads) / sum(f.slots for f in full),
    }


def _listed(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)

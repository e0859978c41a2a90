"""Measuring: what an arm serves for an item, how the model then answers, and how far that is from a re-prefill.

`Measurer.samples` is the one place where arms meet items. A run (`ctxwin_evals.run`) keeps its samples on disk, the probe
(`ctxwin_evals.probe`) judges them as they come.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Any, ClassVar

import numpy as np
import torch

from ctxwin.errors import BudgetExceeded
from ctxwin.kv.layout import SpanKV
from ctxwin_evals.arms import REFERENCE, Arm, Served
from ctxwin_evals.decoder import Decoder, Memory
from ctxwin_evals.elastic import Policy
from ctxwin_evals.generation import forced_logits, generate
from ctxwin_evals.group import Group
from ctxwin_evals.items import Item, grouped
from ctxwin_evals.metrics import kl_divergence
from ctxwin_evals.patching import Patcher
from ctxwin_evals.samples import Sample

BATCH = 16
"""Contexts that share a forward, at most."""
_DIGITS = 6
_COSTS = ("stored", "over", "computed", "forwards", "encodes")


@dataclass
class Reply:
    """Answer of the model about one item, given the KV of one arm.

    Attributes:
        logits: of the next token, float32 ``[vocab]``, or what else `Measurer.divergence` compares.
        answer: its greedy answer's text.
        token_ids: the answer's tokens, along which other arms are read.
        forced: logits along the reference's tokens, ``[n, vocab]``; None where that has one token and they are ``logits``.
    """

    logits: Any
    answer: str
    token_ids: list[int] = field(default_factory=list)
    forced: Sequence[Any] | np.ndarray | None = None


class Measurer:
    """Puts arms to items on one model.

    Args:
        decoder: the model.
        patcher: compresses deficits.
        system_prompt: system prompt of items that have none of their own.
        along: read arms along the reference's answer, its end included, and generate their own answer only where they depart
            from it: one pass for an arm instead of one for each token. Distances of the KV by layer are left out.
    """

    divergence: Callable[[Any, Any], float] = staticmethod(kl_divergence)
    """KL of two next-token distributions, nats."""
    groups: ClassVar[type[Group]] = Group

    def __init__(self, decoder: Decoder, patcher: Patcher, system_prompt: str, *, along: bool = False) -> None:
        self.decoder = decoder
        self.patcher = patcher
        self.system_prompt = system_prompt
        self.along = along

    def group(self, items: Sequence[Item]) -> Group:
        """Items of one shape as a group; each context once."""
        firsts = [some[0] for some in grouped(items, _context).values()]
        return self.groups(self.decoder, firsts, self.patcher, self.system_prompt)

    def samples(
        self,
        items: Sequence[Item],
        arms: Sequence[Arm],
        *,
        base: Arm | None = None,
        reference: Arm = REFERENCE,
        control: Arm | None = None,
        group: Group | None = None,
        on_arm: Callable[[], None] = lambda: None,
    ) -> Iterator[Sample]:
        """Samples of every arm on every item, all of one shape, compared with ``reference``.

        ``base`` is what doing nothing would serve, the reference itself by default. The distance of ``control`` to each arm is
        also measured, along the reference's answer (``to_control``). ``group`` is that of the items where it exists already.
        ``on_arm`` is called once each arm has been served.

        A sample is unscored, with the reason, where the prompt is too long, an arm has no meaning for the item, or logits are
        NaN. Cost: the reference, and for each arm its serving and its answers.
        """
        limit, about = self.decoder.engine.spec.max_tokens, ""
        try:
            group = self.group(items) if group is None else group
        except BudgetExceeded as error:  # a text that the model could not read even alone
            total, about = error.needed, "at least "
        else:
            longest = max(self.decoder.query(item.query).tokens + item.max_tokens for item in items)
            total = group.system_prompt.tokens + group.context_tokens + longest
        if group is None or total > limit:
            reason = f"the prompt of {about}{total} tokens is longer than the model's {limit}"
            unread = {"placed": total, "tokens": total, "media": 0}
            for arm, item in product(arms, items):
                sizes = unread if group is None else self._sizes(item, group)
                yield self._sample(item, arm, **sizes, unscored=reason)
            return
        numbers = {_context(item): b for b, item in enumerate(group.items)}
        rows = [numbers[_context(item)] for item in items]
        base = reference if base is None else base
        results: dict[Arm, tuple[list[Served | None], list[Reply | None]]] = {}
        for arm in dict.fromkeys((reference, base, *([control] if control else []), *arms)):
            entries = arm.serve(group)
            selected = [entries[row] for row in rows]
            results[arm] = selected, self._ask(group, items, selected, results[reference][1] if results else None)
            if arm in arms:
                on_arm()
        for arm in arms:
            for i, item in enumerate(items):
                one, answer = results[arm][0][i], results[arm][1][i]
                first, base_answer = results[reference][1][i], results[base][1][i]
                sizes = self._sizes(item, group)
                if one is None or answer is None or first is None or base_answer is None:
                    yield self._sample(item, arm, **sizes, unscored="the arm has no meaning for this item")
                    continue
                extra = dict(one.extra)
                try:
                    distances = self._distances(first, answer), self._distances(first, base_answer)
                    if control is not None and (other := results[control][1][i]) is not None:
                        kl, along = self._distances(other, answer)
                        extra["to_control"] = kl if along is None else along
                except FloatingPointError as error:
                    yield self._sample(item, arm, **sizes, unscored=str(error))
                    continue
                layers = None if self.along or one.begin is not None else by_layer(one.spans, group.exact[rows[i]])
                figures: dict[str, Any] = {name: getattr(one, name) for name in _COSTS}
                figures |= {"answer": answer.answer, "reference": first.answer, "base": base_answer.answer}
                yield self._sample(
                    item,
                    arm,
                    **sizes,
                    **figures,
                    kl=distances[0][0],
                    base_kl=distances[1][0],
                    forced_kl=distances[0][1],
                    base_forced_kl=distances[1][1],
                    extra=extra,
                    by_layer=layers,
                )

    def text(self, token_ids: Sequence[int]) -> str:
        """An answer's text."""
        return str(self.decoder.engine.decode(token_ids)).strip()

    def _sample(self, item: Item, arm: Arm, **more: Any) -> Sample:
        same: dict[str, Any] = {name: getattr(item, name) for name in ("task", "index", "doc_id", "cluster", "target")}
        same |= {"case": item.digest, "frames": len(item.placed), "question": item.query, "meta": dict(item.meta)}
        return Sample(arm=arm.name, **same, **more)

    def _distances(self, reference: Reply, other: Reply) -> tuple[float, float | None]:
        """KL of the next token, and its mean along the reference's answer; None where that has one token."""
        kl = self.divergence(reference.logits, other.logits)
        if reference.forced is None or other.forced is None:
            return kl, None
        return kl, float(np.mean([self.divergence(p, q) for p, q in zip(reference.forced, other.forced, strict=True)]))

    def _sizes(self, item: Item, group: Group) -> dict[str, int]:
        tokens = group.system_prompt.tokens + group.context_tokens + self.decoder.query(item.query).tokens
        media = sum(len(group.chunks[0][f].media) for f in group.items[0].placed)
        return {"placed": group.context_tokens, "tokens": tokens, "media": media}

    def _ask(
        self, group: Group, items: Sequence[Item], served: Sequence[Served | None], first: Sequence[Reply | None] | None
    ) -> list[Reply | None]:
        """Ask each item's question given the spans served for it; ``first`` holds the reference's answers."""
        kinds: dict[object, list[tuple[int, Served]]] = {}
        for i, one in enumerate(served):
            if one is None:
                continue
            # These share passes: as many slots, a question of one length at one position, no policy.
            item, alone = items[i], i if one.policy is not None else -1
            slots, length = sum(span.tokens for span in one.spans), self.decoder.query(item.query).tokens
            kinds.setdefault((slots, _begin(one, group), length, item.max_tokens, alone), []).append((i, one))
        out: list[Reply | None] = [None] * len(items)
        for same in kinds.values():
            memory, some = group.memory([one.spans for _, one in same]), [items[i] for i, _ in same]
            references = [answer for i, _ in same if first is not None and (answer := first[i]) is not None]
            begin, policy = _begin(same[0][1], group), same[0][1].policy
            for (i, _), answer in zip(same, self._answers(memory, some, begin, policy, references), strict=True):
                out[i] = answer
        return out

    def _answers(
        self, memory: Memory, items: Sequence[Item], begin: int, policy: Policy | None, first: Sequence[Reply]
    ) -> list[Reply]:
        queries, longest = [self.decoder.query(item.query) for item in items], items[0].max_tokens
        if not self.along and longest == 1:
            logits = self.decoder.read(memory, [item.query for item in items], begin)
            return [Reply(row.numpy(), self.text([int(row.argmax())])) for row in logits]
        if not (self.along and first):
            continuations = generate(self.decoder, memory, queries, begin, max_tokens=longest, policy=policy)
            ids = [one.whole if self.along else one.token_ids for one in continuations]
            answers = [
                Reply(one.logits[0].numpy(), self.text(one.token_ids), token_ids)
                for one, token_ids in zip(continuations, ids, strict=True)
            ]
            along = [one.token_ids for one in first or answers]
            for j in (j for j, answer in enumerate(along) if len(answer) > 1):
                row = forced_logits(self.decoder, memory.of([j]), [queries[j]], begin, [along[j]], policy)[0]
                answers[j].forced = row.numpy()
            return answers
        rows = forced_logits(self.decoder, memory, queries, begin, [one.token_ids for one in first], policy)
        both = zip(first, (row.numpy() for row in rows), strict=True)
        answers = [replace(one, logits=row[0], forced=row) for one, row in both]
        if astray := [j for j, row in enumerate(rows) if row.argmax(-1).tolist() != first[j].token_ids]:
            part, questions = memory.of(astray), [queries[j] for j in astray]
            continuations = generate(self.decoder, part, questions, begin, max_tokens=longest, policy=policy)
            for j, one in zip(astray, continuations, strict=True):
                answers[j].answer = self.text(one.token_ids)
        return answers


def by_shape(items: Sequence[Item], size: int = BATCH) -> Iterator[list[Item]]:
    """Items that can share forwards: of one shape, of ``size`` contexts at most."""
    shapes = grouped(items, lambda item: ("alone", _context(item)) if item.shape is None else item.shape)
    for same in shapes.values():
        contexts = list(grouped(same, _context).values())
        for at in range(0, len(contexts), size):
            yield list(chain.from_iterable(contexts[at : at + size]))


def by_layer(spans: Sequence[SpanKV], exact: Sequence[SpanKV]) -> list[float] | None:
    """Relative distance ``|KV - exact| / |exact|`` of each layer, rope and content channel together, over all placed chunks.

    Shows where in depth an arm is wrong (Kamera, section 4 and figure 8). None where it serves other tokens than a re-prefill
    (thinned out, or other chunks). Cost: one pass over the KV.
    """
    if [span.tokens for span in spans] != [span.tokens for span in exact]:
        return None
    squared_error = size = torch.zeros(exact[0].k.shape[0], dtype=torch.float64)
    for ours, theirs in zip(spans, exact, strict=True):
        for a, b in ((ours.k, theirs.k), (ours.v, theirs.v)):
            reference = b.double()
            squared_error = squared_error + (a.double() - reference).pow(2).sum(dim=(1, 2, 3))
            size = size + reference.pow(2).sum(dim=(1, 2, 3))
    return [float(f"{x:.{_DIGITS}g}") for x in (squared_error / size).sqrt().tolist()]


def _context(item: Item) -> str | int:
    """What items that share their context have in common."""
    return item.context or item.index


def _begin(served: Served, group: Group) -> int:
    """Return the position of the question after the served KV."""
    return group.begin if served.begin is None else served.begin

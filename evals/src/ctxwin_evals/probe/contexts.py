"""Contexts of a probe: sequences of chunks, each with strangers of the same sizes to swap in, and questions.

A question names the places that its answer depends on, where that is known. Whether a model reads its context at all is
then seen without knowing any answer: swapping a needed chunk must move the answer more than swapping another one.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from ctxwin.chunk import Chunk
from ctxwin.hashing import digest
from ctxwin_evals.items import Item, Scored, Task

Kind = Literal["one", "cross", "yours"]
"""Asks about one chunk; about several; as the user wrote it."""
Split = Literal["reading", "choosing", "proving", "fitting", "moving"]
"""What contexts are for; no two splits share a context. ``fitting`` also shares no medium, where there are enough."""
PLACED = 4
"""Chunks of a sequence: three antecedents have six orders, five of them others than the one that is served."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Question:
    """One question about a context: the places that its answer needs (ascending) and the right answer, where known."""

    text: str
    kind: Kind
    needs: tuple[int, ...] = ()
    truth: str | None = None


@dataclass(frozen=True)
class Context:
    """Chunks with questions.

    Attributes:
        load: makes the chunks: `PLACED` of them and a stranger of the same size for each, or all of a stream.
        sizes: of the chunks (in a context, of the placed ones); contexts of the same sizes share forwards.
        cluster: contexts of one cluster are not independent.
        questions: equally many for every context of a source, kinds in one order; in a stream, one for each slide.
    """

    load: Callable[[], Sequence[Chunk]]
    sizes: tuple[object, ...]
    cluster: str
    questions: tuple[Question, ...]


class Source(Task):
    """Where contexts come from: a task with one item per question.

    Attributes:
        kind: ``world``, ``scenes`` or ``images``.
        system_prompt: of all contexts.
        max_tokens: longest answer.
        notes: what a reader must know of these contexts.
        fits: whether there is something to fit on that no other split shares.
    """

    kind: ClassVar[str]
    endless = True
    system_prompt: str
    max_tokens: int
    notes: tuple[str, ...] = ()
    fits: bool = True

    @abstractmethod
    def context(self, split: Split, index: int) -> Context:
        """The context at ``index`` of a split; depends on nothing else."""

    @abstractmethod
    def stream(self, index: int, slides: int) -> Context:
        """A sequence of `PLACED` + ``slides`` chunks (fewer where there are no more) that a window slides along."""

    def items(
        self, n: int | None = None, split: Split = "choosing", *, strangers: bool = False, first: int = 0
    ) -> list[Item]:
        """The questions of ``n`` contexts of a split, from the ``first`` on.

        With ``strangers``, chunk `PLACED` + i of an item is a stranger of the same size as chunk i.
        """
        items: list[Item] = []
        for i in range(first, first + (n or 0)):
            context, count = self.context(split, i), 2 * PLACED if strangers else PLACED
            for question in context.questions:
                items.append(self._item(context, question, len(items), f"{split}-{i}", count))
        return items

    def slid(self, streams: Sequence[Context], slides: int) -> list[Item]:
        """Windows of `PLACED` chunks after so many slides along streams that are long enough."""
        count = PLACED + slides
        long = [(i, stream) for i, stream in enumerate(streams) if slides <= len(stream.questions)]
        items = [self._item(s, s.questions[slides - 1], i, f"stream-{i}-{slides}", count) for i, s in long]
        first_order, order = tuple(range(count)), tuple(range(slides, count))
        window = {"stream_window": PLACED}
        return [replace(item, before=first_order, placed=order, meta={**item.meta, **window}) for item in items]

    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        """The first word must be the truth, where one is known; answers agree where all their words do."""
        return Scored(None if target is None else float(normal(answer) == target), answer)

    def _item(self, context: Context, question: Question, index: int, name: str, count: int) -> Item:
        """A question after the first `PLACED` of ``count`` chunks."""
        return Item(
            task=f"probe/{self.kind}",
            index=index,
            load=lambda: list(context.load())[:count],
            count=count,
            placed=tuple(range(PLACED)),
            query=question.text,
            target=question.truth,
            doc_id=name,
            cluster=context.cluster,
            digest=digest("probe", self.kind, name, index),
            max_tokens=self.max_tokens,
            shape=(self.kind, context.sizes[:count]),
            context=name,
            meta={"kind": question.kind, "needs": list(question.needs)},
        )


def seed_of(split: str) -> int:
    """One number a split, for generators."""
    return int(digest("probe-split", split)[:12], 16)


def normal(answer: str) -> str:
    """An answer as it is compared with a truth: its first word without punctuation, in lower case."""
    words = answer.replace(",", " ").replace(".", " ").split()
    return words[0].strip("\"'`*:;!?()").lower() if words else ""

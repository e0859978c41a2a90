"""What a probe reads: sequences of chunks, each with strangers of the same sizes to swap in, and questions.

A question names the places that its answer depends on, where that is known. Whether a model reads its context at all is
then seen without knowing any answer: swapping a needed chunk must move the answer more than swapping another one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ctxwin.evals.items import Item
from ctxwin.hashing import digest

if TYPE_CHECKING:
    from ctxwin.chunk import Chunk

Kind = Literal["one", "cross", "yours"]
"""Asks about one chunk; about several; as the user wrote it."""
Split = Literal["reading", "choosing", "proving", "fitting", "moving"]
"""What contexts are for; no two splits share a context. ``fitting`` also shares no medium, where there are enough."""
SPLITS: tuple[Split, ...] = ("reading", "choosing", "proving", "fitting", "moving")
PLACED = 4
"""Chunks of a sequence: three antecedents have six orders, five of them others than the one that is served."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Question:
    """One question about a context.

    Attributes:
        needs: places that the answer depends on, ascending; () where that is not known.
        truth: the right answer; None where it is not known.
    """

    text: str
    kind: Kind
    needs: tuple[int, ...] = ()
    truth: str | None = None


@dataclass(frozen=True)
class Context:
    """A sequence of chunks with questions.

    Attributes:
        item: the chunks: ``placed`` are 0 .. K-1; chunk K + i is a stranger of the same size as chunk i.
        questions: as many for every context of a source, kinds in one order.
    """

    item: Item
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Stream:
    """A longer sequence a window slides along.

    Attributes:
        item: all chunks, in order.
        questions: one a slide: about the newest chunk where the source knows what to ask of it.
    """

    item: Item
    questions: tuple[Question, ...]


class Source(ABC):
    """Where contexts come from.

    Attributes:
        name: ``world``, ``scenes``, ``images`` or ``texts``.
        about: half a line for the report.
        system_prompt: system prompt.
        max_tokens: longest answer.
        notes: what a reader must know of these contexts.
    """

    name: ClassVar[str]
    about: str
    system_prompt: str
    max_tokens: int
    notes: tuple[str, ...] = ()

    @abstractmethod
    def context(self, split: Split, index: int) -> Context:
        """The context at ``index`` of a split; depends on nothing else."""

    @abstractmethod
    def stream(self, index: int, slides: int) -> Stream:
        """A sequence of `PLACED` + ``slides`` chunks (fewer where there are no more)."""

    def contexts(self, split: Split, count: int) -> list[Context]:
        """The first ``count`` contexts of a split."""
        return [self.context(split, i) for i in range(count)]


def as_item(
    source: str,
    split: str,
    index: int,
    load: Callable[[], Sequence[Chunk]],
    count: int,
    placed: int,
    cluster: str,
    max_tokens: int,
    shape: tuple[object, ...] | None,
) -> Item:
    """Chunks as an item of the evals, so that arms and groups read them; what is asked is in `Context.questions`."""
    name = f"probe/{source}/{split}"
    return Item(
        task=name, index=index, load=load, count=count, placed=tuple(range(placed)), query="", target=None,
        doc_id=f"{split}-{index}", cluster=cluster, digest=digest("probe", name, index), max_tokens=max_tokens,
        shape=shape,
    )  # fmt: skip


def seed_of(split: str) -> int:
    """One number a split, for generators."""
    return int(digest("probe-split", split)[:12], 16)


def normal(answer: str) -> str:
    """An answer as it is compared: its first word without punctuation, in lower case."""
    words = answer.replace(",", " ").replace(".", " ").split()
    return words[0].strip("\"'`*:;!?()").lower() if words else ""

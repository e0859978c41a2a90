"""Items of a task, each a context of chunks in a setting with one question, and how answers are scored.

A `Task` stands for a benchmark (one file of MM-NIAH, Video-MME, one set of MileBench, one kind of generated item). Scoring needs
neither its data nor a model, so a finished run can be scored again from its samples.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from ctxwin.chunk import Chunk

Setting = Literal["window", "slide", "recall"]
"""What happened before the question: nothing; the leading chunks left; a chunk came back after others than it left."""
_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Item:
    """One question about a context.

    Attributes:
        task, index: which item this is; it depends on nothing else, in particular not on how many are drawn.
        load: makes all chunks, in an order that ``placed`` and ``before`` index; the same chunks every time. May read files;
            raises BadMedia or FileNotFoundError where a medium cannot be read.
        count: number of chunks that ``load`` makes.
        placed: chunks that are placed when the question is asked, in order.
        query: text after the last chunk.
        target: JSON-able value that the scorer needs.
        doc_id: the data set's own name of the item.
        cluster: items of one cluster are not independent (one video, one document); never empty.
        digest: content of the item, so that samples of other data are noticed.
        before: chunks placed earlier: when survivors were conditioned (slide), or when the patch was formed (recall).
        asked: position in ``placed`` of the chunk that came back (recall) or that holds the answer.
        max_tokens: longest answer; 1 where the next token is the answer.
        system_prompt: system prompt; None takes the run's.
        shape: items of one shape have chunks of the same sizes and share forwards; None: this item is read alone.
        context: items of one context (where not empty) place the same chunks, which an arm serves only once.
        meta: lengths, depths, frame indices, ..., by which the report groups items; JSON-able.
    """

    task: str
    index: int
    load: Callable[[], Sequence[Chunk]] = field(repr=False, compare=False)
    count: int
    placed: tuple[int, ...]
    query: str
    target: Any
    doc_id: str
    cluster: str
    digest: str
    before: tuple[int, ...] = ()
    asked: int | None = None
    max_tokens: int = 1
    system_prompt: str | None = None
    shape: tuple[Any, ...] | None = None
    context: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        used = {*self.placed, *self.before}
        if not self.placed or min(used) < 0 or max(used) >= self.count:
            raise ValueError(f"placed and before must be chunks 0..{self.count - 1}, got {self.placed}, {self.before}")
        if self.asked is not None and not 0 <= self.asked < len(self.placed):
            raise ValueError(f"asked must be a position in placed, got {self.asked} of {len(self.placed)}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if not self.cluster or not self.doc_id:
            raise ValueError(f"an item must name its document and cluster, got {self.doc_id!r} and {self.cluster!r}")


@dataclass(frozen=True)
class Scored:
    """One answer under a task's rule.

    Attributes:
        score: 0..1; None where the rule cannot score it (an answer without a letter, for example). Unscored is not wrong.
        prediction: the answer as the rule reads it; two answers agree where these are equal.
        metrics: further figures of this answer by the same rule.
    """

    score: float | None
    prediction: str
    metrics: Mapping[str, float] = field(default_factory=dict)


class Task(ABC):
    """A benchmark.

    Attributes:
        name: as on the command line, e.g. ``mm-niah/retrieval-image``.
        about: half a line.
        setting: what happens before the question; decides which arms apply and what their base is.
        control: negative controls: items whose answer blind reuse should not change.
        endless: items are generated, as many as asked for.
        version: rises when items or scores change.
    """

    name: str
    about: str
    setting: Setting = "window"
    control: bool = False
    endless: ClassVar[bool] = False
    version: ClassVar[int] = 1

    @abstractmethod
    def items(self, n: int | None = None) -> Sequence[Item]:
        """The first ``n`` items (all of a data set for None), by index; media are not read yet.

        Raises ValueError where the task has no data, naming the option that gives it.
        """

    @abstractmethod
    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        """Score one answer; needs no data."""

    def leave_out(self, error: ValueError) -> None:
        """Leave out an item whose media cannot be read; raise the error where there is no such item."""
        raise error

    def official(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The data set's own aggregate figures over rows ``{"score", "prediction", "target", "meta", "doc_id"}``, by name."""
        return {}

    def config(self) -> dict[str, Any]:
        """Return the options that items depend on (data, split, frames ...), JSON-able; part of a run's configuration."""
        return {"version": self.version}


class GeneratedTask(Task):
    """A benchmark whose items are generated one by one."""

    endless = True

    def items(self, n: int | None = None) -> list[Item]:
        if n is None:
            raise ValueError(f"n must be given for {self.name}: there is no end of generated items")
        return [self.item(i) for i in range(n)]

    @abstractmethod
    def item(self, index: int) -> Item:
        """The item at ``index``."""


def grouped(values: Iterable[_Value], key: Callable[[_Value], _Key]) -> dict[_Key, list[_Value]]:
    """Values by their keys, both in the order in which they come first."""
    groups: dict[_Key, list[_Value]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups

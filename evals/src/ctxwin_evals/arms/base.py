"""Base classes of arms. An arm is a dataclass that turns a group of items into the KV that precedes a question."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from ctxwin.kv.layout import SpanKV
from ctxwin_evals.elastic import Policy
from ctxwin_evals.group import Group
from ctxwin_evals.items import Setting


@dataclass(frozen=True)
class Served:
    """KV of one item as an arm serves it, and its cost.

    Attributes:
        spans: what stands between the system prompt and the question, rotated in place; one for each placed chunk, or
            rows that an arm has thinned out.
        stored: bytes kept for the patched chunks beyond the KV they are applied to; without such KV, bytes of the chunks.
        over: bytes of those chunks' KV in bf16.
        computed: placed tokens that go through the decoder when the question comes. What is formed once for these chunks
            in this order and then kept is not counted here, but in ``extra["formed"]``; canonicals are formed once for all.
        forwards: decoder passes for them.
        encodes: pictures that go through the vision tower then.
        begin: position of the question, where an arm places other chunks than the item says; None: after the placed ones.
        recompute: token ranges of each span that the request which asks computes in place, where the engine is only asked.
        policy: drops KV while an answer is generated; None keeps everything.
        extra: further figures of this sample.
    """

    spans: Sequence[SpanKV]
    stored: int = 0
    over: int = 0
    computed: int = 0
    forwards: int = 0
    encodes: int = 0
    begin: int | None = None
    recompute: Sequence[tuple[tuple[int, int], ...]] = ()
    policy: Policy | None = None
    extra: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Arm(ABC):
    """A way to serve, which never reads an answer. ``name`` is the spelling it was requested by; comparisons ignore it.

    A subclass declares in its head how it is spelled (``form``), where it comes from (``source``), the ``settings`` in which
    it is meaningful, the pattern of its ``argument``, whose groups are fields, and whether it reads ``inside`` the model, so that
    no serving engine can be asked for it.
    """

    name: str = field(compare=False)

    form: ClassVar[str]
    source: ClassVar[str]
    settings: ClassVar[tuple[Setting, ...]] = ("window", "slide")
    argument: ClassVar[str] = ""
    inside: ClassVar[bool] = False

    def __init_subclass__(cls, **declared: Any) -> None:
        """Set the class attributes that a subclass declares in its head; others are inherited."""
        super().__init_subclass__()
        if unknown := declared.keys() - Arm.__annotations__.keys():
            raise TypeError(f"an arm declares form, source, settings, argument and inside, got {', '.join(unknown)}")
        for name, value in declared.items():
            setattr(cls, name, value)

    @property
    def rank(self) -> int | None:
        """The rank of its patches; None where it has none, or full ones."""
        return None

    @property
    def turnover(self) -> float | None:
        """The only turnover that it was requested for; None where it runs at any."""
        return None

    def on(self, setting: Setting) -> Self:
        """This arm for tasks of a setting; itself where all of its settings are served alike."""
        return replace(self, setting=setting) if hasattr(self, "setting") else self  # type: ignore[call-arg]

    @abstractmethod
    def serve(self, group: Group) -> list[Served | None]:
        """One entry for each item; None where the arm is meaningless for the item, which is then not scored."""

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """The arm of a spelling whose part before the colon has been matched; None where the rest is not a valid argument."""
        _, colon, text = name.partition(":")
        match = re.fullmatch(cls.argument, text)
        if match is None or (colon and not text):
            return None
        return cls(name, **{key: _value(key, part) for key, part in match.groupdict().items() if part is not None})


RANK, COUNT, SHARE = r"\d+|full", r"\d+|all", r"0+(?:\.\d*)?|0*1(?:\.0*)?|\.\d+"
"""Patterns of arguments: a rank, a number of tokens, a share 0..1."""


def _value(field: str, text: str) -> Any:
    """The value of a field as an argument spells it; texts are left alone."""
    if field in ("share", "at"):
        return float(text)
    if field in ("size", "stale", "count", "orders"):
        return None if text in ("full", "all") else int(text)
    return text


@dataclass(frozen=True)
class RankedArm(Arm, argument=f"(?P<size>{RANK})"):
    """An arm of a rank; None for all directions."""

    size: int | None

    @property
    def rank(self) -> int | None:
        return self.size


@dataclass(frozen=True)
class CountedArm(Arm, argument=f"(?P<count>{COUNT})"):
    """An arm of a number of tokens; None for all."""

    count: int | None


@dataclass(frozen=True)
class SharedArm(Arm, argument=f"(?P<share>{SHARE})"):
    """An arm of a share, 0..1."""

    share: float

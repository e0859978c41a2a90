"""What every arm is: a dataclass that turns a group of items into what is placed, ready to be asked behind."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

from ctxwin.evals.items import Setting
from ctxwin.kv.layout import SpanKV

if TYPE_CHECKING:
    from ctxwin.evals.generation import Policy
    from ctxwin.evals.group import Group


@dataclass(frozen=True)
class Served:
    """What an arm serves for one item.

    Attributes:
        spans: what stands between the system prompt and the question, rotated in place; one a placed chunk, or rows that an arm
            has thinned out.
        stored: bytes kept for the patched chunks beyond the KV they are applied to; where that is nothing, of the chunks.
        over: bytes of those chunks' KV in bf16.
        computed: placed tokens that go through the decoder when the question comes. What is formed once for these chunks
            in this order and then kept is not counted here, but in ``extra["formed"]``; canonicals are formed once for all.
        forwards: decoder passes for them.
        encodes: pictures that go through the vision tower then.
        begin: position of the question, where an arm places other chunks than the item says; None: behind the placed ones.
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
    policy: Policy | None = None
    extra: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Arm(ABC):
    """A way to serve. ``name`` is the spelling it was asked for by, and does not count in comparisons.

    An arm never reads an answer. ``form`` is its spelling, ``source`` where it is from.
    """

    name: str = field(compare=False)

    form: ClassVar[str]
    source: ClassVar[str]
    settings: ClassVar[tuple[Setting, ...]]

    @property
    def rank(self) -> int | None:
        """Rank of its patches; None where it has none, or full ones."""
        return None

    @property
    def turnover(self) -> float | None:
        """The one turnover it was asked for at; None where it runs at any."""
        return None

    def on(self, setting: Setting) -> Arm:
        """This arm on tasks of a setting; itself, where it does the same in all of its settings."""
        return self

    @property
    def found(self) -> tuple[str, ...]:
        """KV in place that is there when the question comes (see `Group.rewind`), beside what is stored for it.

        What an oracle looks at belongs to it, too: knowing costs it no time.
        """
        return ()

    def prepared(self, group: Group) -> Callable[[], Served | None]:
        """Does what is done before the question comes for a group of one; what the call then does is timed."""
        self.serve(group)
        group.rewind(self.found)
        return lambda: self.serve(group)[0]

    @abstractmethod
    def serve(self, group: Group) -> list[Served | None]:
        """One entry an item; None where this arm has no meaning for the item, which is then unscored."""

    @classmethod
    @abstractmethod
    def parse(cls, name: str, argument: str) -> Self | None:
        """The arm of this spelling, ``argument`` being what stands behind the colon ("" for nothing); None if there is none."""


@dataclass(frozen=True)
class PlainArm(Arm):
    """An arm without an argument."""

    @classmethod
    def parse(cls, name: str, argument: str) -> Self | None:
        return None if argument or name.endswith(":") else cls(name)


@dataclass(frozen=True)
class RankedArm(Arm):
    """An arm of a rank; None for all directions."""

    size: int | None

    @property
    def rank(self) -> int | None:
        return self.size

    @classmethod
    def parse(cls, name: str, argument: str) -> Self | None:
        match = re.fullmatch(r"(\d+)|full", argument)
        return cls(name, int(match[1]) if match[1] else None) if match else None


@dataclass(frozen=True)
class CountedArm(Arm):
    """An arm of a number of tokens; None for all."""

    count: int | None

    @classmethod
    def parse(cls, name: str, argument: str) -> Self | None:
        match = re.fullmatch(r"(\d+)|all", argument)
        return cls(name, int(match[1]) if match[1] else None) if match else None


@dataclass(frozen=True)
class SharedArm(Arm):
    """An arm of a share, 0..1."""

    share: float

    @classmethod
    def parse(cls, name: str, argument: str) -> Self | None:
        share = parse_share(argument)
        return None if share is None else cls(name, share)


def parse_share(text: str) -> float | None:
    """A number 0..1, or None."""
    if not re.fullmatch(r"\d+(?:\.\d*)?|\.\d+", text):
        return None
    return share if (share := float(text)) <= 1 else None

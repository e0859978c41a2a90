"""Which messages leave together, what stands in their place, and who leaves first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, ToolMessage

from ctxwin.adapters.langchain.messages import message_key


@dataclass(frozen=True)
class Unit:
    """Messages that leave and come back together: one message, or an answer that calls tools with their results.

    Attributes:
        key: names it in the decisions: the id of its first message; where that has none, its content, counted.
        messages: in order.
        position: of its first message in the conversation; larger is newer.
        read: the conversation's length when it was last read: when it arrived, or was recalled.
        tokens: how many of the context it takes; 0 where tokens do not decide.
    """

    key: str
    messages: tuple[AnyMessage, ...]
    position: int
    read: int = 0
    tokens: int = 0

    @property
    def has_media(self) -> bool:
        """Whether there is a picture or video in it."""
        return any(is_media(block) for m in self.messages for block in blocks(m))


class MessagePolicy(Protocol):
    """Who leaves first. It orders messages for any chat model, as `ctxwin.policies` order the chunks of a window."""

    def order(self, units: Sequence[Unit]) -> Iterable[Unit]:
        """``units`` (given in prompt order) in the order in which they leave; one that is left out never leaves."""


@dataclass(frozen=True)
class OldestMessages:
    """The oldest message leaves first."""

    def order(self, units: Sequence[Unit]) -> Iterable[Unit]:
        """The units in prompt order."""
        return units


@dataclass(frozen=True)
class LeastRecentlyReadMessages:
    """What has not been written or recalled for the longest time leaves first."""

    def order(self, units: Sequence[Unit]) -> Iterable[Unit]:
        """The units by when they were last read."""
        return sorted(units, key=lambda unit: unit.read)


def blocks(message: BaseMessage) -> list[Any]:
    """A message's content as a list."""
    return [message.content] if isinstance(message.content, str) else list(message.content)


def is_media(block: Any) -> bool:
    """Whether a content block is a picture or a video."""
    return isinstance(block, dict) and block.get("type") in ("image", "image_url", "video", "video_url")


def units_of(messages: Sequence[AnyMessage], read: Mapping[str, int]) -> list[Unit]:
    """``messages`` as units; ``read`` by key, for those that were recalled."""
    groups: list[list[AnyMessage]] = []
    for message in messages:
        if isinstance(message, ToolMessage) and groups and isinstance(groups[-1][0], AIMessage):
            groups[-1].append(message)
        else:
            groups.append([message])
    out: list[Unit] = []
    same: Counter[str] = Counter()
    at = 0
    for group in groups:
        name = group[0].id or message_key(group[0])
        same[name] += 1
        key = name if same[name] == 1 else f"{name}#{same[name]}"
        out.append(Unit(key, tuple(group), at, read.get(key, at + len(group))))
        at += len(group)
    return out


def shown(
    units: Sequence[Unit], out: Container[str], numbers: Mapping[str, int] | None, *, media_only: bool
) -> list[AnyMessage]:
    """The messages as the model sees them.

    Args:
        out: keys of the units that left.
        numbers: of those units, so that placeholders name what to recall; None for no placeholders.
        media_only: only the pictures and videos of a unit left, and its text stays.
    """
    view: list[AnyMessage] = []
    run: list[int] = []
    for unit in units:
        if unit.key not in out:
            view += _placeholder(run)
            run = []
            view += unit.messages
        elif media_only:
            note = "" if numbers is None else f"(Omitted in context. recall({numbers[unit.key]}) shows it again.)"
            view += [_without_media(m, note) for m in unit.messages]
        elif numbers is not None:
            run.append(numbers[unit.key])
    return view + _placeholder(run)


def spans(numbers: Sequence[int]) -> str:
    """``1-3, 7`` for 1, 2, 3 and 7."""
    steps = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in steps]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _placeholder(run: Sequence[int]) -> list[AnyMessage]:
    """One line for everything that left between two messages, so that what is shown stays bounded."""
    return [HumanMessage(f"(Omitted in context: {spans(run)}. recall(number) shows one again.)")] if run else []


def _without_media(message: AnyMessage, note: str) -> AnyMessage:
    if not any(map(is_media, blocks(message))):
        return message
    told: list[Any] = [{"type": "text", "text": note}] if note else []
    kept = [part for block in blocks(message) for part in (told if is_media(block) else [block])]
    return message.model_copy(update={"content": kept or note})

"""What of a message list leaves together, what stands in its place, and who leaves first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, ToolMessage

from ctxwin.adapters.langchain.messages import message_key

_MEDIA = ("image", "image_url", "video", "video_url")


@dataclass(frozen=True)
class Unit:
    """Messages that leave and come back together: one message, or an answer that calls tools with their results.

    Attributes:
        key: id of its first message (its content, and the how manieth with that, where it has none); what a decision about
            it is kept under.
        messages: in order.
        position: of its first message in the conversation; larger is newer.
        read: the conversation's length when it was last read: as it arrived, or was recalled.
        tokens: what it takes of the context.
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
    """Who leaves first. Policies of `ctxwin.policies` order a window's chunks; here there is no window, and any chat model."""

    def order(self, units: Sequence[Unit]) -> Iterable[Unit]:
        """``units`` (in prompt order), the one to leave first first; one that is left out never leaves."""


@dataclass(frozen=True)
class OldestMessages:
    """The oldest message leaves first."""

    def order(self, units: Sequence[Unit]) -> Iterable[Unit]:
        """Units, the one to leave first at the front."""
        return units


@dataclass(frozen=True)
class LeastRecentlyReadMessages:
    """What was neither written nor recalled for the longest time leaves first."""

    def order(self, units: Sequence[Unit]) -> Iterable[Unit]:
        """Units, the one to leave first at the front."""
        return sorted(units, key=lambda unit: unit.read)


def blocks(message: BaseMessage) -> list[Any]:
    """A message's content as a list."""
    return [message.content] if isinstance(message.content, str) else list(message.content)


def is_media(block: Any) -> bool:
    """Whether a content block is a picture or a video."""
    return isinstance(block, dict) and block.get("type") in _MEDIA


def units_of(messages: Sequence[AnyMessage], read: Mapping[str, int]) -> list[Unit]:
    """``messages`` as units; ``read`` by key, for those that were recalled."""
    groups: list[list[int]] = []
    for i, message in enumerate(messages):
        if isinstance(message, ToolMessage) and groups and isinstance(messages[groups[-1][0]], AIMessage):
            groups[-1].append(i)
        else:
            groups.append([i])
    out = []
    same: Counter[str] = Counter()
    for group in groups:
        first = messages[group[0]]
        key = first.id or message_key(first)
        same[key] += 1
        if same[key] > 1:
            key = f"{key}#{same[key]}"
        out.append(Unit(key, tuple(messages[i] for i in group), group[0], read.get(key, group[-1] + 1)))
    return out


def shown(
    units: Sequence[Unit], out: Container[str], numbers: Mapping[str, int] | None, *, media_only: bool
) -> list[AnyMessage]:
    """The messages as the model sees them.

    Args:
        out: keys of the units that left.
        numbers: of those units, for placeholders that name what to recall; None for no placeholders.
        media_only: what left is the pictures and videos of a unit, and its text stays.
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
    out: list[list[int]] = []
    for number in sorted(numbers):
        if out and number == out[-1][1] + 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def _placeholder(run: Sequence[int]) -> list[AnyMessage]:
    """One line for all that left between two messages, so that what is shown stays bounded."""
    if not run:
        return []
    return [HumanMessage(f"(Omitted in context: {spans(run)}. recall(number) shows one again.)")]


def _without_media(message: AnyMessage, note: str) -> AnyMessage:
    kept: list[Any] = []
    for block in blocks(message):
        if not is_media(block):
            kept.append(block)
        elif note:
            kept.append({"type": "text", "text": note})
    if len(kept) == len(blocks(message)) and not any(map(is_media, blocks(message))):
        return message
    return message.model_copy(update={"content": kept or note})

"""Prompts of users of a prefix cache, shared by the ledger, the demo, the bench and the evals.

| policy   | what stands in the prompt                                                                           |
|----------|-----------------------------------------------------------------------------------------------------|
| `naive`  | what the window places, in its order: every slide misses behind the system prompt                   |
| `trim`   | chunks until the prompt is full, then the older half leaves, so that most asks extend a cached one; |
|          | a chunk that is looked back at goes to its chronological place                                      |
| `append` | the same, but a chunk that is looked back at goes to the end: nothing in front is computed again    |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

Policy = Literal["naive", "trim", "append"]
T = TypeVar("T", bound=Hashable)

POLICIES: tuple[Policy, ...] = ("naive", "trim", "append")
NAMES: dict[Policy, str] = {
    "naive": "prefix cache: same prompts",
    "trim": "prefix cache: trim half when full",
    "append": "trim, look back at the end",
}
"""Display names of the policies."""


@dataclass
class PrefixUser(Generic[T]):
    """The prompt of one user of a prefix cache, for one conversation.

    Attributes:
        policy: how the prompt is kept.
        held: the chunks in the prompt, in order, by whatever names them.
        seen: all chunks that ever came in; what was dropped does not come back by itself.
    """

    policy: Policy
    held: list[T] = field(default_factory=list)
    seen: set[T] = field(default_factory=set)

    def copy(self) -> PrefixUser[T]:
        """The same prompt for a branch."""
        return PrefixUser(self.policy, list(self.held), set(self.seen))

    def arrive(
        self, new: T, fits: Callable[[Sequence[T]], bool], *, before: Container[T] = (), drop: int | None = None
    ) -> None:
        """Take in a chunk, unless it is held already, and make room for it first; see `make_room` and `place`."""
        if new not in self.held:
            self.make_room([new], fits, drop)
            self.place(new, before)

    def make_room(self, new: Sequence[T], fits: Callable[[Sequence[T]], bool], drop: int | None = None) -> None:
        """Drop the oldest chunks until ``new`` fits.

        Args:
            new: chunks about to come in, together.
            fits: whether chunks fit the prompt.
            drop: chunks that leave at a time, by default half of those held; never fewer than ``new`` has.
        """
        while self.held and not fits([*self.held, *new]):
            del self.held[: max(len(new), len(self.held) // 2 if drop is None else drop)]

    def place(self, new: T, before: Container[T] = ()) -> None:
        """Put a chunk in front of the first one held that is in ``before``, or at the end."""
        self.seen.add(new)
        self.held.insert(next((at for at, one in enumerate(self.held) if one in before), len(self.held)), new)

    def leave(self, chunks: Collection[T]) -> None:
        """Take chunks out."""
        self.held = [one for one in self.held if one not in chunks]

    def reorder(self, order: Sequence[T]) -> None:
        """Bring the chunks into an order. Those it does not name are the oldest and go in front, as they stood."""
        rank = {one: at for at, one in enumerate(order)}
        self.held.sort(key=lambda one: rank.get(one, -1))

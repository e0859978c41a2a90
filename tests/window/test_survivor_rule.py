"""Random edits against the survivor rule, kept by hand: what each chunk absorbed, and what it may leave unseen.

The rule: the chunks in front are those it was conditioned on minus those that left the front, in the same order, and besides
them only those that a recall or an insertion put in front of it while it stood there. Apart from the rule, a chunk may be
served as it was before behind the same contents.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.window.state import State
from twins import seeds
from window.fake import FakeEngine

OPS = (
    "append", "insert", "evict", "slide", "recall", "look_back", "reorder", "ask", "ask", "ask", "toggle", "adopt", "restore",
)  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """How a plan serves a placed chunk; ``prompt``: the contents up to it, with those that are toggled clean."""

    id: str
    lane: str
    reused: bool
    prompt: tuple[tuple[str, bool], ...]


class Book:
    """What the rule knows of every chunk, by placement id; and the prompts that were asked."""

    def __init__(self) -> None:
        self.absorbed: dict[str, tuple[str, ...]] = {}
        self.allowed: dict[str, set[str]] = {}
        self.asked: set[tuple[tuple[str, bool], ...]] = set()

    def copy(self) -> Book:
        made = Book()
        made.absorbed, made.allowed = dict(self.absorbed), {i: set(a) for i, a in self.allowed.items()}
        made.asked = set(self.asked)
        return made

    def came(self, window: Window, ids: list[str]) -> None:
        for new in ids:
            self.allowed[new] = set()
        for new in ids:
            for behind in window.ids[window.ids.index(new) + 1 :]:
                if behind not in ids:
                    self.allowed[behind].add(new)

    def left(self, ids: list[str]) -> None:
        for allowed in self.allowed.values():
            allowed.difference_update(ids)

    def answered(self, lanes: list[Seen]) -> None:
        for i, seen in enumerate(lanes):
            if seen.lane not in ("survivor", "canonical") and not seen.reused:
                self.absorbed[seen.id] = tuple(front.id for front in lanes[:i])
                self.allowed[seen.id] = set()
            self.asked.add(seen.prompt)

    def check(self, lanes: list[Seen]) -> int:
        """The number of survivors, each by the rule."""
        placed = [seen.id for seen in lanes]
        assert all(seen.prompt in self.asked for seen in lanes if seen.reused), "it was never served behind these"
        survivors = [i for i, seen in enumerate(lanes) if seen.lane == "survivor" and not seen.reused]
        for i in survivors:
            front, absorbed = placed[:i], self.absorbed[placed[i]]
            assert [a for a in absorbed if a in front] == [f for f in front if f in absorbed], "another order"
            assert set(front) - set(absorbed) <= self.allowed[placed[i]], "it must absorb what is in front of it"
        return len(survivors)

    def check_snapshot(self, window: Window) -> None:
        """The KV of every chunk names what it absorbed, in the state, as JSON, and in a window that is restored from that."""
        state = window.snapshot()
        again = State.model_validate_json(state.model_dump_json())
        assert again == state
        with Window.restore(window.engine, again) as restored:
            for one in (state, again, restored.snapshot()):
                for p in (*one.placed, *one.evicted):
                    assert p.kv is None or tuple(p.kv.antecedents) == self.absorbed[p.id]
            plan, expected = restored.plan(), window.plan()
            assert plan == expected or any(e.reused for e in expected.entries), "only that is forgotten"


def lanes_of(window: Window) -> list[Seen]:
    window.check()
    seen: list[Seen] = []
    for e in window.chunks:
        front = seen[-1].prompt if seen else ()
        seen.append(Seen(e.id, e.lane, e.reused, (*front, (e.chunk_id, e.conditioned))))
    return seen


@pytest.mark.parametrize("seed", seeds(6, 20))
def test_survivors_keep_the_rule(seed: int) -> None:
    rng = random.Random(seed)
    engine, book, survivors = FakeEngine(), Book(), 0
    window = Window(engine, "h", budget=400, fidelity=Fidelity("patched", rank=2))
    for _ in range(100):
        op = rng.choice(OPS)
        if op == "append":
            book.came(window, [window.append(Chunk.text(rng.choice("abcd")))])
        elif op == "insert":
            book.came(window, [window.insert(rng.randint(0, len(window.ids)), Chunk.text(rng.choice("abcd")))])
        elif op == "evict" and window.ids:
            gone = rng.choice(window.ids)
            window.evict(gone)
            book.left([gone])
        elif op == "slide" and window.ids:
            book.left(window.slide(1))
        elif op == "recall" and window.evicted:
            back = rng.choice(window.evicted)
            window.recall(back, rng.choice([None, rng.randint(0, len(window.ids))]))
            book.came(window, [back])
        elif op == "look_back" and window.evicted:
            some = rng.sample(window.evicted, min(len(window.evicted), rng.randint(1, 3)))
            assert window.look_back(" ".join(some)) == some
            book.came(window, some)
        elif op == "reorder":
            order = rng.sample(window.ids, len(window.ids))
            window.reorder(order)
            for i, placement in enumerate(order):
                book.allowed[placement] &= set(order[:i])
        elif op == "ask":
            lanes = lanes_of(window)
            window.ask("q", 1)
            book.answered(lanes)
        elif op == "toggle" and window.ids:
            placed = rng.choice(window.snapshot().placed)
            window.toggle(placed.id, conditioned=not placed.conditioned)
        elif op == "adopt":
            branch, kept = window.fork(), book.copy()
            if branch.evicted:
                back = rng.choice(branch.evicted)
                branch.recall(back)
                kept.came(branch, [back])
            book.check(lanes_of(window))
            window.adopt(branch)
            branch.close()
            book = kept
        elif op == "restore":
            again = Window.restore(engine, window.snapshot().model_dump_json())
            window.close()
            window = again
        survivors += book.check(lanes_of(window))
        book.check_snapshot(window)
    assert survivors, "none survived: nothing was tested"

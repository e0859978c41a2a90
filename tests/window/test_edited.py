"""Lane ``edited``, held against a book of the texts that all KV absorbed, and against KV computed again from that book."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Segment
from ctxwin.fidelity import Lane, Mode
from ctxwin.kv.layout import SpanKV
from ctxwin.window.choice import Choice
from ctxwin.window.difference import Change, Difference
from ctxwin.window.lanes import choose
from ctxwin.window.state import State
from twins import seeds
from window.fake import FakeEngine

MOST = 4
EDITED = Fidelity("patched", rank=2, survivors="refresh", edited_tokens=MOST)
CLOCKS = ["it is 10:00 in rome", "it is 10:05 in rome", "it is 17:05 in rome", "it is noon in rome", "no clock, sir"]
TEXTS = ["abcdef", "abcxef", "abcxxf", "abxxxf", "a", "b", "bcdefa", "zzzzzzzz"]
OPS = ("prompt", "prompt", "replace", "replace", "append", "evict", "recall", "reorder", "restore", "ask", "ask", "ask")


def distance(a: list[int], b: list[int]) -> int:
    """Tokens of the longer text between what both have in common at the beginning and at the end, one by one."""
    n, first, last = min(len(a), len(b)), 0, 0
    while first < n and a[first] == b[first]:
        first += 1
    while last < n - first and a[-1 - last] == b[-1 - last]:
        last += 1
    return max(len(a), len(b)) - first - last


@dataclass(frozen=True, eq=False)
class Computed:
    """A chunk's KV as it was computed: the text in front of it, and the KV of the chunks in front of it."""

    prompt: str
    text: list[int]
    front: list[Computed]
    chunk: Chunk

    @cached_property
    def versions(self) -> set[tuple[int, ...]]:
        """The text in front of it, as it was and as any KV that it stands on has seen its beginning."""
        engine, texts = FakeEngine(), {tuple(self.text)}
        start = engine.encode_system_prompt(self.prompt).tokens
        for kv in self.front:
            texts |= {(*text, *self.text[start:]) for text in kv.versions}
            start += engine.encode(kv.chunk).tokens
        return texts

    @cached_property
    def span(self) -> SpanKV:
        engine = FakeEngine()
        return engine._forward(*served(engine, self.prompt, self.front, self.chunk))


def served(engine: FakeEngine, prompt: str, front: list[Computed], chunk: Chunk) -> tuple[list[SpanKV], object, int]:
    """The arguments of a forward over ``chunk`` behind KV that was computed elsewhere and is moved here."""
    segments = layout(engine, prompt, front)
    last = segments[-1]
    return engine._run(segments)[0], engine.encode(chunk), last.start + last.encoded.advance


def layout(engine: FakeEngine, prompt: str, front: list[Computed]) -> list[Segment]:
    segments = [Segment(engine.encode_system_prompt(prompt), 0)]
    for kv in front:
        start = segments[-1].start + segments[-1].encoded.advance
        segments.append(Segment(engine.encode(kv.chunk), start, span=kv.span))
    return segments


class Book:
    """What each store key of a window's KV absorbed."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.kv = engine, dict[str, Computed]()

    def choices(self, window: Window) -> list[Choice]:
        assembly = window.core.assembly
        return choose(
            window.snapshot(), window.fidelity, assembly.has, assembly.prices, assembly.memo.memos, engine=window.engine
        )

    def text_before(self, state: State, index: int) -> list[int]:
        text = [*self.engine.encode_system_prompt(state.system_prompt).token_ids]
        for p in state.placed[:index]:
            text += self.engine.encode(p.chunk).token_ids
        return text

    def check(self, window: Window) -> int:
        """The number of chunks in lane ``edited``, each within the bound; what is within it by its own text is not computed."""
        window.check()
        state, edited = window.snapshot(), 0
        for i, choice in enumerate(self.choices(window)):
            if choice.lane == "edited":
                edited += 1
                assert not choice.conditioning.exact and choice.conditioning.depth > 0
                for text in self.kv[choice.conditioning.span].versions:
                    assert distance([*text], self.text_before(state, i)) <= MOST
            kv = choice.entry.kv
            if choice.compute and kv is not None and kv.exact and window.fidelity.allows("edited"):
                assert distance(self.kv[kv.span].text, self.text_before(state, i)) > MOST
        return edited

    def ask(self, window: Window) -> None:
        """Ask; the answer is read from the very KV that the plan names, moved, as a book of texts computes it."""
        state, front = window.snapshot(), list[Computed]()
        for i, choice in enumerate(self.choices(window)):
            key = choice.conditioning.span
            if choice.compute and key not in self.kv:
                text = self.text_before(state, i)
                self.kv[key] = Computed(state.system_prompt, text, list(front), choice.entry.chunk)
            front.append(self.kv[key])
        engine = FakeEngine()
        segments = layout(engine, state.system_prompt, front)
        expected = engine.generate(segments, engine.encode_query("q"), Sampling(3))
        assert window.ask("q", 3).token_ids == tuple(expected.token_ids)


def lanes(window: Window) -> list[Lane]:
    window.check()
    return [entry.lane for entry in window.chunks]


@pytest.fixture
def clock(engine: FakeEngine) -> Window:
    window = Window(engine, CLOCKS[0], fidelity=EDITED)
    window.extend([Chunk.text("aaa"), Chunk.text("bbb"), Chunk.text("ccc")])
    window.ask("q")
    return window


@pytest.mark.parametrize("seed", seeds(8, 40))
def test_whatever_is_edited_no_text_that_kv_absorbed_is_further_away(seed: int) -> None:
    rng = random.Random(seed)
    engine = FakeEngine()
    survivors = rng.choice(["refresh", "keep"])
    window = Window(engine, CLOCKS[0], fidelity=EDITED.model_copy(update={"survivors": survivors}))
    book = Book(engine)
    window.extend([Chunk.text(text) for text in TEXTS[:4]])
    book.ask(window)
    with window.fork(system_prompt=CLOCKS[1]) as branch:
        assert book.check(branch) == 4
    for _ in range(80):
        op = rng.choice(OPS)
        if op == "prompt":
            branch = window.fork(system_prompt=rng.choice(CLOCKS))
            window.close()
            window = branch
        elif op == "replace" and window.ids:
            at = rng.randrange(len(window.ids))
            old = window.ids[at]
            window.insert(at, Chunk.text(rng.choice(TEXTS)))
            window.evict(old)
        elif op == "append" and len(window.ids) < 6:
            window.append(Chunk.text(rng.choice(TEXTS)))
        elif op == "evict" and len(window.ids) > 3:
            window.evict(rng.choice(window.ids))
        elif op == "recall" and window.evicted and len(window.ids) < 6:
            window.recall(rng.choice(window.evicted), rng.choice([None, rng.randint(0, len(window.ids))]))
        elif op == "reorder":
            window.reorder(rng.sample(window.ids, len(window.ids)))
        elif op == "restore":
            window = Window.restore(engine, window.snapshot().model_dump_json())
        elif op == "ask":
            book.ask(window)
        book.check(window)


def test_a_clock_that_goes_on_costs_its_system_prompt_and_what_is_new(clock: Window) -> None:
    for minute in range(1, 40):
        clock = clock.fork(system_prompt=f"it is 10:{minute:02} in rome")
        clock.append(Chunk.text(f"turn {minute}"))
        assert set(lanes(clock)[:-1]) == {"edited"} and lanes(clock)[-1] == "computed"
        answer = clock.ask("q")
        assert not answer.usage.exact
        assert answer.usage.reused_tokens["edited"] == clock.tokens - len(CLOCKS[0]) - 1 - clock.chunks[-1].tokens


def test_many_small_edits_do_not_add_up(clock: Window) -> None:
    """Each version differs from the last by a token, and from what the chunks absorbed by one more."""
    text = CLOCKS[0]
    for i in range(1, MOST + 2):
        text = text[: i - 1] + "x" + text[i:]
        clock = clock.fork(system_prompt=text)
        assert lanes(clock) == (["edited"] * 3 if i <= MOST else ["formed"] * 3)
        clock.ask("q")
    assert clock.plan().exact, "what was too far away was computed again, all of it"


def test_what_was_computed_behind_edited_chunks_carries_their_text(clock: Window) -> None:
    """Its own text differs in two tokens at most, that of the chunks in front of it in up to five."""
    branch = clock.fork(system_prompt="it is 1x:xx in rome")
    branch.append(Chunk.text("ddd"))
    branch.ask("q")
    assert lanes(branch) == ["edited"] * 3 + ["resident"]
    assert lanes(branch.fork(system_prompt="it is 1x:x1 in rome")) == ["edited"] * 4
    assert lanes(branch.fork(system_prompt="it is xx:xx in rome")) == ["formed"] * 4


def test_a_chunk_that_is_replaced(engine: FakeEngine) -> None:
    """Whatever its length; a survivor of the same edit would go by the place of what left, and not by how much it is."""
    window = Window(engine, "h", fidelity=EDITED)
    memory, *_ = window.extend([Chunk.text("likes tea"), Chunk.text("bb"), Chunk.text("cc")])
    window.ask("q")
    window.evict(memory)
    window.insert(0, Chunk.text("likes coal"))
    assert lanes(window) == ["computed", "edited", "edited"]
    plan = window.plan()
    assert plan.entries[1].evicted_antecedents == (memory,) and plan.entries[1].not_attended == window.ids[:1]
    assert plan.entries[1].start == window.chunks[0].start + len("likes coal")
    window.ask("q")
    other = window.insert(0, Chunk.text("likes beer and skittles"))
    window.evict(window.ids[1])
    assert lanes(window) == ["computed", "formed", "formed"], "too many tokens"
    window.evict(other)
    window.recall(memory, 0)
    assert lanes(window) == ["resident"] * 3, "what it was conditioned on is back"


def test_pictures_are_no_text(engine: FakeEngine) -> None:
    """Pictures of equal size have equal tokens in many models, whatever they show."""
    window = Window(engine, "h", fidelity=EDITED)
    shown, _ = window.extend([Chunk.image(np.full((4, 4, 3), 9, np.uint8)), Chunk.text("bb")])
    window.ask("q")
    window.evict(shown)
    window.insert(0, Chunk.image(np.full((4, 4, 3), 7, np.uint8)))
    assert lanes(window) == ["computed", "formed"]


def test_what_is_approximate_by_other_means_is_computed(clock: Window) -> None:
    clock.toggle(clock.ids[1], conditioned=False)
    clock.append(Chunk.text("ddd"))
    clock.ask("q")
    assert lanes(clock) == ["resident", "canonical", "resident", "resident"]
    assert lanes(clock.fork(system_prompt=CLOCKS[1])) == ["edited", "canonical", "formed", "formed"]


@pytest.mark.parametrize("mode", ["exact", "patched", "blind"])
def test_nobody_else_is_served_so(engine: FakeEngine, mode: Mode) -> None:
    fidelity = Fidelity(mode) if mode == "patched" else Fidelity(mode, edited_tokens=MOST)
    window = Window(engine, CLOCKS[0], fidelity=fidelity)
    window.extend([Chunk.text("aaa"), Chunk.text("bbb")])
    window.ask("q")
    branch = window.fork(system_prompt=CLOCKS[1])
    assert all(p.kv is None for p in branch.snapshot().placed)
    assert branch.plan().computed_tokens == branch.tokens
    assert not set(lanes(branch)) & {"edited", "survivor", "resident"}
    forbidden = Window(engine, CLOCKS[0], fidelity=EDITED.with_advanced(forbid=("edited",)))
    forbidden.extend([Chunk.text("aaa"), Chunk.text("bbb")])
    forbidden.ask("q")
    assert "edited" not in lanes(forbidden.fork(system_prompt=CLOCKS[1]))


def test_behind_another_prompt_no_chunk_survives_as_its_own(engine: FakeEngine) -> None:
    """Where survivors are kept, what left is not all that they remember."""
    window = Window(engine, CLOCKS[0], fidelity=EDITED.model_copy(update={"survivors": "keep"}))
    window.extend([Chunk.text("aaaaaaaa"), Chunk.text("bbb"), Chunk.text("ccc")])
    window.ask("q")
    branch = window.fork(system_prompt=CLOCKS[4])
    assert lanes(branch) == ["formed"] * 3
    branch = window.fork(system_prompt=CLOCKS[1])
    branch.slide(1)
    assert lanes(branch) == ["formed"] * 2, "eight tokens left as well"


def test_forgotten_text_goes_with_what_absorbed_it(engine: FakeEngine) -> None:
    window = Window(engine, "h", fidelity=EDITED)
    secret, *_ = window.extend([Chunk.text("pin 1234"), Chunk.text("bb"), Chunk.text("cc")])
    window.ask("q")
    window.evict(secret)
    window.insert(0, Chunk.text("pin 1239"))
    window.ask("q")
    window.append(Chunk.text("dd"))
    window.ask("q")
    assert lanes(window) == ["resident", "edited", "edited", "resident"]
    window.evict(secret, forget=True)
    assert all(p.kv is None for p in window.snapshot().placed[1:])
    assert window.ask("q").usage.exact


TOKENS = st.lists(st.integers(0, 2), max_size=8)


@given(st.lists(TOKENS, min_size=2, max_size=5))
def test_a_difference_contains_every_version(versions: list[list[int]]) -> None:
    """Of a text that changes again and again: outside of it all versions agree, and no distance is larger."""
    difference: Difference | None = None
    for before, after in pairwise(versions):
        difference = Change.between(before, after).applied_to(difference)
    assert difference is not None
    last = versions[-1]
    begin, tail = difference.begin, len(last) - difference.end
    assert 0 <= begin <= difference.end <= len(last)
    for version in versions:
        assert version[:begin] == last[:begin] and version[len(version) - tail :] == last[len(last) - tail :]
        assert distance(version, last) <= difference.tokens
        assert len(version) - begin - tail <= difference.tokens

"""A window follows any conversation: against plain lists."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin import Chunk, Window
from ctxwin.policies import ById
from langchain_ctxwin.langgraph.node import Without, follow
from window.fake import FakeEngine

LISTS = st.lists(st.lists(st.integers(0, 5), max_size=7), max_size=6)


def chunks(numbers: list[int]) -> list[Chunk]:
    return [Chunk.text(f"n{i}") for i in numbers]


def shown(window: Window) -> list[int]:
    return [int(window.chunk(i).parts[0].text[1:]) for i in window.ids]  # type: ignore[union-attr]


@settings(max_examples=60, deadline=None)
@given(lists=LISTS, others=st.booleans())
def test_whatever_changes_the_window_shows_the_last_list(lists: list[list[int]], others: bool) -> None:
    with FakeEngine() as engine, Window(engine, "hd") as window:
        foreign = {window.append(Chunk.text("n9"))} if others else set()
        removed: list[str] = []
        for wanted in lists:
            gone = follow(window, chunks(wanted), removed=removed, others=foreign)
            window.check()
            assert [n for n in shown(window) if n != 9] == wanted
            assert (9 in shown(window)) == others
            removed = [i for i in window.evicted if i in gone]
            assert len(window.evicted) == len(removed), "only what is in no conversation leaves"


@settings(max_examples=60, deadline=None)
@given(lists=LISTS, slides=st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_what_slid_out_stays_out_and_what_is_new_is_shown(lists: list[list[int]], slides: list[int]) -> None:
    """Conversations that only grow: the window shows a tail of them, however it slides."""
    with FakeEngine() as engine, Window(engine, "hd") as window:
        talk: list[int] = []
        kept = 0
        for new, count in zip(lists, slides, strict=False):
            talk += new
            assert follow(window, chunks(talk)) == []
            kept += len(new)
            assert shown(window) == talk[len(talk) - kept :]
            kept -= len(window.slide(min(count, len(window.ids))))


def test_what_was_removed_is_not_retrieved() -> None:
    with FakeEngine() as engine, Window(engine, "hd") as window:
        a, b = window.extend(chunks([1, 2]))
        window.slide(2)
        assert list(Without(ById(), frozenset([a])).choose(window, f"{a} {b}")) == [b]

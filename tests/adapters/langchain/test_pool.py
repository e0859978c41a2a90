"""The windows behind a chat model: which are kept, which one a call begins with, and what stays leased."""

from __future__ import annotations

from ctxwin import Chunk
from langchain_ctxwin.pool import Pool
from window.fake import FakeEngine


def texts(*names: str) -> list[Chunk]:
    return [Chunk.text(f"{name} says something ") for name in names]


def test_conversations_with_the_same_long_header_do_not_push_each_other_out() -> None:
    engine = FakeEngine()
    pool = Pool(engine, None, None, 4, ())
    system_prompt = "a system prompt that is much longer than what is said behind it " * 8
    for chunks in (texts("a", "b"), texts("c", "d"), texts("e", "f")):
        with pool.window(system_prompt, chunks) as window:
            assert not window.evicted  # nothing of the others is dragged along, and leased
    assert len(pool) == 3
    with pool.window(system_prompt, texts("a", "b", "g")):
        pass
    assert len(pool) == 3  # the first conversation, gone on
    pool.close()
    assert not len(pool)


def test_a_window_that_is_in_use_when_the_pool_closes_is_closed_behind_it() -> None:
    engine = FakeEngine()
    pool = Pool(engine, None, None, 4, ())
    with pool.window("", texts("a")) as window:
        window.ask("q", 2)
        keys = window.snapshot().keys()
        assert any(engine.repo.leased(k) for k in keys)
        pool.close()
    assert not len(pool)
    assert not any(engine.repo.leased(k) for k in keys)

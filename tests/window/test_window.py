"""What each edit of a window does, on an engine whose KV is a pure function of everything in front."""

from __future__ import annotations

import asyncio
import copy
import itertools
import pickle
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.errors import AnswerStopped, ReadOnlyWindow, UnknownChunk, WindowBusy
from ctxwin.window.ask import Question
from window.fake import FakeEngine


def lanes(window: Window) -> list[str]:
    return [e.lane for e in window.chunks]


def fresh(engine: FakeEngine, window: Window) -> list[int]:
    """The answer of a window that computes the same chunks from nothing."""
    with Window(FakeEngine(), window.system_prompt, window.budget, Fidelity("exact")) as other:
        for placement in window.ids:
            chunk = window.chunk(placement)
            if chunk.media:
                chunk = Chunk.image(np.full((4, 4, 3), 9, np.uint8), text="b")
            other.append(chunk)
        return list(other.ask("q", max_tokens=3).token_ids)


def test_first_sight_is_computed_once_and_then_resident(engine: FakeEngine) -> None:
    window = Window(engine, "hd", fidelity=Fidelity("patched"))
    window.append(Chunk.text("aa"))
    first = window.ask("q")
    assert first.usage.reused_tokens == {"computed": 3 + 2}
    assert first.usage.computed_tokens == first.usage.prompt_tokens
    again = window.ask("q")
    assert again.token_ids == first.token_ids
    assert again.usage.reused_tokens == {"resident": 5}
    assert again.usage.computed_tokens == again.usage.prompt_tokens - 5
    assert again.usage.bytes_loaded > 0


def test_a_plan_says_what_the_ask_then_costs(window: Window) -> None:
    window.append(Chunk.text("dddd"))
    window.reorder([window.ids[-1], *window.ids[:-1]])
    plan = window.plan()
    usage = window.ask("q").usage
    assert usage.computed_tokens == plan.computed_tokens + 3
    assert usage.reused_tokens == plan.tokens_by_lane


def test_a_slide_leaves_survivors_that_cost_nothing(window: Window) -> None:
    gone = window.slide(1)
    assert gone == list(window.evicted)
    assert lanes(window) == ["survivor", "survivor"]
    assert [e.evicted_antecedents for e in window.chunks] == [tuple(gone)] * 2
    assert not window.plan().exact
    assert window.plan().computed_tokens == 0


def test_recall_to_its_old_place_makes_everything_exact_again(engine: FakeEngine, window: Window) -> None:
    before = window.ask("q", max_tokens=3).token_ids
    b = window.ids[1]
    window.evict(b)
    assert window.recall(b) == 1
    assert lanes(window) == ["resident"] * 3
    assert window.ask("q", max_tokens=3).token_ids == before
    assert engine.counters.vision_encodes == 1


def test_recall_to_the_front_swaps_in_the_canonical_where_it_is_held(window: Window) -> None:
    a, b, c = window.ids
    window.toggle(b, conditioned=False)
    window.ask("q")  # forms b's canonical
    window.toggle(b, conditioned=True)
    window.evict(a)
    assert lanes(window) == ["resident", "survivor"]  # only the system prompt is in front of b
    assert window.chunks[0].exact
    assert window.maintenance.dependents(a) == (b, c)
    window.ask("q")
    assert window.maintenance.dependents(a) == (c,), "b settled on its canonical; c still carries a"


def test_recall_keeps_dependents_unless_told_to_repair(window: Window) -> None:
    a, b, c = window.ids
    window.evict(a)
    d = window.append(Chunk.text("dd"))
    window.ask("q")
    window.recall(a)
    assert lanes(window) == ["resident", "resident", "resident", "survivor"]
    assert window.chunks[3].not_attended == (a,)
    assert window.plan().repair_tokens == 2
    window.evict(a)
    window.recall(a, repair=True)
    # b and c find the spans they were computed with; only d was never computed behind a.
    assert lanes(window) == ["resident", "resident", "resident", "formed"]
    window.ask("q")
    assert window.plan().exact
    assert window.maintenance.dependents(a) == (b, c, d)


def test_survivors_of_slides_only(engine: FakeEngine) -> None:
    """What lost the first chunks in front of it survives; what lost one from the middle, or came back behind others, does not."""
    window = Window(engine, "hd", fidelity=Fidelity("patched", survivors="slid"))
    ids = window.extend([Chunk.text(text) for text in ("aa", "bb", "cc", "dd")])
    window.ask("q")
    with window.fork() as slid:
        slid.slide(2)
        assert lanes(slid) == ["survivor", "survivor"]
    with window.fork() as cut:
        cut.evict(ids[1])
        assert lanes(cut) == ["resident", "formed", "formed"]
    window.slide(3)
    window.recall(ids[0])
    assert lanes(window) == ["resident", "formed"], "d has a in front, and lost b and c behind it"


@pytest.mark.parametrize("survivors", ["keep", "refresh"])
def test_survivors_policy(engine: FakeEngine, survivors: Any) -> None:
    window = Window(engine, "hd", fidelity=Fidelity("patched", rank=2, survivors=survivors))
    window.extend([Chunk.text("aa"), Chunk.text("bb"), Chunk.text("cc")])
    window.ask("q")
    window.slide(1)
    assert lanes(window) == (["survivor"] * 2 if survivors == "keep" else ["formed"] * 2)
    window.ask("q")
    if survivors == "keep":
        return
    assert window.plan().exact
    assert lanes(window) == ["resident"] * 2
    engine.repo.delete(window.snapshot().placed[1].kv.span)  # type: ignore[union-attr]
    assert lanes(window) == ["resident", "formed"]
    assert window.ask("q").usage.computed_tokens == 3 + 2
    assert lanes(window) == ["resident"] * 2


def test_reorder_re_forms_what_moved_and_remembers_both_orders(engine: FakeEngine, window: Window) -> None:
    a, b, c = window.ids
    first = window.ask("q", max_tokens=3).token_ids
    window.reorder([a, c, b])
    assert lanes(window) == ["resident", "survivor", "formed"], "c keeps what b, now behind it, left in it"
    window.ask("q")
    assert window.maintenance.refresh() == [c, b]
    assert list(window.ask("q", max_tokens=3).token_ids) == fresh(engine, window)
    window.reorder([a, b, c])
    assert lanes(window) == ["resident"] * 3
    assert window.ask("q", max_tokens=3).token_ids == first


def test_toggle_off_and_on_is_bit_identical(engine: FakeEngine, window: Window) -> None:
    b = window.ids[1]
    before = window.ask("q", max_tokens=3, logprobs=-1)
    keys = [p.kv for p in window.snapshot().placed]
    window.toggle(b, conditioned=False)
    assert lanes(window) == ["resident", "canonical", "survivor"]
    window.ask("q")
    window.toggle(b, conditioned=True)
    assert [p.kv for p in window.snapshot().placed] == keys
    after = window.ask("q", max_tokens=3, logprobs=-1)
    assert after.first_token_logprobs == before.first_token_logprobs
    assert engine.counters.vision_encodes == 1


def test_an_exact_window_computes_what_follows_a_clean_view_once(engine: FakeEngine) -> None:
    def clean_again(window: Window) -> tuple[Any, int]:
        window.toggle(window.ids[1], conditioned=False)
        answer = window.ask("q", 3, logprobs=-1)
        window.toggle(window.ids[1], conditioned=True)
        assert window.ask("q").usage.computed_tokens == 3
        return answer.first_token_logprobs, answer.usage.computed_tokens

    chunks = [Chunk.text(text) for text in ("aa", "bbb", "cccc", "ddddd")]
    with Window(engine, "hd", fidelity=Fidelity("exact")) as window:
        window.extend(chunks)
        window.ask("q")
        first, *again = (clean_again(window) for _ in range(3))
        assert first[1] == 3 + 4 + 5 + 3, "its canonical, what follows it, and the query"
        assert again == [(first[0], 3)] * 2
        window.append(Chunk.text("ee"))
        window.ask("q")
        assert clean_again(window)[1] == 2 + 3, "and what is new behind it"
        window.evict(window.ids[0])
        window.ask("q")
        assert clean_again(window)[1] == 4 + 5 + 2 + 3, "another view: nothing in front of it now"


def test_a_toggled_chunks_conditioned_span_stays_leased(engine: FakeEngine, window: Window) -> None:
    b = window.ids[1]
    span = window.snapshot().placed[1].kv.span  # type: ignore[union-attr]
    window.toggle(b, conditioned=False)
    assert engine.repo.leased(span)


def test_blind_serves_canonicals(engine: FakeEngine) -> None:
    window = Window(engine, "hd", fidelity=Fidelity("blind"))
    window.extend([Chunk.text("aa"), Chunk.text("bb")])
    first = window.ask("q").usage
    assert first.reused_tokens["canonical"] == 4
    assert window.plan().computed_tokens == 0
    assert [e.exact for e in window.chunks] == [True, False]


def test_exact_never_approximates(engine: FakeEngine) -> None:
    window = Window(engine, "hd", fidelity=Fidelity("exact"))
    a, *_ = window.extend([Chunk.text("aa"), Chunk.text("bb"), Chunk.text("cc")])
    window.ask("q")
    window.evict(a)
    assert lanes(window) == ["computed", "computed"]
    assert list(window.ask("q", max_tokens=3).token_ids) == fresh(engine, window)


def test_what_was_computed_behind_another_rank_is_not_taken(engine: FakeEngine) -> None:
    """Two windows of one content: what one computed behind its patches is not what the other one's would give."""
    spans = []
    for rank in (1, 4):
        window = Window(engine, "hd", fidelity=Fidelity("patched", rank=rank))
        window.extend([Chunk.text("aa"), Chunk.text("b" * 30)])
        window.ask("q")
        assert window.maintenance.compress() > 0
        window.append(Chunk.text("cc"))
        assert lanes(window)[1:] == ["patched", "computed"]
        window.ask("q")
        spans.append(window.snapshot().placed[-1].kv.span)  # type: ignore[union-attr]
    assert all(map(engine.repo.contains, spans)) and spans[0] != spans[1]
    with Window(engine, "hd", fidelity=Fidelity("patched", rank=4)) as again:
        again.extend([Chunk.text("aa"), Chunk.text("b" * 30), Chunk.text("cc")])
        assert lanes(again)[1:] == ["patched", "resident"], "of the same rank it is"


def test_streams_and_async_asks_take_the_options_of_ask(window: Window) -> None:
    with pytest.raises(TypeError, match=r"options must be of temperature, .*, remember, .*, got \['beams'\]"):
        window.stream("q", beams=3)  # type: ignore[call-arg]
    assert "".join(window.stream("q", stop=None, seed=1)) == window.ask("q").text
    for options in ({"min_p": 2}, {"repetition_penalty": 0}, {"presence_penalty": float("inf")}, {"top_k": -2}):
        with pytest.raises(ValueError, match=next(iter(options))):
            window.ask("q", **options)


def test_a_fork_shares_everything_and_its_edits_stay_its_own(engine: FakeEngine, window: Window) -> None:
    size = engine.store.stats().bytes
    branch = window.fork()
    assert engine.store.stats().bytes == size
    assert branch.plan().computed_tokens == 0
    branch.evict(branch.ids[0])
    assert len(window.ids) == 3
    window.adopt(branch)
    assert window.ids == branch.ids
    late = window.fork()
    window.append(Chunk.text("moved on"))
    with pytest.raises(ValueError, match="must not have moved since the fork"):
        window.adopt(late)
    window.adopt(late, force=True)
    assert window.ids == late.ids
    with pytest.raises(ValueError, match="must be a fork of this window"):
        window.adopt(Window(engine, "hd"))


def test_branches_are_of_their_windows_class(engine: FakeEngine) -> None:
    class Own(Window):
        """A user's own class."""

    window = Own(engine)
    assert type(window.fork()) is type(Own.restore(engine, window.snapshot())) is Own


def test_a_window_is_neither_copied_nor_pickled(window: Window) -> None:
    for take in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"a window must be forked or saved, .* take fork\(\) or snapshot\(\)"):
            take(window)


def test_an_engine_is_neither_copied_nor_pickled(engine: FakeEngine) -> None:
    for take in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="opened where it is used"):
            take(engine)


@pytest.mark.parametrize("forks", [8, pytest.param(20, marks=(pytest.mark.slow, pytest.mark.guard))])
def test_forks_of_a_window_that_slides_meanwhile_answer_for_themselves(forks: int) -> None:
    """Taken in other threads, at any moment of its edits and asks."""
    stop, interval, setting = threading.Event(), sys.getswitchinterval(), ("hd", 400, Fidelity("exact"))
    with FakeEngine() as engine, Window(engine, *setting) as window, ThreadPoolExecutor(3) as pool:
        window.extend([Chunk.text(f"t={i}") for i in range(6)])

        def slide() -> int:
            for i in itertools.count(6):
                window.append(Chunk.text(f"t={i}"))
                window.slide(len(window.ids) - 5)
                if i % 5 == 0:
                    window.ask("q", 2)
                if stop.is_set():
                    break
            return i

        def fork(seed: int) -> list[tuple[list[Chunk], str]]:
            found = []
            for i in range(forks):
                with window.fork() as branch:
                    branch.append(Chunk.text(f"{seed} {i}"))
                    branch.check()
                    found.append(([branch.chunk(name) for name in branch.ids], branch.ask("q", 3).text))
            return found

        sys.setswitchinterval(1e-6)
        try:
            sliding = pool.submit(slide)
            found = [*itertools.chain(*pool.map(fork, range(2)))]
        finally:
            stop.set()
            sys.setswitchinterval(interval)
        assert sliding.result(60) > 6
    assert engine.store.stats().leased == 0
    for chunks, text in found:
        with FakeEngine() as alone, Window(alone, *setting) as fresh:
            fresh.extend(chunks)
            assert fresh.ask("q", 3).text == text


def test_a_fork_behind_another_header_sees_nothing_again(engine: FakeEngine, window: Window) -> None:
    branch = window.fork(system_prompt="other")
    assert branch.system_prompt == "other"
    assert branch.version == window.version
    assert branch.ids == window.ids
    assert all(lane in ("computed", "formed") for lane in lanes(branch))
    branch.ask("q")
    assert engine.counters.vision_encodes == 1
    assert branch.plan().exact
    assert lanes(window) == ["resident"] * 3


def test_old_versions_can_be_read_and_not_edited(window: Window) -> None:
    version, ids = window.version, window.ids
    window.slide(1)
    old = window.at(version)
    assert old.ids == ids
    assert old.ask("q").text
    with pytest.raises(ReadOnlyWindow, match=r"fork\(\)"):
        old.slide(1)
    assert old.fork().slide(1) == [ids[0]]
    with pytest.raises(LookupError, match="kept version"):
        window.at(version + 99)


def test_forgetting_recomputes_all_that_absorbed_a_chunk(engine: FakeEngine, window: Window) -> None:
    a, b, _ = window.ids
    window.evict(b)
    d = window.append(Chunk.text("dd"))  # absorbs what c absorbed from b
    window.ask("q")
    window.recall(b)
    part = window.chunk(b).media[0]
    version = window.version
    window.evict(b, forget=True)
    assert [e.lane for e in window.chunks] == ["resident", "formed", "formed"]
    assert window.chunks[-1].id == d
    assert list(window.ask("q", max_tokens=3).token_ids) == fresh(engine, window)
    assert b not in window.evicted
    with pytest.raises(UnknownChunk):
        window.recall(b)
    with pytest.raises(LookupError):
        window.at(version)
    assert not engine.repo.contains(f"source/{part.content}")
    assert window.ids[0] == a


def test_remember_captures_the_very_pass(engine: FakeEngine, window: Window) -> None:
    answer = window.ask("q", max_tokens=3, remember=True)
    assert window.ids[-1] == answer.remembered
    assert lanes(window)[-1] == "resident"
    assert answer.usage.computed_tokens == 3 + 3  # the query; the last answer token and the closing of its turn
    held = list(window.ask("q", max_tokens=3).token_ids)
    assert held == fresh(engine, window)
    other = window.remember("who", "nobody")
    assert window.ids[-1] == other
    assert lanes(window)[-1] == "computed"


def test_disposable_compares_two_asks_and_changes_nothing(window: Window) -> None:
    state = window.snapshot()
    result = window.disposable(window.ids[0], "q", max_tokens=3)
    clean = window.disposable(window.ids[0], "q", max_tokens=3, clean=True)
    assert window.snapshot() == state
    assert result.disposable == (result.answer_with == result.answer_without)
    assert clean.answer_with == result.answer_with
    assert clean.kl > 0
    assert result.kl >= 0


def test_streams_yield_the_answers_text(window: Window) -> None:
    whole = window.ask("q", max_tokens=3)
    stream = window.stream("q", max_tokens=3)
    assert "".join(stream) == whole.text
    assert stream.answer is not None  # type: ignore[attr-defined]
    assert stream.answer.token_ids == whole.token_ids  # type: ignore[attr-defined]

    async def collect() -> str:
        return "".join([text async for text in window.astream("q", max_tokens=3)])

    assert asyncio.run(collect()) == whole.text


def test_a_stream_closed_early_changes_nothing(engine: FakeEngine, window: Window) -> None:
    window.append(Chunk.text("dd"))
    state = window.snapshot()
    engine.delay = 0.05
    stream = window.stream("q", max_tokens=3)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert window.snapshot() == state
    engine.delay = 0.0
    assert window.ask("q").text


def test_cancelling_aask_changes_nothing(engine: FakeEngine, window: Window) -> None:
    window.append(Chunk.text("dd"))
    state = window.snapshot()
    engine.delay = 0.05

    async def cancelled() -> None:
        task = asyncio.create_task(window.aask("q", max_tokens=3))
        await asyncio.sleep(0.03)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert window.snapshot() == state
    window.append(Chunk.text("free again"))


def test_a_chunk_that_comes_back_behind_another_must_see_it(engine: FakeEngine) -> None:
    """What it was allowed not to see where it stood before it left counts no more."""
    window = Window(engine, "hd", fidelity=Fidelity("patched"))
    legend = window.append(Chunk.text("legend"))
    window.evict(legend)
    scene = window.append(Chunk.text("scene"))
    window.ask("q")
    window.recall(legend)
    assert lanes(window)[1] == "survivor", "a recall leaves the chunks behind it as they are"
    asked = window.fork()
    for either in (window, asked):
        if either is asked:
            either.ask("q")
        either.evict(legend)
        either.evict(scene)
        either.recall(legend)
        either.recall(scene)
    assert lanes(window)[1] == "formed"
    assert asked.plan().entries[1].reused, "the very same was asked before, and a prefix cache would compute nothing"
    asked.close()
    assert list(window.ask("q", max_tokens=3).token_ids) == fresh(engine, window)
    window.check()


def test_a_window_has_one_writer(engine: FakeEngine, window: Window) -> None:
    engine.delay = 0.1
    thread = threading.Thread(target=window.ask, args=("q",))
    thread.start()
    while not window.core._writer.locked():
        pass
    with pytest.raises(WindowBusy, match="one writer"):
        window.append(Chunk.text("x"))
    assert window.fork().plan().tokens == window.tokens
    thread.join()
    window.append(Chunk.text("x"))


def test_a_writer_that_is_being_stopped_is_waited_for(window: Window) -> None:
    answering, stop, refused = threading.Event(), threading.Event(), []

    def on_token(_: int, __: str) -> bool:
        answering.set()
        assert stop.wait(30)
        try:
            window.append(Chunk.text("x"))
        except WindowBusy as error:  # this thread's own answer is never waited for
            refused.append(error)
        time.sleep(0.1)
        return True

    def answer() -> None:
        with suppress(AnswerStopped):
            window.answer(Question.of("q", 8), on_token=on_token, stopped=stop.is_set)

    thread = threading.Thread(target=answer)
    thread.start()
    assert answering.wait(30)
    before = window.ids
    with pytest.raises(WindowBusy):
        window.append(Chunk.text("x"))
    stop.set()
    assert window.append(Chunk.text("x")) and window.ids[:-1] == before and len(refused) == 1
    thread.join()

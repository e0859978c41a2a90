"""`Plan.requests` and what each of them computes, against what the engines do.

Chunks that must be computed in front of held ones take an engine request of their own: an insertion, a repair, an entry
of the store that is gone. The plan names these requests and the usage of the answer counts them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from ctxwin import Answer, Chunk, Fidelity, Plan, PlanRequest, Window, open_engine
from ctxwin.engines.base import Engine
from ctxwin.engines.results import Generation
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.window import serialization
from twins import twins
from window.fake import FakeEngine

HEADER = "You watch a camera."
QUERY = "color of 03?"
BLOCK = 32
"""Tokens of a block of vLLM's paged cache on a CPU."""
OPS = ("append", "insert", "recall", "repair", "evict", "forget", "slide", "reorder", "toggle", "lose", "fork", "ask")


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    with open_engine("tiny", engine=request.param, dtype="float32") as opened:
        yield opened


def chunk(seed: int) -> Chunk:
    """Texts, and every third a picture: of a block and more, and of a few tokens."""
    if seed % 3 == 0:
        return Chunk.image(
            np.random.default_rng(seed).integers(0, 255, (28, 28, 3), dtype=np.uint8), text=f"t={seed} s"
        )
    return Chunk.text(f"{seed} red blue circle " * (1 + seed % 5))


def filled(engine: Engine, seeds: Sequence[int], mode: Any = "patched") -> Window:
    window = Window(engine, HEADER, fidelity=Fidelity(mode, rank=4))
    window.extend([chunk(seed) for seed in seeds])
    return window


def spend(window: Window, plan: Plan) -> None:
    """Asks, and holds what it cost against the plan, made without the question and with it."""
    engine: Any = window.engine
    asked = window.plan(QUERY)
    usage = window.ask(QUERY, max_tokens=1).usage
    query = engine.encode_query(QUERY).tokens
    assert usage.misses == usage.fallbacks == 0
    assert usage.forwards == plan.requests == asked.requests
    assert usage.prompt_tokens == plan.tokens + query
    assert usage.computed_tokens == asked.computed_tokens
    # What of a question that was asked before is still in vLLM's cache is the one thing that only the second plan knows.
    repeated = plan.computed_tokens + query - usage.computed_tokens
    assert repeated == 0 or (engine.spec.name == "vllm" and 0 < repeated <= query + BLOCK)


def check_steps(plan: Plan) -> None:
    """What holds of every plan."""
    *before, answer = plan.steps
    assert answer.purpose == "answer" and answer.tokens == plan.tokens
    assert all(step.purpose != "answer" for step in before)
    assert all(step.computed > 0 and step.reused >= 0 for step in before) and 0 <= answer.computed <= answer.tokens
    assert sum(step.computed for step in plan.steps) == plan.computed_tokens
    chunks = [step.tokens for step in plan.steps if step.purpose in ("chunks", "answer")]
    assert chunks == sorted(set(chunks)), "each request goes further than the one before it"
    assert (
        serialization.plan_from(serialization.plan_to(plan)) == plan
        and serialization.plan_to(plan)["requests"] == plan.requests
    )
    assert (f"{plan.requests} requests: " in str(plan)) == (plan.requests > 1)


class TestWhatIsPlanned:
    def test_first_sight_and_append_are_one_request(self, engine: Any) -> None:
        with filled(engine, range(100, 103)) as window:
            plan = window.plan()
            check_steps(plan)
            assert [s.purpose for s in plan.steps] == ["answer"] and plan.steps[0].computed == plan.computed_tokens
            spend(window, plan)
            window.append(chunk(103))
            plan = window.plan()
            assert plan.steps == (PlanRequest("answer", plan.tokens, window.chunks[-1].tokens),)
            spend(window, plan)
            plan = window.plan()
            assert plan.steps == (PlanRequest("answer", plan.tokens, 0),)

    def test_insertions_take_a_request_each(self, engine: Any) -> None:
        with filled(engine, range(110, 115)) as window:
            window.ask(QUERY, max_tokens=1)
            window.insert(1, chunk(115))
            window.insert(4, chunk(116))
            window.insert(5, chunk(117))
            window.append(chunk(118))
            plan = window.plan()
            check_steps(plan)
            sizes = [plan.system_prompt_tokens, *(e.tokens for e in plan.entries)]
            assert plan.steps == (
                PlanRequest("chunks", sum(sizes[:3]), sizes[2]),
                PlanRequest("chunks", sum(sizes[:7]), sizes[5] + sizes[6]),
                PlanRequest("answer", sum(sizes), sizes[-1]),
            )
            assert "3 requests: " in str(plan)
            spend(window, plan)

    def test_repair_of_the_tail_is_one_request(self, engine: Any) -> None:
        with filled(engine, range(120, 124)) as window:
            window.ask(QUERY, max_tokens=1)
            gone = window.ids[0]
            window.evict(gone)
            window.ask(QUERY, max_tokens=1)
            window.recall(gone, at=1, repair=True)
            plan = window.plan()
            check_steps(plan)
            assert plan.requests == 1 and plan.steps[0].computed >= sum(e.tokens for e in plan.entries[2:])
            spend(window, plan)

    def test_canonicals_come_first_and_once(self, engine: Any) -> None:
        """The same chunk placed twice and toggled clean twice has one canonical, behind a system prompt that is computed once."""
        with Window(engine, "A system prompt of its own.", fidelity=Fidelity("patched", rank=4)) as window:
            ids = window.extend([chunk(130), chunk(131), chunk(131), chunk(132)])
            for placed in ids[1:3]:
                window.toggle(placed, conditioned=False)
            plan = window.plan()
            check_steps(plan)
            tokens = window.chunks[1].tokens
            assert [s.purpose for s in plan.steps] == ["system_prompt", "canonical", "chunks", "answer"]
            assert plan.steps[1] == PlanRequest("canonical", plan.system_prompt_tokens + tokens, tokens)
            assert [e.compute for e in plan.entries[1:3]] == [tokens, 0]
            spend(window, plan)


def test_nothing_to_compute_takes_no_request(engine: Any) -> None:
    """A base model without a chat template has an empty system prompt, which the store may have lost."""
    empty = Encoded("", (), np.zeros((3, 0), dtype=np.int64), 0)
    parts, query = [empty, engine.encode(chunk(141)), engine.encode(chunk(142))], engine.encode_query(QUERY)
    starts = [0, 0, parts[1].advance]
    segments = [Segment(part, start, capture=True) for part, start in zip(parts, starts, strict=True)]
    whole = engine.generate(segments, query, Sampling(1, logprobs=-1), salt="empty")
    assert whole.forwards == 1 and [whole.captured[i].tokens for i in range(3)] == [p.tokens for p in parts]
    held = [segments[0], *(Segment(p.encoded, p.start, span=whole.captured[i]) for i, p in enumerate(segments) if i)]
    again = engine.generate(held, query, Sampling(1, logprobs=-1), salt="empty, held")
    assert again.forwards == 1 and again.computed_tokens == query.tokens and again.captured[0].tokens == 0
    # A query of its own is a smaller product, whose sums processors make in another order: a few float32 roundings.
    assert max(abs(again.logprobs[t] - whole.logprobs[t]) for t in whole.logprobs) < 1e-4


def check_plans(engine: Any, data: st.DataObject) -> None:
    """Random programs of edits, losses in the store among them."""
    mode = data.draw(st.sampled_from(["patched", "patched", "exact", "blind"]))
    with filled(engine, data.draw(st.lists(st.integers(0, 11), min_size=2, max_size=4)), mode) as window:
        branches = []
        for _ in range(data.draw(st.integers(2, 6))):
            op, i = data.draw(st.sampled_from(OPS)), data.draw(st.integers(0, 7))
            ids, gone = window.ids, window.evicted
            if op == "append":
                window.append(chunk(i))
            elif op == "insert":
                window.insert(i % (len(ids) + 1), chunk(12 + i))
            elif op in ("recall", "repair") and gone:
                at = data.draw(st.none() | st.integers(0, len(ids)))
                window.recall(gone[i % len(gone)], at=at, repair=op == "repair")
            elif op in ("evict", "forget") and len(ids) > 1:
                window.evict(ids[i % len(ids)], forget=op == "forget")
            elif op == "slide" and len(ids) > 1:
                window.slide(1)
            elif op == "reorder":
                window.reorder(data.draw(st.permutations(ids)))
            elif op == "toggle" and ids:
                entry = window.chunks[i % len(ids)]
                window.toggle(entry.id, conditioned=not entry.conditioned)
            elif op == "lose" and ids:
                kv = window.snapshot().placed[i % len(ids)].kv
                if kv is not None:
                    engine.repo.delete(kv.span)
            elif op == "fork":
                branches.append(window)
                window = window.fork()
            elif op == "ask":
                plan = window.plan()
                check_steps(plan)
                spend(window, plan)
        plan = window.plan()
        check_steps(plan)
        spend(window, plan)
        for branch in branches:
            branch.close()


test_every_plan_is_what_the_engine_does, test_every_plan_of_many_is = twins(check_plans, 25, 150, data=st.data())


class TestConcurrently:
    WINDOWS = 4

    def with_holes(self, engine: Any, first: int = 1000) -> list[Window]:
        """Windows whose next ask takes three requests; no two hold the same chunks."""
        made = []
        for i in range(self.WINDOWS):
            window = filled(engine, [first + 10 * i + j for j in range(4)])
            window.ask(QUERY, max_tokens=1)
            window.insert(1, chunk(first + 10 * i + 5))
            window.insert(3, chunk(first + 10 * i + 6))
            assert window.plan().requests == 3
            made.append(window)
        return made

    def test_requests_of_several_windows_are_in_flight_together(self, engine: Any) -> None:
        if engine.spec.name != "vllm":
            pytest.skip("transformers runs one request at a time")
        driver = engine._core.driver
        scheduler = driver.llm.llm_engine.engine_core.engine_core.scheduler
        steps: list[int] = []
        step = driver.engine.step

        def counted() -> Any:
            made = step()
            steps.append(len(scheduler.running) + len(scheduler.finished_req_ids))
            return made

        def ask(window: Window) -> Any:
            return window.ask(QUERY, max_tokens=4, logprobs=-1)

        # Two tenants: neither store nor prefix cache of one knows what the other has computed.
        with engine.view("alone") as first, engine.view("together") as second:
            windows, again = self.with_holes(first), self.with_holes(second)
            driver.engine.step = counted
            try:
                alone = [ask(window) for window in windows]
                one_by_one = len(steps)
                steps.clear()
                together = self.at_once(driver, [partial(ask, window) for window in again])
            finally:
                del driver.engine.step
        assert max(steps) == self.WINDOWS, "the first requests of all windows run in one step"
        assert len(steps) < one_by_one
        for a, b in zip(alone, together, strict=True):
            assert b.usage.forwards == 3 and a.token_ids == b.token_ids
            gaps = [abs(a.first_token_logprobs[t] - b.first_token_logprobs[t]) for t in a.first_token_logprobs]
            assert max(gaps) < 1e-4  # in another batch, sums are in another order

    def at_once(self, driver: Any, asks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Results of asks in a thread each; vLLM's thread waits until each of them has handed its first request over."""
        arrived, blocked = threading.Semaphore(0), threading.Event()
        submit = driver.submit

        def submitted(*args: Any, **kwargs: Any) -> Any:
            ticket = submit(*args, **kwargs)
            arrived.release()
            return ticket

        held = threading.Thread(target=driver.call, args=(blocked.wait,))
        held.start()
        driver.submit = submitted
        try:
            with ThreadPoolExecutor(len(asks)) as pool:
                answers = [pool.submit(ask) for ask in asks]
                for _ in asks:
                    assert arrived.acquire(timeout=30)
                blocked.set()
                return [answer.result(timeout=60) for answer in answers]
        finally:
            blocked.set()
            del driver.submit
            held.join()


def test_as_many_ask_at_once_as_there_are_windows() -> None:
    """By `aask`, on a machine with fewer cores: each ask waits until all of them have reached the engine."""
    count = 40
    together = threading.Barrier(count)

    class Meeting(FakeEngine):
        def generate(self, *args: Any, **kwargs: Any) -> Generation:
            together.wait(timeout=30)
            return super().generate(*args, **kwargs)

    with Meeting() as engine:
        windows = [Window(engine, f"system prompt {i}") for i in range(count)]

        async def asked() -> list[Answer]:
            return await asyncio.gather(*(window.aask("q", max_tokens=2) for window in windows))

        answers = asyncio.run(asked())
    assert len(answers) == count and all(answer.token_ids for answer in answers)

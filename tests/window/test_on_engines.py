"""Windows on the real engines and the bundled model, in float32: what is exact is exact to the bit or to 1e-5."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import permutations
from pathlib import Path
from threading import current_thread
from types import SimpleNamespace
from typing import Any

import pytest

from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.engines.base import Engine
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Segment
from ctxwin.errors import BudgetExceeded
from ctxwin.store import codec
from ctxwin.tiny import world
from ctxwin.window.ask import kl
from ctxwin.window.idle import prefiller_of
from interpreted import resident_copies
from window.on_engines import FRAMES, HEADER, QUESTIONS, SHARED, ask, ask_exactly, chunk, close, reprefill, window_on

ENGINES = ["hf", pytest.param("vllm", marks=pytest.mark.vllm)]
# And with copies of the KV kept where it is served, as on a GPU; Triton's interpreter takes a second for a window.
RESIDENT = pytest.param("resident", marks=pytest.mark.vllm)
ELSEWHERE = pytest.param("resident multi", marks=[pytest.mark.vllm, pytest.mark.slow, pytest.mark.guard])
on_resident_copies = pytest.mark.parametrize("engine", [*ENGINES, RESIDENT, ELSEWHERE], indirect=True, scope="module")


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    resident, _, processes = request.param.partition(" ")
    copies = resident == "resident"
    options = {"processes": processes} if processes else {}
    start = partial(open_engine, "tiny", engine="vllm" if copies else resident, dtype="float32", **options)
    if copies:
        pytest.importorskip("triton")
    with resident_copies(start, interpret=not processes) if copies else start() as opened:
        yield opened


@on_resident_copies
def test_an_exact_window_answers_like_a_re_prefill_after_every_edit(engine: Engine) -> None:
    with window_on(engine, "exact") as window:
        a, b, c, d = window.ids
        edits = (
            ("check",),
            ("evict", b),
            ("recall", b, 0),
            ("reorder", [d, a, c, b]),
            ("slide", 1),
            ("append", chunk(4)),
        )
        for edit, *arguments in edits:
            getattr(window, edit)(*arguments)
            for question in QUESTIONS:
                assert ask_exactly(engine, window, question, 1e-5).usage.exact


@pytest.mark.parametrize("engine", [RESIDENT], indirect=True, scope="module")
def test_a_slide_is_one_launch_on_the_device(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No KV of its survivors crosses from the host or is digested, but by the thread that writes the store behind answers."""
    from triton.runtime.interpreter import GridExecutor

    launches, digests, launch = [], [], GridExecutor.__call__

    def launched(self: Any, *args: Any, **options: Any) -> None:
        launches.append(self.grid)
        launch(self, *args, **options)

    def digested(*args: Any) -> Any:
        digests.append(current_thread().name)
        return sha256(*args)

    with Window(engine, HEADER, fidelity=Fidelity("patched", survivors="keep")) as window:
        window.extend([chunk(i) for i in range(4)])
        ask(window, QUESTIONS[0])
        copies = engine._core.transport.paged.resident  # type: ignore[attr-defined]
        copied = copies.copied_bytes
        monkeypatch.setattr(GridExecutor, "__call__", launched)
        monkeypatch.setattr(codec, "hashlib", SimpleNamespace(sha256=digested))
        window.slide(1)
        usage = ask(window, QUESTIONS[0]).usage
    assert usage.bytes_loaded > 0 == usage.reused_tokens.get("computed", 0) and copies.copied_bytes == copied
    assert [layers for _, _, layers in launches] == [engine.spec.kv.layers]
    assert {name.partition("_")[0] for name in digests} <= {"ctxwin-store"}


@pytest.mark.parametrize("engine", [RESIDENT], indirect=True, scope="module")
def test_steps_ahead_of_an_answers_end_keep_no_blocks(engine: Engine) -> None:
    with window_on(engine) as window:
        for _ in range(3):
            ask(window, QUESTIONS[0])
            assert engine._core.driver.reset_prefix_cache()  # type: ignore[attr-defined]
            window.slide(1)


@on_resident_copies
def test_toggle_off_and_on_is_bit_identical(engine: Engine) -> None:
    with window_on(engine, "exact") as other:
        other.toggle(other.ids[1], conditioned=False)
        ask(other, QUESTIONS[0])
    with window_on(engine) as window:
        for compress in (False, True):  # served behind a clean view by what another window computed, then by patches
            ask(window, QUESTIONS[0])
            if compress:
                assert window.maintenance.compress()
            before, entries = ask(window, QUESTIONS[0]).first_token_logprobs, window.plan().entries
            window.toggle(window.ids[1], conditioned=False)
            off = ask(window, QUESTIONS[0])
            assert off.usage.reused_tokens["canonical"] > 0
            restored = Window.restore(engine, window.snapshot())
            for toggled in (window, restored):
                toggled.toggle(window.ids[1], conditioned=True)
            assert [(e.lane, e.depth) for e in window.plan().entries] == [(e.lane, e.depth) for e in entries]
            assert [e.lane for e in restored.plan().entries] == [e.lane for e in entries]
            assert ask(window, QUESTIONS[0]).first_token_logprobs == before
            restored.close()
        window.maintenance.refresh()  # other tests find the KV exact


def test_no_edit_runs_the_vision_tower(engine: Engine) -> None:
    with window_on(engine) as window:
        ask(window, QUESTIONS[0])
        encodes = engine.counters.vision_encodes
        a, b, c, d = window.ids
        window.slide(1)
        ask(window, QUESTIONS[0])
        window.recall(a)
        window.reorder([b, a, d, c])
        ask(window, QUESTIONS[0])
        window.toggle(b, conditioned=False)
        branch = window.fork(system_prompt="Answer briefly.")
        for view in (window, branch):
            ask(view, QUESTIONS[0])
        window.disposable(c, QUESTIONS[0], max_tokens=2)
        window.maintenance.compress()
        window.maintenance.refresh()
        window.maintenance.prepare_orbit(window.ids[:2], orders=2)
        assert engine.counters.vision_encodes == encodes


def test_any_order_of_a_prepared_set_is_served_without_a_forward(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM runs all forwards that prepare it in one step, behind one that loads the system prompt where it is not cached."""
    steps: list[int] = []
    if engine.spec.name == "vllm":
        batching: Any = engine
        vllm = batching.core.driver.engine
        monkeypatch.setattr(vllm, "step", lambda step=vllm.step: (steps.append(1), step())[1])
    fidelity = Fidelity("patched", orbit=True, advanced={"forbid": ("survivor", "patched")})
    (question,) = (q.text for q in world.questions_for(FRAMES[:4], 1, 0, ["multi_hop"]))
    query = engine.encode_query(question).tokens
    losses: dict[str, list[float]] = {"orbit": [], "blind": []}
    with Window(engine, HEADER, fidelity=fidelity) as window:
        ids = window.extend([chunk(i) for i in range(4)])
        ask(window, question)
        plan, before = window.maintenance.plan_orbit(ids[:3]), replace(engine.counters)
        steps.clear()
        assert window.maintenance.prepare_orbit(ids[:3]) == ids
        assert engine.counters.prefill_forwards - before.prefill_forwards == plan["forwards"] <= 4
        assert len(steps) in ((1, 2) if engine.spec.name == "vllm" else (0,))
        assert engine.counters.prefill_tokens - before.prefill_tokens <= plan["tokens"]
        for order in permutations(range(3)):
            with window.fork() as branch, Window(engine, HEADER, fidelity=Fidelity("blind")) as blind:
                branch.reorder([*(ids[i] for i in order), ids[3]])
                blind.extend([chunk(i) for i in (*order, 3)])
                exact = reprefill(engine, branch, question)
                for view, kind in ((branch, "orbit"), (blind, "blind")):
                    answer = ask(view, question)
                    assert answer.usage.computed_tokens == query
                    losses[kind].append(kl(exact, answer.first_token_logprobs))
    assert sum(losses["orbit"]) < sum(losses["blind"]) / 2


def test_an_append_computes_the_new_chunk_and_the_query(engine: Engine) -> None:
    with window_on(engine) as window:
        window.slide(1)
        ask(window, QUESTIONS[0])
        window.append(chunk(5))
        usage = ask(window, QUESTIONS[0]).usage
        query = engine.encode_query(QUESTIONS[0]).tokens
        new = window.chunks[-1].tokens
        assert usage.computed_tokens == new + query
        assert usage.reused_tokens["computed"] == new
        again = ask(window, QUESTIONS[0]).usage
        assert again.computed_tokens == query
        if engine.spec.name == "vllm":  # a last, partly filled block (32 tokens on a CPU)
            assert max(usage.bytes_loaded, again.bytes_loaded) < 32 * engine.spec.kv.token_bytes


def test_a_look_back_in_an_exact_window_computes_the_chunk_and_the_query(engine: Engine) -> None:
    """Whatever returned before leaves from the end, so that the prefix stands."""
    with window_on(engine, "exact", 6) as window:
        ids = window.ids
        window.slide(2)
        tokens, query = window.tokens, engine.encode_query(QUESTIONS[0]).tokens
        ask(window, QUESTIONS[0])
        for back in (*ids[:2], ids[0]):
            window.look_back(back, reserve_tokens=window.budget - tokens - window.chunks[0].tokens)
            assert window.ids == (*ids[2:], back)
            answer = ask_exactly(engine, window, QUESTIONS[0], 1e-5)
            assert answer.usage.computed_tokens < window.chunks[-1].tokens + query + 2 * 32


@on_resident_copies
def test_approximation_is_close_and_never_reaches_an_exact_window(engine: Engine) -> None:
    with window_on(engine) as patched:
        ask(patched, QUESTIONS[0])
        assert patched.maintenance.compress() > 0
        assert not patched.plan().exact
        served = [ask(patched, question).first_token_logprobs for question in QUESTIONS]
        with window_on(engine, "exact") as exact:
            assert exact.plan().computed_tokens > 0, "patches must not serve an exact window"
            for question, answer in zip(QUESTIONS, served, strict=True):
                reference = reprefill(engine, patched, question)
                assert reference != answer and kl(reference, answer) < 0.05
                assert close(ask(exact, question).first_token_logprobs, reference, 1e-5)
                assert ask(exact, question).usage.exact


@pytest.mark.parametrize(
    ("layout", "layers"), [("joint", "deep"), ("quantized", "deep"), ("joint", (0.25, 1)), ("joint", (0.75, 1))]
)
def test_a_removal_patch_answers_like_a_re_prefill_of_what_stayed(engine: Engine, layout: str, layers: Any) -> None:
    removing = Fidelity("patched", bytes_share=0.11, layers=layers, survivors="removal", advanced={"layout": layout})
    with Window(engine, HEADER, fidelity=removing) as window:
        window.extend([chunk(i) for i in (3, 1, 4, 0)])
        ask(window, QUESTIONS[0])
        window.slide(1)
        ask_exactly(engine, window, QUESTIONS[0], 1e-4)
        assert [entry.lane for entry in window.chunks] == ["resident", "patched", "patched"]
        keys = [p.kv.patch for p in window.snapshot().placed if p.kv and p.kv.patch]
        stored = [engine.repo.get_patch(key) for key in keys]
        assert {patch.layout for patch in stored} == {layout}
        assert {patch.layers for patch in stored} == {{"deep": (2, 3), (0.25, 1): (1, 2, 3), (0.75, 1): (3,)}[layers]}
        for question in QUESTIONS:
            answer, reference = ask(window, question), reprefill(engine, window, question)
            assert not answer.usage.exact and answer.usage.reused_tokens["patched"] > 0
            assert reference != answer.first_token_logprobs and kl(reference, answer.first_token_logprobs) < 0.05


def test_removal_patches_formed_ahead_serve_a_slide_close_to_a_re_prefill(engine: Engine) -> None:
    """The ask behind a slide computes its new chunk and question, and answers more like a re-prefill than survivors do."""
    tokens = [engine.encode(chunk(i)).tokens for i in range(6)]
    query = max(engine.encode_query(question).tokens for question in QUESTIONS)
    header = f"{HEADER} What stays moves up."  # of its own: no KV is there that another test left
    budget = engine.encode_system_prompt(header).tokens + 4 * max(tokens) + query + 2
    lost: dict[str, float] = {}
    for survivors in ("keep", "removal"):
        fidelity = Fidelity("patched", rank=16, survivors=survivors)
        with Window(engine, header, budget, fidelity, prefill="idle") as window:
            for i in range(6):
                window.append(chunk(i))
                window.slide(reserve_tokens=query + 2)
                answers = [ask(window, question) for question in QUESTIONS]
                assert prefiller_of(engine).drain(60)
            exact = [reprefill(engine, window, question) for question in QUESTIONS]
            lost[survivors] = sum(kl(a, b.first_token_logprobs) for a, b in zip(exact, answers, strict=True))
            usage, counts = answers[0].usage, window.maintenance.prefill_counts
            assert usage.computed_tokens <= tokens[5] + query + 32 and usage.reused_tokens["computed"] == tokens[5]
            assert counts is not None and counts.predictions == (2 if survivors == "removal" else 0)
            assert usage.reused_tokens.get("patched", 0) == (sum(tokens[3:5]) if survivors == "removal" else 0)
    assert 0 < lost["removal"] < lost["keep"] / 2


def test_a_removal_patch_is_formed_anew_where_chunks_change_places(engine: Engine) -> None:
    removing = Fidelity("patched", rank=16, survivors="removal")
    with Window(engine, HEADER, fidelity=removing, prefill="idle") as window:
        window.extend([chunk(i) for i in (2, 5, 3, 0, 4)])
        ask(window, QUESTIONS[0])
        window.slide(1)
        assert prefiller_of(engine).drain(60)
        stale = {p.id: p.kv.patch for p in window.snapshot().placed if p.kv}
        a, b, c, d = window.ids
        window.reorder([a, c, b, d])
        assert prefiller_of(engine).drain(60)
        for question in QUESTIONS:
            answer, exact = ask(window, question), reprefill(engine, window, question)
            assert kl(exact, answer.first_token_logprobs) < 0.05
            assert answer.usage.computed_tokens <= engine.encode_query(question).tokens + 32
            assert answer.usage.reused_tokens["patched"] >= window.chunks[3].tokens
        last = window.snapshot().placed[3]
        assert last.kv is not None and last.kv.patch is not None and last.kv.patch != stale[d]


def test_a_clock_in_the_system_prompt_leaves_chunks_the_kv_they_had(engine: Engine) -> None:
    """Moved, as the new text is longer; held against that KV computed and moved by hand, and against a re-prefill."""
    system_prompts = f"{HEADER} the number is 3", f"{HEADER} the number is 4 now"
    clock = Fidelity("patched", survivors="refresh", edited_tokens=8)
    with Window(engine, system_prompts[0], fidelity=clock) as window:
        window.extend([chunk(i) for i in range(4)])
        ask(window, QUESTIONS[0])
        branch = window.fork(system_prompt=system_prompts[1])
    answers = [ask(branch, question) for question in QUESTIONS]
    assert not answers[0].usage.exact and {entry.lane for entry in branch.chunks} == {"edited"}
    old, new = ([Segment(engine.encode_system_prompt(text), 0)] for text in system_prompts)
    for encoded in (engine.encode(branch.chunk(placement)) for placement in branch.ids):
        start, there = (front[-1].start + front[-1].encoded.advance for front in (old, new))
        old.append(Segment(encoded, start, span=engine.prefill(old, encoded, start, salt="by hand"), approximate=True))
        new.append(replace(old[-1], start=there))
    with branch, Window(engine, system_prompts[1], fidelity=Fidelity("exact")) as exact:
        exact.extend([chunk(i) for i in range(4)])
        for question, answer in zip(QUESTIONS, answers, strict=True):
            query, reference = engine.encode_query(question), reprefill(engine, exact, question)
            by_hand = engine.generate(new, query, Sampling(1, logprobs=-1), salt="moved by hand").logprobs
            assert close(answer.first_token_logprobs, by_hand, 1e-4) and answer.usage.reused_tokens["edited"] > 0
            assert not close(answer.first_token_logprobs, reference, 1e-5)
            assert kl(reference, answer.first_token_logprobs) < 0.05
            assert close(ask(exact, question).first_token_logprobs, reference, 1e-5)


def test_patches_over_the_models_basis_answer_like_a_re_prefill(engine: Engine, own: Path) -> None:
    chunks = [chunk(i) for i in (2, 0, 3, 1)]  # other KV than that of the other tests on this engine
    with Window(engine, HEADER, fidelity=SHARED) as window:
        window.extend(chunks)
        ask(window, QUESTIONS[0])
        assert window.maintenance.compress() > 0
        answers = [ask(window, question) for question in QUESTIONS]
        assert all(answer.usage.reused_tokens["patched"] > 0 and not answer.usage.misses for answer in answers)
        for question, answer in zip(QUESTIONS, answers, strict=True):
            reference = reprefill(engine, window, question)
            assert reference != answer.first_token_logprobs and kl(reference, answer.first_token_logprobs) < 1e-3
        state = window.snapshot()
        patches = [engine.repo.get_patch(p.kv.patch) for p in state.placed if p.kv is not None and p.kv.patch]
        assert len(patches) == 3
        for patch in patches:
            assert patch is not None and patch.layout == "shared" and patch.rank == 48
            assert patch.nbytes == 48 * 2 * patch.tokens
        assert len({id(patch.basis) for patch in patches if patch}) == 1
        with Window.restore(engine, state.model_dump_json()) as again:
            assert again.fidelity == window.fidelity and again.fidelity.advanced.layout == "shared"
            answer = ask(again, QUESTIONS[0])
            assert close(answer.first_token_logprobs, answers[0].first_token_logprobs, 1e-5)
            assert answer.usage.reused_tokens == answers[0].usage.reused_tokens


def test_remembering_captures_what_a_prefill_would_compute(engine: Engine) -> None:
    with window_on(engine, n=2) as window:
        answer = window.ask(QUESTIONS[0], max_tokens=2, remember=True)
        assert answer.remembered == window.ids[-1]
        assert window.chunks[-1].lane == "resident"
        assert window.chunks[-1].exact
        ask_exactly(engine, window, QUESTIONS[1], 1e-4)


def test_what_is_remembered_up_to_the_limit_is_computed_later(engine: Engine) -> None:
    most, query = engine.spec.max_tokens, engine.encode_query(QUESTIONS[0]).tokens
    with window_on(engine, "exact", n=1) as window:
        (token,) = engine.encode(Chunk.text("a")).token_ids
        window.append(Chunk.tokens([token] * (most - window.tokens - query - 2)))
        answer = window.ask(QUESTIONS[0], max_tokens=2, remember=True)
        assert answer.text and answer.remembered == window.ids[-1] and window.tokens > most - 2
        with pytest.raises(BudgetExceeded, match="slide"):
            window.ask(QUESTIONS[1])
        window.evict(window.ids[1])
        assert ask_exactly(engine, window, QUESTIONS[1], 1e-4).usage.exact


def test_usage_counts_what_went_through_a_forward(engine: Engine) -> None:
    """Canonicals, remembered exchanges and what an engine's own prefix cache served, to the token."""
    system_prompt = HEADER + " The camera sees one shape at a time." * 4

    def counted(window: Window, **options: Any) -> None:
        tokens, forwards = engine.counters.prefill_tokens, engine.counters.prefill_forwards
        usage = window.ask(QUESTIONS[0], max_tokens=3, **options).usage
        assert usage.computed_tokens == engine.counters.prefill_tokens - tokens
        assert usage.forwards == engine.counters.prefill_forwards - forwards

    for mode in ("blind", "patched", "exact"):
        with Window(engine, system_prompt, fidelity=Fidelity(mode)) as window:
            window.extend([chunk(i) for i in range(3)])
            counted(window)
            counted(window, remember=True)
            window.reorder([window.ids[2], *window.ids[:2], *window.ids[3:]])
            counted(window, remember=True)
            window.append(chunk(4))
            counted(window)


def test_frames_count_each_run_of_the_tower(engine: Engine) -> None:
    before = engine.counters.vision_encodes
    frames = [world.render(FRAMES[i % 6]) for i in range(40)]
    clip = engine.encode(Chunk.video(frames, fps=2.0, as_frames=True))
    assert engine.counters.vision_encodes - before == 3  # 16, 16 and 8 of them at once
    assert len(clip.media) == 40


@on_resident_copies
def test_what_is_computed_because_a_load_failed_is_exact(engine: Engine) -> None:
    if engine.spec.name != "vllm":
        pytest.skip("transformers has no loads that fail")
    from adapters.vllm import faults

    with window_on(engine, n=3) as window:
        ask(window, QUESTIONS[0])
        assert window.maintenance.compress() > 0
        window.append(chunk(4))
        assert not window.plan().entries[-1].exact
        with faults.Faults(engine, lambda: faults.KINDS[type(engine._core.transport)][0]):  # type: ignore[attr-defined]
            answer = window.ask(QUESTIONS[0], max_tokens=2, logprobs=-1, remember=True)
        assert answer.usage.fallbacks == 1 and answer.usage.exact and set(answer.usage.reused_tokens) == {"computed"}
        assert [entry.exact for entry in window.plan().entries] == [True, False, False, True, True]
        chunks = [window.chunk(placement) for placement in window.ids]
        engine._core.driver.reset_prefix_cache()  # type: ignore[attr-defined]
        with Window(engine, HEADER, fidelity=Fidelity("exact")) as exact:  # served what the window has stored
            exact.extend(chunks)
            assert ask_exactly(engine, exact, QUESTIONS[1], 1e-4).usage.bytes_loaded > 0


@pytest.mark.parametrize("mode", ["exact", "patched"])
def test_a_prefilled_frame_leaves_only_the_question_to_the_answer(engine: Engine, mode: Any) -> None:
    shown = [
        Chunk.image(world.render(frame), text=f"{mode}: {i}") for i, frame in enumerate(FRAMES[:4])
    ]  # of no other test
    fidelity = Fidelity(mode, bytes_share=0.11, layers="deep")
    with Window(engine, HEADER, fidelity=fidelity) as window, Window(engine, HEADER, fidelity=fidelity) as other:
        for made in (window, other):
            made.extend(shown[:3])
            made.ask(QUESTIONS[0])
            made.append(shown[3])
            made.slide(1)
        assert window.maintenance.prefill()[-1] == window.ids[-1]
        answer, usual = ask(window, QUESTIONS[1]), ask(other, QUESTIONS[1])
        # vLLM's prefix cache ends with a whole block: less than one is computed again.
        again = answer.usage.computed_tokens - (answer.usage.prompt_tokens - window.tokens)
        assert again == 0 or (answer.usage.engine == "vllm" and 0 < again < 32)
        assert answer.usage.exact == usual.usage.exact == (mode == "exact")
        assert close(answer.first_token_logprobs, usual.first_token_logprobs, 1e-4)
        if mode == "exact":
            assert close(answer.first_token_logprobs, reprefill(engine, window, QUESTIONS[1]), 1e-4)


def test_an_exact_window_with_a_mark_costs_what_trimming_by_hand_does(engine: Engine) -> None:
    """Its answers are a re-prefill's; the user of a prefix cache drops the oldest half when the prompt is too long."""
    frames = world.make_stream(seed=23, n_frames=20)
    shown = [Chunk.image(world.render(frame), text=f"mark {i}") for i, frame in enumerate(frames)]
    size = max(engine.encode(c).tokens for c in shown)
    query = engine.encode_query(QUESTIONS[0]).tokens
    head = engine.encode_system_prompt(HEADER).tokens
    budget = head + 6 * size + query + 2
    computed = by_hand = 0
    kept: list[int] = []
    with Window(engine, HEADER, budget, Fidelity("exact"), low_water=0.5) as window:
        for i, new in enumerate(shown):
            window.append(new)
            window.slide(reserve_tokens=query + 2)
            answer = ask(window, QUESTIONS[0])
            computed += answer.usage.computed_tokens
            if i % 5 == 4:
                assert close(answer.first_token_logprobs, reprefill(engine, window, QUESTIONS[0]), 1e-4)
            whole = [*kept, engine.encode(new).tokens]
            if head + sum(whole) + query + 2 > budget:
                while head + sum(whole) + query + 2 > budget // 2:
                    whole.pop(0)
                by_hand += sum(whole) + query
            else:
                by_hand += whole[-1] + query + head * (i == 0)
            kept = whole
            assert len(kept) == len(window.ids)
    # Less than a block of vLLM's prefix cache is computed again at each ask, as it is for who trims by hand.
    assert computed <= by_hand + 32 * len(shown) * (answer.usage.engine == "vllm")
    assert computed < 0.5 * len(shown) * 6 * size


def test_merged_chunks_on_both_engines(engine: Engine) -> None:
    # Whole KV that other tests have left would be served in the place of the same chunks'.
    own = [Chunk.image(world.render(frame), text=f"merged {i}") for i, frame in enumerate(FRAMES[:5])]
    with Window(engine, HEADER, fidelity=Fidelity("patched", merge=0.5)) as window:
        window.extend(own[:4])
        whole = ask(window, QUESTIONS[0])
        tokens = [entry.tokens for entry in window.chunks]
        assert [window.maintenance.merge(i) for i in window.ids[1:3]] == [-(-t // 2) for t in tokens[1:3]]
        assert [e.lane for e in window.chunks] == ["resident", "merged", "merged", "resident"]
        half = ask(window, QUESTIONS[0])
        assert half.usage.computed_tokens == engine.encode_query(QUESTIONS[0]).tokens and not half.usage.fallbacks
        assert not half.usage.exact and not close(half.first_token_logprobs, whole.first_token_logprobs, 1e-5)
        window.append(own[4])
        window.slide(1)
        assert [e.lane for e in window.chunks] == ["merged", "merged", "survivor", "computed"]
        moved = ask(window, QUESTIONS[1])
        with Window(engine, HEADER, fidelity=Fidelity("patched", merge=0.5)) as other:
            other.adopt(window, force=True)
            assert close(ask(other, QUESTIONS[1]).first_token_logprobs, moved.first_token_logprobs, 1e-5)
        for placement in window.ids[:2]:
            window.maintenance.merge(placement, 1)
        window.maintenance.refresh()
        assert ask_exactly(engine, window, QUESTIONS[1], 1e-5).usage.exact


def test_a_prompt_is_merged_for_its_answer_and_the_window_stays_whole(engine: Engine) -> None:
    fidelity = Fidelity("exact", merge=0.3, advanced={"merge_prompt": True, "eliminate": 4})
    with Window(engine, HEADER, fidelity=fidelity) as window:
        window.extend([chunk(i) for i in range(3)])
        window.ask(QUESTIONS[0], max_tokens=2, remember=True)
        window.evict(window.ids[-1])
        plan = window.plan(QUESTIONS[0])
        merged = window.ask(QUESTIONS[0], max_tokens=12, logprobs=-1)
        assert plan.computed_tokens == merged.usage.computed_tokens == merged.usage.prompt_tokens
        assert plan.requests == merged.usage.forwards == 1 and not plan.bytes
        window.check()
        assert not merged.usage.exact and not plan.exact and all(entry.exact for entry in plan.entries)
        assert close(merged.first_token_logprobs, reprefill(engine, window, QUESTIONS[0]), 1e-5)
        query = engine.encode_query(QUESTIONS[0])
        held = Sampling(12, hold=0.3, hold_every=4, merge_prompt=True)
        layout = [Segment(engine.encode_system_prompt(HEADER), 0)]
        layout += [Segment(engine.encode(chunk(i)), entry.start) for i, entry in enumerate(window.chunks)]
        assert merged.token_ids == tuple(engine.generate(layout, query, held).token_ids)
        with Window(engine, HEADER, fidelity=Fidelity("exact")) as whole:
            whole.extend([chunk(i) for i in range(3)])
            again = ask(whole, QUESTIONS[0])
            assert again.usage.exact and close(again.first_token_logprobs, merged.first_token_logprobs, 1e-5)
            assert again.usage.computed_tokens < merged.usage.computed_tokens / 2

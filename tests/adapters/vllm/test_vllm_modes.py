"""One window program on vLLM in this process, in processes of its own, and as AsyncLLM: the same answers, batched, and
nothing but names and numbers between the processes."""

from __future__ import annotations

import asyncio
import itertools
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import current_thread
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from adapters.vllm.layouts import distance, encoded, laid
from ctxwin import Answer, Chunk, Fidelity, Window, open_engine
from ctxwin.audit import Options, auditor_of
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Segment
from ctxwin.store import codec
from ctxwin.tiny import world
from interpreted import Count, resident_copies

needs_processes = pytest.mark.vllm
pytestmark = [needs_processes, pytest.mark.slow]  # `make guard` runs them

HEADER = "You watch a camera."
FRAMES = world.make_stream(seed=11, n_frames=12)
QUESTIONS = [q.text for q in world.questions_for(FRAMES[:6], 3, 0, ("single_hop", "multi_hop"))]
WINDOWS = 8
# Float32 logprobs of the same model in another process or another batch: sums in another order; 1.3e-5 was seen.
CLOSE = 1e-4


def frame(i: int) -> Chunk:
    return Chunk.image(world.render(FRAMES[i]), text=f"t={i} s")


def ask(window: Window, question: int = 0, **options: Any) -> Answer:
    return window.ask(QUESTIONS[question % len(QUESTIONS)], max_tokens=4, logprobs=-1, **options)


def program(engine: Any) -> list[Answer]:
    """Every kind of edit, an answer after each; the pictures are seen by the engine's vision tower."""
    answers = []
    with Window(engine, HEADER, fidelity=Fidelity("patched", rank=4)) as window:
        a, b, c, d, e, _ = window.extend([frame(i) for i in range(6)])
        answers.append(ask(window))
        window.slide(1)
        answers.append(ask(window, 1))
        window.evict(c)
        window.recall(a, at=1)
        answers.append(ask(window, 2))
        window.recall(c)
        window.reorder([*reversed(window.ids[:3]), *window.ids[3:]])
        answers.append(ask(window, 3))
        window.toggle(d, conditioned=False)
        answers.append(ask(window))
        window.toggle(d, conditioned=True)
        answers.append(ask(window))
        window.insert(2, Chunk.text("red blue circle square"))
        answers.append(ask(window, 1, remember=True))
        with window.fork() as branch:
            branch.append(frame(6))
            branch.evict(e)
            answers.append(ask(branch, 2))
        stream: Any = window.stream(QUESTIONS[0], max_tokens=4, logprobs=-1)
        assert "".join(stream) == stream.answer.text
        answers.append(stream.answer)
        window.maintenance.refresh()
        assert window.maintenance.compress() > 0
        assert "patched" in {chunk.lane for chunk in window.chunks}
        answers.append(ask(window))
        window.evict(b, forget=True)
        answers.append(ask(window, 3))
    return answers


def gap(a: Answer, b: Answer) -> float:
    return distance(a.first_token_logprobs, b.first_token_logprobs)


def agree(ours: list[Answer], theirs: list[Answer]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.text == b.text and a.token_ids == b.token_ids
        assert gap(a, b) <= CLOSE
        for name in ("reused_tokens", "computed_tokens", "forwards", "vision_encodes", "bytes_loaded", "cached_tokens"):
            assert getattr(a.usage, name) == getattr(b.usage, name), name
        assert b.usage.misses == b.usage.fallbacks == 0


def primitive(value: Any) -> bool:
    """Whether ``value`` is made of names and numbers only."""
    if is_dataclass(value):
        return all(primitive(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, dict):
        return all(primitive(k) and primitive(v) for k, v in value.items())
    if isinstance(value, list | tuple | set):
        return all(primitive(v) for v in value)
    return value is None or isinstance(value, str | int | float | bool)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside a prompt as vLLM's renderer would hand it over."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from tensors(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from tensors(v)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))
    elif hasattr(value, "get_data"):
        yield from tensors(value.get_data())


@pytest.fixture(scope="module")
def reference() -> list[Answer]:
    """The program in this process; what the connector's scheduler tells its workers is looked at on the way."""
    from ctxwin_vllm.connector import CtxwinConnector
    from ctxwin_vllm.connector.scheduler import Step
    from ctxwin_vllm.transport import LoadSpec, SaveSpec

    told: list[Step] = []
    build = CtxwinConnector.build_connector_meta

    def watched(self: Any, output: Any) -> Step:
        told.append(build(self, output))
        return told[-1]

    with (
        mock.patch.object(CtxwinConnector, "build_connector_meta", watched),
        open_engine("tiny:vllm", dtype="float32") as e,
    ):
        answers = program(e)
    assert any(step.loads for step in told) and all(primitive(step) for step in told)
    kinds = {field.type for kind in (LoadSpec, SaveSpec) for field in fields(kind)}
    assert kinds <= {"str", "int", "bool", "tuple[int, ...]", "dict[str, tuple[int, int]]"}
    return answers


def crossing(monkeypatch: pytest.MonkeyPatch) -> tuple[Count, list[int]]:
    """Count digests, but for those of who writes the store behind, and the bytes of files for workers, but for embeddings."""
    from ctxwin_vllm.transport import SharedMemoryTransport

    digests, written, put = Count(), list[int](), SharedMemoryTransport._put

    def digested(*args: Any) -> Any:
        digests.add(not current_thread().name.startswith("ctxwin-store"))
        return sha256(*args)

    def wrote(self: Any, name: str, blob: bytes) -> None:
        written.append(0 if name.startswith("embed") else len(blob))
        put(self, name, blob)

    monkeypatch.setattr(codec, "hashlib", SimpleNamespace(sha256=digested))  # in forked processes, too
    monkeypatch.setattr(SharedMemoryTransport, "_put", wrote)
    return digests, written


@pytest.mark.parametrize("processes", ["single", "multi", "async"])
def test_a_slide_takes_no_kv_over_the_host(processes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where KV that was read back, or loaded, is kept on the device; nor is it digested, but by who writes the store behind."""
    digests, written = crossing(monkeypatch)
    start = partial(open_engine, "tiny:vllm", dtype="float32", processes=processes)
    fidelity = Fidelity("patched", survivors="keep")
    with resident_copies(start, interpret=False) as engine, Window(engine, HEADER, fidelity=fidelity) as window:
        window.extend([frame(i) for i in range(4)])
        ask(window)
        window.append(frame(4))
        ask(window)
        before = digests.value
        for _ in range(2):
            written.clear()
            window.slide(1)
            usage = ask(window).usage
            assert usage.bytes_loaded > 0 == usage.reused_tokens.get("computed", 0) and not usage.fallbacks
            assert engine.bytes_copied.value == 0 and digests.value == before
            assert sum(written) < usage.bytes_loaded / 20, "names and positions"
        assert engine.counters.retries == 0


@pytest.mark.parametrize("processes", ["single", "multi", "async"])
def test_an_answer_that_drops_slots_takes_no_kv_over_the_host(
    processes: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it keeps of its prompt stays where it was computed, also where the prompt is merged first."""
    from ctxwin_vllm.engine import VLLMEngine

    digests, written = crossing(monkeypatch)
    start = partial(VLLMEngine, model_dir, dtype="float32", processes=processes)
    answers = []
    with resident_copies(start, interpret=False) as engine:
        for merging in (False, True):
            asked = engine, Sampling(40, hold=0.5, hold_every=8, merge_prompt=merging)
            answers.append(held(*asked))
            before, loaded = digests.value, engine.counters.bytes_loaded
            written.clear()
            assert held(*asked) == answers[-1]
            assert engine.bytes_copied.value == 0 and digests.value == before
            assert sum(written) < (engine.counters.bytes_loaded - loaded) / 10, "names, positions and weights"
        assert engine.counters.retries == 0
    with HFEngine(model_dir, dtype="float32") as oracle:
        for merging, answer in zip((False, True), answers, strict=True):
            assert held(oracle, Sampling(40, hold=0.5, hold_every=8, merge_prompt=merging)) == answer


def held(engine: Any, sampling: Sampling) -> list[int]:
    """Return the tokens of an answer over four pictures."""
    layout = laid(encoded(engine, [1, 2, 3, 4]), capture=False)
    return list(engine.generate(layout, engine.encode_query(QUESTIONS[0]), sampling, salt="held").token_ids)


@dataclass
class Opened:
    engine: Any
    processes: list[Any]
    folder: Path
    answers: list[Answer]
    prompts: list[dict[str, Any]]
    parameters: list[Any]
    calls: list[tuple[Any, ...]]


@pytest.fixture(scope="module", params=["multi", pytest.param("async", marks=pytest.mark.slow)])
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    """An engine in processes of its own, which has run the program; what it left behind is checked at the end."""
    import psutil

    from ctxwin_vllm.vision import remote

    before = {p.pid for p in psutil.Process().children(recursive=True)}
    engine: Any = open_engine("tiny:vllm", dtype="float32", processes=request.param, disable_log_stats=False)
    try:
        found = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
        found = [p for p in found if "resource_tracker" not in " ".join(p.cmdline())]
        made = Opened(engine, found, engine._core.transport.path, [], [], [], [])
        driver = engine._core.driver
        submit = driver.submit

        def submitted(prompt: dict[str, Any], parameters: Any, *rest: Any) -> Any:
            made.prompts.append(prompt)
            made.parameters.append(parameters)
            return submit(prompt, parameters, *rest)

        def called(self: Any, *args: Any) -> Any:
            made.calls.append(args)
            assert stat.S_IMODE(Path(args[1]).stat().st_mode) == 0o600, "pixels are the engine's alone, too"
            return rpc(self, *args)

        rpc = type(driver).rpc
        driver.submit = submitted
        with mock.patch.object(type(driver), "rpc", called):
            # The engine holds the method that it was opened with.
            engine.encoder._vision = remote(driver.rpc, made.folder)
            made.answers = program(engine)
        del driver.submit
        yield made
    finally:
        engine.close()
    assert not made.folder.exists()
    _, alive = psutil.wait_procs(made.processes, timeout=20)
    assert not alive, "vLLM's processes end with the engine"


def test_the_same_answers_as_in_one_process(opened: Opened, reference: list[Answer]) -> None:
    assert not opened.engine._core.driver.local and opened.processes
    agree(reference, opened.answers)
    assert sum(answer.usage.vision_encodes for answer in opened.answers) == 7, (
        "the worker's tower saw each picture once"
    )


def test_an_audit_says_what_it_says_on_transformers(opened: Opened) -> None:
    """How far an answer is from a re-prefill, and which ones lost their value."""
    questions = world.questions_for(FRAMES[:6], 4, 0, ("multi_hop",))
    found, lost = [], []
    with open_engine("tiny", engine="hf", dtype="float32") as other:
        for engine in (opened.engine, other):
            fidelity = Fidelity("blind", audit=1.0, advanced={"reference": "window"})
            with Window(engine, HEADER, fidelity=fidelity) as window:
                window.extend([frame(i) for i in range(6)])
                found.append([window.ask(question.text, max_tokens=4) for question in questions])
                assert auditor_of(engine, Options(share=1.0)).drain(60)
                lost.append(auditor_of(engine).counts.lost)
    for one, two in zip(*found, strict=True):
        assert one.token_ids == two.token_ids and one.audit == pytest.approx(two.audit, rel=1e-2, abs=1e-4)
    assert found[1][0].audit and found[1][0].audit > 1e-3
    assert lost[0] == lost[1] > 0


def test_answers_within_a_share_of_the_kv_are_those_of_transformers(opened: Opened) -> None:
    """Of a prompt that is merged as well: the workers weigh its tokens by its attention."""
    ids, rows, sums = list(range(300, 312)), [], []
    with open_engine("tiny", engine="hf", dtype="float32") as other:
        for engine in (other, opened.engine):
            parts = [engine.encode_system_prompt(HEADER), *(engine.encode(frame(i)) for i in range(2))]
            starts = itertools.accumulate((part.advance for part in parts), initial=0)
            layout = [Segment(part, start) for part, start in zip(parts, starts, strict=False)]
            query = engine.encode_query(QUESTIONS[0])
            whole = engine.forced_logprobs(layout, [(query, ids)], best=-1)[0]
            for merging in (False, True):
                sampling = Sampling(hold=0.5, hold_every=4, merge_prompt=merging)
                rows += engine.forced_logprobs(layout, [(query, ids)], best=-1, sampling=sampling)
                assert max(abs(whole[-1][token] - rows[-1][-1][token]) for token in whole[-1]) > CLOSE
            sums.append(engine.attended(layout[:2], parts[2], layout[2].start).sums)
    for one, two in zip(rows[0] + rows[1], rows[2] + rows[3], strict=True):
        assert max(abs(one[token] - two[token]) for token in two) < 1e-3
    torch.testing.assert_close(sums[1], sums[0], atol=1e-3, rtol=0)


def test_nothing_but_names_and_numbers_travels(opened: Opened) -> None:
    """No KV, no embeddings and no pixels: a handle, token ids, the grids that positions follow from."""
    import vllm.envs

    assert opened.prompts and not vllm.envs.VLLM_ALLOW_INSECURE_SERIALIZATION
    for parameters in opened.parameters:
        assert list(parameters.extra_args) == ["kv_transfer_params"]
        ((name, handle),) = parameters.extra_args["kv_transfer_params"].items()
        assert name == "ctxwin" and len(handle) == 32 and int(handle, 16)
    found = [tensor for prompt in opened.prompts for tensor in tensors(prompt)]
    assert found, "the prompts' pictures were looked into"
    # Grids (t, h, w), of all pictures of a prompt together.
    assert all(tensor.dtype == torch.int64 and tensor.shape[-1] == 3 for tensor in found)
    assert max(tensor.numel() for tensor in found) <= 3 * 8
    assert opened.calls and all(primitive(args) for args in opened.calls)


def test_chunk_files_are_the_engines_alone(opened: Opened) -> None:
    files = [path for path in opened.folder.rglob("*") if path.is_file()]
    assert any(path.name.startswith("span-") for path in files)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(opened.folder.stat().st_mode) == 0o700
    left = [path.name for path in files if path.name.startswith(("job-", "seen-", "out-", "error-"))]
    assert left == [], "files of requests go with them"


def steps() -> int:
    """Steps that vLLM has made, by its own metrics."""
    from prometheus_client import REGISTRY

    found = [
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "vllm:iteration_tokens_total_count"
    ]
    assert found, "vLLM counts its steps"
    return int(sum(found))


def counted(work: Callable[[], list[Answer]]) -> tuple[list[Answer], int]:
    before = steps()
    answers = work()
    return answers, steps() - before


def test_windows_that_ask_together_are_batched(opened: Opened) -> None:
    """From threads and by ``aask``; each gets what it gets alone."""

    def windows(engine: Any) -> list[Window]:
        made = []
        for i in range(WINDOWS):
            window = Window(engine, HEADER, fidelity=Fidelity("patched", rank=4))
            window.extend([frame((i + j) % 8) for j in range(4)])
            ask(window)
            window.slide(1)
            window.append(frame(8 + i % 4))
            made.append(window)
        return made

    def alone(made: list[Window]) -> list[Answer]:
        return [ask(window, i) for i, window in enumerate(made)]

    def threads(made: list[Window]) -> list[Answer]:
        with ThreadPoolExecutor(WINDOWS) as pool:
            return list(pool.map(ask, made, range(WINDOWS)))

    def tasks(made: list[Window]) -> list[Answer]:
        async def gathered() -> list[Answer]:
            asks = [w.aask(QUESTIONS[i % len(QUESTIONS)], 4, logprobs=-1) for i, w in enumerate(made)]
            return list(await asyncio.gather(*asks))

        return asyncio.run(gathered())

    results = {}
    for way in (alone, threads, tasks):
        # A tenant each, so that none finds what another has computed.
        with opened.engine.view(way.__name__) as view:
            made = windows(view)
            results[way.__name__] = counted(lambda way=way, made=made: way(made))  # type: ignore[misc]
    first, one_by_one = results["alone"]
    assert one_by_one >= WINDOWS
    for way in ("threads", "tasks"):
        answers, together = results[way]
        agree(first, answers)
        assert together <= 0.8 * one_by_one, f"{way}: {together} steps, one after the other {one_by_one}"

"""vLLM's prefix cache under windows: what is found again, what is shared with plain requests, and what never is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin import Answer, Chunk, Fidelity, Window, open_engine
from ctxwin.baselines import POLICIES
from ctxwin.demo.run import Options, prepare, run
from ctxwin.engines.segments import Encoded, MediaSpan, Segment
from ctxwin.tiny import checkpoint_dir, world

HEADER = "You watch a camera. " + "red blue circle square color number " * 9
FRAMES = world.make_stream(seed=11, n_frames=30)
QUERY = "color of 03?"
BLOCK = 32
"""Tokens of a block of vLLM's paged cache on a CPU."""
CLOSE = 1e-4
"""Float32 logprobs of the same KV in another batch: sums in another order; 1.3e-5 was seen."""

PLAIN = """
import json, sys
from ctxwin.engines.torchvision_repair import repair
repair()
import numpy as np, torch
from transformers import AutoConfig
from vllm import LLM, SamplingParams
from vllm.model_executor.models.registry import ModelRegistry
job = json.load(open(sys.argv[1]))
# Imported here, since vLLM would look at the class in a process of its own, which has had no repair.
for name in AutoConfig.from_pretrained(job["model"]).architectures:
    ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
llm = LLM(job["model"], dtype="float32", enforce_eager=True, block_size=32, kv_cache_memory_bytes=1 << 28, seed=0,
          max_logprobs=-1, disable_log_stats=True, enable_mm_embeds=True, skip_mm_profiling=True,
          enable_prefix_caching=True)
made = []
for prompt in job["prompts"]:
    if prompt.get("reset"):
        llm.reset_prefix_cache()
    asked = {"prompt_token_ids": prompt["ids"]}
    if prompt["embeds"]:
        data = np.load(prompt["embeds"])
        asked["multi_modal_data"] = {"image": {"image_embeds": torch.from_numpy(data["embeds"]),
                                               "image_grid_thw": torch.from_numpy(data["grid"])}}
        asked["multi_modal_uuids"] = {"image": prompt["uuids"]}
    (out,) = llm.generate(asked, SamplingParams(max_tokens=4, temperature=0, logprobs=-1, detokenize=False), use_tqdm=False)
    part = out.outputs[0]
    made.append({"ids": list(part.token_ids), "cached": out.num_cached_tokens, "prompt": len(out.prompt_token_ids),
                 "logprobs": [{str(k): v.logprob for k, v in row.items()} for row in part.logprobs]})
json.dump(made, open(sys.argv[2], "w"))
"""

FRESH = "CTXWIN_TEST_FRESH_PROCESS"
"""Set in the environment of the process that compares bits."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with open_engine("tiny:vllm", dtype="float32") as opened:
        yield opened


@pytest.fixture
def view(engine: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine with a store of its own on the same vLLM, whose cache is empty; of no tenant, as plain requests are."""
    engine._core.driver.reset_prefix_cache()
    with engine.view("") as made:
        yield made


def frame(i: int) -> Chunk:
    return Chunk.image(world.render(FRAMES[i]), text=f"t={i} s")


def words(i: int) -> Chunk:
    return Chunk.text(f"{i} " + "red blue circle square color number " * 3)


def window_on(engine: Any, chunks: Sequence[Chunk], mode: Any = "exact", system_prompt: str = HEADER) -> Window:
    made = Window(engine, system_prompt, fidelity=Fidelity(mode, rank=4))
    made.extend(chunks)
    return made


def ask(window: Window, query: str = QUERY) -> Answer:
    return window.ask(query, max_tokens=4, logprobs=-1)


def gap(p: dict[int, float], q: dict[int, float]) -> float:
    assert p.keys() == q.keys() and len(p) > 100
    return max(abs(p[token] - q[token]) for token in p)


def prompt_of(engine: Any, window: Window, query: str = QUERY) -> tuple[list[int], list[MediaSpan]]:
    """The tokens that ``window`` asks with, and their media."""
    from ctxwin_vllm.inputs import join

    chunks = [engine.encode(window.chunk(i)) for i in window.ids]
    return join([engine.encode_system_prompt(window.system_prompt), *chunks, engine.encode_query(query)])


def collapsed(engine: Any, ids: Sequence[int]) -> list[int]:
    """One placeholder a picture, which vLLM's processor expands."""
    pad = engine.encoder.checkpoint.media.image
    return [token for at, token in enumerate(ids) if token != pad or not at or ids[at - 1] != pad]


def plain_request(engine: Any, window: Window, query: str = QUERY, **more: Any) -> dict[str, Any]:
    ids, media = prompt_of(engine, window, query)
    if not media:
        return {"prompt_token_ids": ids, **more}
    return {
        "prompt_token_ids": collapsed(engine, ids),
        "multi_modal_data": {
            "image": {
                "image_embeds": torch.cat([engine.embed(span.key) for span in media]),
                "image_grid_thw": torch.tensor([span.grid_thw for span in media]),
            }
        },
        # The name under which windows know a picture, which nobody outside can know: vLLM would hash the embeddings.
        "multi_modal_uuids": {"image": [engine._core.inputs.name(span.key) for span in media]},
        **more,
    }


def plain(engine: Any, prompt: dict[str, Any]) -> Any:
    """One request of somebody who knows nothing of ctxwin, by `vllm.LLM.generate` on the same vLLM."""
    from vllm import SamplingParams

    from ctxwin_vllm.drivers import _no_compilation

    driver = engine._core.driver
    parameters = SamplingParams(max_tokens=4, temperature=0, logprobs=-1, detokenize=False)

    def generate() -> Any:
        with _no_compilation(driver.config):
            (out,) = driver.llm.generate(dict(prompt), parameters, use_tqdm=False)
        return out

    return driver.call(generate)


def logprobs_of(out: Any) -> list[dict[int, float]]:
    return [{token: entry.logprob for token, entry in row.items()} for row in out.outputs[0].logprobs]


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


class TestWindows:
    @pytest.mark.parametrize("gpu", [False, True])
    def test_an_append_loads_or_computes_less_than_a_block(
        self, view: Any, gpu: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Exact windows: what was asked before is in the cache, but for its last partial block."""
        monkeypatch.setattr(view._core, "min_load", BLOCK if gpu else 0)
        token, query = view.spec.kv.token_bytes, view.encode_query(QUERY).tokens
        with window_on(view, [frame(i) for i in range(4)]) as window:
            ask(window)
            for i in range(4, 12):
                window.append(frame(i) if i % 2 else words(i))
                for new in (window.chunks[-1].tokens + query, query):
                    usage = ask(window).usage
                    uncached = usage.prompt_tokens - usage.cached_tokens
                    loaded = (
                        0 if gpu else max(0, uncached - new)
                    )  # a question that was asked before may be cached in part
                    assert loaded < BLOCK and uncached < new + BLOCK
                    assert (usage.bytes_loaded, usage.computed_tokens) == (token * loaded, uncached - loaded)

    def test_the_demos_moves_cost_no_more_than_those_of_the_best_user_of_a_prefix_cache(
        self, view: Any, tmp_path: Path
    ) -> None:
        options = Options(out=tmp_path, frames=12, fidelity=Fidelity("exact"))
        summary = run(view, options, prepare(options))["summary"]
        assert summary["asks"] > 15 and summary["agreement"] == 1.0
        assert summary["computed_tokens"] <= 1.05 * min(summary[f"computed_tokens_{policy}"] for policy in POLICIES)

    def test_an_append_behind_survivors_reloads_less_than_a_block(self, view: Any) -> None:
        """Approximate windows: a last block that is not whole is loaded, and nothing is computed again."""
        with window_on(view, [frame(i) for i in range(6)], "patched") as window:
            ask(window)
            window.slide(2)
            survivors = sum(chunk.tokens for chunk in window.chunks)
            slid = ask(window).usage
            token = view.spec.kv.token_bytes
            # The system prompt's whole blocks are those of the first ask.
            assert slid.bytes_loaded == token * (window.tokens - whole_blocks(window.tokens - survivors))
            assert slid.cached_tokens == whole_blocks(window.tokens - survivors)
            window.append(frame(6))
            assert ask(window).usage.bytes_loaded < BLOCK * token
            window.append(words(7))
            assert ask(window).usage.bytes_loaded < BLOCK * token
            for i in range(8, 12):
                window.append(words(i))
                usage = ask(window).usage
                assert usage.bytes_loaded < BLOCK * token
                assert usage.computed_tokens == window.chunks[-1].tokens + view.encode_query(QUERY).tokens

    def test_a_fork_adds_no_block(self, view: Any) -> None:
        pool = view._core.driver.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        taken: list[int] = []
        take = pool.get_new_blocks

        def counted(count: int) -> Any:
            taken.append(count)
            return take(count)

        for mode, edit in (("exact", None), ("patched", "slide")):
            with window_on(view, [frame(i) for i in range(6)], mode) as window:
                ask(window)
                if edit:
                    window.slide(1)
                    ask(window)
                    window.append(words(1))
                ask(window)
                cached, free = len(pool.cached_block_hash_to_block), pool.get_num_free_blocks()
                with window.fork() as branch, mock.patch.object(pool, "get_new_blocks", counted):
                    usage = ask(branch).usage
                # What is not in the cache is the last, partial block with the query: nothing of the window is stored twice.
                whole = whole_blocks(window.tokens)
                loaded = usage.bytes_loaded // view.spec.kv.token_bytes
                assert loaded <= window.tokens - whole
                assert usage.cached_tokens >= whole
                assert usage.cached_tokens + usage.computed_tokens + loaded == usage.prompt_tokens
                assert sum(taken) <= -(-(usage.prompt_tokens + 4) // BLOCK) - whole // BLOCK
                taken.clear()
                assert (len(pool.cached_block_hash_to_block), pool.get_num_free_blocks()) == (cached, free)

    def test_an_edit_reloads_nothing_in_front_of_it(self, view: Any) -> None:
        """What is exact in front of the first approximation stays in the blocks it is in."""
        with window_on(view, [frame(i) for i in range(10)], "patched") as window:
            ask(window)
            ids = window.ids
            for edit in (
                lambda: window.evict(ids[5]),
                lambda: window.recall(ids[5], at=7),
                lambda: window.reorder([*window.ids[:6], *reversed(window.ids[6:])]),
                lambda: window.toggle(ids[8], conditioned=False),
                lambda: window.insert(6, words(1)),
                lambda: window.evict(window.ids[7]),
            ):
                edit()
                entries = window.chunks
                first = next((entry.offset for entry in entries if not entry.exact), window.tokens)
                held = next((entry.offset for entry in entries if entry.compute), window.tokens)
                usage = ask(window).usage
                assert usage.cached_tokens >= whole_blocks(min(first, held))
                assert usage.bytes_loaded <= view.spec.kv.token_bytes * (window.tokens - whole_blocks(min(first, held)))

    def test_an_edit_undone_comes_back_to_its_blocks(self, view: Any) -> None:
        with window_on(view, [frame(i) for i in range(8)], "patched") as window:
            ask(window)
            ids = window.ids
            window.slide(1)
            slid = ask(window)
            window.toggle(ids[4], conditioned=False)
            off = ask(window)
            window.toggle(ids[4], conditioned=True)
            back = ask(window)
            assert back.usage.bytes_loaded < BLOCK * view.spec.kv.token_bytes
            assert back.first_token_logprobs == slid.first_token_logprobs != off.first_token_logprobs

    @pytest.mark.parametrize(
        "kind", [lambda i: Chunk.text(f"{i} " + "red blue circle square color number " * 25), frame]
    )
    def test_exact_kv_behind_an_approximation_has_blocks_of_its_own(self, view: Any, kind: Any) -> None:
        """KV of one chunk behind one patch: computed behind that patch, and later exact, from an exact window's span."""
        fidelity = Fidelity("patched", rank=2)
        chunks = [kind(i) for i in range(3)]

        def patched() -> Window:
            made = Window(view, HEADER, fidelity=fidelity)
            made.extend(chunks[:2])
            ask(made)
            assert made.maintenance.compress() > 0
            return made

        with patched() as window:
            window.append(chunks[2])
            ask(window)  # leaves KV of the last chunk, computed behind the patch, in vLLM's blocks
            with window_on(view, chunks) as exact:
                ask(exact)
            patched().close()  # the exact KV of the second chunk is gone again
            assert [entry.exact for entry in window.plan().entries] == [True, False, True]
            served = ask(window)
            view._core.driver.reset_prefix_cache()
            assert gap(served.first_token_logprobs, ask(window).first_token_logprobs) < CLOSE


class TestWithPlainRequests:
    @pytest.mark.parametrize("kind", [frame, words])
    def test_an_exact_window_serves_plain_requests(self, view: Any, kind: Any) -> None:
        with window_on(view, [kind(i) for i in range(5)]) as window:
            ours = ask(window)
            out = plain(view, plain_request(view, window))
            assert len(out.prompt_token_ids) == ours.usage.prompt_tokens
            assert out.num_cached_tokens == whole_blocks(ours.usage.prompt_tokens - 1) > window.tokens // 2
            assert gap(ours.first_token_logprobs, logprobs_of(out)[0]) < CLOSE
            assert list(out.outputs[0].token_ids)[: len(ours.token_ids)] == list(ours.token_ids)

    @pytest.mark.parametrize("kind", [frame, words])
    def test_plain_requests_serve_an_exact_window(self, view: Any, kind: Any) -> None:
        with window_on(view, [kind(i) for i in range(5)]) as window:
            out = plain(view, plain_request(view, window))
            assert out.num_cached_tokens == 0
            ours = ask(window)
            assert (
                ours.usage.cached_tokens == whole_blocks(ours.usage.prompt_tokens - 1) and ours.usage.bytes_loaded == 0
            )
            assert gap(ours.first_token_logprobs, logprobs_of(out)[0]) < CLOSE

    def test_spans_loaded_into_the_exact_space_serve_plain_requests(self, view: Any) -> None:
        with window_on(view, [frame(i) for i in range(5)]) as window:
            ours = ask(window)
            view._core.driver.reset_prefix_cache()
            loaded = ask(window)
            assert loaded.usage.bytes_loaded == view.spec.kv.token_bytes * window.tokens
            out = plain(view, plain_request(view, window))
            assert out.num_cached_tokens == whole_blocks(loaded.usage.prompt_tokens - 1)
            assert gap(ours.first_token_logprobs, logprobs_of(out)[0]) < CLOSE

    def test_nobody_outside_can_name_a_windows_picture(self, view: Any) -> None:
        """Another picture under the name that follows from the content, in the very place of the window's."""
        with window_on(view, [frame(i) for i in range(4)]) as window:
            prompt = plain_request(view, window)
            _, media = prompt_of(view, window)
            embeds = prompt["multi_modal_data"]["image"]["image_embeds"]
            prompt["multi_modal_data"]["image"]["image_embeds"] = embeds.flip(0)
            prompt["multi_modal_uuids"] = {"image": [span.key.rpartition("/")[2] for span in media]}
            plain(view, prompt)
            served = ask(window)
            with view.view("another") as other, window_on(other, [frame(i) for i in range(4)]) as alone:
                assert gap(served.first_token_logprobs, ask(alone).first_token_logprobs) < CLOSE

    def test_what_is_exact_in_front_of_an_approximation_is_shared_and_the_rest_is_not(self, view: Any) -> None:
        with window_on(view, [frame(i) for i in range(9)], "patched") as window:
            ask(window)
            window.evict(window.ids[4])
            window.append(frame(9))
            approximate = ask(window)
            begins = next(chunk.offset for chunk in window.chunks if not chunk.exact)
            # With a store of its own: what it computes must not become this window's.
            with view.view("") as other, window_on(other, [frame(i) for i in range(10) if i != 4]) as exact:
                out = plain(view, plain_request(other, exact))
                # No block that an approximation reaches into, and every block in front of those.
                assert out.num_cached_tokens == whole_blocks(begins) > 0
                right = ask(exact)
                assert gap(right.first_token_logprobs, logprobs_of(out)[0]) < CLOSE
                assert gap(right.first_token_logprobs, approximate.first_token_logprobs) > 100 * CLOSE
                again = plain(view, plain_request(other, exact))
                assert again.num_cached_tokens == whole_blocks(len(again.prompt_token_ids) - 1)
                assert gap(right.first_token_logprobs, logprobs_of(again)[0]) < CLOSE
            assert ask(window).first_token_logprobs == approximate.first_token_logprobs

    def test_an_approximate_text_without_a_picture_keeps_the_window_apart(self, view: Any) -> None:
        with window_on(view, [words(i) for i in range(5)], "patched") as window:
            ask(window)
            window.evict(window.ids[1])
            approximate = ask(window)
            assert approximate.usage.cached_tokens == 0 and approximate.usage.bytes_loaded > 0
            with window_on(view, [window.chunk(i) for i in window.ids]) as exact:
                out = plain(view, plain_request(view, exact))
                assert out.num_cached_tokens == whole_blocks(window.chunks[1].offset)
                assert gap(ask(exact).first_token_logprobs, logprobs_of(out)[0]) < CLOSE

    def test_an_approximation_whose_reason_has_gone_stays_out(self, view: Any) -> None:
        """KV that was computed behind a patch, while what the patch stood for is exact by now: its provenance is that of
        the exact KV, and it must not be found under the exact tokens."""
        chunks = [frame(i) for i in range(7)]
        with window_on(view, chunks[:5], "patched") as window:
            ask(window)
            assert window.maintenance.compress() > 0  # all but the first are patched
            window.extend(chunks[5:])  # computed behind patches
            ask(window)
            with window_on(view, chunks[:5]) as other:
                ask(other)  # whoever needs them exact computes them again
            lanes = {chunk.lane for chunk in window.chunks}
            assert lanes == {"resident"} and [chunk.exact for chunk in window.chunks] == [True] * 5 + [False] * 2
            view._core.driver.reset_prefix_cache()
            approximate = ask(window)
            assert approximate.usage.bytes_loaded > 0
            with window_on(view, chunks, "exact") as exact:
                out = plain(view, plain_request(view, exact))
                assert out.num_cached_tokens <= whole_blocks(window.chunks[5].offset)
                right = ask(exact)
                assert gap(right.first_token_logprobs, logprobs_of(out)[0]) < CLOSE
                assert gap(right.first_token_logprobs, approximate.first_token_logprobs) > CLOSE


class Elsewhere:
    """Prompts for plain vLLM in a process of its own, without ctxwin's connector."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prompts: list[dict[str, Any]] = []

    def add(self, engine: Any, window: Window, query: str = QUERY, reset: bool = False) -> int:
        """One prompt more; returns its number. ``reset``: the prefix cache is emptied in front of it."""
        ids, media = prompt_of(engine, window, query)
        made: dict[str, Any] = {"ids": collapsed(engine, ids), "embeds": "", "reset": reset}
        if media:
            made["embeds"] = str(self.folder / f"{len(self.prompts)}.npz")
            made["uuids"] = [span.key.rpartition("/")[2] for span in media]
            embeds = torch.cat([engine.embed(span.key) for span in media]).numpy()
            np.savez(made["embeds"], embeds=embeds, grid=np.array([span.grid_thw for span in media]))
        self.prompts.append(made)
        return len(self.prompts) - 1

    def run(self) -> list[dict[str, Any]]:
        job, out = self.folder / "job.json", self.folder / "out.json"
        job.write_text(json.dumps({"model": str(checkpoint_dir()), "prompts": self.prompts}))
        env = {
            **os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", PLAIN, str(job), str(out)], env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found: list[dict[str, Any]] = json.loads(out.read_text())
        for one in found:
            one["logprobs"] = [{int(token): p for token, p in row.items()} for row in one["logprobs"]]
        return found


@pytest.mark.slow
def test_plain_requests_get_what_they_get_without_ctxwin() -> None:
    """`test_bit_for_bit` in a process of its own, as plain vLLM is: threads and memory that earlier tests have left behind
    change the last bits of a sum."""
    if FRESH in os.environ:
        pytest.skip("this is the process of its own")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::test_bit_for_bit"]
    done = subprocess.run(command, env={**os.environ, FRESH: "1"}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.skipif(FRESH not in os.environ, reason="runs in a process of its own, see the test above")
def test_bit_for_bit(view: Any, tmp_path: Path) -> None:
    """Bit for bit, before, beside and after windows of the same tokens: over blocks that plain requests have computed,
    that windows have computed whole or append by append, that were loaded from spans, or that stand in front of
    approximations; with another query, and for tokens that no window has seen."""
    elsewhere = Elsewhere(tmp_path)
    asked: list[tuple[str, int, Any]] = []

    def both(name: str, window: Window, query: str = QUERY, reset: bool = False) -> None:
        """The same plain request here and there."""
        number = elsewhere.add(window.engine, window, query, reset)
        asked.append((name, number, plain(view, plain_request(window.engine, window, query))))

    for kind in (frame, words):
        chunks = [kind(i) for i in range(6)]
        with fresh(view) as store, window_on(store, chunks[:5]) as window:
            both("before", window, reset=True)
            both("again", window)
            ask(window)
            both("after", window)
            both("after, another query", window, "shape of 07?")
            view._core.driver.reset_prefix_cache()
            assert ask(window).usage.bytes_loaded > 0
            both("over what a window has loaded", window)
        with fresh(view) as store, window_on(store, chunks[:5]) as window:
            elsewhere.add(store, window, reset=True)
            assert ask(window).usage.cached_tokens == 0
            both("over what a window has computed", window)
            both("over what a window has computed, another query", window, "shape of 07?")
        with fresh(view) as store, window_on(store, chunks[:2]) as window:
            elsewhere.add(store, window, reset=True)
            ask(window)
            for chunk in chunks[2:5]:
                window.append(chunk)
                elsewhere.add(store, window)
                ask(window)
            both("over what a window has appended", window)
        with fresh(view) as store, window_on(store, chunks, "patched") as window:
            ask(window)
            window.evict(window.ids[2])
            assert not ask(window).usage.exact
            with window_on(store, [*chunks[:2], *chunks[3:]]) as exact:
                both("beside an approximate window", exact, reset=True)
            with window_on(store, [kind(i) for i in range(20, 25)]) as untouched:
                both("tokens that no window has seen", untouched)
    found = elsewhere.run()
    assert len({name for name, _, _ in asked}) == 10
    for name, number, out in asked:
        theirs = found[number]
        if name != "beside an approximate window":  # its exact front is cached here
            assert out.num_cached_tokens == theirs["cached"], name
        assert list(out.outputs[0].token_ids) == theirs["ids"], name
        assert logprobs_of(out) == theirs["logprobs"], name


@contextmanager
def fresh(view: Any) -> Iterator[Any]:
    """An empty store and an empty cache."""
    view._core.driver.reset_prefix_cache()
    with view.view("") as made:
        yield made


def test_plain_requests_in_the_same_steps_as_windows(view: Any) -> None:
    """Batched with loads, captures and other prompts: the same to float32's rounding."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from ctxwin_vllm.requests import _next

    driver = view._core.driver
    with window_on(view, [words(i) for i in range(20, 24)]) as window:
        prompt = plain_request(view, window)
    alone = plain(view, prompt)
    driver.reset_prefix_cache()
    windows = [window_on(view, [frame(i + j) for j in range(4)], "patched") for i in range(6)]

    def work(window: Window) -> None:
        ask(window)
        window.slide(1)
        ask(window)
        window.insert(1, words(1))
        ask(window)

    parameters = SamplingParams(
        max_tokens=4, temperature=0, logprobs=-1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    answers = []
    with ThreadPoolExecutor(len(windows)) as pool:
        asks = [pool.submit(work, window) for window in windows]
        while not all(a.done() for a in asks):
            rendered = view._core.inputs.prompt(prompt["prompt_token_ids"], [], view.embed, "")
            ticket = driver.submit(rendered.prompt, parameters, 0)
            while not (output := _next(driver, ticket.outputs, None)).finished:
                pass
            answers.append(output)
        for done in asks:
            done.result()
    assert len(answers) > 3
    right = logprobs_of(alone)
    for output in answers:
        assert list(output.outputs[0].token_ids) == list(alone.outputs[0].token_ids)
        assert max(gap(p, q) for p, q in zip(right, logprobs_of(output), strict=True)) < CLOSE
    for window in windows:
        window.close()


class TestTenants:
    def test_no_tenant_finds_what_another_has_computed(self, engine: Any) -> None:
        engine._core.driver.reset_prefix_cache()
        chunks = [frame(i) for i in range(5)]
        with engine.view("a") as a, engine.view("b") as b, engine.view("") as nobody:
            sides = [window_on(view, chunks) for view in (a, b, nobody)]
            first = [ask(window) for window in sides]
            assert [answer.usage.cached_tokens for answer in first] == [0, 0, 0]
            assert [answer.usage.bytes_loaded for answer in first] == [0, 0, 0]
            assert a.plain_salt and b.plain_salt and a.plain_salt != b.plain_salt and not nobody.plain_salt
            # Plain requests of a tenant carry its salt, and only then they share its blocks; its pictures have names
            # of the tenant's, so those of text alone are compared.
            texts = [words(i) for i in range(5)]
            for view in (a, b, nobody):
                with window_on(view, texts) as window:
                    assert ask(window).usage.cached_tokens <= whole_blocks(window.chunks[0].offset)
                    prompt = plain_request(view, window)
                    whole = whole_blocks(len(prompt["prompt_token_ids"]) - 1)
                    salts = {view.plain_salt or None: whole, "somebody": 0}
                    for salt, expected in salts.items():
                        assert plain(view, {**prompt, "cache_salt": salt}).num_cached_tokens == expected
                    engine._core.driver.reset_prefix_cache()
            for window in sides:
                window.close()

    def test_tenants_share_no_block(self, engine: Any) -> None:
        """By the blocks themselves: those that stand behind each request of two tenants and of a plain user."""
        engine._core.driver.reset_prefix_cache()
        scheduler = engine._core.driver.llm.llm_engine.engine_core.engine_core.scheduler
        manager = scheduler.kv_cache_manager
        found: dict[str, set[Any]] = {"a": set(), "b": set(), "plain": set()}
        owner = ""
        finished = type(scheduler)._free_request

        def seen(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            (ids,) = manager.get_block_ids(request.request_id)
            hashes = {manager.block_pool.blocks[i].block_hash for i in ids}
            found[owner] |= {h for h in hashes if h is not None}
            return finished(self, request, *args, **kwargs)

        chunks = [frame(i) for i in range(5)]
        with mock.patch.object(type(scheduler), "_free_request", seen), engine.view("a") as a, engine.view("b") as b:
            for name, view in (("a", a), ("b", b)):
                owner = name
                with window_on(view, chunks, "patched") as window:
                    ask(window)
                    window.slide(1)
                    ask(window)
            owner = "plain"
            with window_on(a, chunks) as window:
                plain(engine, plain_request(a, window))
        assert all(len(names) > 3 for names in found.values())
        assert not found["a"] & found["b"] and not (found["a"] | found["b"]) & found["plain"]


@st.composite
def layouts(draw: st.DrawFn) -> list[Segment]:
    """Segments of 1 to 70 tokens with up to two media each, some of them apart."""
    segments: list[Segment] = []
    start = 0
    for i in range(draw(st.integers(1, 6))):
        tokens = draw(st.integers(1, 70))
        cuts = sorted(draw(st.lists(st.integers(0, tokens), max_size=4, unique=True)))
        media = tuple(
            MediaSpan("image", f"embed/m{draw(st.integers(0, 2))}", at, end - at, (1, 2, 2))
            for at, end in zip(cuts[::2], cuts[1::2], strict=False)
        )
        ids = tuple(draw(st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens)))
        encoded = Encoded(f"c{i}", ids, np.zeros((3, tokens), dtype=np.int64), tokens, media)
        segments.append(Segment(encoded, start, span_key=f"kv-{i}", approximate=draw(st.booleans()) and i > 0))
        start += tokens
    return segments


def block_names(segments: Sequence[Segment], salt: str, block: int) -> list[bytes]:
    """vLLM's own names of the whole blocks of a layout."""
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from ctxwin_vllm.cache_namespace import namespace_of
    from ctxwin_vllm.inputs import join

    init_none_hash(sha256)
    namespace = namespace_of(segments, salt, block)
    ids, media = join([segment.encoded for segment in segments])
    features = []
    for span in media:
        mark = namespace.marks.get(span.offset)
        name = span.key.rpartition("/")[2] + (f"@{mark}" if mark else "")
        place = PlaceholderRange(offset=span.offset, length=span.tokens)
        features.append(MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place))
    request = Request(
        "r", ids, SamplingParams(max_tokens=1), None, mm_features=features, cache_salt=namespace.salt or None,
        block_hasher=get_request_block_hasher(block, sha256),
    )  # fmt: skip
    return list(request.block_hashes)


@settings(max_examples=120, deadline=None)
@given(segments=layouts(), block=st.sampled_from([16, 32]), data=st.data())
def test_no_approximate_token_is_in_a_block_of_an_exact_name(
    segments: list[Segment], block: int, data: st.DataObject
) -> None:
    from ctxwin_vllm.cache_namespace import namespace_of

    exact = block_names([replace(segment, approximate=False) for segment in segments], "", block)
    apart = [i for i, segment in enumerate(segments) if segment.approximate]
    if not apart:
        return
    namespace = namespace_of(segments, "salt", block)
    mine = block_names(segments, "salt", block)
    begins = [sum(segment.encoded.tokens for segment in segments[:i]) for i in range(len(segments))]
    for j, (ours, theirs) in enumerate(zip(mine, exact, strict=True)):
        assert (ours == theirs) == (not namespace.salt and j * block < namespace.private_from)
        if (j + 1) * block > begins[apart[0]]:
            assert ours != theirs
    # Another approximation of one chunk: nothing from the block on in which that chunk begins.
    changed = data.draw(st.sampled_from(apart))
    other = [replace(segment, span_key="another") if i == changed else segment for i, segment in enumerate(segments)]
    for j, (ours, theirs) in enumerate(zip(mine, block_names(other, f"salt of {changed}", block), strict=True)):
        if (j + 1) * block > begins[changed]:
            assert ours != theirs
    # What is served so far does not depend on what is placed behind it, unless that marks a medium among it.
    cut = data.draw(st.integers(apart[0] + 1, len(segments)))
    if not namespace.salt and not namespace_of(segments[:cut], "salt", block).salt:
        marks = {at: mark for at, mark in namespace.marks.items() if at < sum(p.encoded.tokens for p in segments[:cut])}
        if marks == namespace_of(segments[:cut], "salt", block).marks:
            fewer = block_names(segments[:cut], "salt", block)
            assert mine[: len(fewer)] == fewer


def part(name: str, tokens: int) -> Encoded:
    return Encoded(name, tuple(range(tokens)), np.tile(np.arange(tokens), (3, 1)), tokens)


def test_the_same_text_apart_at_another_place_has_another_name() -> None:
    """Placed twice, one chunk is served from its canonical at one place and computed at the other: other KV, same tokens."""
    from ctxwin_vllm.cache_namespace import namespace_of

    system_prompt, text = part("system_prompt", 32), part("text", 32)
    picture = replace(part("picture", 32), media=(MediaSpan("image", "media/p", 0, 32, (1, 8, 16)),))
    names = []
    for first in (True, False):
        segments = [Segment(system_prompt, 0, span_key="h"), Segment(picture, 32, span_key="p")]
        for i, approximate in enumerate((first, not first)):
            segments.append(
                Segment(
                    text, 64 + 32 * i, span_key="canonical" if approximate else f"exact {i}", approximate=approximate
                )
            )
        names.append(namespace_of(segments, "salt", 32).marks)
    assert names[0].keys() == names[1].keys() == {32}
    assert names[0] != names[1]

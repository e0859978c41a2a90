"""Plain requests on a vLLM that windows use get what they get without ctxwin, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adapters.vllm.prefixes import (
    QUERY,
    ask,
    collapsed,
    frame,
    logprobs_of,
    plain,
    plain_request,
    prompt_of,
    window_on,
    words,
)
from ctxwin import Window, open_engine
from ctxwin.tiny import checkpoint_dir

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


@pytest.fixture
def view() -> Iterator[Any]:
    """A view of no tenant, as plain requests are, on a vLLM whose cache is empty."""
    with open_engine("tiny:vllm", dtype="float32") as engine, engine.view("") as made:  # type: ignore[attr-defined]
        yield made


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

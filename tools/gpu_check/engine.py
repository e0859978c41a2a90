"""Does the embedded vLLM answer right on this GPU, and what does a slide cost? Run by ``gpu_check`` where vLLM is installed.

``python tools/gpu_check/engine.py NAME DEVICE [MODEL]`` is one engine in a process of its own, which ends with it. It writes rows
as JSON: programs of edits and asks, and, for ``7B``, times of first tokens. Without MODEL, a folder, it opens the bundled model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

if TYPE_CHECKING:
    from ctxwin import Chunk, Window
    from ctxwin.engines.base import Engine
    from ctxwin.window.answer import Answer

Row = dict[str, Any]
Answers = list[tuple[str, dict[str, int], dict[int, float]]]
"""Text, tokens by lane and log-probabilities of each ask of a program."""
OPTIONS: dict[str, dict[str, Any]] = {
    "float32, Triton attention, eager": {"dtype": "float32", "attention_backend": "TRITON_ATTN", "enforce_eager": True},
    "bfloat16, vLLM's attention, eager": {"dtype": "bfloat16", "enforce_eager": True},
    "bfloat16, compiled, CUDA graphs": {"dtype": "bfloat16"},
    "bfloat16, compiled, CUDA graphs, stage outputs": {"dtype": "bfloat16", "outputs": True},
}
"""The engines that programs run on; the first one also on a processor."""
PRETRAINED = ("float32, Triton attention, eager", "bfloat16, compiled, CUDA graphs")
"""The engines that other models than the bundled one run on."""
TIMES = "7B"
BOUNDS = {"float32": 1e-3, "bfloat16": 0.5}
"""How far log-probabilities may be from those of a re-prefill by the same vLLM, or of the transformers engine."""
PATCHES = {"mode": "patched", "bytes_share": 0.11, "survivors": "keep", "advanced": {"layout": "joint"}}
"""Of factors that two engines form alike: codes of quantized ones differ where KV does in its last bits."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TRITON_F32_DEFAULT": "ieee",  # else vLLM's Triton attention computes float32 in tf32
    "CTXWIN_AUDITS": "0",
}
HEADER, LIMIT_S = "You watch a camera.", 150


def engines(device: torch.device, *, quick: bool, models: Sequence[Path] = ()) -> Iterator[Row]:
    """Yield the rows of all engines; one that does not open or end in time is a row with a ``fault``.

    ``models`` are folders of text models, each of which runs the programs on texts in float32 and compiled in bfloat16.
    """
    names = [*OPTIONS, TIMES] if device.type == "cuda" and not quick else [*list(OPTIONS)[:1], TIMES]
    runs = [(name, None) for name in names]
    runs += [(name, model) for model in models for name in PRETRAINED if name in names]
    for name, model in runs:
        command = [sys.executable, __file__, name, str(device), *([str(model)] if model else [])]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LIMIT_S, env={**ENVIRONMENT, **os.environ}, check=False
            )
            rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("row ")]
            fault = None if done.returncode == 0 else done.stderr.strip().splitlines()[-1:]
        except subprocess.TimeoutExpired:
            rows, fault = [], [f"not done after {LIMIT_S} s"]
        label = {"engine": name} | ({"model": model.name} if model else {})
        yield from (label | row for row in rows)
        if fault is not None:
            yield label | {"program": "all", "fault": fault[0] if fault else "it ended without a word"}


def main(name: str, device: torch.device, model: Path | None = None) -> None:
    """Run one engine and write its rows, each in a line behind ``row``."""
    for row in times(device) if name == TIMES else programs(name, device, model):
        sys.stdout.write(f"row {json.dumps(row)}\n")
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads may outlive it


def programs(name: str, device: torch.device, model: Path | None = None) -> Iterator[Row]:
    """Run every program: exact ones against re-prefills, others against the transformers engine; on texts only with ``model``."""
    from ctxwin import open_engine
    from ctxwin.tiny import checkpoint_dir

    dtype = OPTIONS[name]["dtype"]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # pictures, too, in float32
    folder = str(model or checkpoint_dir())
    contents = (_passages(),) if model else (_texts(), _pictures())
    with _open(folder, device, **OPTIONS[name]) as engine:
        paged = engine.core.transport.paged  # type: ignore[attr-defined]  # of `VLLMEngine`
        kernel = {"kernel": paged.kernel, "in_place": paged.direct, "backend": type(paged.layers[0].impl).__name__}
        if device.type == "cuda" and (paged.kernel, paged.direct) != ("triton", True):
            yield {"program": "loads", "fault": f"they must run on the Triton kernel, in place, got {kernel}"}
        if engine.spec.outputs:
            yield {"program": "hidden states, text"} | kernel | hidden_states(engine, *_texts()[1:])
            return
        for content in contents:
            yield {"program": f"exact, {content[0]}"} | kernel | exact(engine, *content[1:], BOUNDS[dtype])
            for kind in ("survivors", "patches", "blind"):
                with engine.view(f"{kind} {content[0]}") as view:
                    got = reuse(view, kind, *content[1:])
                with open_engine(f"hf:{folder}", dtype=dtype, device=str(device)) as other:
                    want = reuse(other, kind, *content[1:])
                yield {"program": f"{kind}, {content[0]}"} | kernel | compare(got, want, BOUNDS[dtype])
        yield {"program": "asks in one batch, text"} | kernel | mixed(engine, *contents[0][1:], BOUNDS[dtype])


def mixed(engine: Engine, chunks: list[Chunk], questions: list[str], bound: float) -> Row:
    """Ask windows that load spans, and compute prompts anew, in the same steps of the engine; compare with one after the other.

    ``steps_together`` and ``steps_alone`` count the engine's steps.
    """
    from ctxwin import Chunk, Fidelity, Window

    fidelities = [Fidelity("exact"), Fidelity("blind"), Fidelity(**PATCHES)]
    answers: dict[str, Answers] = {}
    steps: dict[str, int] = {}
    vllm = engine.core.driver.engine  # type: ignore[attr-defined]  # of `VLLMEngine`
    for way, threads in (("alone", 1), ("together", 16)):
        with ExitStack() as stack, ThreadPoolExecutor(threads) as pool:
            windows = []
            for i in range(9):
                view = stack.enter_context(engine.view(f"{way} {i}"))
                window = stack.enter_context(Window(view, HEADER, fidelity=fidelities[i % 3]))
                window.extend([*chunks[i % 2 : 4], Chunk.text(f"window {i}")])
                window.ask(questions[0], max_tokens=1)
                window.slide(1)
                window.append(chunks[4])
                windows.append(window)
            counted = stack.enter_context(patch.object(vllm, "step", wraps=vllm.step))
            asks = [pool.submit(_ask, window, questions[i % 2]) for i, window in enumerate(windows)]
            plain = [pool.submit(reprefill, w, questions[0], f"{way} {i}", 8) for i, w in enumerate(windows)]
            answers[way] = [ask.result() for ask in asks]
            answers[way] += [(one.text, {}, one.logprobs) for one in (request.result() for request in plain)]
            steps[way] = counted.call_count
    counts = {f"steps_{way}": count for way, count in steps.items()}
    return compare(answers["together"], answers["alone"], bound) | counts


def exact(engine: Engine, chunks: list[Chunk], questions: list[str], bound: float) -> Row:
    """Ask an exact window after each edit, and a re-prefill of the same prompt in a space of its own."""
    from ctxwin import Fidelity, Window

    got: Answers = []
    want: Answers = []
    with Window(engine, HEADER, fidelity=Fidelity("exact")) as window:
        window.extend(chunks[:4])
        a, b, c, d = window.ids
        for edit in (
            lambda: None,
            lambda: window.evict(b),
            lambda: window.recall(b, at=0),
            lambda: window.reorder([d, a, c, b]),
            lambda: (window.slide(1), window.append(chunks[4])),
            lambda: window.recall(window.evicted[0]),
        ):
            edit()
            for question in questions:
                got.append(_answer(window.ask(question, max_tokens=2, logprobs=-1)))
                result = reprefill(window, question, f"alone {len(want)}", 2)
                want.append((result.text, got[-1][1], result.logprobs))
    return compare(got, want, bound)


def hidden_states(engine: Engine, chunks: list[Chunk], questions: list[str]) -> Row:
    """Ask an exact window after each chunk, and a view that reuses nothing; compare the hidden states of the prompts' tokens.

    ``away`` is their largest distance, relative to the length of a prompt's hidden states; ``equal`` counts those of no distance.
    """
    from ctxwin import Fidelity, Window

    distances: list[float] = []
    with Window(engine, HEADER, fidelity=Fidelity("exact")) as window:
        for i, chunk in enumerate(chunks):
            window.append(chunk)
            got = window.ask(questions[0], max_tokens=4)
            with engine.view(f"outputs {i}") as alone, Window(alone, HEADER, fidelity=Fidelity("exact")) as other:
                other.extend(chunks[: i + 1])
                want = other.ask(questions[0], max_tokens=4)
            prompt = slice(0, got.usage.prompt_tokens)
            ours, theirs = (answer.outputs["hidden_states"][prompt].float() for answer in (got, want))  # type: ignore[index]
            distances.append(float((ours - theirs).norm() / theirs.norm()))
    away, bound = max(distances), 0.05
    fault = None if away <= bound else f"hidden states are {away:.2g} away, more than {bound}"
    return {"asks": len(chunks), "compared": len(chunks), "equal": distances.count(0), "away": away, "fault": fault}


def reuse(engine: Engine, kind: str, chunks: list[Chunk], questions: list[str]) -> Answers:
    """Answers of a window that reuses KV approximately, through slides, a look-back and another order."""
    from ctxwin import Fidelity, Window

    fidelity = Fidelity("blind") if kind == "blind" else Fidelity(**PATCHES)
    answers: Answers = []

    def ask(window: Window) -> None:
        answers.extend(_answer(window.ask(question, max_tokens=2, logprobs=-1)) for question in questions)

    with Window(engine, HEADER, fidelity=fidelity) as window:
        window.extend(chunks[:4])
        ask(window)
        if kind == "patches":
            window.maintenance.compress()
        window.slide(1)
        ask(window)
        window.append(chunks[4])
        window.recall(window.evicted[0], at=2)
        ask(window)
        window.reorder(list(window.ids)[::-1])
        ask(window)
    return answers


def compare(got: Answers, want: Answers, bound: float) -> Row:
    """Count equal answers; the distance is over asks of both engines up to the first that they served by other lanes, which
    is a choice by prices."""
    alike = next((i for i, (one, other) in enumerate(zip(got, want, strict=True)) if one[1] != other[1]), len(got))
    pairs = list(zip(got, want, strict=True))[:alike]
    away = max((abs(one[2][t] - p) for one, other in pairs for t, p in other[2].items() if p > -10), default=0.0)
    equal = sum(one[0] == other[0] for one, other in pairs)
    fault = None if away <= bound else f"log-probabilities are {away:.2g} away, more than {bound}"
    if bound < 0.01 and equal < alike:
        fault = fault or f"{alike - equal} answers differ"
    return {"asks": len(got), "compared": alike, "equal": equal, "away": away, "fault": fault}


def times(device: torch.device) -> Iterator[Row]:
    """Asks behind a slide of 16 chunks of 1,024 tokens: survivors moved within the device and from the host, the same with a new
    chunk, the prompt computed again, and the same prompt once more, which vLLM's prefix cache holds; an exact window's slide and
    new chunk, with and without a prefill ahead of the ask. A 7B decoder of random weights in bfloat16."""
    from shapes import DECODERS
    from timing import write_model

    from ctxwin import Chunk, Fidelity, Window

    small = device.type != "cuda"
    decoder, count, tokens, rounds = (DECODERS[0].smaller(), 4, 64, 2) if small else (DECODERS[0], 16, 1024, 7)
    noise = torch.Generator().manual_seed(0)

    def chunk() -> Chunk:
        return Chunk.tokens([int(i) for i in torch.randint(100, 800, (tokens,), generator=noise)])

    samples: dict[str, list[float]] = {}
    row: Row = {"program": f"{count} chunks of {tokens} tokens", "decoder": decoder.name, "fault": None}

    def timed(name: str, run: Callable[[], object]) -> None:
        began = time.perf_counter()
        run()
        samples.setdefault(name, []).append((time.perf_counter() - began) * 1e3)

    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        write_model(decoder, Path(folder), decoder.layers, "bfloat16", device)
        options = {
            "kv_cache_memory_bytes": (1 << 28) if small else 12 << 30,
            "gpu_memory_utilization": 0.9,
            "enforce_eager": True,
            "dtype": "bfloat16",
        }
        longest = 2048 if small else 32_768
        more = {"max_model_len": longest, "max_num_batched_tokens": longest}
        with ExitStack() as stack:
            engine = stack.enter_context(_open(str(folder), device, **options, **more))
            window = stack.enter_context(Window(engine, HEADER, fidelity=Fidelity("patched", survivors="keep")))
            window.extend([chunk() for _ in range(count)])
            window.ask("color of 17?", max_tokens=1)
            copies = engine.core.transport.paged.resident  # type: ignore[attr-defined]  # of `VLLMEngine`
            for i in range(rounds + 1):
                copied = copies.copied_bytes if copies else 0
                window.slide(1)
                timed("slide_ms", lambda: window.ask("color of 17?", max_tokens=1))
                if copies is not None:
                    row["slide_megabytes_from_host"] = (copies.copied_bytes - copied) / 1e6
                for name in ("computed_ms", "prefix_cached_ms"):
                    timed(name, lambda i=i: reprefill(window, "color of 17?", f"alone {i}", 1))  # type: ignore[misc]
                window.append(chunk())
                timed("slide_and_append_ms", lambda: window.ask("color of 17?", max_tokens=1))
            if copies is not None:
                copies.clear()
                copies.max_bytes = 0
                for _ in range(rounds + 1):
                    window.slide(1)
                    timed("slide_from_host_ms", lambda: window.ask("color of 17?", max_tokens=1))
                    window.append(chunk())
                    window.ask("color of 17?", max_tokens=1)
            view = stack.enter_context(engine.view("exact"))
            window = stack.enter_context(Window(view, HEADER, fidelity=Fidelity("exact")))
            window.extend([chunk() for _ in range(count)])
            window.ask("color of 17?", max_tokens=1)
            for _ in range(rounds + 1):
                window.slide(1)
                window.append(chunk())
                timed("exact_slide_and_append_ms", lambda: window.ask("color of 17?", max_tokens=1))
                window.slide(1)
                window.append(chunk())
                timed("prefill_ahead_ms", window.maintenance.prefill)
                timed("exact_behind_prefill_ms", lambda: window.ask("color of 17?", max_tokens=1))
    yield row | {name: median(values[1:]) for name, values in samples.items()}


def reprefill(window: Window, question: str, space: str, tokens: int) -> Any:
    """The answer of the same engine to a window's prompt, nothing reused but what an earlier call in ``space`` computed."""
    from ctxwin.engines.sampling import Sampling
    from ctxwin.engines.segments import Segment

    engine = window.engine
    head = engine.encode_system_prompt(HEADER)
    segments, at = [Segment(head, 0)], head.advance
    for placement in window.ids:
        encoded = engine.encode(window.chunk(placement))
        segments.append(Segment(encoded, at))
        at += encoded.advance
    return engine.generate(segments, engine.encode_query(question), Sampling(tokens, logprobs=-1), salt=space)


def _open(model: str, device: torch.device, **options: Any) -> AbstractContextManager[Engine]:
    from ctxwin_vllm.engine import (
        VLLMEngine,  # `open_engine` finds it where it is installed, which this machine need not have
    )

    if device.type != "cuda":
        options.pop("attention_backend", None)
    else:
        options.setdefault("gpu_memory_utilization", 0.2)  # its blocks are counted in bytes
    return VLLMEngine(model, **({"kv_cache_memory_bytes": 1 << 30} | options))


def _answer(answer: Answer) -> tuple[str, dict[str, int], dict[int, float]]:
    return answer.text, dict(answer.usage.reused_tokens), dict(answer.first_token_logprobs or {})


def _ask(window: Window, question: str) -> tuple[str, dict[str, int], dict[int, float]]:
    return _answer(window.ask(question, max_tokens=8, logprobs=-1))


def _texts() -> tuple[str, list[Chunk], list[str]]:
    from ctxwin import Chunk

    words = [
        "the camera",
        "sees",
        "a red cube",
        "and then",
        "a blue ball",
        "near",
        "the green star",
        "while",
        "nothing moves",
    ]
    texts = [" ".join(words[(i * 5 + j * (i + 2)) % len(words)] for j in range(25 + 6 * i)) + "." for i in range(5)]
    return "text", [Chunk.text(text) for text in texts], ["color of 17?", "shape of 17?"]


def _passages() -> tuple[str, list[Chunk], list[str]]:
    import argparse
    import collections
    import inspect
    import string
    import threading

    from ctxwin import Chunk

    documented = (argparse, collections.Counter, string.Template, threading.Condition, inspect.Signature)
    texts = [" ".join((inspect.getdoc(one) or "").split())[:600] for one in documented]
    return "text", [Chunk.text(text) for text in texts], ["What is it for?", "Which names does it have?"]


def _pictures() -> tuple[str, list[Chunk], list[str]]:
    from ctxwin import Chunk
    from ctxwin.tiny import world

    frames = world.make_stream(seed=5, n_frames=5)
    questions = [question.text for question in world.questions_for(frames[:4], 2, 0, ("single_hop", "multi_hop"))]
    return "pictures", [Chunk.image(world.render(f), text=f"t={i} s") for i, f in enumerate(frames)], questions


if __name__ == "__main__":
    main(sys.argv[1], torch.device(sys.argv[2]), *map(Path, sys.argv[3:]))

"""Windows that go on elsewhere: on another engine, in another process, with another basis."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ctxwin import Window, open_engine, open_store
from ctxwin.window.ask import kl
from window.on_engines import HEADER, QUESTIONS, SHARED, another_basis, ask, chunk, close, reprefill, window_on


@pytest.mark.vllm
def test_both_engines_agree() -> None:
    answers = []
    for name in ("hf", "vllm"):
        with open_engine("tiny", engine=name, dtype="float32") as engine, window_on(engine) as window:
            ask(window, QUESTIONS[0])
            window.slide(1)  # survivors, then a look-back behind them
            window.append(chunk(4))
            ask(window, QUESTIONS[0])
            window.recall(window.evicted[0], at=2)
            answers.append([ask(window, question).first_token_logprobs for question in QUESTIONS])
    for ours, theirs in zip(*answers, strict=True):
        assert close(ours, theirs, 1e-4)


PROGRAM = """
import sys
from ctxwin import Window, open_engine, open_store
with open_engine("tiny:hf", dtype="float32", store=open_store("disk:" + sys.argv[1])) as engine:
    window = Window.restore(engine, sys.stdin.read())
    answer = window.ask(sys.argv[2], max_tokens=2)
    print(answer.text, engine.counters.vision_encodes, answer.usage.computed_tokens, answer.usage.misses, sep="|")
"""


def elsewhere(folder: Path, state: str) -> list[str]:
    """The answer of another process that restores ``state``."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), QUESTIONS[0]],
        input=state,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip().splitlines()[-1].split("|")


def test_another_process_goes_on_where_this_one_stopped(tmp_path: Path) -> None:
    """It finds chunks, conditioned KV, patches and embeddings; a corrupt entry is a counted miss, never an answer."""
    with open_engine("tiny:hf", dtype="float32", store=open_store(f"disk:{tmp_path}")) as engine:
        window = window_on(engine)
        expected = window.ask(QUESTIONS[0], max_tokens=2)
        query = engine.encode_query(QUESTIONS[0]).tokens
        span = window.snapshot().placed[1].kv
        assert span is not None
        state = window.snapshot().model_dump_json()
        window.close()
        engine.store.close()
    assert elsewhere(tmp_path, state) == [expected.text, "0", str(query), "0"]

    blobs = [
        p for p in tmp_path.rglob("*") if p.is_file() and span.span.removeprefix("span/").encode() in p.read_bytes()
    ]
    blobs = [p for p in blobs if p.stat().st_size > 10_000 and not p.name.startswith("cache.db")]
    assert len(blobs) == 1
    raw = bytearray(blobs[0].read_bytes())
    raw[-100] ^= 0xFF
    blobs[0].write_bytes(bytes(raw))
    with open_engine("tiny:hf", dtype="float32", store=open_store(f"disk:{tmp_path}")) as engine:
        with Window.restore(engine, state) as window:
            answer = window.ask(QUESTIONS[0], max_tokens=2)
        assert (answer.text, engine.counters.vision_encodes, answer.usage.misses) == (expected.text, 0, 1)
        assert answer.usage.computed_tokens > query
        engine.store.close()


def test_patches_of_another_basis_are_not_served(tmp_path: Path, own: Path) -> None:
    """Patches lie on disk, the basis beside the model; with another one they are computed anew, with it they are served."""
    folder = tmp_path / "store"
    with open_engine("tiny:hf", dtype="float32", store=f"disk:{folder}") as engine:
        with Window(engine, HEADER, fidelity=SHARED) as window:
            window.extend([chunk(i) for i in range(3)])
            ask(window, QUESTIONS[0])
            assert window.maintenance.compress() > 0
            served = ask(window, QUESTIONS[0])
            state = window.snapshot().model_dump_json()
        assert not list(engine.store.list("basis/"))
        engine.store.close()
    for other in (False, True):
        if other:
            another_basis()
        with open_engine("tiny:hf", dtype="float32", store=f"disk:{folder}") as engine:
            with Window.restore(engine, state) as window:
                answer = ask(window, QUESTIONS[0])
                reference = reprefill(engine, window, QUESTIONS[0])
            engine.store.close()
        assert kl(reference, answer.first_token_logprobs) < 1e-3
        if other:
            assert "patched" not in answer.usage.reused_tokens
            assert close(answer.first_token_logprobs, reference, 1e-5)
        else:
            assert answer.usage.misses == 0 and answer.usage.reused_tokens == served.usage.reused_tokens

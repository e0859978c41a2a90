"""Measures what an ask costs whose chunks lie on disk and in no memory, with vLLM in processes of its own.

    python tests/adapters/vllm/cold_load.py [TOKENS] [RUNS]

The model is random: its KV is large (96 KiB a token in float32) and its forwards are cheap, so that the load is what is
measured. Each run opens the store anew and empties vLLM's prefix cache. Prints one JSON line: medians in milliseconds.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from ctxwin import Window
from ctxwin.chunk import Chunk
from ctxwin.engines.torchvision_repair import repair
from ctxwin.opening import open_engine
from ctxwin.store import open_store

CHUNK = "red blue circle square color number " * 40


def write_model(folder: Path) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from engines.models import build_tokenizer

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=512, intermediate_size=64, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main(tokens: int = 2048, runs: int = 9) -> None:
    repair()
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch, "model"))
        store = f"disk:{scratch}/store"
        engine = open_engine(f"vllm:{model}", store=store, processes="multi", dtype="float32", max_model_len=8192)
        size = engine.encode(Chunk.text(CHUNK)).tokens
        chunks = [Chunk.text(f"{i} {CHUNK}") for i in range(max(1, tokens // size))]
        found: list[dict[str, float]] = []
        for _ in range(runs + 2):
            engine._core.driver.reset_prefix_cache()  # type: ignore[attr-defined]
            with engine.view("", store=open_store(store)) as view, Window(view, "system") as window:  # type: ignore[attr-defined]
                window.extend(chunks)
                began = time.perf_counter()
                usage = window.ask("what color", max_tokens=1).usage
                ms = 1000 * (time.perf_counter() - began)
                found.append({"ms": ms, "ttft": 1000 * usage.ttft_s, "mb": usage.bytes_loaded / 1e6})
        engine.close()
    cold = found[2:]  # the first computes, the second warms up
    medians = {name: round(statistics.median(run[name] for run in cold), 1) for name in cold[0]}
    print(json.dumps({"runs": runs, "tokens": size * len(chunks)} | medians))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

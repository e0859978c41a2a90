"""``python -m evals.studies.states``: chunks of a hybrid as maps on its recurrent states, beside a forward over them.

A random hybrid of Qwen3.5's architecture on transformers. What is measured does not depend on weights: how long it takes to move
a chunk by its map and by a forward, its bytes, and how far what follows is from one forward with the same inputs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Sampling, Segment
from ctxwin.evals.console import Json, errors, new_table, numbers, progress, show, write_result

from .command import SYSTEM_PROMPT, Output

if TYPE_CHECKING:
    from rich.table import Table

    from ctxwin.engines.hf.engine import HFEngine


def random_hybrid(folder: Path, layers: int, hidden: int) -> Path:
    """A random Qwen3.5 text model with heads of 128 in its recurrent layers, as the released ones have, and states that last."""
    import torch
    from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

    from ctxwin.tiny import checkpoint_dir

    tokenizer = AutoTokenizer.from_pretrained(checkpoint_dir())
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 128, num_key_value_heads=max(1, hidden // 512), head_dim=256,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=hidden // 256,
        linear_num_value_heads=hidden // 128, max_position_embeddings=16_384, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(0.005, 0.1).log_()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def measure(
    engine: HFEngine, lengths: Sequence[int], front: int, runs: int, done: Callable[[int], None]
) -> list[dict[str, Any]]:
    """One row for each length of a chunk that stands behind ``front`` tokens."""
    header = engine.encode_system_prompt(SYSTEM_PROMPT)
    before = engine.encode(Chunk.tokens([5 + i % 90 for i in range(front)]))
    query, kv = engine.encode_query("now?"), engine.spec.kv
    behind = [Segment(header, 0, capture=True), Segment(before, header.advance, capture=True)]
    start, one = header.advance + before.advance, Sampling(max_tokens=1)
    made = engine.generate(behind, query, one)
    behind = [replace(s, span=made.captured[i], capture=False) for i, s in enumerate(behind)]
    rows = []
    for length in lengths:
        chunk = engine.encode(Chunk.tokens([7 + i % 83 for i in range(length)]))
        span = engine.prefill(behind, chunk, start)
        took: dict[str, list[float]] = {"forward": [], "map": []}
        found: dict[str, Any] = {}
        for run in range(runs + 1):
            computed = Segment(chunk, start, capture=True)
            for name, segment in (("forward", computed), ("map", Segment(chunk, start, span, approximate=True))):
                begin = time.perf_counter()
                found[name] = engine.generate([*behind, segment], query, one, capture_query=True)
                if run:
                    took[name].append(time.perf_counter() - begin)
        pairs = [(found["map"].query_span.states[n], s) for n, s in found["forward"].query_span.states.items()]
        apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        rows.append({
            "tokens": length, "forward_ms": 1e3 * median(took["forward"]), "map_ms": 1e3 * median(took["map"]),
            "kv_bytes": length * kv.token_bytes, "state_bytes": kv.state_bytes, "error": apart, "runs": runs,
        })  # fmt: skip
        done(1)
    return rows


def main(
    layers: Annotated[int, typer.Option(help="Decoder layers, a quarter of them attention.", min=4)] = 8,
    hidden: Annotated[int, typer.Option(help="Width; a multiple of 512.", min=512)] = 1024,
    lengths: Annotated[str, typer.Option(help="Tokens of a chunk, comma-separated.")] = "16,64,256,1024",
    front: Annotated[int, typer.Option(help="Tokens in front of it.", min=1)] = 1024,
    runs: Annotated[int, typer.Option(help="Timed runs, side by side.", min=1)] = 5,
    quick: Annotated[bool, typer.Option(help="Four layers of 512, two lengths, two runs.")] = False,
    output: Output = None,
    json: Json = False,
) -> None:
    """Moving a chunk of a hybrid by its map on the states, beside a forward over it: milliseconds, bytes, error."""
    from ctxwin.engines.hf.engine import HFEngine

    if quick:
        layers, hidden, lengths, runs = 4, 512, "16,256", 2
    with errors(), tempfile.TemporaryDirectory() as folder:
        engine = HFEngine(random_hybrid(Path(folder), layers, hidden), dtype="float32", position_free=True)
        with progress("lengths", len(numbers(lengths))) as done:
            rows = measure(engine, numbers(lengths), front, runs, done)
    result = {"config": {"layers": layers, "hidden": hidden, "front": front}, "rows": rows}
    write_result(output, "states.json", result)
    show(result, json, table(rows))


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """What was measured, for people."""
    made = new_table("A chunk behind others", "tokens|forward, ms|map, ms|KV, MB|states and maps, MB|error")
    for row in rows:
        shown = (f"{row['forward_ms']:.0f}", f"{row['map_ms']:.0f}", f"{row['kv_bytes'] / 1e6:.1f}")
        made.add_row(str(row["tokens"]), *shown, f"{row['state_bytes'] / 1e6:.1f}", f"{row['error']:.1e}")
    return made


if __name__ == "__main__":
    typer.run(main)

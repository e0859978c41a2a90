"""``python -m evals.studies.states``: chunks of a hybrid as maps on its recurrent states, beside a forward over them.

A random hybrid of Qwen3.5's architecture, on transformers or on vLLM. What is measured does not depend on weights: how long it
takes to move a chunk by its map and by a forward, whose KV is kept or not, its bytes, and how far what follows is from a
forward with the same inputs.
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

    from ctxwin.engines.base import Generation
    from ctxwin.engines.hf.engine import HFEngine
    from ctxwin.engines.vllm.engine import VLLMEngine
    from ctxwin.kv.states import States


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
    engine: HFEngine | VLLMEngine, lengths: Sequence[int], front: int, runs: int, done: Callable[[int], None]
) -> list[dict[str, Any]]:
    """One row for each length of a chunk that stands behind ``front`` tokens.

    ``error`` is how far states behind it, composed where it was computed, are from those of a forward that ends and begins where
    the chunk does; ``cut``: how far those of one forward over chunk and query are from them; ``elsewhere``: how far composed
    states behind other tokens are from a forward's, in the first layer, where nothing else tells them apart.
    """
    header = engine.encode_system_prompt(SYSTEM_PROMPT)
    query, kv = engine.encode_query("now?"), engine.spec.kv
    start, one = header.advance + front, Sampling(max_tokens=1)

    def behind(step: int) -> list[Segment]:
        """System prompt and ``front`` tokens, which end alike whatever the step: the convolution reaches over three."""
        ids = [5 + step * i % 90 for i in range(front - 4)] + [5, 6, 7, 8]
        before = engine.encode(Chunk.tokens(ids[-front:]))
        layout = [Segment(header, 0, capture=True), Segment(before, header.advance, capture=True)]
        made = engine.generate(layout, query, one)
        return [replace(s, span=made.captured[i], span_key=f"{step}-{i}", capture=False) for i, s in enumerate(layout)]

    here, there = behind(1), behind(7)
    rows = []
    for length in lengths:
        chunk = engine.encode(Chunk.tokens([7 + i % 83 for i in range(length)]))
        span = engine.prefill(here, chunk, start)
        asked = Segment(chunk, start)
        ways = {"forward": asked, "kept": replace(asked, capture=True)}
        ways["map"] = replace(asked, span=span, span_key=f"chunk-{length}", approximate=True)
        took: dict[str, list[float]] = {name: [] for name in ways}
        found: dict[str, States] = {}
        for run in range(runs + 1):
            for name, segment in ways.items():
                begin = time.perf_counter()
                made = engine.generate([*here, segment], query, one, capture_query=True, salt=f"{length}-{name}-{run}")
                if run:
                    took[name].append(1e3 * (time.perf_counter() - begin))
                found[name] = _states(made)
        moved, computed = (
            _states(engine.generate([*there, ways[name]], query, one, capture_query=True, salt=f"{length}-{name}"))
            for name in ("map", "kept")
        )
        rows.append({
            "tokens": length, **{f"{name}_ms": median(ms) for name, ms in took.items()},
            "kv_bytes": length * kv.token_bytes, "state_bytes": kv.state_bytes, "runs": runs,
            "error": _apart(found["map"], found["kept"]), "cut": _apart(found["forward"], found["kept"]),
            "elsewhere": _apart(moved, {"0.recurrent": computed["0.recurrent"]}),
        })  # fmt: skip
        done(1)
    return rows


def _states(made: Generation) -> States:
    """Behind the query."""
    assert made.query_span is not None
    return {n: s for n, s in made.query_span.states.items() if n.endswith((".conv", ".recurrent"))}


def _apart(a: States, b: States) -> float:
    """The largest difference of a layer's states, as a share of the largest number in them."""
    return max(float((a[name].float() - s.float()).abs().max() / s.float().abs().max()) for name, s in b.items())


def main(
    engine: Annotated[str, typer.Option(help="hf, in float32, or vllm, in bfloat16.")] = "hf",
    layers: Annotated[int, typer.Option(help="Decoder layers, a quarter of them attention.", min=4)] = 8,
    hidden: Annotated[int, typer.Option(help="Width; a multiple of 512.", min=512)] = 1024,
    lengths: Annotated[str, typer.Option(help="Tokens of a chunk, comma-separated.")] = "16,64,256,1024",
    front: Annotated[int, typer.Option(help="Tokens in front of it.", min=8)] = 1024,
    runs: Annotated[int, typer.Option(help="Timed runs, side by side.", min=1)] = 5,
    quick: Annotated[bool, typer.Option(help="Four layers of 512, two lengths, two runs.")] = False,
    output: Output = None,
    json: Json = False,
) -> None:
    """Moving a chunk of a hybrid by its map on the states, beside a forward over it: milliseconds, bytes, error."""
    from ctxwin.engines.open import open_engine

    if quick:
        layers, hidden, lengths, runs = 4, 512, "16,256", 2
    with errors(), tempfile.TemporaryDirectory() as folder:
        model = f"{engine}:{random_hybrid(Path(folder), layers, hidden)}"
        dtype = "bfloat16" if engine == "vllm" else "float32"
        with (
            open_engine(model, dtype=dtype, position_free=True) as opened,
            progress("lengths", len(numbers(lengths))) as done,
        ):
            rows = measure(opened, numbers(lengths), front, runs, done)  # type: ignore[arg-type]
    config = {"engine": engine, "layers": layers, "hidden": hidden, "front": front}
    result = {"config": config, "rows": rows}
    write_result(output, "states.json", result)
    show(result, json, table(rows))


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """What was measured, for people."""
    head = "tokens|forward, ms|kept, ms|map, ms|KV, MB|states and maps, MB|error|cut elsewhere|behind others"
    made = new_table("A chunk behind others", head)
    for row in rows:
        times = (f"{row[name]:.0f}" for name in ("forward_ms", "kept_ms", "map_ms"))
        sizes = (f"{row[name] / 1e6:.1f}" for name in ("kv_bytes", "state_bytes"))
        made.add_row(str(row["tokens"]), *times, *sizes, *(f"{row[n]:.1e}" for n in ("error", "cut", "elsewhere")))
    return made


if __name__ == "__main__":
    typer.run(main)

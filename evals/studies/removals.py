"""A window that slides at every question: survivors as they are, beside removal patches that were formed while the engine idled.

``make released`` and then ``python -m evals.studies.removals --model ~/.cache/ctxwin/released/smollm2``. Natural text runs
through a window of six chunks, one a turn: a new chunk, room for it, a question, a pause. After each slide the model reads the
next 32 tokens of the text over the KV that the answer was served; what it expects there is compared with what it expects over a
re-prefill of what is placed.

Ways: ``keep`` rotates survivors, ``removal`` corrects them (`Fidelity("patched", survivors="removal")`, ``prefill="idle"``) by
patches as they are by default, ``removal:RANK`` by joint factors.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from ctxwin.chunk import Chunk
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.segments import Segment
from ctxwin.fidelity import Fidelity
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.patch import apply_patch
from ctxwin.kv.relocate import relocate
from ctxwin.window.idle import prefiller_of
from ctxwin.window.window import Window
from ctxwin_evals.console import Json, Threads, errors, new_table, open_model, progress, show
from ctxwin_evals.decoder import Decoder
from ctxwin_evals.generation import forced_logits
from ctxwin_evals.stats import bootstrap_mean

from .command import Output, Seed, write_result
from .released_texts import NEXT, SYSTEM_PROMPT, Context, Texts

QUESTION = "?"


def served_spans(window: Window) -> list[SpanKV]:
    """Return KV of the placed chunks as the last answer left it, in place."""
    state, repo, spec, spans = window.snapshot(), window.engine.repo, window.engine.spec.kv, []
    for p, start in zip(state.placed, state.starts(), strict=True):
        base = repo.get_span(p.kv.span) if p.kv else None
        patch = repo.get_patch(p.kv.patch) if p.kv and p.kv.patch else None
        if p.kv is None or base is None or (p.kv.patch and patch is None):
            raise RuntimeError(f"KV of {p.id} must be stored, got none")
        spans.append(apply_patch(base[0], patch, spec, start) if patch else relocate(base[0], spec, start))
    return spans


class Reader:
    """Expectations of a model of the tokens behind a window, over KV that was served or over a re-prefill."""

    def __init__(self, engine: HFEngine) -> None:
        self.engine, self._decoder = engine, Decoder(engine)
        self._header, self._header_span = self._decoder.system_prompt(SYSTEM_PROMPT)

    def expected(self, window: Window, spans: Sequence[SpanKV], tokens: Sequence[int]) -> Tensor:
        """Return log-probabilities of all ``tokens`` but the first, float32 ``[tokens - 1, vocab]``."""
        state = window.snapshot()
        begin = state.system_prompt_advance + sum(p.advance for p in state.placed)
        memory = self._decoder.memory([[self._header_span, *spans]])
        query = self.engine.encode(Chunk.tokens(list(tokens[:1])))
        return forced_logits(self._decoder, memory, [query], begin, [tokens[1:]])[0].log_softmax(-1)

    def reprefilled(self, window: Window) -> list[SpanKV]:
        """Return KV of the placed chunks from nothing, in place."""
        state, segments = window.snapshot(), [Segment(self._header, 0, span=self._header_span)]
        for p, start in zip(state.placed, state.starts(), strict=True):
            encoded = self.engine.encode(p.chunk)
            span = self.engine.prefill(tuple(segments), encoded, start, salt="reference")
            segments.append(Segment(encoded, start, span=span))
        return [segment.span for segment in segments[1:] if segment.span is not None]


def open_window(engine: HFEngine, way: str, budget: int) -> Window:
    """Return an empty window of one way. Raises ValueError for an unknown one."""
    name, _, rank = way.partition(":")
    if name == "keep" and not rank:
        return Window(engine, SYSTEM_PROMPT, budget, Fidelity("patched", survivors="keep"))
    if name != "removal" or not (rank.isdecimal() or way == name):
        raise ValueError(f"a way must be keep, removal or removal:RANK, got {way!r}")
    size: dict[str, Any] = {"rank": int(rank), "advanced": {"layout": "joint"}} if rank else {}
    return Window(engine, SYSTEM_PROMPT, budget, Fidelity("patched", survivors="removal", **size), prefill="idle")


def measure(reader: Reader, context: Context, way: str, references: dict[int, Tensor]) -> Iterator[dict[str, Any]]:
    """Yield a row for each slide: KL, flips, tokens on the path of the answer, and tokens computed while the engine idled.

    ``references``, expectations over re-prefills by turn, is filled by the first way.
    """
    engine, size = reader.engine, len(context.chunks[0])
    query_tokens = engine.encode_query(QUESTION).tokens
    header = engine.encode_system_prompt(SYSTEM_PROMPT).tokens
    with open_window(engine, way, header + context.placed * size + query_tokens + 2) as window:
        for turn, ids in enumerate(context.chunks[:-1]):
            window.append(Chunk.tokens(list(ids)))
            slid = window.slide(reserve_tokens=query_tokens + 1)
            usage = window.ask(QUESTION, 1).usage
            counts = window.maintenance.prefill_counts
            row = {
                "way": way,
                "turn": turn,
                "path": usage.computed_tokens - query_tokens,
                "used": usage.prefilled_tokens,
            }
            if slid:
                tokens = context.chunks[turn + 1][: NEXT + 1]
                if turn not in references:
                    references[turn] = reader.expected(window, reader.reprefilled(window), tokens)
                exact, got = references[turn], reader.expected(window, served_spans(window), tokens)
                row["kl"] = float((exact.exp() * (exact - got)).sum(-1).clamp_min(0).mean())
                row["flips"] = float((exact.argmax(-1) != got.argmax(-1)).float().mean())
            if not prefiller_of(engine).drain(600):
                raise RuntimeError("the engine must come to rest, got work for ten minutes")
            after = window.maintenance.prefill_counts
            if slid:
                yield row | {"idle": after.tokens - counts.tokens if after and counts else 0}
    for kind in ("span/", "patch/"):
        for key in list(engine.store.list(kind)):
            engine.repo.delete(key)


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures of each way, with 95 % intervals over contexts."""
    result = []
    for way in dict.fromkeys(row["way"] for row in rows):
        some = [row for row in rows if row["way"] == way]
        means = {key: sum(row[key] for row in some) / len(some) for key in ("kl", "flips", "path", "used", "idle")}
        interval = bootstrap_mean([row["kl"] for row in some], [str(row["context"]) for row in some])
        result.append({"way": way, "n": len(some), **means, "kl_ci95": interval})
    return result


def run(reader: Reader, contexts: Sequence[Context], ways: Sequence[str], advance: Callable[[int], None]) -> Any:
    """Return the rows of all contexts in all ways."""
    rows: list[dict[str, Any]] = []
    for context in contexts:
        references: dict[int, torch.Tensor] = {}
        for way in ways:
            rows += [{"context": context.index, **row} for row in measure(reader, context, way, references)]
            advance(1)
    return rows


def _table(summary: Sequence[dict[str, Any]]) -> Any:
    head = "way | slides | KL | 95 % | flips | tokens on the path | computed ahead and served | computed while idle"
    table = new_table("Slides", head, left=(0,))
    for f in summary:
        low, high = f["kl_ci95"] or (0.0, 0.0)
        table.add_row(
            f["way"], str(f["n"]), f"{f['kl']:.4f}", f"{low:.4f}, {high:.4f}", f"{f['flips']:.1%}",
            *(f"{f[key]:.0f}" for key in ("path", "used", "idle")),
        )  # fmt: skip
    return table


def main(
    model: Annotated[str, typer.Option(help="tiny, or the folder of a text model.")] = "tiny",
    texts: Annotated[str, typer.Option(help="Set of contexts, text-PLACEDxTOKENS.")] = "text-6x64",
    ways: Annotated[
        str, typer.Option(help="Ways to serve survivors, comma-separated.")
    ] = "keep,removal,removal:16,removal:32",
    n: Annotated[int, typer.Option(help="Contexts, each a stream.", min=1)] = 4,
    seed: Seed = 0,
    threads: Threads = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure survivors of a stream with and without removal patches formed ahead."""
    with errors(), open_model(model, "float32", "cpu", threads) as engine:
        chosen = [way.strip() for way in ways.split(",")]
        contexts = Texts(engine, seed).contexts(texts, n)
        with progress("streams", n * len(chosen)) as advance:
            rows = run(Reader(engine), contexts, chosen, advance)
        result: dict[str, Any] = {"model": Path(model).name, "texts": texts, "n": n, "ways": summarise(rows)}
        write_result(output, f"removals-{result['model']}-{texts}.json", result)
        show(result, as_json, _table(result["ways"]))


if __name__ == "__main__":
    typer.run(main)

"""A window that slides at every question: survivors as they are, beside removal patches that were formed while the engine idled.

``make released`` and then ``python -m evals.studies.removals --model ~/.cache/ctxwin/released/smollm2``. Natural text runs
through a window of six chunks, one a turn: a new chunk, room for it, a question, a pause. After each slide the model reads the
next 32 tokens of the text over the KV that the answer was served; what it expects there is compared with what it expects over a
re-prefill of what is placed. With ``--texts frames-4`` frames of the bundled model's world run through a window of four, and it
is asked for colours that a placed frame decides by what stood in front of it; their answers are compared, too.

Ways: ``keep`` rotates survivors, ``removal`` corrects them (`Fidelity("patched", survivors="removal")`, ``prefill="idle"``) by
patches as they are by default, ``removal:RANK`` by joint factors.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from torch import Tensor

from ctxwin.chunk import Chunk
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.fidelity import Fidelity
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.patch import apply_patch
from ctxwin.kv.relocate import relocate
from ctxwin.progress import progress
from ctxwin.tiny.world import make_stream
from ctxwin.window.idle import prefiller_of
from ctxwin.window.window import Window
from ctxwin_evals.console import Json, Threads, new_table, open_model, show
from ctxwin_evals.decoder import Decoder
from ctxwin_evals.generation import forced_logits
from ctxwin_evals.stats import bootstrap_mean, share_interval
from ctxwin_evals.tasks.drawn import TRAINED_FRAMES
from ctxwin_evals.tasks.tiny import render_frames

from . import command, released_texts
from .command import Output, Seed, errors, write_result
from .released_texts import NEXT, Texts
from .scenes import scene_questions

QUESTION = "?"
FRAMES, ASKED = 20, 4
"""Frames of a stream, and most questions that are asked about a window of them."""


@dataclass(frozen=True)
class Stream:
    """Chunks that run through a window of ``placed``; ``reads`` are, by turn, queries and what is read behind them."""

    chunks: Sequence[Chunk]
    placed: int
    reads: Sequence[Sequence[tuple[Encoded, Sequence[int]]]]


def streams_of(engine: HFEngine, name: str, n: int, seed: int) -> list[Stream]:
    """Return streams of a set, ``frames-PLACED`` or one of natural text (`released_texts`)."""
    if match := re.fullmatch(r"frames-([2-5])", name):
        return [frames_stream(engine, int(match[1]), np.random.default_rng((seed, i))) for i in range(n)]
    streams = []
    for context in Texts(engine, seed).contexts(name, n):
        chunks, following = [Chunk.tokens(list(ids)) for ids in context.chunks[:-1]], context.chunks[1:]
        reads = [[(engine.encode(Chunk.tokens(list(ids[:1]))), ids[1 : NEXT + 1])] for ids in following]
        streams.append(Stream(chunks, context.placed, reads))
    return streams


def frames_stream(engine: HFEngine, placed: int, rng: np.random.Generator) -> Stream:
    """Return a stream of the bundled world's frames, with questions about the scenes of each window."""
    frames, reads = make_stream(rng, FRAMES, window=TRAINED_FRAMES), []
    for turn in range(FRAMES):
        questions = scene_questions(frames[max(0, turn + 1 - placed) : turn + 1], ASKED, rng)
        reads.append([(engine.encode_query(q.text), engine.text_ids(q.answer)) for q in questions])
    return Stream(render_frames(frames), placed, reads)


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

    def __init__(self, engine: HFEngine, system_prompt: str = released_texts.SYSTEM_PROMPT) -> None:
        self.engine, self.system_prompt, self._decoder = engine, system_prompt, Decoder(engine)
        self._header, self._header_span = self._decoder.system_prompt(system_prompt)

    def expected(
        self, window: Window, spans: Sequence[SpanKV], reads: Sequence[tuple[Encoded, Sequence[int]]]
    ) -> list[Tensor]:
        """Return log-probabilities of what is read behind each query, float32 ``[tokens, vocab]``."""
        state = window.snapshot()
        begin = state.system_prompt_advance + sum(p.advance for p in state.placed)
        memory = self._decoder.memory([[self._header_span, *spans]])
        logits = (forced_logits(self._decoder, memory, [query], begin, [tokens])[0] for query, tokens in reads)
        return [rows.log_softmax(-1) for rows in logits]

    def reprefilled(self, window: Window) -> list[SpanKV]:
        """Return KV of the placed chunks from nothing, in place."""
        state, segments = window.snapshot(), [Segment(self._header, 0, span=self._header_span)]
        for p, start in zip(state.placed, state.starts(), strict=True):
            encoded = self.engine.encode(p.chunk)
            span = self.engine.prefill(tuple(segments), encoded, start, salt="reference")
            segments.append(Segment(encoded, start, span=span))
        return [segment.span for segment in segments[1:] if segment.span is not None]


def open_window(engine: HFEngine, system_prompt: str, way: str, budget: int) -> Window:
    """Return an empty window of one way. Raises ValueError for an unknown one."""
    name, _, rank = way.partition(":")
    if name == "keep" and not rank:
        return Window(engine, system_prompt, budget, Fidelity("patched", survivors="keep"))
    if name != "removal" or not (rank.isdecimal() or way == name):
        raise ValueError(f"a way must be keep, removal or removal:RANK, got {way!r}")
    size: dict[str, Any] = {"rank": int(rank), "advanced": {"layout": "joint"}} if rank else {}
    return Window(engine, system_prompt, budget, Fidelity("patched", survivors="removal", **size), prefill="idle")


def measure(reader: Reader, stream: Stream, way: str, references: dict[int, list[Tensor]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each slide: what was read, tokens on the path of the answer, and tokens computed while the engine idled.

    ``references``, expectations over re-prefills by turn, is filled by the first way.
    """
    engine, size = reader.engine, reader.engine.encode(stream.chunks[0]).tokens
    query_tokens = engine.encode_query(QUESTION).tokens
    header = engine.encode_system_prompt(reader.system_prompt).tokens
    with open_window(engine, reader.system_prompt, way, header + stream.placed * size + query_tokens + 2) as window:
        for turn, chunk in enumerate(stream.chunks):
            window.append(chunk)
            slid = window.slide(reserve_tokens=query_tokens + 1)
            usage = window.ask(QUESTION, 1).usage
            counts = window.maintenance.prefill_counts
            row: dict[str, Any] = {
                "way": way,
                "turn": turn,
                "path": usage.computed_tokens - query_tokens,
                "used": usage.prefilled_tokens,
            }
            if slid:
                reads = stream.reads[turn]
                if turn not in references:
                    references[turn] = reader.expected(window, reader.reprefilled(window), reads)
                got = reader.expected(window, served_spans(window), reads)
                row["reads"] = [
                    compare(*case) for case in zip(references[turn], got, (tokens for _, tokens in reads), strict=True)
                ]
            if not prefiller_of(engine).drain(600):
                raise RuntimeError("the engine must come to rest, got work for ten minutes")
            after = window.maintenance.prefill_counts
            if slid:
                yield row | {"idle": after.tokens - counts.tokens if after and counts else 0}
    for kind in ("span/", "patch/"):
        for key in list(engine.store.list(kind)):
            engine.repo.delete(key)


def compare(exact: Tensor, got: Tensor, tokens: Sequence[int]) -> dict[str, float]:
    """Return how far an expectation is from a re-prefill's, and whether its best tokens, and the latter's, are the true ones."""
    best, choice = exact.argmax(-1), got.argmax(-1)
    return {
        "kl": float((exact.exp() * (exact - got)).sum(-1).clamp_min(0).mean()),
        "flips": float((best != choice).float().mean()),
        "changed": float((best != choice).any()),
        "right": float(choice.tolist() == list(tokens)),
        "exact_right": float(best.tolist() == list(tokens)),
    }


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures of each way, with 95 % intervals over streams."""
    result = []
    for way in dict.fromkeys(row["way"] for row in rows):
        some = [row for row in rows if row["way"] == way]
        means = {key: sum(row[key] for row in some) / len(some) for key in ("path", "used", "idle")}
        reads = [(read, str(row["context"])) for row in some for read in row["reads"]]
        clusters = [cluster for _, cluster in reads]
        values = {key: [read[key] for read, _ in reads] for key in ("kl", "flips", "changed", "right", "exact_right")}
        means |= {key: sum(column) / len(column) for key, column in values.items()}
        result.append({
            "way": way, "n": len(some), "answers": len(reads), **means, "kl_ci95": bootstrap_mean(values["kl"], clusters),
            **{f"{key}_ci95": share_interval(values[key], clusters) for key in ("changed", "right", "exact_right")},
        })  # fmt: skip
    return result


def run(reader: Reader, streams: Sequence[Stream], ways: Sequence[str], advance: Callable[[int], None]) -> Any:
    """Return the rows of all streams in all ways."""
    rows: list[dict[str, Any]] = []
    for number, stream in enumerate(streams):
        references: dict[int, list[Tensor]] = {}
        for way in ways:
            rows += [{"context": number, **row} for row in measure(reader, stream, way, references)]
            advance(1)
    return rows


def _table(summary: Sequence[dict[str, Any]], *, answers: bool) -> Any:
    head = "way | slides | KL | 95 % | flips | tokens on the path | computed ahead and served | computed while idle"
    head += " | answers | changed | right | by re-prefill" * answers
    table = new_table("Slides", head, left=(0,))
    for f in summary:
        low, high = f["kl_ci95"] or (0.0, 0.0)
        keys = ("changed", "right", "exact_right")
        shares = ["{:.1%} [{:.1%}, {:.1%}]".format(f[key], *f[f"{key}_ci95"]) for key in keys]
        table.add_row(
            f["way"], str(f["n"]), f"{f['kl']:.4f}", f"{low:.4f}, {high:.4f}", f"{f['flips']:.1%}",
            *(f"{f[key]:.0f}" for key in ("path", "used", "idle")), *[str(f["answers"]), *shares] * answers,
        )  # fmt: skip
    return table


def main(
    model: Annotated[str, typer.Option(help="tiny, or the folder of a text model.")] = "tiny",
    texts: Annotated[str, typer.Option(help="Set of streams, text-PLACEDxTOKENS or frames-PLACED.")] = "text-6x64",
    ways: Annotated[str, typer.Option(help="Ways to serve survivors.")] = "keep,removal,removal:16,removal:32",
    n: Annotated[int, typer.Option(help="Streams.", min=1)] = 4,
    seed: Seed = 0,
    threads: Threads = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure survivors of a stream with and without removal patches formed ahead."""
    with errors(), open_model(model, "float32", "cpu", threads) as engine:
        chosen = [way.strip() for way in ways.split(",")]
        frames = texts.startswith("frames-")
        system_prompt = command.SYSTEM_PROMPT if frames else released_texts.SYSTEM_PROMPT
        with progress("streams", n * len(chosen)) as advance:
            rows = run(Reader(engine, system_prompt), streams_of(engine, texts, n, seed), chosen, advance)
        result: dict[str, Any] = {"model": Path(model).name, "texts": texts, "n": n, "ways": summarise(rows)}
        write_result(output, f"removals-{result['model']}-{texts}.json", result)
        show(result, as_json, _table(result["ways"], answers=frames))


if __name__ == "__main__":
    typer.run(main)

"""Reuse on released weights: natural text and facts, every way to serve the same contexts, beside the floor.

``make released`` and then ``python -m evals.studies.released`` measure SmolLM2-135M; ``--model`` takes another model.
Each context is served in every way (`ctxwin_evals.arms`), and the model reads what comes next in truth: the next 32 tokens of
the text, or the answer to a question about a fact. What it expects there is compared with what it expects behind a re-prefill.

Arms are spelled as `ctxwin eval run` has them. ``slideN/ARM``: the placed chunks are the end of a stream that slid N times.
``recall/ARM``: the asked chunk came back behind others. ``floor/...``: nothing is reused, another arithmetic is used:

- ``floor/pieces``: the same engine, in pieces of 100 tokens instead of one pass;
- ``floor/bfloat16``: bfloat16 against float32;
- ``floor/bfloat16-pieces``: bfloat16 in pieces of 100 against bfloat16 in one pass.

Every row is kept in ``OUTPUT/samples.jsonl`` as it is done, so a run goes on where it stopped, with other arms or more contexts.
``--workers`` shares the contexts among processes, each with the model on ``--device``. Patches of arms that name no variant are
of ``--layout``; a shared basis is fitted on the contexts in front of ``--first``.
"""

import multiprocessing
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from ctxwin.chunk import Chunk
from ctxwin.kv.patch import Layout
from ctxwin.progress import progress
from ctxwin_evals.arms import BASES, Arm, Served, parse_arm
from ctxwin_evals.console import Device, Json, Threads, open_model, show
from ctxwin_evals.decoder import Decoder
from ctxwin_evals.generation import forced_logits
from ctxwin_evals.group import Group
from ctxwin_evals.patching import Patcher, fitted
from ctxwin_evals.samples import FORMAT, Sample, Samples, open_samples
from ctxwin_evals.stats import bootstrap_mean, bootstrap_ratio, share_interval
from tools.released_models import default_cache

from .command import Seed, errors
from .released_texts import Context, Texts

Job = tuple[Context, list[str]]
"""A context and the arms that it is to be served in."""
MAIN = (
    "blind", "oracle", "patched:4", "patched:8", "patched:16", "patched:32", "epic:16", "slide1/survivor",
    "slide1/removal:16",
)  # fmt: skip
"""Arms that cost few forwards each."""
MORE = (
    "patched:16@per_layer", "patched:16@deep", "patched:16@per_layer+deep", "cacheblend:0.15", "mpic:32", "elastic:0.5",
    "orbit:16", "recall/blind", "recall/stale:16", "recall/update:16", "slide2/survivor", "slide6/survivor",
    "slide12/survivor", "floor/pieces", "floor/bfloat16", "floor/bfloat16-pieces",
)  # fmt: skip
FLOORS = ("pieces", "bfloat16", "bfloat16-pieces")
REPREFILL, PIECE = "reprefill", 100
RIGHT = 0.9
"""Share of right answers by re-prefill under which a form of facts is too hard for the model, and not scored."""
_RANK = 32


def split(name: str) -> tuple[str, str]:
    """Return what happened to the window (nothing, ``slideN``, ``recall``, ``floor``), and the arm. Raises ValueError."""
    history, _, arm = name.rpartition("/")
    setting = "slide" if re.fullmatch(r"slide[1-9]\d*", history) else history or "window"
    fits = arm in FLOORS if setting == "floor" else name == "recall/blind" or setting in parse_arm(arm).settings
    if not fits:
        raise ValueError(f"an arm must be ARM, slideN/ARM, recall/ARM or floor/({'|'.join(FLOORS)}), got {name!r}")
    return history, arm


def base_of(name: str) -> str:
    """Return the arm whose KL is the whole of eta: blind reuse, or for removal patches the survivors under them."""
    history, arm = split(name)
    if history == "recall":
        return "recall/blind"
    return f"{history}/survivor" if arm.startswith("removal") else "blind"


class Views:
    """One context as groups, by what happened to its window; all of them place the same chunks and share their KV."""

    def __init__(self, decoder: Decoder, patcher: Patcher, context: Context) -> None:
        self.decoder, self.patcher, self.context = decoder, patcher, context
        self._groups: dict[str, Group] = {}

    def group(self, history: str) -> Group:
        """Return the group of a history."""
        if history not in self._groups:
            group = Group(self.decoder, [self.context.item(history)], self.patcher, self.context.system_prompt)
            if history:
                plain = self.group("")
                vars(group).update(exact=plain.exact, canonical=plain.canonical, blind=plain.blind)
            self._groups[history] = group
        return self._groups[history]

    def read(self, served: Served) -> Tensor:
        """Return log-probabilities of the target's tokens over what is served, float32 ``[tokens, vocab]``."""
        group, query = self.group(""), self.decoder.engine.encode(Chunk.tokens(self.context.query))
        begin = group.begin if served.begin is None else served.begin
        policy = served.policy if served.policy is not None and served.policy.window is None else None
        rows = forced_logits(self.decoder, group.memory([served.spans]), [query], begin, [self.context.target], policy)
        return rows[0].log_softmax(-1)

    @cached_property
    def exact(self) -> Tensor:
        """Log-probabilities over a re-prefill."""
        return self.read(Served(self.group("").exact[0]))

    def in_pieces(self) -> Tensor:
        """The same, computed `PIECE` tokens at a time."""
        group = self.group("")
        memory = group.behind_system_prompt(1)
        for begin in range(0, group.context_tokens, PIECE):
            part = torch.arange(begin, min(begin + PIECE, group.context_tokens))[None]
            memory, _ = self.decoder.append(group.context.pick(part.to(memory.k.device)), memory)
        return self.read(Served(group.spans(memory)[0]))


@dataclass(frozen=True)
class Patching:
    """The layout of patches; a shared basis is fitted on the first ``fitted`` contexts of a task and kept in ``folder``."""

    layout: Layout = "joint"
    task: str = ""
    seed: int = 0
    fitted: int = 0
    folder: Path | None = None


class Study:
    """Serves contexts in every way and keeps a row for each; ``rounded`` opens the model in bfloat16 when a floor asks for it."""

    def __init__(self, decoder: Decoder, rounded: Callable[[], Decoder], patching: Patching = Patching()) -> None:
        self.decoder, self._rounded = decoder, cache(rounded)

        def groups() -> Iterator[Group]:
            contexts = Texts(decoder.engine, patching.seed).contexts(patching.task, patching.fitted)
            return (Views(decoder, Patcher(decoder.spec), context).group("") for context in contexts)

        self._patcher = fitted(decoder, (patching.layout, "all", "none"), groups, keep=patching.folder)
        self._patcher.floor = _RANK

    def serve(self, jobs: Iterable[Job]) -> Iterator[list[Sample]]:
        """Yield the rows of each job."""
        return (list(self.rows(*job)) for job in jobs)

    def rows(self, context: Context, names: Sequence[str]) -> Iterator[Sample]:
        """Yield a sample of each arm that has a meaning for the context.

        ``kl`` is the mean over the target's tokens; ``extra`` has the other figures.
        """
        views = Views(self.decoder, self._patcher, context)
        rounded = cache(lambda: Views(self._rounded(), self._patcher, context))
        for name in names:
            reference, served = views.exact, Served([], computed=views.group("").context_tokens)
            match name:
                case "reprefill":
                    other = views.exact
                case "floor/pieces":
                    other = views.in_pieces()
                case "floor/bfloat16":
                    other = rounded().exact
                case "floor/bfloat16-pieces":
                    reference, other = rounded().exact, rounded().in_pieces()
                case _:
                    answer = _serve(views, name)
                    if answer is None:  # an orbit of a chunk behind one other, say
                        continue
                    served, other = answer, views.read(answer)
            yield _sample(context, name, views.group(""), served, reference, other)


def _serve(views: Views, name: str) -> Served | None:
    history, text = split(name)
    arm: Arm = BASES["recall"] if name == "recall/blind" else parse_arm(text)
    return arm.serve(views.group(history))[0]


def _sample(context: Context, name: str, group: Group, served: Served, reference: Tensor, other: Tensor) -> Sample:
    target = torch.tensor(context.target)[:, None]
    kl = (reference.exp() * (reference - other)).sum(-1).clamp_min(0)
    tokens = group.context_tokens
    return Sample(
        task=context.task,
        arm=name,
        index=context.index,
        doc_id=str(context.index),
        cluster=str(context.index),
        case=context.digest,
        frames=context.placed,
        tokens=group.system_prompt.tokens + tokens + len(context.query) + len(context.target),
        placed=tokens,
        question=group.decoder.engine.decode(context.query),
        target=group.decoder.engine.decode(context.target),
        meta={},
        kl=float(kl.mean()),
        stored=served.stored,
        over=served.over,
        computed=served.computed,
        extra={
            "flips": float((reference.argmax(-1) != other.argmax(-1)).float().mean()),
            "loss": float((reference - other).gather(1, target).mean()),
            "right": float((other.argmax(-1) == target[:, 0]).all()),
            "recomputed": float(served.extra.get("recomputed", served.computed / tokens)),
        },
    )


def run(
    serve: Callable[[Iterable[Job]], Iterator[list[Sample]]],
    samples: Samples,
    contexts: Sequence[Context],
    names: Sequence[str],
    deadline: float,
    advance: Callable[[int], None] = lambda done: None,
) -> bool:
    """Serve contexts of one set in the arms that have no row yet; return False where the deadline (monotonic) ended it.

    ``serve`` is `Study.serve` or `Processes.serve`, ``advance`` receives how many more contexts are done. Raises ValueError where
    a row is of another context than the set has today.
    """
    jobs: list[Job] = []
    for context in contexts:
        missing = [name for name in names if not samples.has(context.task, name, context.index)]
        for name in set(names) - {*missing}:
            if samples.rows[context.task, name, context.index].case != context.digest:
                raise ValueError(f"{samples.folder} must hold rows of today's texts, got others; name another --output")
        jobs += [(context, missing)] if missing else []
    advance(0)  # so that what follows at once is seen to be kept, and says nothing of the pace
    advance(len(contexts) - len(jobs))
    done = 0
    for rows in serve(job for job in jobs if time.monotonic() < deadline):
        samples.add(rows)
        advance(1)
        done += 1
    return done == len(jobs)


class Processes:
    """Processes that each open the model, with so many ``threads``, and serve contexts of their own."""

    def __init__(self, count: int, model: str, device: str, threads: int, patching: Patching = Patching()) -> None:
        self._count, self._opening = count, (model, device, threads, patching)
        # CUDA does not survive a fork.
        self._executor = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"))

    def serve(self, jobs: Iterable[Job]) -> Iterator[list[Sample]]:
        """Yield the rows of each job; a job is taken when a process is free for it."""
        pending: deque[Future[list[Sample]]] = deque()
        for job in jobs:
            pending.append(self._executor.submit(_serve_in_process, self._opening, job))
            if len(pending) > self._count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


@cache
def _open_study(model: str, device: str, threads: int, patching: Patching) -> Study:
    decoder = Decoder(open_model(model, "float32", device, threads))
    return Study(decoder, lambda: Decoder(open_model(model, "bfloat16", device, threads)), patching)


def _serve_in_process(opening: tuple[str, str, int, Patching], job: Job) -> list[Sample]:
    return list(_open_study(*opening).rows(*job))


def summarise(samples: Samples) -> dict[str, Any]:
    """Figures by set and arm, each with its n and 95 % interval over contexts; eta is over the contexts of both arms."""
    by_set: dict[str, dict[str, dict[int, Sample]]] = {}
    for (task, name, index), row in samples.rows.items():
        by_set.setdefault(task, {}).setdefault(name, {})[index] = row
    order = {name: i for i, name in enumerate((REPREFILL, *MAIN, *MORE))}
    result: dict[str, Any] = {}
    for task in sorted(by_set, reverse=True):
        arms = by_set[task]
        names = sorted(arms, key=lambda name: (order.get(name, len(order)), name))
        bases = {name: None if name == REPREFILL else arms.get(base_of(name)) for name in names}
        result[task] = {name: _figures(arms[name], bases[name]) for name in names}
        exact = result[task][REPREFILL]
        exact["scored"] = task.startswith("text") or exact["right"] >= RIGHT
    return result


def _figures(rows: dict[int, Sample], base: dict[int, Sample] | None) -> dict[str, Any]:
    indices = sorted(rows)  # so that a table does not depend on the order in which rows came
    some, clusters = [rows[i] for i in indices], [str(i) for i in indices]
    figures: dict[str, Any] = {"n": len(some)}
    columns = {"kl": [row.kl for row in some]} | {key: [row.extra[key] for row in some] for key in ("flips", "loss")}
    for key, values in columns.items():
        figures[key], figures[f"{key}_ci95"] = sum(values) / len(values), bootstrap_mean(values, clusters)
    right = [row.extra["right"] for row in some]
    figures["right"], figures["right_ci95"] = sum(right) / len(right), share_interval(right, clusters)
    over = sum(row.over for row in some)
    figures["bytes_share"] = sum(row.stored for row in some) / over if over else 0.0
    figures["computed_share"] = sum(row.extra["recomputed"] for row in some) / len(some)
    both = [i for i in indices if base is not None and i in base]
    if base is not None and both and (total := sum(base[i].kl for i in both)):
        kls, under = [rows[i].kl for i in both], [base[i].kl for i in both]
        interval = bootstrap_ratio(kls, under, [str(i) for i in both])
        figures["eta"] = 1 - sum(kls) / total
        figures["eta_ci95"] = None if interval is None else (1 - interval[1], 1 - interval[0])
    return figures


def tables(summary: dict[str, Any]) -> str:
    """Return the figures for people, a table a set."""
    lines = []
    for task, arms in summary.items():
        exact = arms[REPREFILL]
        heading = f"{task}, n = {exact['n']}"
        if not task.startswith("text"):
            heading += f", right by re-prefill {exact['right']:.1%}" + ", too few to score" * (not exact["scored"])
        scored = not task.startswith("text") and exact["scored"]
        columns = ["arm", "n", "KL", "eta", "top-1 flips", "loss rise", *["right"] * scored, "bytes", "computed"]
        lines += ["", heading, "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for name, f in list(arms.items())[1:]:
            cells = [name, str(f["n"]), _cell(f, "kl", "{:.4f}"), _cell(f, "eta", "{:.2f}")]
            cells += [_cell(f, "flips", "{:.1%}"), _cell(f, "loss", "{:+.3f}"), *[_cell(f, "right", "{:.1%}")] * scored]
            shares = f["bytes_share"], f["computed_share"]
            lines += [f"| {' | '.join([*cells, *(f'{share:.1%}' if share else '' for share in shares)])} |"]
    return "\n".join(lines).strip()


def _cell(figures: dict[str, Any], key: str, form: str) -> str:
    if figures.get(key) is None:
        return ""
    interval = figures[f"{key}_ci95"]
    bounds = "" if interval is None else f" [{form.format(interval[0])}, {form.format(interval[1])}]"
    return form.format(figures[key]) + bounds


def main(
    model: Annotated[str, typer.Option(help="Folder of a model.")] = str(default_cache() / "smollm2"),
    sets: Annotated[
        str, typer.Option(help="text-PLACEDxTOKENS, pictures-FEWEST-MOST, facts-one, -cut, -pronoun, -comparison.")
    ] = "text-6x64",
    arms: Annotated[str, typer.Option(help="main, more, or arms, separated by commas.")] = "main",
    n: Annotated[int, typer.Option(help="Contexts of each set.", min=1)] = 300,
    first: Annotated[int, typer.Option(help="Number of the first one, where machines share a run.", min=0)] = 0,
    layout: Annotated[Layout, typer.Option(help="Factors of patches whose arm names no variant.")] = "joint",
    minutes: Annotated[float, typer.Option(help="End after so many minutes with what is there; 0: never.", min=0)] = 0,
    seed: Seed = 0,
    threads: Threads = 0,
    device: Device = "cpu",
    workers: Annotated[int, typer.Option(help="Processes that share the contexts; each opens the model.", min=1)] = 1,
    output: Annotated[Path | None, typer.Option(help="Folder of the rows; one that exists is continued.")] = None,
    as_json: Json = False,
) -> None:
    """Measure reuse on released weights."""
    with errors():
        words = [word.strip() for word in arms.split(",") if word.strip()]
        names = [name for word in words for name in {"main": MAIN, "more": MORE}.get(word, (word,))]
        names = list(dict.fromkeys([REPREFILL, *names, *(base_of(name) for name in names)]))
        if layout == "shared" and not first:
            raise ValueError(
                "--first must be at least 1, so that --layout shared has contexts to fit its basis on; got 0"
            )
        begun, tasks = time.monotonic(), [task.strip() for task in sets.split(",")]
        folder = output or Path("eval-output") / f"released-{Path(model).name}-{seed}"
        patching = Patching(layout, tasks[0], seed, first, folder)
        study = _open_study(model, device if workers == 1 else "cpu", threads, patching)
        engine, serve = study.decoder.engine, study.serve
        if workers > 1:
            serve = Processes(workers, model, device, threads or 1, patching).serve
        texts = Texts(engine, seed)
        config = {"format": FORMAT, "study": "released", "model": engine.spec.identity, "seed": seed}
        config["layout"] = f"shared, fitted on {first} of {tasks[0]}" if layout == "shared" else layout
        contexts = [texts.contexts(task, n)[first:] for task in tasks]
        deadline = begun + 60 * minutes if minutes else float("inf")
        with open_samples(folder, config) as samples:
            with progress("contexts", sum(map(len, contexts))) as advance:
                whole = all(run(serve, samples, some, names, deadline, advance) for some in contexts)
            summary = summarise(samples)
        result = {"model": Path(model).name, "seed": seed, "complete": whole, "output": str(folder), "sets": summary}
        note = "" if whole else f"Ended after {minutes:g} minutes; run it again to go on."
        show(result, as_json, tables(summary), note)


if __name__ == "__main__":
    typer.run(main)

"""The result of a run in others' files: lm-eval's, for its table maker and people's scripts, and those of data sets' own scripts.

lm-eval names a figure ``METRIC,FILTER``, a filter being one way to read the same answers to the same documents. Arms take
its place: ``acc,patched:8`` stands beside ``acc,blind`` under one task, a sample names its arm as ``filter``, and lm-eval's
``none`` is the exact re-prefill, what any harness would report. Names, versions and counts stay one per task.
"""

import hashlib
import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import ctxwin
from ctxwin.files import atomic_write
from ctxwin_evals.benchmarks.base import DataTask
from ctxwin_evals.items import grouped
from ctxwin_evals.metrics import Outcome, agreed, harmed, measured
from ctxwin_evals.samples import Samples, read_samples
from ctxwin_evals.score import Cells, Scorer, Table, TaskOf, select
from ctxwin_evals.stats import standard_error

PLAIN = "none"
"""lm-eval's name of unfiltered answers: here re-prefill's."""
HIGHER = {"acc": True, "agreement": True, "eta": True, "kl": False, "harm": False, "spent_share": False}


def write_lm_eval(
    samples: Samples,
    out: Path,
    names: Sequence[str] | None = None,
    n: int | None = None,
    *,
    task_of: TaskOf | None = None,
) -> Path:
    """Write both kinds of files into ``out``; they carry the run's date, so that scoring again replaces them.

    ``samples_TASK_DATE.jsonl`` has one line a document and arm. Its ``doc_hash`` is the content of the item, chunks
    included (the names and sizes of media that are read late), and ``prompt_hash`` the same with the question;
    ``arguments`` hold the question only, since the chunks in front of it may be pictures.
    Returns the path of the aggregated file, ``results_DATE.json``.

    Raises ValueError as `ctxwin_evals.score.scores` does.
    """
    table = Table(select(samples, names, n), Scorer(task_of))
    stamp = (samples.created or "undated").replace(":", "-")
    for task in table.rows:
        name = re.sub(r"\W", "_", task)
        lines = (f"{json.dumps(line, ensure_ascii=False)}\n".encode() for line in _lines(table, task))
        atomic_write(out / f"samples_{name}_{stamp}.jsonl", lines)
    path = out / f"results_{stamp}.json"
    return atomic_write(path, f"{json.dumps(_result(table, samples, n), indent=2, ensure_ascii=False)}\n".encode())


def version() -> str:
    """The commit of the checkout that this code is from, or the library's version where it is no checkout."""
    root = Path(ctxwin.__file__).resolve().parent.parent
    if (root / ".git").exists():
        try:
            command = ["git", "-C", str(root), "rev-parse", "HEAD"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            pass  # no git here: the version says less, and is true
    return ctxwin.__version__


def _result(table: Table, samples: Samples, n: int | None) -> dict[str, Any]:
    """The aggregated file, of the first ``n`` items.

    ``n-samples`` counts documents that were asked about (``original``) and those that some arm has a score for
    (``effective``); ``sample_count`` in a task's results counts the scored answers behind each ``acc``. Standard errors are
    cluster-robust.
    """
    cells, config = table.arms(), samples.config
    indices = {task: {row.index for row in samples.first(n) if row.task == task} for task in table.rows}
    tasks = {name: table.scorer.task(name) for name in table.rows}
    metrics = [{"metric": m, "aggregation": "mean", "higher_is_better": up} for m, up in HIGHER.items()]
    settings = {k: v for k, v in config.items() if k not in ("format", "tasks", "model")}
    settings |= {"model_args": config.get("name", ""), "model_sha": config.get("model")}
    return {
        "results": {name: {"alias": name} | _figures(name, table, cells) for name in tasks},
        "configs": {
            name: {"task": name, "description": task.about, "output_type": "generate_until", "num_fewshot": 0}
            | {"metric_list": metrics, "metadata": dict(config.get("tasks", {}).get(name, {}))}
            for name, task in tasks.items()
        },
        "versions": {name: task.version for name, task in tasks.items()},
        "n-shot": dict.fromkeys(tasks, 0),
        "higher_is_better": {name: dict(HIGHER) for name in tasks},
        "n-samples": {name: {"original": len(indices[name]), "effective": _effective(table, name)} for name in tasks},
        "config": {"model": "ctxwin", "limit": n, **settings},
        "git_hash": version(),
        "date": datetime.fromisoformat(samples.created).timestamp() if samples.created else None,
        "task_hashes": {
            name: _hash("".join(x["doc_hash"] + x["prompt_hash"] + x["target_hash"] for x in _lines(table, name)))
            for name in tasks
        },
    }


def _figures(task: str, table: Table, cells: Cells) -> dict[str, Any]:
    """``METRIC,ARM`` and ``METRIC_stderr,ARM`` of one task, re-prefill as ``none`` over every item that any arm has."""
    figures: dict[str, Any] = {}
    count: dict[str, int] = {}

    def put(metric: str, arm: str, outcomes: Iterable[Outcome], read: Callable[[Outcome], float | bool | None]) -> None:
        values, clusters = measured(outcomes, read)
        if values:
            error = standard_error(values, clusters)
            figures[f"{metric},{arm}"] = sum(values) / len(values)
            figures[f"{metric}_stderr,{arm}"] = "N/A" if error is None else error
            if metric == "acc":
                count[f"acc,{arm}"] = len(values)

    by_arm = {arm: table.outcomes.get((task, arm), {}) for arm in table.rows[task]}
    reference = {index: o for outcomes in by_arm.values() for index, o in outcomes.items()}
    put("acc", PLAIN, [o for _, o in sorted(reference.items())], lambda o: o.reference.score)
    for arm, outcomes in by_arm.items():
        if not outcomes or arm == "reprefill":
            continue
        put("acc", arm, outcomes.values(), lambda o: o.answer.score)
        put("kl", arm, outcomes.values(), lambda o: o.row.kl)
        put("agreement", arm, outcomes.values(), agreed)
        put("harm", arm, outcomes.values(), harmed)
        cell = cells[arm][task]
        for name, value in (("eta", cell["eta"]), ("spent_share", cell["spent_share"])):
            if value is not None:
                figures[f"{name},{arm}"] = value
    return figures | {"sample_len": len(reference), "sample_count": count}


def _effective(table: Table, task: str) -> int:
    """Items that some arm has a scored answer to."""
    outcomes = [table.outcomes.get((task, arm), {}) for arm in table.rows[task]]
    return len({index for some in outcomes for index, o in some.items() if o.answer.score is not None})


def _lines(table: Table, task: str) -> Iterator[dict[str, Any]]:
    indices: set[int] = set()
    for arm, rows in table.rows[task].items():
        for row in rows:
            outcome = table.outcomes[task, arm][row.index]
            if row.index not in indices:
                indices.add(row.index)
                yield _line(PLAIN, outcome, table.scorer)
            if arm != "reprefill":
                yield _line(arm, outcome, table.scorer)


def _line(arm: str, outcome: Outcome, scorer: Scorer) -> dict[str, Any]:
    row, field = outcome.row, "reference" if arm == PLAIN else "answer"
    scored = scorer.scored(row, field)
    metrics: dict[str, float | None] = {"acc": scored.score, **scored.metrics}
    if arm != PLAIN:
        harm = harmed(outcome)
        metrics |= {"kl": row.kl, "agreement": float(agreed(outcome)), "harm": None if harm is None else float(harm)}
    return {
        "doc_id": row.index,
        "doc": {"id": row.doc_id, "cluster": row.cluster, "frames": row.frames, "meta": row.meta},
        "target": str(row.target),
        "arguments": {"gen_args_0": {"arg_0": row.question, "arg_1": {"do_sample": False}}},
        "resps": [[getattr(row, field)]],
        "filtered_resps": [scored.prediction],
        "filter": arm,
        "metrics": list(metrics),
        "doc_hash": row.case,
        "prompt_hash": _hash(row.case + row.question),
        "target_hash": _hash(str(row.target)),
        **metrics,
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def export_run(folder: Path, arm: str, output: Path) -> dict[str, Path]:
    """Write a file for each task of a data set that an arm has answered; return them by task.

    Each lies where its script looks, see `DataTask.export_path`. Scripts that count want every item: one that the arm could not
    serve has an empty answer. Raises ValueError for an arm that is not there, or a run without any such task.
    """
    samples, scorer = read_samples(folder), Scorer()
    model = re.sub(r"[^\w.-]+", "_", str(samples.config.get("name") or "model"))
    by_task = grouped(samples.rows.values(), lambda row: row.task)
    tasks = {name: task for name in by_task if isinstance(task := scorer.task(name), DataTask)}
    if not tasks:
        raise ValueError(f"{folder} must hold answers to a benchmark's data, got {', '.join(by_task) or 'no answers'}")
    arms = sorted({row.arm for name in tasks for row in by_task[name]})
    reference_only = arm == "reprefill" and arm not in arms  # every sample carries the answer of the exact re-prefill
    if not reference_only and arm not in arms:
        raise ValueError(f"arm must be one of reprefill, {', '.join(arms)}; got {arm!r}")
    files = {}
    title = f"{model}_{re.sub(r'[^A-Za-z0-9.-]+', '_', arm)}"
    for name, task in tasks.items():
        some = [r for r in by_task[name] if r.arm == arm or (reference_only and r.unscored is None)]
        if all(r.unscored for r in some):
            continue
        rows = {
            r.doc_id: {"answer": r.reference if reference_only else r.answer}
            | r.model_dump(include={"doc_id", "target", "meta"})
            for r in sorted(some, key=lambda r: r.index)
        }
        files[name] = output / task.export_path(title, some[0].meta.get("split", task.split))
        atomic_write(files[name], task.export(list(rows.values())).encode())
    if not files:
        raise ValueError(f"arm {arm!r} must have served at least one item, got none")
    return files

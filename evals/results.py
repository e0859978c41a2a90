"""The result of a run in lm-eval's files, for its table maker and for people's scripts.

lm-eval names a figure ``METRIC,FILTER``, a filter being one way to read the same answers of the same documents. Arms take
that place: ``acc,patched:8`` stands beside ``acc,blind`` under one task, tables show the arm in the filter column, a sample
names its arm as ``filter``, and lm-eval's ``none`` is the exact re-prefill, i.e. what any harness would report of the model.
That way ``results[TASK]["acc,none"]`` means what it means elsewhere, and task names, versions, configurations, counts and
hashes stay one a task. (Tasks named TASK|ARM would hide all figures from scripts that look up a task by name.)
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import ctxwin
from ctxwin.evals.metrics import Outcome, agreed, harmed
from ctxwin.evals.samples import Sample, Samples
from ctxwin.evals.score import Cells, Scorer, Table, TaskOf, select
from ctxwin.evals.stats import standard_error

PLAIN = "none"
"""lm-eval's name of unfiltered answers: here re-prefill's."""
HIGHER = {"acc": True, "agreement": True, "eta": True, "kl": False, "harm": False, "spent_share": False}


def lm_eval_result(found: Table, samples: Samples, n: int | None = None) -> dict[str, Any]:
    """The aggregated file (``results_DATE.json``).

    ``n-samples`` counts documents that were asked about (``original``) and that some arm has a score of (``effective``);
    ``sample_count`` in a task's results counts the scored answers behind each ``acc``. Standard errors are cluster-robust.

    Args:
        found: the samples, scored.
        samples: of the run they are from.
        n: the limit on items that ``found`` was made with, if any.
    """
    made = found.arms()
    asked: dict[str, set[int]] = {task: set() for task in found.rows}
    for row in samples.first(n):
        if row.task in asked:
            asked[row.task].add(row.index)
    tasks = {name: found.scorer.task(name) for name in found.rows}
    about = samples.config.get("tasks", {})
    metrics = [{"metric": m, "aggregation": "mean", "higher_is_better": up} for m, up in HIGHER.items()]
    kept = {k: v for k, v in samples.config.items() if k not in ("format", "tasks", "model")}
    return {
        "results": {name: {"alias": name} | _figures(name, found, made) for name in tasks},
        "configs": {
            name: {
                "task": name,
                "description": task.about,
                "output_type": "generate_until",
                "num_fewshot": 0,
                "metric_list": metrics,
                "metadata": dict(about.get(name, {})),
            }
            for name, task in tasks.items()
        },
        "versions": {name: task.version for name, task in tasks.items()},
        "n-shot": dict.fromkeys(tasks, 0),
        "higher_is_better": {name: dict(HIGHER) for name in tasks},
        "n-samples": {name: {"original": len(asked[name]), "effective": _effective(found, name)} for name in tasks},
        "config": {"model": "ctxwin", "model_args": str(samples.config.get("model", "")), "limit": n, **kept},
        "git_hash": version(),
        "date": _date(samples),
        "task_hashes": {name: _hash("".join(_hashes(found, name))) for name in tasks},
    }


def lm_eval_samples(found: Table) -> dict[str, Iterator[dict[str, Any]]]:
    """The lines of each task's file (``samples_TASK_DATE.jsonl``): one a document and arm, re-prefill's as ``none``.

    ``doc_hash`` is the content of the item, chunks included, and ``prompt_hash`` the same with the question; ``arguments``
    hold the question only, since the chunks in front of it may be pictures.
    """
    return {task: _lines(found, task) for task in found.rows}


def write_lm_eval(
    samples: Samples,
    out: Path,
    names: Sequence[str] | None = None,
    n: int | None = None,
    *,
    task_of: TaskOf | None = None,
) -> Path:
    """Writes both kinds of files into ``out``; they carry the run's date, so that scoring again replaces them.

    Returns the path of the aggregated file. Raises ValueError as `ctxwin.evals.score.scores` does.
    """
    found = Table(select(samples, names, n), Scorer(task_of))
    out.mkdir(parents=True, exist_ok=True)
    stamp = (samples.created or "undated").replace(":", "-")
    for task, lines in lm_eval_samples(found).items():
        name = re.sub(r"\W", "_", task)
        with (out / f"samples_{name}_{stamp}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path = out / f"results_{stamp}.json"
    text = json.dumps(lm_eval_result(found, samples, n), indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def version() -> str:
    """The commit of the checkout that this code is from, or the library's version where it is no checkout."""
    root = Path(ctxwin.__file__).resolve().parent.parent
    if (root / ".git").exists():
        try:
            made = subprocess.run(
                ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
            )
            return made.stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            pass  # no git here: the version says less, and is true
    return ctxwin.__version__


def _figures(task: str, found: Table, made: Cells) -> dict[str, Any]:
    """``METRIC,ARM`` and ``METRIC_stderr,ARM`` of one task, re-prefill as ``none`` over every item that any arm has."""
    figures: dict[str, Any] = {}
    count: dict[str, int] = {}
    reference = {o_index: o for arm in found.rows[task] for o_index, o in found.outcomes.get((task, arm), {}).items()}
    _put(figures, count, "acc", PLAIN, [(o.reference.score, o.cluster) for _, o in sorted(reference.items())])
    for arm in found.rows[task]:
        outcomes = list(found.outcomes.get((task, arm), {}).values())
        if not outcomes or arm == "reprefill":
            continue
        _put(figures, count, "acc", arm, [(o.answer.score, o.cluster) for o in outcomes])
        _put(figures, count, "kl", arm, [(o.kl, o.cluster) for o in outcomes])
        _put(figures, count, "agreement", arm, [(agreed(o), o.cluster) for o in outcomes])
        _put(figures, count, "harm", arm, [(harmed(o), o.cluster) for o in outcomes])
        cell = made[arm][task]
        for name, value in (("eta", cell["eta"]), ("spent_share", cell["spent_share"])):
            if value is not None:
                figures[f"{name},{arm}"] = value
    return figures | {"sample_len": len(reference), "sample_count": count}


def _effective(found: Table, task: str) -> int:
    """Items that some arm has a scored answer of."""
    return len(
        {
            index
            for arm in found.rows[task]
            for index, outcome in found.outcomes.get((task, arm), {}).items()
            if outcome.answer.score is not None
        }
    )


def _put(figures: dict[str, Any], count: dict[str, int], metric: str, arm: str,
         pairs: Sequence[tuple[float | bool | None, str]]) -> None:  # fmt: skip
    known = [(float(v), c) for v, c in pairs if v is not None]
    if not known:
        return
    values, clusters = [v for v, _ in known], [c for _, c in known]
    error = standard_error(values, clusters)
    figures[f"{metric},{arm}"] = sum(values) / len(values)
    figures[f"{metric}_stderr,{arm}"] = "N/A" if error is None else error
    if metric == "acc":
        count[f"acc,{arm}"] = len(values)


def _lines(found: Table, task: str) -> Iterator[dict[str, Any]]:
    seen: set[int] = set()
    for arm, rows in found.rows[task].items():
        for row in rows:
            outcome = found.outcomes[task, arm][row.index]
            if row.index not in seen:
                seen.add(row.index)
                yield _line(row, PLAIN, outcome, found.scorer)
            if arm != "reprefill":
                yield _line(row, arm, outcome, found.scorer)


def _line(row: Sample, arm: str, outcome: Outcome, scorer: Scorer) -> dict[str, Any]:
    said = "reference" if arm == PLAIN else "answer"
    answer, scored = getattr(row, said), scorer.scored(row, said)
    metrics: dict[str, float | None] = {"acc": scored.score, **scored.metrics}
    if arm != PLAIN:
        metrics |= {"kl": outcome.kl, "agreement": float(agreed(outcome)), "harm": _number(harmed(outcome))}
    return {
        "doc_id": row.index,
        "doc": {"id": row.doc_id, "cluster": row.cluster, "frames": row.frames, "meta": row.meta},
        "target": str(row.target),
        "arguments": {"gen_args_0": {"arg_0": row.question, "arg_1": {"do_sample": False}}},
        "resps": [[answer]],
        "filtered_resps": [scored.prediction],
        "filter": arm,
        "metrics": list(metrics),
        "doc_hash": row.case,
        "prompt_hash": _hash(row.case + row.question),
        "target_hash": _hash(str(row.target)),
        **metrics,
    }


def _hashes(found: Table, task: str) -> Iterator[str]:
    for line in _lines(found, task):
        yield line["doc_hash"] + line["prompt_hash"] + line["target_hash"]


def _number(value: bool | None) -> float | None:
    return None if value is None else float(value)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _date(samples: Samples) -> float | None:
    """Seconds since 1970, as lm-eval has it."""
    return datetime.fromisoformat(samples.created).timestamp() if samples.created else None

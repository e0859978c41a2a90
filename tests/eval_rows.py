"""Samples and a task for the tests of scoring and reports: no model, no data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ctxwin_evals.items import Item, Scored, Task
from ctxwin_evals.samples import FORMAT, Sample

CONFIG: dict[str, Any] = {
    "format": FORMAT,
    "model": "made/model",
    "kv": "float32",
    "tasks": {"made/words": {"seed": 0}},
}


class Words(Task):
    """The answer must be the target; an answer of two words cannot be scored; capitals do not count."""

    about = "words"

    def __init__(self, name: str) -> None:
        self.name = name
        self.control = name.endswith("control")

    def items(self, n: int | None = None) -> Sequence[Item]:
        raise ValueError("these tests have no data")

    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        read = answer.lower()
        return Scored(None, "") if " " in read else Scored(float(read == target), read, {"letters": float(len(read))})

    def official(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        scored = [row["score"] for row in rows]
        return {"strict": sum(s or 0.0 for s in scored) / len(scored)}


def row(arm: str, index: int, answer: str = "red", task: str = "made/words", **more: Any) -> Sample:
    """A sample whose re-prefill is right ("red") and whose base is wrong ("blue"); figures without a field go to ``extra``."""
    made: dict[str, Any] = {
        "task": task, "arm": arm, "index": index, "doc_id": f"d{index}", "cluster": f"c{index}", "case": f"digest {index}",
        "frames": 2 + index % 2, "tokens": 100, "placed": 100, "question": "color of 17?", "target": "red", "meta": {"frames": 2},
        "answer": answer, "reference": "red", "base": "blue", "kl": 0.0 if answer == "red" else 0.5, "base_kl": 2.0, "over": 1000,
    }  # fmt: skip
    extra = {name: float(value) for name, value in more.items() if name not in Sample.model_fields}
    fields = {name: value for name, value in more.items() if name in Sample.model_fields}
    return Sample(**made | fields, extra=extra)


def unserved(arm: str, index: int, task: str = "made/words") -> Sample:
    """A sample that its arm had no meaning for."""
    return row(arm, index, "", task, unscored="no other order exists")


def sweep(n: int = 40, task: str = "made/words", per_cluster: int = 1, seed: int = 0) -> list[Sample]:
    """Re-prefill, blind, patches of three ranks and a token arm of three settings, better with their bytes."""
    rng = np.random.default_rng(seed)
    arms: list[tuple[str, float, dict[str, Any]]] = [
        ("reprefill", 1.0, {"recomputed": 1.0, "computed": 80, "forwards": 1}),
        ("blind", 0.0, {}),
        *((f"patched:{m}", 1 - 0.6**m, {"stored": 10 * m}) for m in (1, 4, 8)),
        *((f"first_k:{k}", 0.02 * k, {"recomputed": k / 100, "computed": k, "forwards": 1}) for k in (2, 6, 20)),
    ]
    rows = []
    for i in range(n):
        luck, base = rng.random(), float(rng.uniform(1.0, 3.0))
        for arm, quality, more in arms:
            answer = "red" if luck < quality else "blue"
            kl = 0.0 if arm == "reprefill" else base * (1 - quality)
            more = more | {"cluster": f"c{i // per_cluster}"}
            more |= {"meta": {"context_length": 500 * (1 + i % 7), "placed_depth": [0.1, i % 5 / 4]}}
            more |= {"by_layer": [0.0, 0.1 * i, 1.0]} if arm.startswith("patched") else {}
            rows.append(row(arm, i, answer, task, kl=kl, base_kl=base, **more))
    return rows

"""Writes a small MuSiQue-Ans: chains of facts, each in a paragraph of its own, among paragraphs about others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

_SPACE = 0x6D757369
_PARAGRAPHS = 20
_NAMES = ("Otto", "Mira", "Jonas", "Selma", "Ravi", "Ines", "Tomas", "Greta", "Bruno", "Hilde", "Omar", "Vera")
_LAST = ("Vogt", "Lindt", "Amsel", "Brook", "Castell", "Dorn", "Ebner", "Fjord", "Gallo", "Hollis", "Ilves", "Junker")
_CRAFTS = ("teacher", "brother", "neighbour", "publisher")
_TOWNS = ("Altmar", "Brisk", "Corven", "Dalheim", "Estrand", "Falun Bay", "Gorse", "Hollow End", "Ister", "Jarl")


def write_musique(out: Path, n: int, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Writes ``n`` questions of each split as JSON lines; hops cycle through two, three and four.

    Returns the rows by split. Raises ValueError for ``n`` < 1.
    """
    if n < 1:
        raise ValueError(f"n must be >= 1, got {n}")
    out.mkdir(parents=True, exist_ok=True)
    rows = {split: [_row(k, i, seed) for i in range(n)] for k, split in enumerate(("dev", "train"))}
    for split, lines in rows.items():
        text = "".join(json.dumps(row) + "\n" for row in lines)
        (out / f"musique_ans_v1.0_{split}.jsonl").write_text(text, encoding="utf-8")
    return rows


def _row(split: int, index: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng((_SPACE, seed, split, index))
    hops = 2 + index % 3
    people = [f"{_NAMES[i]} {_LAST[j]}" for i, j in zip(rng.permutation(12), rng.permutation(12), strict=True)]
    town = _TOWNS[int(rng.integers(len(_TOWNS)))]
    ties = [_CRAFTS[int(i)] for i in rng.integers(len(_CRAFTS), size=hops - 1)]
    facts = [(people[i], f"{people[i]} owed much to a {tie}, {people[i + 1]}.") for i, tie in enumerate(ties)]
    facts.append((people[hops - 1], f"{people[hops - 1]} was born in {town}, on the coast."))
    places = sorted(int(i) for i in rng.permutation(_PARAGRAPHS)[:hops])
    rng.shuffle(places)
    paragraphs = []
    for at in range(_PARAGRAPHS):
        who = people[hops + at % (len(people) - hops)]
        title, text = facts[places.index(at)] if at in places else (who, f"{who} kept bees for {at + 2} years.")
        paragraphs.append({"idx": at, "title": title, "paragraph_text": text, "is_supporting": at in places})
    numbers = [int(i) for i in rng.integers(1000, 900_000, size=hops)]
    asked = "the " + " of the ".join(reversed(ties)) + f" of {people[0]}"
    steps = [f"{people[0]} >> {ties[0]}", *(f"#{i} >> {tie}" for i, tie in enumerate(ties[1:], 1))]
    steps.append(f"#{hops - 1} >> place of birth")
    answers = [*people[1:hops], town]
    return {
        "id": f"{hops}hop__" + "_".join(map(str, numbers)),
        "paragraphs": paragraphs,
        "question": f"Where was {asked} born?",
        "question_decomposition": [
            {"id": number, "question": step, "answer": answer, "paragraph_support_idx": at}
            for number, step, answer, at in zip(numbers, steps, answers, places, strict=True)
        ],
        "answer": town,
        "answer_aliases": [f"the town of {town}"] if index % 2 else [],
        "answerable": True,
    }

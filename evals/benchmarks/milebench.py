"""Four temporal sets of MileBench (arXiv 2404.18532): what happened in a row of frames, as multiple choice.

Layout, prompt and predictions follow the official repository (commit 9583e1f: ``utils.py``, ``generate.py``,
``evaluate.py``). The central paper evaluates on these four (arXiv 2606.23581, section 6 and table 5). The official script
cuts a prompt from the left at the model's context length; nothing is cut here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ctxwin.evals.benchmarks.base import DataTask, Missing, inside, missing, read_json, want
from ctxwin.evals.benchmarks.milebench_score import aggregate, process, quantity, score_answer
from ctxwin.evals.benchmarks.options import DataOptions
from ctxwin.evals.benchmarks.prompt import Picture, Prompt, interleave
from ctxwin.evals.items import Item, Scored
from ctxwin.hashing import digest

TASKS = {
    "milebench/ActionSequence": "which action came before or after another",
    "milebench/ActionPrediction": "which action comes next",
    "milebench/ObjectShuffle": "where a hidden thing is after swaps",
    "milebench/StateChange": "what changed its state",
}
PLACEHOLDER = "<ImageHere>"
_NUMBERED = re.compile(r"\{(?:image|table)#\d+\}")


def compose(sample: Mapping[str, Any], instructions: Sequence[str], folder: Path, where: str, words: int) -> Prompt:
    """The official prompt: task instruction, context with its pictures, choices; what follows the last picture is the query.

    As in the source, pictures are taken in the order of ``images_path``, whatever numbers the placeholders carry.
    Raises ValueError naming the sample where placeholders and pictures do not agree.
    """
    number = want(sample, "task_instruction_id", int, where)
    if not 0 <= number < len(instructions):
        raise ValueError(f"{where}: task_instruction_id must be one of {len(instructions)} instructions, got {number}")
    task = want(sample, "task_instance", dict, where)
    context = want(task, "context", str, where)
    names = want(task, "images_path", list, where)
    choices = want(task, "choice_list", list, where)
    if not choices or not all(isinstance(c, str) for c in choices):
        raise ValueError(f"{where}: choice_list must be texts, got {choices!r}")
    context += "\nChoice list: \n" + "\n".join(f"{chr(ord('A') + i)}. {c}" for i, c in enumerate(choices))
    context += "\nYour answer is: "
    for i in range(1, len(names) + 1):
        for kind in ("image", "table"):
            context = context.replace(f"{{{kind}#{i}}}", PLACEHOLDER)
    texts = context.split(PLACEHOLDER)
    beyond = len(_NUMBERED.findall(context))
    if len(texts) - 1 != len(names) or beyond:
        raise ValueError(
            f"{where}: the context must hold one placeholder a picture, got {len(texts) - 1 + beyond} of them and "
            f"{len(names)} pictures"
        )
    texts[0] = f"{instructions[number]}\n{texts[0]}"
    paths = [inside(folder, name, where) for name in names]
    return Prompt(interleave(texts[:-1], paths, words), texts[-1])


class MileBench(DataTask):
    """One set, e.g. ``milebench/ActionSequence``."""

    splits = ("test", "adv")
    answer_tokens = 512

    def __init__(self, name: str, options: DataOptions) -> None:
        if name not in TASKS:
            raise ValueError(f"a task must be one of {', '.join(TASKS)}; got {name!r}")
        super().__init__(name, TASKS[name], options)
        self.set = name.partition("/")[2]

    def patterns(self) -> list[str]:
        return [f"{self.set}/**", "MileBench_part*.tar.gz"]

    def config(self) -> dict[str, Any]:
        return {**super().config(), "text_words": self.options.text_words}

    def read(self, root: Path) -> Iterator[Item | tuple[str, Missing]]:
        base = root / self.set
        path = base / (f"{self.set}-adv.json" if self.split == "adv" else f"{self.set}.json")
        if not path.is_file():
            raise ValueError(f"{self.name} must find its annotations, got no file {str(path)!r}")
        whole = read_json(path)
        meta = want(whole, "meta_data", dict, str(path))
        kind = want(meta, "question_type", str, f"{path} meta_data")
        if kind != "multi-choice":
            raise ValueError(f"{path}: question_type must be 'multi-choice', got {kind!r}")
        instructions = want(meta, "task_instruction", list, f"{path} meta_data")
        seen: set[str] = set()
        for index, sample in enumerate(want(whole, "data", list, str(path))):
            name = str(want(sample, "sample_id", (int, str), f"{path} data[{index}]"))
            where = f"{path} sample {name}"
            if name in seen:
                raise ValueError(f"{where}: sample_id must be unique, got it twice")
            seen.add(name)
            prompt = compose(sample, instructions, base / "images", where, self.options.text_words)
            response = str(want(sample, "response", (int, float, str), where))
            choices = sample["task_instance"]["choice_list"]
            if process(response) not in [process(c) for c in choices]:
                raise ValueError(f"{where}: response must be one of the choices, got {response!r} and {choices!r}")
            paths = [p.path for p in prompt.pieces if isinstance(p, Picture)]
            if not paths:
                raise ValueError(f"{where}: images_path must name pictures, got none")
            if (error := missing(paths, where)) is not None:
                yield name, error
            else:
                yield self._item(index, name, sample, prompt, response, paths)

    def _item(
        self, index: int, name: str, sample: Mapping[str, Any], prompt: Prompt, response: str, paths: Sequence[Path]
    ) -> Item:
        task, max_pixels = sample["task_instance"], self.options.max_pixels
        shown = [p if isinstance(p, str) else None for p in prompt.pieces]
        media = [[n, p.stat().st_size] for n, p in zip(task["images_path"], paths, strict=True)]

        return Item(
            task=self.name,
            index=index,
            load=partial(prompt.chunks, max_pixels),
            count=len(prompt.pieces),
            placed=tuple(range(len(prompt.pieces))),
            query=prompt.query,
            target={"response": response, "choice_list": list(task["choice_list"])},
            doc_id=name,
            cluster=f"{self.set}/{name}",
            digest=digest("milebench", shown, prompt.query, media, response, max_pixels),
            max_tokens=self.max_tokens,
            meta={
                "sample_id": sample["sample_id"],
                "num_images": len(paths),
                "image_quantity_level": quantity(len(paths)),
                "images": list(task["images_path"]),
                "split": self.split,
            },
        )

    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        return score_answer(answer, target["response"], target["choice_list"])

    def official(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """See `ctxwin.evals.benchmarks.milebench_score.aggregate`."""
        return aggregate(rows)

    def exported(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """The official ``pred.json``; it belongs into ``<results>/<model>/<set>/``."""
        made = [
            {
                "sample_id": int(row["meta"]["sample_id"]),
                "image": row["meta"]["images"],
                "gt_response": row["target"]["response"],
                "pred_response": row["answer"],
            }
            for row in rows
        ]
        return json.dumps(made, ensure_ascii=False, indent=4) + "\n"

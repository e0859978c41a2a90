"""Four temporal sets of MileBench (arXiv 2404.18532): what happened in a sequence of frames, as multiple choice.

Layout, prompt and predictions follow the official repository (commit 9583e1f: ``utils.py``, ``generate.py``,
``evaluate.py``). The central paper evaluates on these four (arXiv 2606.23581, section 6 and table 5). The official script
cuts a prompt from the left at the model's context length; nothing is cut here.

Scores: ``evaluate.py`` of MileBench (arXiv 2404.18532; commit 9583e1f), whose oddities are kept.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from ctxwin.hashing import digest
from ctxwin_evals.benchmarks.base import Missing, PromptTask, checked, inside, read_json
from ctxwin_evals.benchmarks.prompt import Prompt, interleave
from ctxwin_evals.benchmarks.vqa import strip_punctuation
from ctxwin_evals.items import Item, Scored

PLACEHOLDER = "<ImageHere>"
_NUMBERED = re.compile(r"\{(?:image|table)#\d+\}")


class _Task(BaseModel, strict=True):
    context: str
    images_path: list[str]
    choice_list: Annotated[list[str], Field(min_length=1)]


class Sample(BaseModel, strict=True):
    """One question of a set."""

    sample_id: int | str
    task_instruction_id: int
    task_instance: _Task
    response: int | float | str


class _Meta(BaseModel, strict=True):
    question_type: Literal["multi-choice"]
    task_instruction: list[str]


class _File(BaseModel, strict=True):
    meta_data: _Meta
    data: list[dict[str, Any]]


def compose(sample: Sample, instructions: Sequence[str], folder: Path, where: str, words: int) -> Prompt:
    """The official prompt: task instruction, context with its pictures, choices; what follows the last picture is the query.

    As in the source, pictures are taken in the order of ``images_path``, whatever numbers the placeholders carry.
    Raises ValueError naming the sample where placeholders and pictures do not agree.
    """
    number, task = sample.task_instruction_id, sample.task_instance
    if not 0 <= number < len(instructions):
        raise ValueError(f"{where}: task_instruction_id must be one of {len(instructions)} instructions, got {number}")
    names, choices = task.images_path, (f"{chr(ord('A') + i)}. {c}" for i, c in enumerate(task.choice_list))
    context = "\n".join([task.context, "Choice list: ", *choices, "Your answer is: "])
    for i in range(1, len(names) + 1):
        for kind in ("image", "table"):
            context = context.replace(f"{{{kind}#{i}}}", PLACEHOLDER)
    texts = context.split(PLACEHOLDER)
    beyond = len(_NUMBERED.findall(context))
    if len(texts) - 1 != len(names) or beyond or not names:
        raise ValueError(
            f"{where}: the context must hold one placeholder a picture, and at least one, got {len(texts) - 1 + beyond} "
            f"of them and {len(names)} pictures"
        )
    texts[0] = f"{instructions[number]}\n{texts[0]}"
    return Prompt(interleave(texts[:-1], [inside(folder, name, where) for name in names], words), texts[-1])


class MileBench(PromptTask):
    """One set, e.g. ``milebench/ActionSequence``."""

    names: ClassVar[Mapping[str, str]] = {
        "milebench/ActionSequence": "which action came before or after another",
        "milebench/ActionPrediction": "which action comes next",
        "milebench/ObjectShuffle": "where a hidden thing is after swaps",
        "milebench/StateChange": "what changed its state",
    }
    splits = ("test", "adv")
    answer_tokens = 512

    @property
    def set(self) -> str:
        """Name of the set."""
        return self.name.partition("/")[2]

    def patterns(self) -> list[str]:
        return [f"{self.set}/**", "MileBench_part*.tar.gz"]

    def rows(self, root: Path) -> Iterator[tuple[str, Any]]:
        path = root / self.set / (f"{self.set}-adv.json" if self.split == "adv" else f"{self.set}.json")
        whole = checked(_File, read_json(self.annotations(path)), str(path))
        for index, row in enumerate(whole.data):
            yield f"{path} sample {row.get('sample_id', f'at index {index}')}", (row, whole.meta_data.task_instruction)

    def parse(self, row: Any, where: str) -> Item:
        sample, folder = checked(Sample, row[0], where), self.root / self.set / "images"
        name, response, task = str(sample.sample_id), str(sample.response), sample.task_instance
        prompt = compose(sample, row[1], folder, where, self.options.text_words)
        if process(response) not in [process(c) for c in task.choice_list]:
            raise ValueError(f"{where}: response must be one of the choices, got {response!r} and {task.choice_list!r}")
        Missing.check(paths := prompt.pictures, where, name)
        texts, max_pixels = [p if isinstance(p, str) else None for p in prompt.pieces], self.options.max_pixels
        media = [[n, p.stat().st_size] for n, p in zip(task.images_path, paths, strict=True)]
        counted: dict[str, Any] = {"num_images": len(paths), "image_quantity_level": quantity(len(paths))}
        return self.item_of(
            prompt,
            load=partial(prompt.chunks, max_pixels),
            target={"response": response, "choice_list": task.choice_list},
            doc_id=name,
            cluster=f"{self.set}/{name}",
            digest=digest("milebench", texts, prompt.query, media, response, max_pixels),
            meta=counted | {"sample_id": sample.sample_id, "images": task.images_path, "split": self.split},
        )

    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        return score_answer(answer, target["response"], target["choice_list"])

    def official(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Accuracy, and by the number of pictures: few (under 6), medium, many (over 31); a level without items counts 0."""
        scores = [(row["score"], quantity(row["meta"]["num_images"])) for row in rows if row["score"] is not None]
        figures = {"accuracy": sum(s for s, _ in scores) / len(scores), "n": float(len(scores))}
        for level in ("few", "medium", "many"):
            some = [s for s, at in scores if at == level]
            figures |= {f"accuracy/{level}": sum(some) / len(some) if some else 0.0, f"n/{level}": float(len(some))}
        return figures

    def export(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """The official ``pred.json``."""
        records = [
            {"sample_id": int(row["meta"]["sample_id"]), "image": row["meta"]["images"]}
            | {"gt_response": row["target"]["response"], "pred_response": row["answer"]}
            for row in rows
        ]
        return json.dumps(records, ensure_ascii=False, indent=4) + "\n"

    def export_path(self, title: str, split: str) -> Path:
        return Path(title, self.set, "pred.json")


_SPECIAL = "\\.^$*+?{}[]|()"


def process(text: str) -> str:
    """Lower case, without punctuation and surrounding quotes; articles and numbers stay."""
    text = strip_punctuation(text.replace("\n", " ").replace("\t", " ").strip())
    return text.strip("'").strip('"').strip().lower()


def letter_of(index: int) -> str:
    """A..Z, AA..AZ, BA..; what a choice is called."""
    return chr(ord("A") + index) if index < 26 else ("A" if index < 52 else "B") + chr(ord("A") + index % 26)


def _escape(text: str) -> str:
    return "".join("\\" + c if c in _SPECIAL else c for c in process(text))


def extract(answer: str, choices: Sequence[str]) -> str:
    """The letters an answer is read as.

    Both are processed first (see `process`). An empty answer is read as C. Then, in this order: a letter with its choice
    ("a apples"), anywhere; a choice, spaces ignored (one with a full stop or another sign of regular expressions inside
    is not found this way); an answer of one or two characters that names a choice. Else every letter of the answer that
    names a choice, so that "the answer is b" is read as "AEAEB" among five choices and counts as wrong.
    """
    text = process(answer)
    named = {letter_of(i): process(choice) for i, choice in enumerate(choices)}
    if not text:
        return "C"
    match = re.search("|".join(_escape(f"{letter} {choice}") for letter, choice in named.items()), text, re.S)
    if match:
        return match[0][:1].upper()
    bare = {letter: _escape(choice).replace(" ", "") for letter, choice in named.items()}
    match = re.search("|".join(bare.values()), text.replace(" ", ""), re.S)
    if match:
        for letter, choice in bare.items():
            if match[0].strip() == choice:
                return letter
    if text.upper() in named and len(text) <= 2:
        return text.upper()
    return "".join(c.upper() for c in text if c.upper() in named)


def score_answer(answer: str, response: str, choices: Sequence[str]) -> Scored:
    """Right where the answer is read as the first choice that equals ``response``; ValueError where none does."""
    processed, truth = [process(c) for c in choices], process(response)
    if truth not in processed:
        raise ValueError(f"the response must be one of the choices, got {response!r} and {list(choices)!r}")
    read = extract(answer, choices)
    return Scored(float(read == letter_of(processed.index(truth))), read)


def quantity(pictures: int) -> str:
    """MileBench's level of the number of pictures."""
    return "few" if pictures < 6 else "many" if pictures > 31 else "medium"

"""Names and docstrings read as the field's do: nouns for values, verbs for functions, no docstring that opens as a riddle."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
BARE = frozenset(
    [
        "again",
        "apart",
        "asked",
        "before",
        "behind",
        "come",
        "found",
        "given",
        "goes",
        "gone",
        "heard",
        "held",
        "joined",
        "kept",
        "known",
        "laid",
        "left",
        "made",
        "meant",
        "met",
        "never",
        "own",
        "placed",
        "said",
        "seen",
        "served",
        "settled",
        "several",
        "shown",
        "spoken",
        "taken",
        "told",
        "wanted",
    ]
)
"""Participles and adverbs that say nothing of a value."""
OPENERS = ("Which ", "What ", "Whether ", "Who ", "Whose ")
MOST_NAMES, MOST_OPENERS = 3.0, 1.0
"""In 1,000 lines."""


def bare_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Variables, parameters and functions whose name is a bare participle, with their lines."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
            ):
                if name.strip("_") in BARE:
                    yield name, node.lineno


def riddles(tree: ast.AST) -> Iterator[str]:
    """First lines of docstrings that open with a question word."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node) or ""
            if text.startswith(OPENERS):
                yield text.partition("\n")[0]


def test_the_counters_count() -> None:
    tree = ast.parse(
        'def made(held, size):\n    "What is made."\n    found = [own for own in held]\n    return found\n'
    )
    assert [name for name, _ in bare_names(tree)] == ["made", "held", "found", "own"]
    assert list(riddles(tree)) == ["What is made."]


def test_names_say_what_things_are() -> None:
    lines, names, openers, worst = 0, 0, 0, Counter[str]()
    for folder in ("ctxwin", "adapters", "evals"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
            bare, opened = len(list(bare_names(tree))), len(list(riddles(tree)))
            lines, names, openers = lines + source.count("\n"), names + bare, openers + opened
            worst[str(path.relative_to(ROOT))] += bare + opened
    assert names <= MOST_NAMES * lines / 1000, f"{names} bare names in {lines} lines; most in {worst.most_common(5)}"
    assert openers <= MOST_OPENERS * lines / 1000, f"{openers} riddles in {lines} lines; most in {worst.most_common(5)}"

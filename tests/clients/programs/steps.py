"""What every program does: ten questions about a camera whose oldest picture leaves, asked with one framework."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

SYSTEM = "You watch a camera."


@dataclass(frozen=True)
class Task:
    """What the test asks of a program.

    Attributes:
        url: of the server, without ``/v1``.
        steps: the pictures that are shown (data URLs of PNG files) and the question about them.
    """

    url: str
    steps: list[tuple[list[str], str]]


def read() -> Task:
    """The task on standard input."""
    given = json.load(sys.stdin)
    return Task(given["url"], [(step["pictures"], step["question"]) for step in given["steps"]])


def run(ask: Callable[[list[str], str], str], task: Task) -> None:
    """Print the answers to all steps, as JSON."""
    print(json.dumps([ask(pictures, question) for pictures, question in task.steps]))


def part_of_chat(picture: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": picture}}


def text_part(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


def base64_of(picture: str) -> str:
    return picture.split(",", 1)[1]

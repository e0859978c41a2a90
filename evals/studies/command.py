"""Shared parts of the studies' commands."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

Seed = Annotated[int, typer.Option(help="Seed of what is drawn.", min=0)]
Output = Annotated[Path | None, typer.Option(help="Also write the result into this folder, as NAME.json.")]

SYSTEM_PROMPT = "You watch a camera."


def write_result(folder: Path | None, name: str, result: Mapping[str, Any]) -> None:
    """Write a result as JSON to ``name`` in a folder, which is created where missing; do nothing without a folder."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

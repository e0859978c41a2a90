"""The samples of a run on disk: ``config.json`` and an append-only ``samples.jsonl``, one line per (task, arm, item).

A line is written whole or not at all as far as a reader is concerned: a last line without its newline, left by a killed
run, is cut off when the file is opened again. Lines are never rewritten.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Key = tuple[str, str, int]

FORMAT = 1


def key_of(row: Row) -> Key:
    """(task, arm, index): what a sample is of."""
    return row["task"], row["arm"], row["index"]


@dataclass
class Samples:
    """A folder of samples of one configuration.

    Use `open_samples` to make or continue one, `read_samples` to look at one.
    """

    folder: Path
    config: dict[str, Any]
    rows: dict[Key, Row] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder / "samples.jsonl"

    def add(self, rows: Iterable[Row]) -> None:
        """Appends samples that are not there yet, and makes them durable. Cost: one write and one sync."""
        fresh = {key_of(row): row for row in rows if key_of(row) not in self.rows}
        if not fresh:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in fresh.values()))
            file.flush()
            os.fsync(file.fileno())
        self.rows |= fresh

    def has(self, task: str, arm: str, index: int) -> bool:
        return (task, arm, index) in self.rows


def open_samples(folder: Path, config: dict[str, Any]) -> Samples:
    """Starts a folder, or continues one of the same configuration.

    Raises ValueError where the folder holds samples of another configuration, naming what differs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    if path.exists():
        held = _config(folder)
        differs = [k for k in sorted({*held, *config}) if held.get(k) != config.get(k)]
        if differs:
            what = "; ".join(f"{k} {held.get(k)!r} there, {config.get(k)!r} now" for k in differs)
            raise ValueError(f"{folder} must hold samples of this configuration, got {what}; choose another --output")
        samples = Samples(folder, held)
        _cut_torn_line(samples.path)
        samples.rows = {key_of(row): row for row in _lines(samples.path)}
        return samples
    if (folder / "samples.jsonl").exists():
        raise ValueError(f"{folder} must hold a config.json beside its samples, got none; choose another --output")
    temporary = folder / "config.json.tmp"
    temporary.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
    return Samples(folder, config)


def read_samples(folder: Path) -> Samples:
    """Reads a folder without changing it. Raises ValueError where it holds no run, or a damaged one."""
    samples = Samples(folder, _config(folder))
    samples.rows = {key_of(row): row for row in _lines(samples.path)}
    return samples


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"a run folder must hold config.json, got none in {str(folder)!r}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must be JSON, got {error}") from error
    if config.get("format") != FORMAT:
        raise ValueError(f"{path} must be of format {FORMAT}, got {config.get('format')!r}")
    return config


def _lines(path: Path) -> Iterator[Row]:
    if not path.exists():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            return  # torn by a kill; its sample counts as missing
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} must hold one JSON object a line, got line {number}: {error}") from error


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole != len(raw):
        with path.open("r+b") as file:
            file.truncate(whole)

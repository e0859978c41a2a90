"""What the benchmarks share: their data folder, their options, and reading annotation files with errors that name lines."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from ctxwin.evals.benchmarks.options import DataOptions
from ctxwin.evals.benchmarks.source import find_data, shown_data
from ctxwin.evals.items import Item, Task
from ctxwin.files import atomic_write

_log = logging.getLogger("ctxwin.evals")


class Missing(ValueError):
    """A medium that an item needs is not there; the message names the item and the file."""


class DataTask(Task):
    """A benchmark whose items come from files.

    Attributes:
        options: how items are made.
        split: the one taken.
        skipped: doc_ids that the last call of `items` left out because their media are missing.
    """

    splits: ClassVar[tuple[str, ...]]
    answer_tokens: int

    def __init__(self, name: str, about: str, options: DataOptions, control: bool = False) -> None:
        self.name, self.about, self.control = name, about, control
        self.options = options
        self.split = options.split or self.splits[0]
        if self.split not in self.splits:
            raise ValueError(f"split of {name} must be one of {', '.join(self.splits)}; got {self.split!r}")
        self.skipped: tuple[str, ...] = ()

    @abstractmethod
    def patterns(self) -> list[str]:
        """Files of the hub's data set that this task needs, as globs."""

    @abstractmethod
    def read(self, root: Path) -> Iterator[Item | tuple[str, Missing]]:
        """Items in file order; (doc_id, error) for one whose media are missing. Reads no media."""

    @abstractmethod
    def exported(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Answers of one arm as the data set's own scripts read them: the content of that file."""

    def export(self, rows: Iterable[Mapping[str, Any]], path: Path) -> None:
        """Writes answers as the data set's own scripts read them, whole or not at all.

        Args:
            rows: of one arm, with ``doc_id, answer, target, meta``, as a run's samples have; ValueError otherwise.
            path: the file to write.
        """
        atomic_write(path, self.exported(_of_one_arm(rows)).encode())

    @cached_property
    def root(self) -> Path:
        """The data folder, downloaded where the options say so."""
        if self.options.data is None:
            raise ValueError(
                f"{self.name} must be given its data to make items, got none; pass data=FOLDER or hub:OWNER/NAME"
            )
        return find_data(self.options.data, self.patterns())

    @property
    def max_tokens(self) -> int:
        return self.options.max_tokens or self.answer_tokens

    def items(self, n: int | None = None) -> Sequence[Item]:
        """The first ``n`` items whose media are there (see ``skip_missing``); all or none are returned.

        Raises ValueError where there is no data or a row is malformed (naming file and line), `Missing` for a missing
        medium. Cost: annotations are read, of media only whether they exist.
        """
        if n is not None and n < 1:
            raise ValueError(f"n must be >= 1, got {n}")
        skipped: list[str] = []
        made = list(islice(self._present(skipped), n))
        if not made:
            raise ValueError(
                f"{self.root} must hold items of {self.name}, got none ({len(skipped)} without their media)"
            )
        news, self.skipped = tuple(skipped) != self.skipped, tuple(skipped)
        if skipped and news:
            _log.warning("%s: %d items left out, their media are missing", self.name, len(skipped))
        return made

    def _present(self, skipped: list[str]) -> Iterator[Item]:
        for found in self.read(self.root):
            if isinstance(found, Item):
                # The official prompts have no system turn of their own.
                yield replace(found, system_prompt="") if found.system_prompt is None else found
            elif self.options.skip_missing:
                skipped.append(found[0])
            else:
                raise found[1]

    def config(self) -> dict[str, Any]:
        made = {"data": shown_data(self.options.data), "split": self.split, "max_pixels": self.options.max_pixels}
        return {**super().config(), **made, "max_tokens": self.max_tokens, "skip_missing": self.options.skip_missing}


def missing(paths: Iterable[Path], where: str) -> Missing | None:
    """The error for the first path that is no file; None where all are there."""
    for path in paths:
        if not path.is_file():
            return Missing(f"{where} must find its media, got no file {str(path)!r}; unpack the data set's media there")
    return None


def inside(folder: Path, name: Any, where: str) -> Path:
    """``folder / name``; ValueError where the name is no relative path that stays inside."""
    if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{where}: a picture must be a relative path inside {str(folder)!r}, got {name!r}")
    return folder / name


def want(row: Any, name: str, kinds: type | tuple[type, ...], where: str) -> Any:
    """``row[name]`` of one of the given types; ValueError naming the place."""
    if not isinstance(row, dict) or name not in row:
        raise ValueError(f"{where} must have a field {name!r}, got {_short(row)}")
    value = row[name]
    if not isinstance(value, kinds) or isinstance(value, bool):
        wanted = " or ".join(k.__name__ for k in (kinds if isinstance(kinds, tuple) else (kinds,)))
        raise ValueError(f"{where}: {name!r} must be {wanted}, got {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) < 120 else text[:117] + "..."


def read_json(path: Path) -> Any:
    """A JSON file; ValueError naming it where it is none, with the line of the error."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be JSON in UTF-8, got {error}") from error


def read_lines(path: Path) -> Iterator[tuple[str, int, Any]]:
    """Rows of a JSON-lines file as (place for messages, byte offset, row). Raises ValueError for a line that is no JSON."""
    with path.open("rb") as file:
        at = 0
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield f"{path}:{number}", at, _parsed(raw, f"{path}:{number}")
            at += len(raw)


def read_line_at(path: Path, offset: int) -> Any:
    """The row that starts at a byte offset."""
    with path.open("rb") as file:
        file.seek(offset)
        return _parsed(file.readline(), f"{path} at byte {offset}")


def _parsed(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw.decode("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        torn = "" if raw.endswith(b"\n") else "; it is the last line and has no end: the file is cut short"
        raise ValueError(f"{where} must be one JSON object, got {error}{torn}") from error


def _of_one_arm(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows in order; ValueError where there are none or one question has two answers, as rows of several arms have."""
    listed = list(rows)
    seen: set[str] = set()
    for row in listed:
        if row["doc_id"] in seen:
            raise ValueError(f"rows must be answers of one arm, one a question; got {row['doc_id']!r} twice")
        seen.add(row["doc_id"])
    if not listed:
        raise ValueError("rows must hold at least one answer, got none")
    return listed

"""The samples of a run on disk: ``config.json`` and an append-only ``samples.jsonl``, one line per (task, arm, item).

A line is written whole or not at all as far as a reader is concerned: a last line without its newline, left by a killed
run, is cut off when the file is opened again. Lines are never rewritten. One process writes a folder at a time; the lock
is the kernel's (`fcntl.lockf`) and ends with its process, however that ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from pydantic import BaseModel, ConfigDict, Field

Key = tuple[str, str, int]

FORMAT = 3
"""Rises when samples of an older version cannot be scored by this one."""
_CREATED = "created"
"""When the run was started; in ``config.json``, but no part of what must agree."""


class Sample(BaseModel):
    """What one arm answered to one item, and what that took: one line of ``samples.jsonl``.

    Attributes:
        task, arm, index: what it is a sample of.
        doc_id, cluster, question, target, meta: the item's, see `ctxwin.evals.items.Item`.
        case: the item's digest.
        frames, media, placed, tokens: placed chunks, their pictures and videos, their tokens, and tokens of the whole prompt.
        unscored: why the arm could not serve the item; None where it did. All below is of served items only.
        answer, reference, base: text under the arm, under the exact re-prefill, and under doing nothing.
        kl, base_kl: KL(re-prefill || arm) and KL(re-prefill || base) of the next token, nats.
        forced_kl, base_forced_kl: the same, averaged along re-prefill's answer; None where that has one token.
        stored, over, computed, forwards, encodes: see `ctxwin.evals.arms.Served`.
        by_layer: relative distance of the KV served from the exact one; None where they are of other tokens.
        ttft_s: seconds to the first token; None where it was not timed.
        extra: the arm's own figures, by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    task: str
    arm: str
    index: int
    doc_id: str
    cluster: str
    case: str
    frames: int
    tokens: int
    placed: int
    media: int = 0
    question: str
    target: Any
    meta: dict[str, Any]
    unscored: str | None = None
    answer: str = ""
    reference: str = ""
    base: str = ""
    kl: float = 0.0
    base_kl: float = 0.0
    forced_kl: float | None = None
    base_forced_kl: float | None = None
    stored: int = 0
    over: int = 0
    computed: int = 0
    forwards: int = 0
    encodes: int = 0
    by_layer: list[float] | None = None
    ttft_s: float | None = None
    extra: dict[str, float] = Field(default_factory=dict)

    @property
    def key(self) -> Key:
        """(task, arm, index)."""
        return self.task, self.arm, self.index

    @property
    def answer_kl(self) -> float:
        """KL along re-prefill's answer; of the next token where that has one."""
        return self.kl if self.forced_kl is None else self.forced_kl

    def line(self) -> str:
        """The sample as a line of JSON; ValueError for a figure that is not finite, in its meta or target too."""
        try:
            return json.dumps(self.model_dump(exclude_defaults=True), allow_nan=False) + "\n"
        except ValueError as error:
            raise ValueError(f"a sample must hold finite figures, got {self.key}: {error}") from error


@dataclass(eq=False)
class Samples:
    """A folder of samples of one configuration.

    Use `open_samples` to make or continue one, `read_samples` to look at one. A context manager; what is closed or was
    only read takes no more samples.
    """

    folder: Path
    config: dict[str, Any]
    created: str = ""
    rows: dict[Key, Sample] = field(default_factory=dict)
    _lock: IO[str] | None = field(default=None, repr=False)

    @property
    def path(self) -> Path:
        return self.folder / "samples.jsonl"

    def add(self, rows: Iterable[Sample]) -> None:
        """Appends samples that are not there yet, and makes them durable. Cost: one write and one sync.

        Raises ValueError for a figure that is not finite, and where this folder is not open for writing (any more).
        """
        if self._lock is None:
            raise ValueError(f"{self.folder} must be open for writing, got one that was closed, read, or opened anew")
        fresh = {row.key: row for row in rows if row.key not in self.rows}
        if not fresh:
            return
        lines = "".join(row.line() for row in fresh.values()).encode()
        new = not self.path.exists()
        with self.path.open("ab") as file:
            whole = file.tell()
            try:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                file.truncate(whole)  # a full disk must not leave half a line in front of the next one
                raise
        if new:
            _sync_folder(self.folder)
        self.rows |= fresh

    def has(self, task: str, arm: str, index: int) -> bool:
        return (task, arm, index) in self.rows

    def first(self, n: int | None = None) -> list[Sample]:
        """Samples of the first ``n`` items of every task, counted among the items that have samples; all for None.

        Indices have gaps where a task leaves items out, as it does where media are missing.
        """
        if n is None:
            return list(self.rows.values())
        indices: dict[str, set[int]] = {}
        for task, _, index in self.rows:
            indices.setdefault(task, set()).add(index)
        kept = {(task, index) for task, held in indices.items() for index in sorted(held)[:n]}
        return [row for row in self.rows.values() if (row.task, row.index) in kept]

    def close(self) -> None:
        """Lets another process write here; does nothing the second time."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_WRITERS: weakref.WeakValueDictionary[Path, Samples] = weakref.WeakValueDictionary()
"""Folders that this process writes. The kernel's lock is the process's, so within one this must be kept by hand."""


def open_samples(folder: Path, config: dict[str, Any]) -> Samples:
    """Starts a folder, or continues one of the same configuration.

    Opened a second time by one process, the folder belongs to the newer object and the older one takes no more samples.

    Raises ValueError where the folder holds samples of another configuration, naming what differs, where it is damaged,
    and where another process is writing it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    older = _WRITERS.get(folder.resolve())
    held = None if older is None else older._lock
    lock = held or _take(folder)
    try:
        samples = _opened(folder, config)
    except BaseException:
        if lock is not held:
            lock.close()
        raise
    if older is not None:
        older._lock = None
    samples._lock = lock
    _WRITERS[folder.resolve()] = samples
    return samples


def read_samples(folder: Path) -> Samples:
    """Reads a folder without changing it, also while a run is going on.

    Raises ValueError where it holds no run, or a damaged one.
    """
    held = _config(folder)
    samples = Samples(folder, held, held.pop(_CREATED, ""))
    samples.rows = _rows(samples.path)
    return samples


def _opened(folder: Path, config: dict[str, Any]) -> Samples:
    path = folder / "config.json"
    if path.exists():
        held = _config(folder)
        created = held.pop(_CREATED, "")
        differs = list(_differences(held, json.loads(json.dumps(config))))
        if differs:
            raise ValueError(
                f"{folder} must hold samples of this configuration, got {'; '.join(differs)}; choose another --output"
            )
        samples = Samples(folder, held, created)
        _cut_torn_line(samples.path)
        samples.rows = _rows(samples.path)
        return samples
    if (folder / "samples.jsonl").exists():
        raise ValueError(f"{folder} must hold a config.json beside its samples, got none; choose another --output")
    created = datetime.now(UTC).isoformat(timespec="seconds")
    temporary = folder / "config.json.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps({**config, _CREATED: created}, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_folder(folder)
    return Samples(folder, config, created)


def _take(folder: Path) -> IO[str]:
    """The lock of a folder; ValueError where another process has it."""
    lock = (folder / "lock").open("a+", encoding="utf-8")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        owner = lock.read().strip()
        lock.close()
        raise ValueError(
            f"{folder} must be written by one process at a time, got one that is being written"
            f"{f' by process {owner}' if owner else ''}; wait for it or choose another --output"
        ) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def _differences(held: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """What differs between two configurations, nested ones by their inner names."""
    for key in sorted({*held, *wanted}):
        there, now = held.get(key), wanted.get(key)
        if there == now:
            continue
        if isinstance(there, dict) and isinstance(now, dict):
            yield from _differences(there, now, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key} {there!r} there, {now!r} now"


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"a run folder must hold config.json, got none in {str(folder)!r}") from None
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(f"{path} must be JSON, got {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(config).__name__}")
    if config.get("format") != FORMAT:
        raise ValueError(
            f"{path} must be of format {FORMAT}, got {config.get('format')!r}; run it again into another folder"
        )
    return config


def _rows(path: Path) -> dict[Key, Sample]:
    """The whole lines of a file; ValueError where one is no sample, or stands there twice."""
    rows: dict[Key, Sample] = {}
    if not path.exists():
        return rows
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break  # torn by a kill; its sample counts as missing
            try:
                sample = Sample.model_validate(json.loads(line, parse_constant=_refused))
            except ValueError as error:
                raise ValueError(f"{path} must hold one sample a line as JSON, got line {number}: {error}") from error
            if sample.key in rows:
                raise ValueError(f"{path} must hold each sample once, got {sample.key} again in line {number}")
            rows[sample.key] = sample
    return rows


def _refused(figure: str) -> None:
    raise ValueError(f"figures must be finite, got {figure}")


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        whole = 0
        for line in file:
            if line.endswith(b"\n"):
                whole += len(line)
        if whole != file.seek(0, os.SEEK_END):
            file.truncate(whole)
            os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Makes a new name in a folder durable."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)

"""The samples of a run on disk: ``config.json`` and an append-only ``samples.jsonl``, one line per (task, arm, item).

Readers see whole lines only: a last line without its newline, left by a killed run, is cut off when the file is opened for
writing again. Lines are never rewritten. One process writes a folder at a time; its lock is the kernel's (`fcntl.lockf`) and
ends with the process, however that ends.
"""

import fcntl
import json
import os
import weakref
from collections.abc import Container, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, Field

from ctxwin.files import atomic_write, sync_folder
from ctxwin.validation import validate
from ctxwin_evals.items import grouped

Key = tuple[str, str, int]

FORMAT = 3
"""Rises when samples of an older version cannot be scored by this one."""
_CREATED = "created"
"""When the run was started; stands in ``config.json``, but need not agree."""


class Sample(BaseModel):
    """Answer of one arm to one item and its cost: one line of ``samples.jsonl``.

    Attributes:
        doc_id, cluster, question, target, meta: the item's, see `ctxwin_evals.items.Item`; ``case`` is the item's digest.
        frames, media, placed, tokens: placed chunks, their pictures and videos, their tokens, and tokens of the whole prompt.
        unscored: why the arm could not serve the item or be measured; None where it could. Only then are the fields below set.
        answer, reference, base: text under the arm, under the exact re-prefill, and under doing nothing.
        kl, base_kl: KL(re-prefill || arm) and KL(re-prefill || base) of the next token, nats.
        forced_kl, base_forced_kl: the same, averaged along re-prefill's answer; None where that has one token.
        stored, over, computed, forwards, encodes: see `ctxwin_evals.arms.Served`.
        by_layer: relative distance between the served and the exact KV; None where they hold different tokens.
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
    extra: dict[str, float] = Field(default_factory=dict)

    @property
    def key(self) -> Key:
        """(task, arm, index)."""
        return self.task, self.arm, self.index

    @property
    def answer_kl(self) -> float:
        """KL along re-prefill's answer; of the next token where that has one."""
        return self.kl if self.forced_kl is None else self.forced_kl

    @property
    def base_answer_kl(self) -> float:
        """The same under the base."""
        return self.base_kl if self.base_forced_kl is None else self.base_forced_kl

    def line(self) -> str:
        """The sample as a line of JSON; raises ValueError for a figure that is not finite, also in its meta or target."""
        try:
            return json.dumps(self.model_dump(exclude_defaults=True), allow_nan=False) + "\n"
        except ValueError as error:
            raise ValueError(f"a sample must hold finite figures, got {self.key}: {error}") from error


@dataclass(eq=False)
class Samples(AbstractContextManager["Samples"]):
    """A folder of samples of one configuration.

    `open_samples` makes or continues one, `read_samples` only reads one. Once closed, or opened for reading, it takes no more.
    """

    folder: Path
    config: dict[str, Any]
    created: str = ""
    rows: dict[Key, Sample] = field(default_factory=dict)
    _lock: IO[str] | None = field(default=None, repr=False)

    @property
    def path(self) -> Path:
        """File of the samples."""
        return self.folder / "samples.jsonl"

    def add(self, rows: Iterable[Sample]) -> None:
        """Append the samples that are missing and make them durable. Cost: one write and one sync.

        Raises ValueError for a figure that is not finite, and where this folder is not (or no longer) open for writing.
        """
        if self._lock is None:
            raise ValueError(f"{self.folder} must be open for writing, got one that was closed, read, or opened anew")
        fresh = {row.key: row for row in rows if row.key not in self.rows}
        if not fresh:
            return
        lines = "".join(row.line() for row in fresh.values()).encode()
        with self.path.open("ab", buffering=0) as file:  # a buffer would be written again behind what is cut off
            whole = file.tell()
            try:
                while lines:
                    lines = lines[file.write(lines) :]
                os.fsync(file.fileno())
            except OSError as error:
                file.truncate(whole)  # a full disk must not leave half a line before the next one
                error.filename = str(self.path)
                raise
        if not whole:
            sync_folder(self.folder)
        self.rows |= fresh

    def has(self, task: str, arm: str, index: int) -> bool:
        """True if there is a sample of this item under this arm."""
        return (task, arm, index) in self.rows

    def first(self, n: int | None = None) -> list[Sample]:
        """Samples of the first ``n`` items of every task that have any (indices have gaps where media are missing); None: all."""
        by_task = grouped({(task, index) for task, _, index in self.rows}, lambda item: item[0])
        return list(self.only({item for some in by_task.values() for item in sorted(some)[:n]}).rows.values())

    def only(self, items: Container[tuple[str, int]]) -> "Samples":
        """The samples of some items, given as (task, index), to be read."""
        rows = {key: row for key, row in self.rows.items() if (row.task, row.index) in items}
        return Samples(self.folder, self.config, self.created, rows)

    def close(self) -> None:
        """Let another process write here; closing twice is harmless."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __del__(self) -> None:
        self.close()

    def __exit__(self, *_: object) -> None:
        self.close()


_WRITERS: weakref.WeakValueDictionary[Path, Samples] = weakref.WeakValueDictionary()
"""Folders that this process writes: the kernel's lock belongs to the process and does not tell its objects apart."""


def open_samples(folder: Path, config: dict[str, Any]) -> Samples:
    """Start a folder, or continue one of the same configuration.

    When a process opens a folder twice, it belongs to the newer object, and the older one takes no more samples.

    Raises ValueError where the folder holds samples of another configuration, naming the differences, where it is damaged,
    and where another process is writing it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    older = _WRITERS.get(folder.resolve())
    held_lock = None if older is None else older._lock
    lock = held_lock or _take(folder)
    try:
        samples = _open_file(folder, config)
    except BaseException:
        if lock is not held_lock:
            lock.close()
        raise
    if older is not None:
        older._lock = None
    samples._lock = lock
    _WRITERS[folder.resolve()] = samples
    return samples


def _open_file(folder: Path, config: dict[str, Any]) -> Samples:
    path = folder / "config.json"
    if not path.exists():
        if (folder / "samples.jsonl").exists():
            raise ValueError(f"{folder} must hold a config.json beside its samples, got none; choose another --output")
        created = datetime.now(UTC).isoformat(timespec="seconds")
        atomic_write(path, (json.dumps({**config, _CREATED: created}, indent=1) + "\n").encode(), durable=True)
        sync_folder(folder)
        return Samples(folder, config, created)
    samples = read_samples(folder, mend=True)
    if differs := list(_differences(samples.config, json.loads(json.dumps(config)))):
        got = "; ".join(differs)
        raise ValueError(f"{folder} must hold samples of this configuration, got {got}; choose another --output")
    return samples


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


def _differences(recorded: dict[str, Any], current: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the differences of two configurations, nested ones by their inner names."""
    for key in sorted({*recorded, *current}):
        there, now = recorded.get(key), current.get(key)
        if isinstance(there, dict) and isinstance(now, dict):
            yield from _differences(there, now, f"{prefix}{key}.")
        elif there != now:
            yield f"{prefix}{key} {there!r} there, {now!r} now"


def read_samples(folder: Path, *, mend: bool = False) -> Samples:
    """Read a folder, also during a run; raise ValueError where it holds no run, or a damaged one.

    It stays as it is, unless ``mend`` says that a torn last line be cut off.
    """
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
        raise ValueError(f"{path} must be of format {FORMAT}, got {config.get('format')!r}; run it into another folder")
    samples = Samples(folder, config, config.pop(_CREATED, ""))
    if not samples.path.exists():
        return samples
    with samples.path.open("r+b" if mend else "rb") as file:
        whole = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):  # torn by a kill; its sample counts as missing
                if mend:
                    file.truncate(whole)
                    os.fsync(file.fileno())
                break
            whole += len(line)
            try:
                sample: Sample = validate(Sample.model_validate, json.loads(line, parse_constant=_refuse), "")
            except ValueError as error:
                raise ValueError(
                    f"{samples.path} must hold samples as JSON lines, got line {number}: {error}"
                ) from error
            if sample.key in samples.rows:
                raise ValueError(f"{samples.path} must hold each sample once, got {sample.key} again in line {number}")
            samples.rows[sample.key] = sample
    return samples


def _refuse(figure: str) -> None:
    raise ValueError(f"figures must be finite, got {figure}")

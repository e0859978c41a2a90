"""Shared parts of the benchmarks: options, the data folder, and annotation files whose errors name the line."""

import json
import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ValidationInfo

from ctxwin.validation import validate
from ctxwin_evals.benchmarks.frames import FRAME_RULES
from ctxwin_evals.benchmarks.prompt import Prompt
from ctxwin_evals.benchmarks.source import HUB, find_data
from ctxwin_evals.items import Item, Task

_log = logging.getLogger("ctxwin.evals")
_NAMED = 10
"""Odd rows and items without media that are named in the log; all are counted."""
_BATCH = 256
_Row = TypeVar("_Row", bound=BaseModel)


@dataclass(frozen=True)
class DataOptions:
    """Where the data is and how it is shown to a model; each benchmark reads the options that concern it.

    Attributes:
        data: a folder in the data set's official layout, or ``hub:OWNER/NAME`` to download that from the Hugging Face
            hub; None where answers are only scored.
        split: ``val`` or ``test`` (MM-NIAH), ``test`` or ``adv`` (MileBench), ``subset`` or ``full`` (EgoSchema), ``dev`` or
            ``train`` (MuSiQue), ``test`` (the others); empty takes the first.
        frames: frames sampled from a video.
        frame_rule: which ones; see `ctxwin_evals.benchmarks.frames.FRAME_RULES`.
        max_pixels: larger pictures and frames are scaled down to this area, keeping their proportions; None leaves them.
        as_video: frames go in as one native video instead of as pictures.
        subtitles: Video-MME with the subtitles of the sampled frames.
        times: each frame that goes in as a picture has its time in front. The official prompt has none.
        skip_missing: items whose media are not there are left out instead of being an error.
        max_tokens: longest answer; None takes the benchmark's.
        text_words: longer texts between two pictures are cut into chunks of about that many words, at paragraph ends.
    """

    data: str | None = None
    split: str = ""
    frames: int = 8
    frame_rule: str = "vlmevalkit"
    max_pixels: int | None = None
    as_video: bool = False
    subtitles: bool = False
    times: bool = False
    skip_missing: bool = False
    max_tokens: int | None = None
    text_words: int = 512

    def __post_init__(self) -> None:
        for name, least in {"frames": 1, "max_pixels": 28 * 28, "max_tokens": 1, "text_words": 8}.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        if self.frame_rule not in FRAME_RULES:
            raise ValueError(f"frame_rule must be one of {', '.join(FRAME_RULES)}; got {self.frame_rule!r}")
        if self.data is not None and not self.data:
            raise ValueError("data must be a folder or hub:OWNER/NAME, got an empty string")


class Missing(ValueError):
    """A medium that the item ``doc_id`` needs is missing; the message names the item and the file."""

    def __init__(self, message: str, doc_id: str) -> None:
        super().__init__(message)
        self.doc_id = doc_id

    @classmethod
    def check(cls, paths: Iterable[Path], where: str, doc_id: str) -> None:
        """Raise the error for the first path that is no file."""
        for path in paths:
            if not path.is_file():
                remedy = "unpack the data set's media there, or leave such items out (--skip-missing)"
                raise cls(f"{where} must find its media, got no file {str(path)!r}; {remedy}", doc_id)


class DataTask(Task):
    """A benchmark whose items come from files.

    Attributes:
        names: its tasks, with half a line about each.
        options: how items are made.
        split: the one taken.
        skipped: doc_ids left out by the last call of `items` because their media are missing.
    """

    names: ClassVar[Mapping[str, str]]
    splits: ClassVar[tuple[str, ...]]
    answer_tokens: int

    def __init__(self, name: str, options: DataOptions) -> None:
        self.name, self.about, self.options = name, self.names[name], options
        self.split = options.split or self.splits[0]
        if self.split not in self.splits:
            raise ValueError(f"split of {name} must be one of {', '.join(self.splits)}; got {self.split!r}")
        self.skipped: tuple[str, ...] = ()
        self.odd: tuple[str, ...] = ()

    @abstractmethod
    def patterns(self) -> list[str]:
        """Files of the hub's data set that this task needs, as globs."""

    @abstractmethod
    def rows(self, root: Path) -> Iterator[tuple[str, Any]]:
        """(place for messages, row) in file order. Reads no media."""

    @abstractmethod
    def parse(self, row: Any, where: str) -> Item:
        """The item of a row, but for its index. Raises ValueError for an odd one, `Missing` for one without its media."""

    @abstractmethod
    def export(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Answers as the data set's own scripts read them: the content of that file.

        ``rows`` are of one arm, with ``doc_id, answer, target, meta``, as a run's samples have, in the data's order.
        """

    def export_path(self, title: str, split: str) -> Path:
        """Where the official scripts look for the export of a model and arm, below a folder of results."""
        return Path(f"{title}_{self.name.replace('/', '-')}.json")

    @cached_property
    def root(self) -> Path:
        """The data folder, downloaded where the options say so."""
        if self.options.data is None:
            raise ValueError(
                f"{self.name} must be given its data to make items, got none; pass data=FOLDER or hub:OWNER/NAME (--data)"
            )
        return find_data(self.options.data, self.patterns())

    @property
    def max_tokens(self) -> int:
        """The longest answer."""
        return self.options.max_tokens or self.answer_tokens

    def items(self, n: int | None = None) -> Sequence[Item]:
        """The first ``n`` items whose media are there (see ``skip_missing``); all or none are returned.

        Rows that cannot be read are left out: each is logged with file and line, and `odd` has them. Raises ValueError where
        there is no data or nothing but such rows, `Missing` for a missing medium. Cost: annotations are read, of media only
        whether they exist.
        """
        if n is not None and n < 1:
            raise ValueError(f"n must be >= 1, got {n}")
        skipped: list[str] = []
        odd: list[ValueError] = []
        items = list(islice(self._present(skipped, odd), n))
        if odd and not items:
            raise odd[0]
        fresh, self.odd = [str(error) for error in odd if str(error) not in self.odd], tuple(map(str, odd))
        for error in fresh[:_NAMED]:
            _log.warning("%s: a row is left out: %s", self.name, error)
        if fresh:
            _log.warning("%s: %d rows left out, they cannot be read", self.name, len(odd))
        if not items:
            raise ValueError(f"{self.root} must hold items of {self.name}, got none ({len(skipped)} without media)")
        news, self.skipped = tuple(skipped) != self.skipped, tuple(skipped)
        if skipped and news:
            named = ", ".join(skipped[:_NAMED]) + (", ..." if len(skipped) > _NAMED else "")
            _log.warning("%s: %d items left out, their media are missing: %s", self.name, len(skipped), named)
        return items

    def leave_out(self, error: ValueError) -> None:
        self.odd += (str(error),)
        _log.warning("%s: an item is left out: %s", self.name, error)

    def _present(self, skipped: list[str], odd: list[ValueError]) -> Iterator[Item]:
        names: set[str] = set()
        for index, (where, row) in enumerate(self.rows(self.root)):
            try:
                entry: Item | Missing = self.parse(row, where)
            except Missing as error:
                entry = error
            except ValueError as error:
                odd.append(error)
                continue
            if entry.doc_id in names:
                raise ValueError(f"{where}: ids must be unique in a file, got {entry.doc_id} twice")
            names.add(entry.doc_id)
            if isinstance(entry, Item):
                yield replace(entry, index=index)
            elif self.options.skip_missing:
                skipped.append(entry.doc_id)
            else:
                raise entry

    def item(self, count: int, **fields: Any) -> Item:
        """Return an item of which all ``count`` chunks are placed in order. Official prompts have no system turn."""
        same: dict[str, Any] = {"task": self.name, "index": 0, "max_tokens": self.max_tokens, "system_prompt": ""}
        return Item(count=count, placed=tuple(range(count)), **same | fields)

    def annotations(self, path: Path) -> Path:
        """The path of an annotation file; ValueError where there is none."""
        if not path.is_file():
            raise ValueError(f"{self.name} must find its annotations, got no file {str(path)!r}")
        return path

    def config(self) -> dict[str, Any]:
        data = self.options.data
        if data is not None and not data.startswith(HUB):
            data = str(Path(data).expanduser().resolve())  # however it was spelled
        config = {"data": data, "split": self.split, "max_pixels": self.options.max_pixels}
        return {**super().config(), **config, "max_tokens": self.max_tokens}


class PromptTask(DataTask):
    """A benchmark whose contexts are prompts of texts and pictures."""

    def config(self) -> dict[str, Any]:
        return {**super().config(), "text_words": self.options.text_words}

    def item_of(self, prompt: Prompt, **fields: Any) -> Item:
        """Return an item of a prompt, whose pieces are the chunks in order; ``fields`` are further ones."""
        return self.item(len(prompt.pieces), query=prompt.query, **fields)


def inside(folder: Path, name: Any, where: str) -> Path:
    """``folder / name``; ValueError where the name is no relative path that stays inside."""
    if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{where}: a picture must be a relative path inside {str(folder)!r}, got {name!r}")
    return folder / name


def _plain_name(name: str, info: ValidationInfo) -> str:
    if not name or Path(name).name != name:
        raise ValueError(f"{info.field_name} must be a plain name, got {name!r}")
    return name


PlainName = Annotated[str, AfterValidator(_plain_name)]


def checked(kind: type[_Row], row: Any, where: str) -> _Row:
    """A row as a model; ValueError that names the place and the field that is wrong."""
    if isinstance(row, ValueError):
        raise row
    model: _Row = validate(kind.model_validate, row, f"{where}: ")
    return model


def read_json(path: Path) -> Any:
    """A JSON file; ValueError naming it where it is none, with the line of the error."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be JSON in UTF-8, got {error}") from error


def read_lines(path: Path) -> Iterator[tuple[str, int, Any]]:
    """Rows of a JSON-lines file as (place for messages, byte offset, row); a line that is no JSON is the error to raise for it.

    Raises ValueError for a last line that is cut short: others may be missing."""
    with path.open("rb") as file:
        at = 0
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield f"{path}:{number}", at, _parse(raw, f"{path}:{number}")
            at += len(raw)


def read_line_at(path: Path, offset: int) -> Any:
    """The row that starts at a byte offset."""
    with path.open("rb") as file:
        file.seek(offset)
        return _parse(file.readline(), f"{path} at byte {offset}")


def read_parquet(
    path: Path, data_set: str, columns: Sequence[str], unread: Sequence[str] = ()
) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """Rows of a parquet file as (place for messages, row group, row in it, columns).

    Raises ValueError for a damaged file, and for one without these columns or those that are left ``unread``.
    """
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        with pq.ParquetFile(path) as file:
            lacking = [name for name in (*columns, *unread) if name not in file.schema_arrow.names]
            if lacking:
                raise ValueError(f"{path} must have the columns of {data_set}, got none named {', '.join(lacking)}")
            at = 0
            for group in range(file.num_row_groups):
                batches = file.iter_batches(_BATCH, row_groups=[group], columns=list(columns))
                rows = enumerate(row for batch in batches for row in batch.to_pylist())
                yield from ((f"{path} row {at + number}", group, number, row) for number, row in rows)
                at += file.metadata.row_group(group).num_rows
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} must be a whole parquet file, got {error}") from error


def _parse(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        wrong = f"{where} must be one JSON object, got {error}"
        if raw.endswith(b"\n"):
            return ValueError(wrong)
        raise ValueError(f"{wrong}; it is the last line and has no end: the file is cut short") from error


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as the lines of a file, a JSON object each."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

"""Records as one file, to carry them from store to store.

Each record stands as a store seals it (`codec.Seal`), one behind another; a last one counts them. Nothing is compressed and a
length is compared with the bytes at hand before they are read, so an archive takes no more memory than its largest record.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from ctxwin.errors import BadMedia, StoreCorrupt
from ctxwin.files import atomic_write
from ctxwin.store.base import Store, is_key
from ctxwin.store.codec import PREFIX, ForeignRecordError, Seal, parse_header, read_prefix

_END: Final = "archive/end"
_LARGEST: Final = 8 << 30
_LONGEST_HEADER: Final = 4096  # a key of 512 characters, escaped


def write_archive(path: Path, store: Store, keys: Iterable[str]) -> tuple[int, int]:
    """Write what ``store`` holds of ``keys`` to ``path``, whole or not at all; return how many records and bytes.

    The records are sealed with the key that the store was opened with, where it was opened with one.
    """
    seal = Seal(store.archive_secret)
    count = size = 0

    def parts() -> Iterator[bytes]:
        nonlocal count, size
        for key in keys:
            if (value := store.get(key)) is not None:
                head, tail = seal.close(key, value)
                yield from (head, value, tail)
                count, size = count + 1, size + len(value)
        head, tail = seal.close(_END, value := str(count).encode())
        yield from (head, value, tail)

    if path.exists() and not path.is_file():  # before its links are followed: /dev/stdout leads to the pipe itself
        raise ValueError(f"an archive must be written to a file, got {str(path)!r}; choose another path")
    atomic_write(path.resolve(), parts(), mode=0o600)  # a link stays one
    return count, size


def read_archive(
    path: Path, store: Store, secret: bytes | None = None, *, of_library: bool = True
) -> Iterator[tuple[str, bytes]]:
    """Keys and values in ``path``, for ``store``; the first of them once all have been verified.

    Args:
        store: what its key has not sealed is refused, where it was opened with one.
        secret: what the archive was sealed with instead (`ctxwin.store.archive_secret`).
        of_library: whether it may be the export of a library, files that nothing in it names; else BadMedia is raised.

    Raises:
        BadMedia: a file that `write_archive` did not write, that was damaged or cut off since, that holds a record larger than
            the store, or one that was sealed with another key. No record of it was returned.

    Cost: the file is read twice; memory for its largest record.
    """
    seal = Seal(secret or store.archive_secret)
    if not path.is_file():
        raise BadMedia(f"an archive must be a file, got {str(path)!r}")
    with path.open("rb") as file:
        try:
            records = _records(file, seal, min(_LARGEST, store.limit() or _LARGEST))
            kinds = {key.partition("/")[0] for key, _ in records}
            if not of_library and "entry" in kinds and kinds <= {"entry", "source"}:
                raise BadMedia(f"{str(path)!r} is the export of a library; use ctxwin library import")
            file.seek(0)
            yield from _records(file, seal, _LARGEST)
        except ForeignRecordError as error:
            raise BadMedia(
                "an archive's records must be of this version and sealed with the key of the store that takes them, got "
                f"{str(path)!r}: {error}; export them so, or name the key of the file (ctxwin store import --sealed-with)"
            ) from None
        except StoreCorrupt as error:
            raise BadMedia(f"an archive must be a whole file that `export` wrote, got {str(path)!r}: {error}") from None


def _records(file: BinaryIO, seal: Seal, largest: int) -> Iterator[tuple[str, bytes]]:
    """The records of a file, each checked; raises StoreCorrupt."""
    remaining, count = os.fstat(file.fileno()).st_size, 0
    while True:
        first = _read(file, PREFIX.size, remaining)
        # A length that is larger than the file is told here, before anything is read for it.
        prefix = read_prefix(first, None)
        if prefix.header_bytes > _LONGEST_HEADER or prefix.body_bytes > largest or prefix.total > remaining:
            raise StoreCorrupt(
                f"record {count + 1} must have at most {min(largest, remaining)} bytes, got {prefix.total} by its prefix"
            )
        head = first + _read(file, prefix.body_offset - len(first), remaining)
        key = parse_header(head, prefix).get("key")
        if not isinstance(key, str) or not is_key(key) or "/" not in key:
            raise StoreCorrupt(f"record {count + 1} must have the key of a record, got {key!r}"[:200])
        value, tail = _read(file, prefix.body_bytes, remaining), _read(file, prefix.sum_bytes, remaining)
        seal.check(key, head, value, tail)
        remaining -= prefix.total
        if key == _END:
            if remaining or value != str(count).encode():
                raise StoreCorrupt(f"its last record counts {value[:20]!r}, got {count} and {remaining} bytes after it")
            return
        count += 1
        yield key, value


def _read(file: BinaryIO, size: int, remaining: int) -> bytes:
    data = file.read(size) if size <= remaining else b""
    if len(data) < size:
        raise StoreCorrupt("it ends within a record, or without its last one")
    return data

"""Records as one file, to carry them from store to store: a zip without compression, one member a key."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from ctxwin.errors import BadMedia
from ctxwin.store.base import Store, is_key

_LARGEST = 8 << 30


def write_archive(path: Path, store: Store, keys: Iterable[str]) -> tuple[int, int]:
    """Writes what ``store`` holds of ``keys`` to ``path``, whole or not at all; returns how many records and bytes."""
    count = size = 0
    partial = path.with_name(path.name + ".partial")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
            for key in keys:
                blob = store.get(key)
                if blob is not None:
                    archive.writestr(zipfile.ZipInfo(key), blob)
                    count, size = count + 1, size + len(blob)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return count, size


def read_archive(path: Path) -> Iterator[tuple[str, bytes]]:
    """Keys and values in ``path``; BadMedia for a file that `write_archive` did not write, or that was damaged since."""
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if not is_key(member.filename) or "/" not in member.filename or member.file_size > _LARGEST:
                    raise BadMedia(
                        f"an archive's members must be records, got {member.filename[:80]!r} in {str(path)!r}"
                    )
                yield member.filename, archive.read(member)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError) as error:
        raise BadMedia(f"an archive must be a whole zip file of records, got {str(path)!r}: {error}") from error

"""The folder a benchmark's data is in: a local one, or a download from the Hugging Face hub with its archives unpacked."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HUB = "hub:"


def find_data(data: str, patterns: list[str]) -> Path:
    """The data folder.

    Args:
        data: a folder, or ``hub:OWNER/NAME``.
        patterns: what is downloaded of a hub's data set; archives among it are unpacked beside themselves, once.

    Raises:
        ValueError: no such folder, an empty one, no name of a data set, or one that the hub does not give.
    """
    if not data.startswith(HUB):
        folder = Path(data).expanduser()
        if not folder.is_dir() or not any(folder.iterdir()):
            raise ValueError(
                f"data must be a folder in the data set's official layout, got {data!r}, which is none or empty"
            )
        return folder
    repo = data.removeprefix(HUB)
    if repo.count("/") != 1 or not all(repo.split("/")):
        raise ValueError(f"data of the hub must be hub:OWNER/NAME, got {data!r}")
    import huggingface_hub

    try:
        root = Path(huggingface_hub.snapshot_download(repo, repo_type="dataset", allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data must be on the Hugging Face hub or downloaded before, got {data!r}: {error}; or pass a local folder in the "
            "official layout"
        ) from error
    unpack_all(root)
    return root


def shown_data(data: str | None) -> str | None:
    """How a run's configuration names its data: a folder by its whole path, however it was spelled."""
    return data if data is None or data.startswith(HUB) else str(Path(data).expanduser().resolve())


def unpack_all(root: Path) -> None:
    """Unpacks the archives of the three data sets where they belong; what is unpacked already stays.

    ``mm_niah_*/images.tar.gz`` gives ``mm_niah_*/images``; ``MileBench_part*.tar.gz`` give the sets' folders;
    ``videos_chunked_*.zip`` and ``subtitle.zip`` give ``video`` and ``subtitle``. An archive that does not hold what it
    should raises ValueError.
    """
    for archive in sorted(root.glob("mm_niah_*/images.tar.gz")):
        if not (archive.parent / "images").is_dir():
            _unpack_folder(archive, archive.parent / "images")
    for archive in sorted(root.glob("MileBench_part*.tar.gz")):
        done = archive.with_name(archive.name + ".unpacked")
        if not done.exists():
            _unpack_sets(archive, root)
            done.touch()
    for pattern, folder in (("videos_chunked_*.zip", "video"), ("subtitle.zip", "subtitle")):
        for archive in sorted(root.glob(pattern)):
            _unpack_flat(archive, root / folder)


@contextmanager
def _opened(archive: Path, beside: Path) -> Iterator[Path]:
    """A temporary folder with the archive's content, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=beside))
    try:
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise ValueError(
                f"{archive} must be a whole tar archive, got {error}; remove it to fetch it again"
            ) from error
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unpack_folder(archive: Path, target: Path) -> None:
    """The folder of that name inside the archive, at any depth; the archive's whole content where there is none."""
    with _opened(archive, target.parent) as content:
        source = next((p for p in sorted(content.rglob(target.name)) if p.is_dir()), content)
        if not any(source.iterdir()):
            raise ValueError(f"{archive} must hold pictures, got nothing; remove it to fetch it again")
        source.rename(target)


def _unpack_sets(archive: Path, root: Path) -> None:
    """Folders that hold a JSON file of their own name."""
    with _opened(archive, root) as content:
        for annotation in sorted(content.rglob("*.json")):
            target = root / annotation.stem
            if annotation.stem == annotation.parent.name and not target.exists():
                annotation.parent.rename(target)


def _unpack_flat(archive: Path, folder: Path) -> None:
    """Every file of a zip straight into a folder; each whole or not at all."""
    folder.mkdir(exist_ok=True)
    try:
        with zipfile.ZipFile(archive) as zipped:
            for member in zipped.infolist():
                target = folder / Path(member.filename).name
                if member.is_dir() or (target.exists() and target.stat().st_size == member.file_size):
                    continue
                temporary = target.with_name(target.name + ".tmp")
                with zipped.open(member) as source, temporary.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
                temporary.replace(target)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{archive} must be a whole zip archive, got {error}; remove it to fetch it again") from error

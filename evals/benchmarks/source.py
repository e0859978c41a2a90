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
    """How a run's configuration names its data: a folder by its full path, however it was spelled."""
    return data if data is None or data.startswith(HUB) else str(Path(data).expanduser().resolve())


def unpack_all(root: Path) -> None:
    """Unpacks the archives of the three data sets where they belong, each once.

    ``mm_niah_*/images.tar.gz`` gives ``mm_niah_*/images``; ``MileBench_part*.tar.gz`` give the sets' folders, which hold a
    JSON file of their own name; ``videos_chunked_*.zip`` and ``subtitle.zip`` give ``video`` and ``subtitle``. An archive
    that does not hold what it should raises ValueError.
    """
    for archive in sorted(root.glob("mm_niah_*/images.tar.gz")):
        if not (target := archive.parent / "images").is_dir():
            with _content(archive) as content:
                source = next((p for p in sorted(content.rglob("images")) if p.is_dir()), content)
                if not any(source.iterdir()):
                    raise ValueError(f"{archive} must hold pictures, got nothing; remove it to fetch it again")
                source.rename(target)
    for pattern, folder in (
        ("MileBench_part*.tar.gz", ""),
        ("videos_chunked_*.zip", "video"),
        ("subtitle.zip", "subtitle"),
    ):
        for archive in sorted(root.glob(pattern)):
            if (done := archive.with_name(archive.name + ".unpacked")).exists():
                continue
            with _content(archive) as content:
                if folder:
                    (root / folder).mkdir(exist_ok=True)
                    found = {p: root / folder / p.name for p in content.rglob("*") if p.is_file()}
                else:
                    sets = (p.parent for p in content.rglob("*.json") if p.stem == p.parent.name)
                    found = {p: root / p.name for p in sets if not (root / p.name).exists()}
                for path, target in found.items():
                    path.replace(target)
            done.touch()


@contextmanager
def _content(archive: Path) -> Iterator[Path]:
    """A temporary folder beside an archive with its content; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=archive.parent) as folder:
        try:
            # A zip's names cannot lead out of the folder; a tar's need the filter.
            options = {} if archive.suffix == ".zip" else {"filter": "data"}
            shutil.unpack_archive(archive, folder, **options)  # type: ignore[arg-type]
        except (shutil.ReadError, tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
            kind = "zip" if archive.suffix == ".zip" else "tar"
            raise ValueError(
                f"{archive} must be a whole {kind} archive, got {error}; remove it to fetch it again"
            ) from error
        yield Path(folder)

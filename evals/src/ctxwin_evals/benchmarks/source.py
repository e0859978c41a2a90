"""The folder a benchmark's data is in: a local one, or a download from the Hugging Face hub; archives in it are unpacked."""

import fcntl
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HUB = "hub:"
MOST_GROWTH, FREE_BYTES, MOST_FILES = 20, 64 << 20, 1_000_000
"""Bytes that an archive may unpack to, a byte of it and besides: pictures and videos hardly shrink, subtitles to a quarter."""


def find_data(data: str, patterns: list[str]) -> Path:
    """The data folder: one as unpacked or as downloaded, or of ``hub:OWNER/NAME`` the files of these patterns.

    Archives in it are unpacked beside themselves, once. Raises ValueError for no such folder, an empty one, no name of a data
    set, or one that the hub does not give.
    """
    if not data.startswith(HUB):
        folder = Path(data).expanduser().absolute()  # the name of "." tells an MM-NIAH split, too
        if not folder.is_dir() or not any(folder.iterdir()):
            raise ValueError(f"data must be a folder in the data set's official layout, got {data!r}, none or empty")
        unpack_all(folder)
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


def unpack_all(root: Path) -> None:
    """Unpack the archives of the data sets where they belong, each once.

    Where is said by `_ARCHIVES`; ``MileBench_part*.tar.gz`` give the sets' folders, which hold a JSON file of their own name.
    An archive that does not hold what it should raises ValueError. What an unpacking that was ended left behind is removed, and
    it begins again with the archive that it had not finished; two processes take turns. Nothing need be writable where all is
    unpacked.
    """
    archives = [path for pattern, to in _ARCHIVES.items() for path in root.glob(pattern) if not _is_unpacked(path, to)]
    if not archives:
        return
    try:
        lock = (root / ".unpacking.lock").open("ab")
    except OSError as error:
        raise ValueError(
            f"{root} must be writable so that its archives ({archives[0].name}, ...) can be unpacked, got {error}; unpack them "
            f"by hand and leave an empty {archives[0].name}.unpacked beside each, or copy the folder"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in [*root.rglob(".unpacking-*/")]:
            shutil.rmtree(leftover)
        for pattern, folder in _ARCHIVES.items():
            for archive in sorted(root.glob(pattern)):
                if not _is_unpacked(archive, folder):
                    _unpack(archive, folder)


_ARCHIVES = {
    "mm_niah_*/images.tar.gz": "images",
    "images.tar.gz": "images",
    "MileBench_part*.tar.gz": "",
    "videos_chunked_*.zip": "video",
    "subtitle.zip": "subtitle",
    "mmdu_pics.zip": "mmdu_pics",
    "images.zip": "images",
    "evaluation/SparklesEval/images.zip": "images",
}
"""Folders that archives are unpacked to; those of MileBench name their own."""


def _is_unpacked(archive: Path, folder: str) -> bool:
    """True if an archive was unpacked here, or by hand, which is then marked where it can be."""
    root, done = archive.parent, archive.with_name(archive.name + ".unpacked")
    if archive.name == "images.tar.gz":  # no link of the hub's is followed: what it leads to has another name
        return (root / "images").is_dir() or not root.name.startswith("mm_niah_")
    names = (folder, f"{folder}s", *(["data"] if folder == "video" else [])) if folder else ()
    if not done.exists() and any(_holds(root / name, archive) for name in names):
        with suppress(OSError):  # a share that is only read
            done.touch()
        return True
    return done.exists()


def _unpack(archive: Path, folder: str) -> None:
    root = archive.parent
    with _content(archive) as content:
        if archive.name == "images.tar.gz":
            source = next((p for p in sorted(content.rglob("images")) if p.is_dir()), content)
            if not any(source.iterdir()):
                raise ValueError(f"{archive} must hold pictures, got nothing; remove it to fetch it again")
            source.rename(root / folder)
            return
        if folder:
            (root / folder).mkdir(exist_ok=True)
            targets = {p: root / folder / p.name for p in content.rglob("*") if p.is_file()}
        else:
            sets = (p.parent for p in content.rglob("*.json") if p.stem == p.parent.name)
            targets = {p: root / p.name for p in sets if not (root / p.name).exists()}
        for path, target in targets.items():
            path.replace(target)
    archive.with_name(archive.name + ".unpacked").touch()


def _holds(folder: Path, archive: Path) -> bool:
    """True if a folder holds every file of a zip, each of its size."""
    try:
        with zipfile.ZipFile(archive) as zipped:
            files = [(folder / Path(f.filename).name, f.file_size) for f in zipped.infolist() if not f.is_dir()]
    except (zipfile.BadZipFile, OSError):
        return False
    return all(path.is_file() and path.stat().st_size == size for path, size in files)


def _check_size(archive: Path) -> None:
    """ValueError where an archive names more files or bytes than a data set of its size has."""
    count, total, most = 0, 0, MOST_GROWTH * archive.stat().st_size + FREE_BYTES
    for size in _sizes(archive):
        count, total = count + 1, total + size
        if total > most or count > MOST_FILES:
            raise ValueError(
                f"{archive} must unpack to at most {most:,} bytes in {MOST_FILES:,} files, got more; unpack it by hand if it is "
                "right"
            )
    if total > (free := shutil.disk_usage(archive.parent).free):
        raise ValueError(f"{archive} needs {total:,} bytes to unpack, got {free:,} free in {archive.parent}")


def _sizes(archive: Path) -> Iterator[int]:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as zipped:
            yield from (info.file_size for info in zipped.infolist())
    else:
        with tarfile.open(archive) as tarred:
            yield from (member.size for member in tarred)


@contextmanager
def _content(archive: Path) -> Iterator[Path]:
    """A temporary folder beside an archive with its content; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=archive.parent) as folder:
        try:
            # A zip's names cannot lead out of the folder; a tar's need the filter.
            _check_size(archive)
            options = {} if archive.suffix == ".zip" else {"filter": "data"}
            shutil.unpack_archive(archive, folder, **options)  # type: ignore[arg-type]
        except (shutil.ReadError, tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
            kind = "zip" if archive.suffix == ".zip" else "tar"
            raise ValueError(f"{archive} must be a whole {kind} archive, got {error}; remove it to fetch it") from error
        yield Path(folder)

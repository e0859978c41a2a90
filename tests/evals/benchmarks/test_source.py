"""Data from the hub: which files are asked for, and archives unpacked into the official layout."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
from PIL import Image

from benchmark_data import write_milebench, write_mm_niah, write_video_mme
from ctxwin.hashing import digest
from ctxwin_evals.benchmarks import DataOptions, benchmark, source


class Hub:
    """Stands in for `huggingface_hub.snapshot_download`: links what the patterns ask for to copies among its blobs."""

    def __init__(self, files: Path, target: Path) -> None:
        self.files, self.target, self.asked = files, target, []

    def __call__(self, repo_id: str, *, repo_type: str, allow_patterns: list[str]) -> str:
        assert repo_type == "dataset"
        self.asked.append((repo_id, allow_patterns))
        for path in self.files.rglob("*"):
            name = path.relative_to(self.files)
            if path.is_file() and any(fnmatch(str(name), p) for p in allow_patterns):
                link, blob = self.target / name, self.target.parent / "blobs" / digest(str(name))
                for folder in (link.parent, blob.parent):
                    folder.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, blob)
                link.unlink(missing_ok=True)
                link.symlink_to(os.path.relpath(blob, link.parent))
        return str(self.target)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    import huggingface_hub

    made = Hub(tmp_path / "hub", tmp_path / "snapshot")
    made.files.mkdir()
    made.target.mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made)
    return made


def tar(folder: Path, archive: Path, name: str) -> None:
    with tarfile.open(archive, "w:gz") as made:
        made.add(folder, name)
    shutil.rmtree(folder)


@pytest.mark.parametrize("inner", ["images", "mm_niah_val/images", "."])
def test_mm_niah(hub: Hub, inner: str) -> None:
    write_mm_niah(hub.files, 2, lengths=(200,), image_size=56)
    base = hub.files / "mm_niah_val"
    tar(base / "images", base / "images.tar.gz", inner)
    task = benchmark("mm-niah/counting-image", DataOptions(data="hub:owner/niah"))
    assert len([item.load() for item in task.items()]) == 2
    ((repo, patterns),) = hub.asked
    assert repo == "owner/niah"
    assert "mm_niah_val/annotations/counting-image.jsonl" in patterns
    assert [p.name for p in (hub.target / "mm_niah_val" / "annotations").iterdir()] == ["counting-image.jsonl"]
    assert sorted(p.name for p in (hub.target / "mm_niah_val").iterdir()) == ["annotations", "images", "images.tar.gz"]
    # A second session finds it unpacked.
    (hub.target / "mm_niah_val" / "images.tar.gz").write_bytes(b"not read again")
    (hub.files / "mm_niah_val" / "images.tar.gz").unlink()
    assert len(benchmark("mm-niah/counting-image", DataOptions(data="hub:owner/niah")).items()) == 2


def test_video_mme(hub: Hub) -> None:
    write_video_mme(hub.files, 6, seconds=(2, 2, 2), image_size=56)
    videos = sorted((hub.files / "video").iterdir())
    for i, path in enumerate(videos):
        with zipfile.ZipFile(hub.files / f"videos_chunked_{i + 1:02d}.zip", "w") as made:
            made.write(path, f"data/{path.name}")
    with zipfile.ZipFile(hub.files / "subtitle.zip", "w") as made:
        made.writestr("../escape.srt", "1")
        for path in (hub.files / "subtitle").iterdir():
            made.write(path, f"subtitle/{path.name}")
    shutil.rmtree(hub.files / "video")
    shutil.rmtree(hub.files / "subtitle")
    task = benchmark("video-mme", DataOptions(data="hub:owner/mme", subtitles=True, frames=2))
    items = task.items()
    assert len(items) == 6 and {i.meta["subtitles"] for i in items} == {"used"}
    assert len(items[0].load()) == 3
    assert not (hub.target.parent / "escape.srt").exists()


def test_milebench(hub: Hub) -> None:
    write_milebench(hub.files, 1, steps=2, image_size=56)
    names = ["ActionSequence", "ActionPrediction", "ObjectShuffle", "StateChange"]
    for i, name in enumerate(names):
        tar(hub.files / name, hub.files / f"MileBench_part{i}.tar.gz", f"MileBench/{name}" if i % 2 else name)
    for name in names:
        (item,) = benchmark(f"milebench/{name}", DataOptions(data="hub:owner/mile")).items()
        assert item.load()


@pytest.mark.parametrize("zipped", [False, True])
def test_sparkleseval(hub: Hub, zipped: bool) -> None:
    """Of all of Sparkles its evaluation is asked for, with pictures beside one another or in an archive."""
    folder, pictures = hub.files / "evaluation" / "SparklesEval", ("1.jpg", "2.jpg")
    shown = [{"image_id": 1}, {"image_id": 2}]
    said = [{"content": "IMAGE#1 or IMAGE#2?", "images": shown}, {"content": "Both."}]
    (folder / "annotations").mkdir(parents=True)
    text = json.dumps([{"evaluation_id": 3, "dialogue": said}])
    (folder / "annotations" / "sparkles_evaluation_sparkleseval_annotations.json").write_text(text)
    (folder / "images").mkdir()
    for name in pictures:
        Image.new("RGB", (56, 56)).save(folder / "images" / name)
    (hub.files / "models").mkdir()
    (hub.files / "models" / "sparkleschat_7b.pth").write_bytes(b"15 GB")
    if zipped:
        with zipfile.ZipFile(folder / "images.zip", "w") as made:
            for name in pictures:
                made.write(folder / "images" / name, f"images/{name}")
        shutil.rmtree(folder / "images")
    for _ in range(2):  # the second time everything is there
        (item,) = benchmark("sparkles", DataOptions(data="hub:owner/Sparkles")).items()
        assert item.target == "Both." and len(item.load()) == item.count
    assert not (hub.target / "models").exists()


def test_damaged_archives_are_named(hub: Hub) -> None:
    write_mm_niah(hub.files, 1, lengths=(200,), image_size=56)
    base = hub.files / "mm_niah_val"
    tar(base / "images", base / "images.tar.gz", "images")
    raw = (base / "images.tar.gz").read_bytes()
    (base / "images.tar.gz").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ValueError, match=r"images\.tar\.gz must be a whole tar archive"):
        benchmark("mm-niah/retrieval-text", DataOptions(data="hub:owner/niah")).items()
    assert not (hub.target / "mm_niah_val" / "images").exists()
    assert not list((hub.target / "mm_niah_val").glob(".unpacking*"))


def test_a_folder_as_downloaded_is_unpacked_where_it_lies(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and again from where it stopped if it was ended in the middle."""
    root = hub.files
    write_mm_niah(root, 2, lengths=(200,), image_size=56)
    base = root / "mm_niah_val"
    tar(base / "images", base / "images.tar.gz", "images")
    (base / ".unpacking-killed").mkdir()
    (base / ".unpacking-killed" / "half.jpg").write_bytes(b"...")
    monkeypatch.chdir(base)
    for data in (root, base, "."):  # the set, and the folder of one split
        assert len([i.load() for i in benchmark("mm-niah/counting-image", DataOptions(data=str(data))).items()]) == 2
        assert not list(base.glob(".unpacking-*"))
    shutil.rmtree(base / "images")
    assert len(benchmark("mm-niah/counting-image", DataOptions(data=str(base))).items()) == 2
    write_video_mme(root, 3, seconds=(2, 2, 2), image_size=56)
    with zipfile.ZipFile(root / "videos_chunked_01.zip", "w") as made:
        for path in (root / "video").iterdir():
            made.write(path, f"data/{path.name}")
    before = {path.name: path.stat().st_ino for path in (root / "video").iterdir()}
    assert len(benchmark("video-mme", DataOptions(data=str(root))).items()) == 3
    assert {path.name: path.stat().st_ino for path in (root / "video").iterdir()} == before  # was unpacked by hand
    (root / "videos_chunked_01.zip.unpacked").unlink()
    shutil.rmtree(root / "video")
    assert len(benchmark("video-mme", DataOptions(data=str(root))).items()) == 3
    assert hub.asked == []


@pytest.mark.parametrize("place", ["data", "video"])
def test_a_share_that_was_unpacked_by_hand_need_not_be_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """``unzip`` leaves Video-MME in ``data/``, where it is found and not unpacked again."""
    write_video_mme(tmp_path, 3, seconds=(2, 2, 2), image_size=56)
    with zipfile.ZipFile(tmp_path / "videos_chunked_01.zip", "w") as made:
        for path in (tmp_path / "video").iterdir():
            made.write(path, f"data/{path.name}")
    (tmp_path / "video").rename(tmp_path / place)
    (tmp_path / ".unpacking.lock").mkdir()  # cannot be opened, as on a share that is only read

    def refuse(path: Path, *args: object, **options: object) -> None:
        raise PermissionError(f"{path} is only read")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "touch", refuse)
        assert len(benchmark("video-mme", DataOptions(data=str(tmp_path))).items()) == 3
    assert len(benchmark("video-mme", DataOptions(data=str(tmp_path))).items()) == 3
    assert (tmp_path / "videos_chunked_01.zip.unpacked").exists()
    assert sorted({"data", "video"} & {path.name for path in tmp_path.iterdir()}) == [place]
    (tmp_path / "videos_chunked_02.zip").write_bytes(b"not unpacked")
    with pytest.raises(ValueError, match=r"must be writable .* empty videos_chunked_02\.zip\.unpacked beside each"):
        benchmark("video-mme", DataOptions(data=str(tmp_path))).items()


def test_an_archive_can_neither_fill_the_disk_nor_leave_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mm_niah(tmp_path / "data", 1, lengths=(200,), image_size=56)
    base = tmp_path / "data" / "mm_niah_val"
    shutil.rmtree(base / "images")
    monkeypatch.setattr(source, "FREE_BYTES", 1 << 20)
    hostile = {"images/zeros.png": 64 << 20, "../../escape.png": 10, "images/../../../escape.png": 10}
    for name, size in hostile.items():
        with tarfile.open(base / "images.tar.gz", "w:gz") as made:
            info = tarfile.TarInfo(name)
            info.size = size
            made.addfile(info, io.BytesIO(bytes(size)))
        with pytest.raises(ValueError, match=r"images\.tar\.gz must"):
            benchmark("mm-niah/counting-image", DataOptions(data=str(tmp_path / "data"))).items()
        assert not list(tmp_path.rglob("escape.png"))
        assert not list(base.glob(".unpacking-*")) and not (base / "images").exists()
    link = tarfile.TarInfo("images/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc"
    with tarfile.open(base / "images.tar.gz", "w:gz") as made:
        made.addfile(link)
    with pytest.raises(ValueError, match=r"images\.tar\.gz must"):
        benchmark("mm-niah/counting-image", DataOptions(data=str(tmp_path / "data"))).items()


@pytest.mark.parametrize("data", ["hub:", "hub:owner", "hub:a/b/c", "hub:/b"])
def test_names_of_the_hub(hub: Hub, data: str) -> None:
    with pytest.raises(ValueError, match="must be hub:OWNER/NAME"):
        benchmark("video-mme", DataOptions(data=data)).items()
    assert not hub.asked


def test_importing_the_benchmarks_loads_no_heavy_package() -> None:
    import subprocess
    import sys

    code = (
        "import sys, ctxwin_evals.benchmarks as b; "
        "b.benchmark('video-mme').score('A', 'A', {}); "
        "print([m for m in ('torch', 'cv2', 'pyarrow', 'srt', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_data_set_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*args: object, **options: object) -> str:
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"got 'hub:a/b': Name or service not known; or pass a local folder"):
        benchmark("video-mme", DataOptions(data="hub:a/b")).items(1)

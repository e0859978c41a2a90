"""The pixels of a chunk are those that vLLM's own chat path decodes from the same file."""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from core.pictures import MODES, broken, corpus, encoded, oriented, picture
from ctxwin import Chunk
from ctxwin.errors import BadMedia
from ctxwin.media import as_rgb, open_picture, to_rgb
from ctxwin_chats.bodies import FORMATS, picture_size
from langchain_ctxwin.messages import parts

pytest.importorskip("vllm")


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():  # of EXIF blocks and palettes that are odd on purpose
        warnings.simplefilter("ignore")
        yield


def reference(raw: bytes) -> np.ndarray | None:
    """Pixels of vLLM's own reader; None where it raises."""
    from vllm.multimodal.media.image import ImageMediaIO

    try:
        return np.asarray(ImageMediaIO().load_bytes(raw).media)
    except Exception:
        return None


def pixels(raw: object) -> np.ndarray | None:
    """Pixels of a chunk; None where it is refused, in words."""
    try:
        return as_rgb(raw)
    except BadMedia as error:
        assert not re.search(r"\bobject at 0x|^$", str(error)), error
        return None


def compare(files: Iterable[tuple[str, bytes]]) -> tuple[Counter[str], list[str]]:
    """How many files are equal, refused by both or by us alone, and the names of those that differ."""
    counts: Counter[str] = Counter()
    wrong = []
    for name, raw in files:
        theirs, ours = reference(raw), pixels(raw)
        if ours is None:
            counts["refused by both" if theirs is None else "refused here alone"] += 1
        elif theirs is not None and np.array_equal(theirs, ours):
            counts["equal"] += 1
        else:
            wrong.append(name)
    return counts, wrong


def test_a_file_gives_the_pixels_of_vllms_chat_path() -> None:
    files = corpus()
    counts, wrong = compare(files)
    print(f"\n{len(files)} pictures: {dict(counts)}, {len(wrong)} different")
    assert not wrong
    assert counts["equal"] > 300


@pytest.mark.slow
def test_damaged_files_give_the_pixels_of_vllms_chat_path() -> None:
    counts, wrong = compare(broken(trials=1000))
    print(f"\n{dict(counts)}, {len(wrong)} different")
    assert not wrong
    assert counts["equal"] > 1000


def test_every_door_gives_the_same_pixels(tmp_path: Path) -> None:
    """Path, bytes, a picture opened by its owner, a data URL in a message, an upload."""
    ids = set()
    for number, (name, raw) in enumerate(corpus()):
        expected = pixels(raw)
        path = tmp_path / f"{number}.png"  # whatever it is
        path.write_bytes(raw)
        doors: dict[str, object] = {"path": path, "bytearray": bytearray(raw)}
        for door, media in doors.items():
            if expected is None:
                with pytest.raises(BadMedia):
                    Chunk.image(media)
            else:
                assert np.array_equal(as_rgb(media), expected), (name, door)
        block = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(raw).decode()}}
        if expected is None:
            with pytest.raises(BadMedia):
                list(parts([block]))
            continue
        chunk = Chunk.image(raw)
        ids.add(chunk.id)
        same = [*parts([block]), Chunk.image(path), Chunk.image(Image.open(path)), Chunk.image(expected)]
        assert {c.id for c in same if isinstance(c, Chunk)} == {chunk.id}, name
        stored = chunk.media[0].pack(expected[None])
        assert np.array_equal(chunk.media[0].unpack(stored)[0], expected), name
        if Image.open(path).format not in (*FORMATS, "MPO"):  # a JPEG file of two pictures
            with pytest.raises(BadMedia, match="AVIF, got"):
                picture_size(raw)
        else:
            assert sorted(picture_size(raw)) == sorted(expected.shape[:2])
            assert np.array_equal(np.asarray(to_rgb(open_picture(raw, FORMATS))), expected), name
    assert len(ids) > 100


@pytest.mark.parametrize("orientation", [None, 6])
@pytest.mark.parametrize("mode", MODES)
def test_a_picture_in_memory_is_as_vllm_takes_it(mode: str, orientation: int | None) -> None:
    from vllm.multimodal.parse import MultiModalDataParser

    image = picture(mode)
    if orientation is not None:
        image.getexif()[0x0112] = orientation
    before = (image.mode, image.size, image.tobytes())
    if mode[0] in "IF":
        with pytest.raises(BadMedia, match="at most 8 bits a channel"):
            Chunk.image(image)
        return
    ours = as_rgb(image)
    assert (image.mode, image.size, image.tobytes()) == before  # the caller's stays as it is
    if mode == "La":  # vLLM cannot convert it
        assert np.array_equal(ours, as_rgb(ImageOps.exif_transpose(image).convert("LA")))
        return
    if mode == "RGBa":  # vLLM drops its alpha; files never have this mode
        assert np.array_equal(ours, as_rgb(ImageOps.exif_transpose(image).convert("RGBA")))
        return
    item = MultiModalDataParser()._parse_image_data(image)
    assert item is not None and np.array_equal(np.asarray(item.get(0)), ours)


def test_a_frame_that_its_owner_turned_to_is_the_one_seen() -> None:
    frames = [picture("RGB", seed) for seed in range(3)]
    film = Image.open(io.BytesIO(encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)))
    film.seek(2)
    assert np.array_equal(as_rgb(film), np.asarray(frames[2]))


def test_frames_of_a_video_are_seen_upright() -> None:
    turned = encoded(picture("RGB"), "PNG", exif=oriented(6))
    chunk = Chunk.video([turned, turned])
    assert chunk.media[0].shape == (2, 13, 7)

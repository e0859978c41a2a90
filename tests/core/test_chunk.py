"""Content identity, and bad media refused at the edge."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from ctxwin import Chunk
from ctxwin.errors import BadMedia
from ctxwin.hashing import digest
from ctxwin.media import as_rgb, pack_frames, pixels_digest, png, unpack_frames
from ctxwin.video import decode_video

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


def same(a: object, b: object) -> bool:
    """Equality that tells 1, 1.0 and True apart, and lists from each other by their items."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and repr(a) == repr(b)


@given(PLAIN, PLAIN)
def test_digests_differ_exactly_where_values_or_types_do(a: object, b: object) -> None:
    assert (digest(a) == digest(b)) == same(a, b)


class Id(int):
    """An integer that is fed by itself."""


@given(st.lists(st.integers(-3, 300)), st.lists(st.integers(), max_size=3))
def test_a_list_of_token_ids_has_the_digest_of_its_items(ids: list[int], large: list[int]) -> None:
    assert digest(ids + large) == digest([Id(i) for i in ids + large])


class Kind(int, Enum):
    """An integer whose text is its name."""

    ONE = 1


def test_equal_integers_have_one_digest_in_any_order() -> None:
    for members in ([Kind.ONE, 1], [1, Kind.ONE]):
        assert len({digest(member) for member in members}) == 1
    assert digest([Kind.ONE]) == digest([1])


def test_concatenation_is_no_identity() -> None:
    assert digest("ab", "c") != digest("a", "bc") != digest(["a", "bc"])
    assert digest(["a"], "b") != digest(["a", "b"])
    with pytest.raises(TypeError, match="identity must be of"):
        digest(object())


@pytest.fixture
def picture() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (12, 16, 3), dtype=np.uint8)


def test_a_chunk_is_what_the_model_sees(picture: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(picture).save(path)
    forms = [picture, Image.fromarray(picture), path, str(path), path.read_bytes()]
    assert len({Chunk.image(f).id for f in forms}) == 1
    assert Chunk.image(picture, label="x", pin=True).id == Chunk.image(picture).id
    assert Chunk.image(picture, text="t").id != Chunk.image(picture).id
    assert Chunk.image(picture).id != Chunk.video([picture]).id
    # Same bytes, another shape: two images.
    assert Chunk.image(picture).id != Chunk.image(picture.reshape(16, 12, 3)).id
    assert Chunk.text("12").id != Chunk.tokens([12]).id == Chunk.tokens(np.array([12])).id
    assert Chunk.message("user", "hi").id != Chunk.text("hi").id
    assert Chunk.image(path).source == str(path.resolve())


def test_a_copy_of_other_content_has_an_id_of_its_own() -> None:
    """The id is remembered, and copies take along what was remembered."""
    chunk = Chunk.text("a")
    first = chunk.id
    assert chunk.id == first
    other = chunk.model_copy(update={"parts": Chunk.text("b").parts})
    assert other.id == Chunk.text("b").id != first
    turn = chunk.model_copy(update={"role": "user"})
    assert turn.id == Chunk.message("user", "a").id != first
    assert chunk.model_copy(update={"label": "x"}).id == chunk.id == first
    assert chunk.model_copy(update={"as_frames": True}).id != first


def test_a_chunk_survives_json_without_pixels(picture: np.ndarray) -> None:
    chunk = Chunk.message("user", ["look", {"type": "image", "image": picture}, Chunk.text("!")])
    again = Chunk.model_validate_json(chunk.model_dump_json())
    assert again == chunk
    assert again.id == chunk.id
    assert again.pixels(again.media[0]) is None
    pixels = chunk.pixels(chunk.media[0])
    assert pixels is not None and np.array_equal(pixels[0], picture)
    with pytest.raises(ValueError, match="read-only"):  # others would be served what is drawn on it
        pixels[:] = 0
    assert chunk.light().pixels(chunk.media[0]) is None


def test_a_source_that_changed_is_not_the_chunks(picture: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(picture).save(path)
    chunk = Chunk.image(path).light()
    part = chunk.media[0]
    assert np.array_equal(chunk.pixels(part)[0], picture)  # type: ignore[index]
    Image.fromarray(255 - picture).save(path)
    assert chunk.pixels(part) is None
    path.unlink()
    assert chunk.pixels(part) is None


def test_frames_pack_without_loss(picture: np.ndarray) -> None:
    frames = np.stack([picture, 255 - picture])
    packed = pack_frames(frames)
    assert np.array_equal(unpack_frames(packed), frames)
    assert pixels_digest(frames) != pixels_digest(frames[::-1])
    with pytest.raises(BadMedia):
        unpack_frames(b"something else")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"", "must not be empty"),
        (b"not an image", "must be decodable"),
        (np.zeros((0, 4, 3), np.uint8), "must not be empty"),
        (np.zeros((4, 4), np.uint8), "HxWx3 uint8"),
        (np.zeros(60, np.uint8), r"encoded file, as of cv2.imencode, pass its bytes: x.tobytes\(\)"),
        (np.zeros((4, 4, 3), np.float32), "HxWx3 uint8"),
        ("missing.png", "readable file"),
        (12, "must be a path"),
    ],
)
def test_bad_images(bad: object, message: str) -> None:
    with pytest.raises(BadMedia, match=message):
        Chunk.image(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("foreign", "meant"),
    [
        (lambda x: x[..., 0], lambda x: x[..., [0, 0, 0]]),
        (lambda x: x[..., :1], lambda x: x[..., [0, 0, 0]]),
        (lambda x: np.dstack([x, np.full(x.shape[:2], 255, np.uint8)]), lambda x: x),
        (lambda x: np.dstack([x, np.zeros(x.shape[:2], np.uint8)]), lambda x: np.full_like(x, 255)),
        (lambda x: x.transpose(2, 0, 1), lambda x: x),
        (lambda x: x / np.float32(255), lambda x: x),
        (lambda x: x.astype(np.uint16) * 257, lambda x: x),
    ],
    ids=["grey", "one channel", "alpha", "clear", "channels first", "floats", "16 bits"],
)
@given(arrays(np.uint8, st.tuples(st.integers(5, 9), st.integers(5, 9), st.just(3))))
def test_the_remedy_for_another_array_gives_the_picture_that_was_meant(
    foreign: Callable[[np.ndarray], np.ndarray], meant: Callable[[np.ndarray], np.ndarray], pixels: np.ndarray
) -> None:
    with pytest.raises(BadMedia) as refused:
        Chunk.image(foreign(pixels))
    code = re.search(r"Image\.fromarray\(.+\)\)|\(x .+'\)|x\.transpose\(.+\)", str(refused.value))
    assert code, refused.value
    remedied = eval(code[0], {"Image": Image, "x": foreign(pixels)})  # as a reader of the message would type it
    assert np.abs(as_rgb(remedied).astype(int) - meant(pixels)).max() <= 1  # floats are cut off, not rounded


@pytest.mark.parametrize("make", [Chunk.image, Chunk.video, Chunk.audio])
@pytest.mark.parametrize("address", ["https://example.org/a", "data:image/png;base64," + "A" * 9000, "rtsp://camera/1"])
def test_addresses_are_refused_by_name(make: Callable[[str], Chunk], address: str) -> None:
    with pytest.raises(BadMedia, match="URLs are not opened, pass the file's bytes") as refused:
        make(address)
    assert len(str(refused.value)) < 400


@given(arrays(np.float64, (4, 5, 3), elements=st.floats(0, 1)))
def test_pixels_that_are_no_bytes_are_no_picture_to_send(pixels: np.ndarray) -> None:
    with pytest.raises(BadMedia, match=r"dtype float64; convert it first: \(x \* 255\)"):
        png(pixels)
    whole = (pixels * 255).astype("uint8")
    assert np.array_equal(as_rgb(png(whole)), whole)


@pytest.mark.parametrize("dtype", ["bool", "int64", "uint16"])
def test_the_conversion_that_is_named_makes_a_picture(dtype: str, picture: np.ndarray) -> None:
    x = picture > 99 if dtype == "bool" else picture.astype(dtype) * (257 if dtype == "uint16" else 1)
    with pytest.raises(BadMedia, match=f"dtype {dtype}; convert it first: ") as refused:
        Chunk.image(x)
    named = str(refused.value).partition("convert it first: ")[2].partition(" if ")[0]
    assert np.array_equal(as_rgb(eval(named, {"x": x})), (x * 255 if dtype == "bool" else picture))


@pytest.mark.parametrize("held", ["file", "buffer", "tensor"])
def test_what_holds_a_picture_is_refused_with_the_way_to_it(held: str, picture: np.ndarray, tmp_path: Path) -> None:
    import torch

    Image.fromarray(picture).save(path := tmp_path / "x.png")
    ways: dict[str, tuple[Any, str]] = {
        "file": (path.open("rb"), "what its read() returns"),
        "buffer": (io.BytesIO(path.read_bytes()), "its getvalue()"),
        "tensor": (torch.from_numpy(picture), "x.cpu().numpy()"),
    }
    with pytest.raises(BadMedia, match="got .*; pass " + re.escape(ways[held][1])):
        Chunk.image(ways[held][0])


@pytest.mark.parametrize("name", ["start", "end", "fps", "frames", "sampling_rate"])
@pytest.mark.parametrize("value", ["1", True, [1], b"1", 1j, float("nan"), {}], ids=repr)
def test_what_is_no_number_is_none_of_seconds_frames_and_rates(name: str, value: Any, picture: np.ndarray) -> None:
    sound = np.zeros(16_000, np.float32)
    makes: list[Callable[[], Chunk]] = []
    if name != "sampling_rate":
        makes.append(lambda: Chunk.video("there is no such file.mp4", **{name: value}))
    if name == "fps":
        makes.append(lambda: Chunk.video([picture], fps=value))
    if name in ("start", "end", "sampling_rate"):
        makes.append(lambda: Chunk.audio(sound, **{"sampling_rate": 16_000, name: value}))
    for make in makes:
        with pytest.raises((TypeError, BadMedia), match=r"(must be|range must).*got ") as refused:
            make()
        assert repr(value) in str(refused.value) and "no such file" not in str(refused.value)


def test_numbers_of_numpy_are_numbers(picture: np.ndarray) -> None:
    sound = np.zeros(16_000, np.float32)
    assert Chunk.audio(sound, np.int32(16_000), end=np.float32(0.5)).id == Chunk.audio(sound, 16_000, end=0.5).id
    assert Chunk.video([picture], fps=np.float32(1)).id == Chunk.video([picture], fps=1.0).id


@pytest.mark.parametrize(
    "block", [{"type": "image_url", "image_url": {"url": "x"}}, np.zeros((9, 9, 3)), b"x" * 999, None]
)
def test_what_is_no_block_is_refused_with_the_form_of_a_picture(block: Any) -> None:
    with pytest.raises(
        ValueError, match=r'a content block must be .*, got .*; a picture is {"type": "image"'
    ) as refused:
        Chunk.message("user", ["look", block])
    assert len(str(refused.value)) < 400


def test_a_cut_image_is_refused(picture: np.ndarray) -> None:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    with pytest.raises(BadMedia, match="decodable"):
        as_rgb(buffer.getvalue()[:60])


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import cv2

    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 8, (64, 48))
    for i in range(32):
        writer.write(np.full((48, 64, 3), 8 * i, np.uint8))
    writer.release()
    return path


def test_sampling_rules(clip: Path) -> None:
    frames, fps = decode_video(clip, fps=1.0)
    assert fps == 1.0
    assert [round(f.mean() / 8) for f in frames] == [0, 8, 16, 24]
    frames, fps = decode_video(clip, start=1.0, end=3.0, frames=3)
    assert [round(f.mean() / 8) for f in frames] == [8, 15, 23]  # what is shown at linspace(1, 2.875, 3) s
    assert fps == pytest.approx(1.5)
    whole = Chunk.video(clip, fps=1.0)
    assert whole.media[0].shape == (4, 48, 64)
    assert whole.light().pixels(whole.media[0]) is not None
    assert Chunk.video(clip, start=1.0, fps=1.0).id != whole.id


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fps": 1.0, "frames": 2}, "fps or by frames, got both"),
        ({"fps": 0.0}, "fps must be from 0.001 to 1000"),
        ({"frames": 0}, "frames must be an int >= 1"),
        ({"start": 3.0, "end": 2.0}, "0 <= start < end"),
        ({"start": -1.0}, "0 <= start < end"),
        ({"start": 1.0, "end": 9.0}, "must lie inside the file"),
        ({"start": 7.0}, "must lie inside the file"),
    ],
)
def test_bad_ranges(clip: Path, options: dict[str, float], message: str) -> None:
    with pytest.raises(BadMedia, match=message):
        Chunk.video(clip, **options)  # type: ignore[arg-type]


def test_truncated_and_foreign_videos(clip: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(clip.read_bytes()[: clip.stat().st_size // 2])
    with pytest.raises(BadMedia, match="which is truncated: the file ends early"):
        Chunk.video(cut)
    noise = tmp_path / "noise.mp4"
    noise.write_bytes(b"no video" * 100)
    with pytest.raises(BadMedia, match="must be decodable"):
        Chunk.video(noise)
    with pytest.raises(BadMedia, match="readable file"):
        Chunk.video(tmp_path / "none.mp4")
    with pytest.raises(BadMedia, match="at least one frame"):
        Chunk.video([])
    with pytest.raises(BadMedia, match="one size"):
        Chunk.video([np.zeros((4, 4, 3), np.uint8), np.zeros((6, 4, 3), np.uint8)])
    with pytest.raises(BadMedia, match="need a video path"):
        Chunk.video([np.zeros((4, 4, 3), np.uint8)], start=1.0)


def test_bad_text_tokens_and_roles() -> None:
    for make, message in (
        (lambda: Chunk.text(""), "non-empty str"),
        (lambda: Chunk.text("caf\udce9"), r"must be Unicode, got half of a surrogate pair, '\\udce9'"),
        (lambda: Chunk.image(np.zeros((4, 4, 3), np.uint8), text="\ud800"), "text must be Unicode"),
        (lambda: Chunk.text("a", label="caf\udce9.png"), "^label must be Unicode"),
        (lambda: Chunk.text("a", priority=math.nan), "^priority must be a finite number, got nan$"),
        (lambda: Chunk.text("a", lable="b"), "^lable must be left out"),
        (lambda: Chunk.tokens([]), "non-empty list"),
        (lambda: Chunk.tokens([-1]), "ids >= 0"),
        (lambda: Chunk.tokens("12"), "ids >= 0, got '12'"),
        (lambda: Chunk.tokens([1.5]), r"ids >= 0, got \[1.5\]"),
        (lambda: Chunk.tokens(np.array([[1, 2]])), "ids >= 0, got array"),
        (lambda: Chunk.message("robot", "x"), "role must be"),  # type: ignore[arg-type]
        (lambda: Chunk.message("user", []), "must have content"),
        (lambda: Chunk.message("user", None), "content must be a str or a list"),  # type: ignore[arg-type]
        (lambda: Chunk.video(0), "a video must be a path"),  # type: ignore[arg-type]
        (lambda: Chunk.message("user", [{"type": "smell"}]), "content block must be"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(TypeError, match="text must be a str, got int"):
        Chunk.image(np.zeros((4, 4, 3), np.uint8), text=5)  # type: ignore[arg-type]


def test_a_file_whose_name_is_not_unicode_is_as_media_in_memory(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.png")
    path.write_bytes(png(np.zeros((4, 4, 3), np.uint8)))
    chunk = Chunk.image(path)
    assert chunk.source is None and chunk.pixels(chunk.media[0]) is not None
    assert Chunk.model_validate_json(chunk.model_dump_json()) == chunk


@pytest.mark.parametrize("block", [{"type": "text", "text": "a note"}, Chunk.text("a note"), "a note"])
def test_a_block_alone_is_a_message_of_one_block(block: Any) -> None:
    assert Chunk.message("user", block) == Chunk.message("user", [block])
    assert Chunk.message("user", block).parts == Chunk.text("a note").parts


def test_a_buffer_that_is_filled_again_does_not_change_a_chunk(picture: np.ndarray) -> None:
    """OpenCV's ``read(buffer)`` and sound cards write every frame into the same memory."""
    frame, samples = picture.copy(), np.linspace(-1, 1, 800, dtype=np.float32)
    seen, heard = Chunk.image(frame), Chunk.audio(samples, 8000)
    wanted = samples.copy()
    frame[:] = 0
    samples[:] = 0
    assert np.array_equal(seen.pixels(seen.media[0])[0], picture)  # type: ignore[index]
    assert np.array_equal(heard.pixels(heard.media[0]), wanted)  # type: ignore[arg-type]


def test_a_message_is_what_the_chunks_in_it_are(picture: np.ndarray) -> None:
    frames = [picture, picture // 2]
    clip = Chunk.video(frames, fps=1.0, as_frames=True, keep_source=False, pin=True).drawn_from("library")
    turn = Chunk.message("user", ["look", clip])
    assert (turn.as_frames, turn.keep_source, turn.pin, turn.origin) == (True, False, True, "library")
    block = {"type": "video", "video": frames, "fps": 1.0, "as_frames": True}
    assert Chunk.message("user", ["look", block]).id == turn.id
    assert not Chunk.message("user", [clip], pin=False).pin
    plain = Chunk.video(frames, fps=1.0)
    assert Chunk.message("user", [plain, Chunk.image(picture)]).as_frames is False
    with pytest.raises(ValueError, match="as_frames must be the same for all videos of a message"):
        Chunk.message("user", [clip, plain])
    assert Chunk.message("user", [clip, plain], as_frames=True).as_frames
    with pytest.raises(ValueError, match=r"video blocks must hold type, video and .*as_frames.*, got \['rate'\]"):
        Chunk.message("user", [{"type": "video", "video": frames, "rate": 1.0}])


def test_importing_ctxwin_loads_no_heavy_library() -> None:
    """Nor does naming everything public, up to the engine that is opened."""
    code = (
        "import sys, ctxwin; from ctxwin import *; import ctxwin.cli.main;"
        "heavy = [m for m in ('torch', 'vllm', 'transformers', 'cv2', 'matplotlib') if m in sys.modules];"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

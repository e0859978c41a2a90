"""Sound as chunks: content identity, what is refused at the edge, and the lossless form it is kept in."""

from __future__ import annotations

import io
import struct
import sys
import tracemalloc
import wave
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin import Chunk
from ctxwin import audio as sound
from ctxwin.audio import as_samples, pack_samples, resample, samples_digest
from ctxwin.errors import BadMedia, MissingExtra

RATE = 8000


@pytest.fixture
def samples() -> np.ndarray:
    """A second in 16 bits, as a WAV file gives it."""
    return (np.random.default_rng(0).integers(-9999, 9999, RATE) / 32768).astype(np.float32)


def wav(samples: np.ndarray, width: int = 2, channels: int = 1, rate: int = RATE) -> bytes:
    """By the standard library's writer: ``samples`` from -1 to 1 in each of the channels."""
    scaled = np.round(samples.astype(np.float64) * 2.0 ** (8 * width - 1)).astype(np.int64)
    raw = b"".join((int(x) + 128 if width == 1 else int(x)).to_bytes(width, "little", signed=width > 1) for x in scaled)
    frames = b"".join(raw[i : i + width] * channels for i in range(0, len(raw), width))
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(width)
        writer.setframerate(rate)
        writer.writeframes(frames)
    return buffer.getvalue()


def test_a_chunk_is_what_the_model_hears(samples: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(wav(samples))
    made = Chunk.audio(samples, RATE)
    forms = [path, str(path), path.read_bytes(), wav(samples, channels=2), pack_samples(samples, RATE)]
    assert {Chunk.audio(f).id for f in forms} == {made.id}
    assert Chunk.audio(samples, RATE, label="x").id == made.id
    others = [
        Chunk.audio(samples, RATE, text="t"), Chunk.audio(samples, 2 * RATE), Chunk.audio(samples, RATE, end=0.5),
        Chunk.message("user", [made]),
    ]  # fmt: skip
    assert len({made.id, *(other.id for other in others)}) == 5
    assert Chunk.audio(path, start=0.25, end=0.5).id == Chunk.audio(samples[RATE // 4 : RATE // 2], RATE).id
    part = Chunk.audio(path, start=0.25, text="now").media[0]
    assert (part.media, part.shape, part.rate, part.start) == ("audio", (1, 1, RATE * 3 // 4), RATE, 0.25)
    assert Chunk.message("user", [{"type": "audio", "audio": samples, "sampling_rate": RATE}]).parts == made.parts


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_files_of_all_widths(width: int, samples: np.ndarray) -> None:
    got, rate = as_samples(wav(samples, width, channels=3))
    assert rate == RATE and got.dtype == np.float32
    np.testing.assert_allclose(got, samples, rtol=0, atol=1 / 128 if width == 1 else 1e-7)


def test_samples_come_back_bit_for_bit(samples: np.ndarray) -> None:
    """Beyond full scale and below 16 bits, too."""
    odd = np.float32(3.0) * samples + np.float32(1e-9)
    part = Chunk.audio(odd, 44100).media[0]
    back = part.unpack(part.pack(odd))
    assert back.tobytes() == odd.tobytes() and part.digest(back) == part.content == samples_digest(odd, 44100)


def test_a_file_is_read_again_only_where_it_is_the_same(samples: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(wav(samples))
    chunk = Chunk.audio(path, start=0.5).light()
    found = chunk.pixels(chunk.media[0])
    assert found is not None and np.array_equal(found, samples[RATE // 2 :])
    path.write_bytes(wav(-samples))
    assert chunk.pixels(chunk.media[0]) is None
    path.unlink()
    assert chunk.pixels(chunk.media[0]) is None


def test_resampling_keeps_the_sound() -> None:
    at = np.arange(48000) / 48000
    tone = np.sin(2 * np.pi * 440 * at).astype(np.float32)
    got = resample(tone, 48000, 16000)
    assert got.dtype == np.float32 and len(got) == 16000 and resample(tone, 48000, 48000) is tone
    np.testing.assert_allclose(got[500:-500], tone[::3][500:-500], atol=2e-3)


def test_what_is_no_sound_is_refused(samples: np.ndarray, tmp_path: Path) -> None:
    held = wav(samples)
    cases = [
        (lambda: Chunk.audio(samples), "needs its sampling_rate"),
        (lambda: Chunk.audio(held, RATE), "a file has its own"),
        (lambda: Chunk.audio(samples.astype(np.float64), RATE), "float32 mono, got shape .8000,. dtype float64"),
        (lambda: Chunk.audio(samples.reshape(2, -1), RATE), "float32 mono"),
        (lambda: Chunk.audio(samples[:0], RATE), "at least one sample"),
        (lambda: Chunk.audio(np.append(samples, np.float32("nan")), RATE), "must be finite"),
        (lambda: Chunk.audio(samples, 3), "must be an integer from 1,000 to 384,000"),
        (lambda: Chunk.audio(samples, 16000.0), "an integer"),  # type: ignore[arg-type]
        (lambda: Chunk.audio(samples, RATE, start=0.5, end=0.5), "0 <= start < end"),
        (lambda: Chunk.audio(samples, RATE, start=-1), "0 <= start < end"),
        (lambda: Chunk.audio(samples, RATE, start=0.1, end=0.10001), "at least one sample"),
        (lambda: Chunk.audio(held, end=1.5), "ends at 1.000 s"),
        (lambda: Chunk.audio(held, start=1.0), "ends at 1.000 s"),
        (lambda: Chunk.audio(b""), "must not be empty"),
        (lambda: Chunk.audio(tmp_path / "none.wav"), "must be a readable file"),
        (lambda: Chunk.audio(held[:20]), "must be decodable, got audio in memory: .*Malformed"),
        (lambda: Chunk.audio(held[:-1000]), r"is truncated: it ends early after 0.938 s; fetch .* an end before that"),
        (lambda: Chunk.audio(b"RIFF" + held[4:30]), "must be decodable"),
        (lambda: Chunk.audio(3), "must be a path, bytes or a float32 array"),  # type: ignore[arg-type]
        (lambda: Chunk.audio([0.5], RATE), r"got list; pass np.array\(x, dtype='float32'\)"),  # type: ignore[arg-type]
        (lambda: Chunk.audio((samples, RATE)), "got tuple; pass its samples and sampling_rate apart"),  # type: ignore[arg-type]
        (lambda: Chunk.audio(torch.zeros(8), RATE), r"got Tensor; pass x.cpu\(\).numpy\(\)"),  # type: ignore[arg-type]
    ]
    for make, message in cases:
        with pytest.raises(BadMedia, match=message):
            make()


def test_what_a_message_says_of_an_array_makes_a_sound_of_it(samples: np.ndarray) -> None:
    whole = (samples * 32768).astype(np.int16)
    for wrong in (samples.astype(float), whole, whole.astype(np.int32) << 16, np.stack([whole, whole], 1)):
        for array in (wrong, wrong.T):
            with pytest.raises(BadMedia, match="convert it first: ") as caught:
                Chunk.audio(array, RATE)
            converted = eval(str(caught.value).partition("convert it first: ")[2], {"x": array})
            assert Chunk.audio(converted, RATE).id == Chunk.audio(samples, RATE).id
    with pytest.raises(BadMedia, match=r"convert it first: \(x / 128 - 1\)"):
        Chunk.audio(np.zeros(8, dtype=np.uint8), RATE)


def test_only_the_range_of_a_long_file_is_read(tmp_path: Path) -> None:
    path, size = tmp_path / "long.wav", 2_000_000_000
    head = bytearray(wav(np.zeros(1, dtype=np.float32))[:44])
    struct.pack_into("<I", head, 40, size)
    with path.open("wb") as file:  # a sparse one
        file.write(head)
        file.seek(RATE * 2, io.SEEK_CUR)
        file.write(b"\1\0")
        file.truncate(44 + size)
    tracemalloc.start()
    got = as_samples(path, start=1.0, end=2.0)[0]
    with pytest.raises(BadMedia, match="at most 100,000,000 samples in all channels, got 1,000,000,000"):
        Chunk.audio(path)
    assert len(got) == RATE and got[0] == 1 / 32768 and tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x80000000])
def test_a_recorder_that_could_not_seek_leaves_the_size_open(samples: np.ndarray, size: int) -> None:
    held = bytearray(wav(samples))
    struct.pack_into("<I", held, 40, size)
    assert Chunk.audio(bytes(held)).id == Chunk.audio(samples, RATE).id


@pytest.mark.parametrize("kind", ["ULAW", "ALAW", "IMA_ADPCM", "MS_ADPCM", "GSM610", "DOUBLE", "RIFX", "RF64", "WAVEX"])
def test_wav_files_of_all_kinds_are_heard_as_soundfile_hears_them(kind: str, samples: np.ndarray) -> None:
    soundfile, buffer = pytest.importorskip("soundfile"), io.BytesIO()
    options = {"format": "WAV", "subtype": kind}
    if kind in ("RIFX", "RF64", "WAVEX"):
        options = {"format": kind, "subtype": "PCM_24"} if kind != "RIFX" else {"format": "WAV", "endian": "BIG"}
    heard = samples if kind == "GSM610" else np.stack([samples, -0.5 * samples], 1)
    soundfile.write(buffer, heard, RATE, **options)
    theirs = soundfile.read(io.BytesIO(buffer.getvalue()), dtype="float32", always_2d=True)[0].mean(1)
    ours, rate = as_samples(buffer.getvalue())
    assert rate == RATE and np.array_equal(ours, theirs)


def test_sound_is_bounded(samples: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound, "MAX_SAMPLES", 4000)
    with pytest.raises(BadMedia, match="at most 4,000 samples in all channels, got 8,000; pass a shorter"):
        Chunk.audio(samples, RATE)
    assert Chunk.audio(wav(samples, channels=2), end=0.25)
    with pytest.raises(BadMedia, match="got 4,800"):
        Chunk.audio(wav(samples, channels=2), end=0.3)


@given(st.binary(max_size=60), st.integers(0, 43))
@settings(max_examples=300, deadline=None)
def test_a_damaged_header_is_bad_media(noise: bytes, at: int) -> None:
    held = bytearray(wav(np.zeros(50, dtype=np.float32)))
    held[at : at + len(noise)] = noise
    with suppress(BadMedia):
        Chunk.audio(b"RIFF" + bytes(held[4:]))


def test_a_size_that_lies_allocates_nothing(samples: np.ndarray) -> None:
    held = bytearray(wav(samples))
    struct.pack_into("<I", held, 40, 2**31)  # of the samples
    struct.pack_into("<I", held, 4, 2**31 + 36)
    with suppress(BadMedia):
        assert len(as_samples(bytes(held))[0]) <= RATE


def test_a_missing_extra_is_named(samples: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(MissingExtra, match=r"scipy is not installed; run pip install 'ctxwin\[audio\]'"):
        pack_samples(samples, RATE)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(MissingExtra, match=r"soundfile is not installed; run pip install 'ctxwin\[audio\]'"):
        Chunk.audio(b"fLaC" + bytes(99))


def test_other_formats_by_soundfile(samples: np.ndarray) -> None:
    soundfile = pytest.importorskip("soundfile")
    buffer = io.BytesIO()
    soundfile.write(buffer, np.stack([samples, samples], axis=1), RATE, format="FLAC", subtype="PCM_16")
    assert Chunk.audio(buffer.getvalue()).id == Chunk.audio(samples, RATE).id
    assert Chunk.audio(buffer.getvalue(), start=0.5).id == Chunk.audio(samples[RATE // 2 :], RATE).id
    with pytest.raises(BadMedia, match="must be decodable"):
        Chunk.audio(buffer.getvalue()[:30])
    with pytest.raises(BadMedia, match=r"ends at 1\.000 s"):
        Chunk.audio(buffer.getvalue(), end=2.0)


def test_a_video_has_its_track_behind_it(samples: np.ndarray) -> None:
    frames = [np.zeros((8, 8, 3), dtype=np.uint8)] * 2
    made = Chunk.video(frames, audio=samples, sampling_rate=RATE, text="t")
    assert [(p.media, p.track) for p in made.media] == [("video", False), ("audio", True)]
    apart = Chunk(parts=(*Chunk.video(frames, text="t").parts, *Chunk.audio(samples, RATE).parts))
    assert made.id not in (apart.id, Chunk.video(frames, text="t").id)
    with pytest.raises(BadMedia, match="as frames has no track"):
        Chunk.video(frames, audio=samples, sampling_rate=RATE, as_frames=True)
    for wrong in ({"parts": made.parts[2:]}, {"parts": made.parts, "as_frames": True}):
        with pytest.raises(ValueError, match="a track must directly follow its video"):
            Chunk(**wrong)
    with pytest.raises(ValueError, match="rate and track are of sound alone"):
        made.media[0].model_validate(made.media[0].model_dump() | {"rate": RATE})

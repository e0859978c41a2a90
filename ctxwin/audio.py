"""Sound as float32 samples: decoding (soundfile: WAV, FLAC, Ogg, MP3), resampling, lossless storage.

SciPy and soundfile are imported where they are used, so that ``import ctxwin`` loads neither.
"""

from __future__ import annotations

import io
import math
import re
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxwin.errors import BadMedia, MissingExtra
from ctxwin.extras import optional_imports
from ctxwin.hashing import digest
from ctxwin.media import check_file, other_form
from ctxwin.validation import check_numbers

if TYPE_CHECKING:
    import numpy as np

RATES = (1_000, 384_000)  # sane numbers of samples a second
MAX_SAMPLES = 100_000_000  # of all channels together, as decoded: four bytes each, 35 minutes at 48 kHz
_TRUNCATED = re.compile(r"data : (\d+) \(should be")  # libsndfile's log of a WAV file
_PLACEHOLDER = 0x7FFF0000
"""Sizes from here on may stand for an unknown one: FFmpeg (4 GiB) and SoX and arecord (2 GiB) write them into pipes."""
_FULL_SCALE = {"int16": 32768, "int32": 2147483648}


def samples_digest(samples: np.ndarray, rate: int) -> str:
    """Return the identity of mono samples ``[N]`` float32 at ``rate`` samples per second."""
    import numpy as np

    return digest("samples", "float32", rate, len(samples), np.ascontiguousarray(samples).tobytes())


def as_samples(
    audio: Any, sampling_rate: int | None = None, start: float | None = None, end: float | None = None
) -> tuple[np.ndarray, int]:
    """Return mono float32 samples ``[N]`` of ``[start, end)`` seconds, and their rate; channels are averaged.

    Args:
        audio: path, encoded bytes, or float32 array ``[N]``.
        sampling_rate: of an array; a file has its own.
        start, end: seconds; None: from the beginning, to the end.

    Raises:
        BadMedia: empty, undecodable, not finite, outside `RATES` or over `MAX_SAMPLES` (read from a header before anything is
            decoded), or a range outside the sound.
        MissingExtra: soundfile is not installed, for a file.

    Cost: of a plain WAV file only its header and the range are read.
    """
    import numpy as np

    if isinstance(audio, np.ndarray):
        if audio.ndim != 1 or audio.dtype != np.float32:
            raise BadMedia(
                f"an audio array must be [N] float32 mono, got shape {audio.shape} dtype {audio.dtype}; {_conversion(audio)}"
            )
        if sampling_rate is None:
            raise BadMedia("an audio array needs its sampling_rate, got none; pass e.g. sampling_rate=16000")
        rate = _validate_rate(sampling_rate, len(audio))
        first, last = _range(start, end, rate, len(audio))
        samples = np.array(audio[first:last])  # its owner may write what comes next into it
    elif not isinstance(audio, str | Path | bytes | bytearray):
        ways = {"list": "; pass np.array(x, dtype='float32')", "tuple": "; pass its samples and sampling_rate apart"}
        remedy = ways.get(kind := type(audio).__name__) or other_form(audio)
        raise BadMedia(f"audio must be a path, bytes or a float32 array, got {kind}{remedy}")
    else:
        if sampling_rate is not None:
            raise BadMedia("sampling_rate is for arrays; a file has its own, so omit it")
        samples, rate = _decode(audio, start, end)
    if not np.isfinite(samples).all():
        raise BadMedia("audio samples must be finite, got NaN or infinity")
    return samples, rate


def resample(samples: np.ndarray, rate: int, target_rate: int) -> np.ndarray:
    """Resample sound to ``target_rate`` samples per second, by SciPy's polyphase filter; unchanged if that is ``rate``."""
    if rate == target_rate:
        return samples
    import numpy as np

    with optional_imports("audio"):
        from scipy.signal import resample_poly
    common = math.gcd(rate, target_rate)
    return np.asarray(resample_poly(samples, target_rate // common, rate // common), dtype=np.float32)


def pack_samples(samples: np.ndarray, rate: int) -> bytes:
    """Return lossless bytes of mono samples: a WAV file of float32."""
    with optional_imports("audio"):
        from scipy.io import wavfile
    buffer = io.BytesIO()
    wavfile.write(buffer, rate, samples)
    return buffer.getvalue()


def _validate_rate(rate: Any, frames: int) -> int:
    if not isinstance(rate, Integral) or not RATES[0] <= int(rate) <= RATES[1]:
        raise BadMedia(f"the sampling rate must be an integer from {RATES[0]:,} to {RATES[1]:,} a second, got {rate!r}")
    if frames < 1:
        raise BadMedia("audio must hold at least one sample, got none")
    return int(rate)


def _range(start: float | None, end: float | None, rate: int, frames: int, channels: int = 1) -> tuple[int, int]:
    """Return the index of the first sample and the one after the last."""
    check_numbers(start=start, end=end)
    begin = 0.0 if start is None else float(start)
    if not 0 <= begin < math.inf or (end is not None and not begin < end < math.inf):
        raise BadMedia(f"an audio range must be 0 <= start < end, got start={start} end={end}")
    first, last = round(begin * rate), frames if end is None else round(end * rate)
    if first >= frames or last > frames:
        raise BadMedia(f"the sound ends at {frames / rate:.3f} s, got start={start} end={end}; pass a range inside it")
    if (last - first) * channels > MAX_SAMPLES:
        raise BadMedia(
            f"audio must have at most {MAX_SAMPLES:,} samples in all channels, got {(last - first) * channels:,}; pass a "
            "shorter range by start and end"
        )
    if first == last:
        raise BadMedia(f"an audio range must hold at least one sample, got start={start} end={end}")
    return first, last


def _conversion(array: np.ndarray) -> str:
    """Return how an array ``x`` of other values or another shape becomes mono samples."""
    if array.ndim not in (1, 2):
        return "pass the samples of one sound, e.g. x.squeeze()"
    scaled = "x" if array.dtype.kind == "f" else f"(x / {_FULL_SCALE.get(array.dtype.name, 32768)})"
    if array.dtype == "uint8":
        scaled = "(x / 128 - 1)"
    # Of soundfile and SciPy channels are the columns, of librosa and torchaudio the rows.
    mixed = "" if array.ndim == 1 else f".mean(axis={int(array.shape[0] >= array.shape[1])})"
    return f"convert it first: {scaled}{mixed}.astype('float32')"


def _decode(audio: str | Path | bytes | bytearray, start: float | None, end: float | None) -> tuple[np.ndarray, int]:
    if isinstance(audio, str | Path):
        check_file(audio, "an audio")
    if not audio:
        raise BadMedia("audio must not be empty, got 0 bytes")
    name = repr(str(audio)) if isinstance(audio, str | Path) else "audio in memory"
    try:
        with Path(audio).open("rb") if isinstance(audio, str | Path) else io.BytesIO(audio) as file:
            return _read(file, start, end)
    except (BadMedia, MissingExtra):
        raise
    except Exception as error:  # readers raise arbitrary errors on malformed files, MemoryError included
        reason = getattr(error, "error_string", error)  # libsndfile's without the address of the file object
        raise BadMedia(f"audio must be decodable, got {name}: {reason}") from error


def _read(file: Any, start: float | None, end: float | None) -> tuple[np.ndarray, int]:
    """Read a range by libsndfile, which seeks to it where the format allows that."""
    import numpy as np

    with optional_imports("audio"):
        import soundfile
    with soundfile.SoundFile(file) as opened:
        rate = _validate_rate(int(opened.samplerate), int(opened.frames))
        stated = _TRUNCATED.search(opened.extra_info)
        if stated and int(stated[1]) < _PLACEHOLDER and (end is None or round(end * rate) > opened.frames):
            raise ValueError(
                f"the file is truncated: it ends early after {opened.frames / rate:.3f} s; fetch or record it again, or pass an "
                "end before that"
            )
        first, last = _range(start, end, rate, int(opened.frames), int(opened.channels))
        if first:  # GSM 6.10 cannot be sought in
            opened.seek(first)
        samples_in_file = opened.read(last - first, dtype="float32", always_2d=True)
    if len(samples_in_file) < last - first:
        raise ValueError("the file ends early; fetch or record it again")
    return np.asarray(samples_in_file.mean(axis=1, dtype=np.float32)), rate

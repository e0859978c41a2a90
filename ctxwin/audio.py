"""Sound as float32 samples: decoding (WAV by SciPy, other formats by soundfile), resampling, and the lossless form it is kept in.

SciPy and soundfile are imported where they are used, so that ``import ctxwin`` loads neither.
"""

from __future__ import annotations

import io
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxwin.errors import BadMedia, MissingExtra
from ctxwin.extras import optional_imports
from ctxwin.hashing import digest

if TYPE_CHECKING:
    import numpy as np

RATES = (1_000, 384_000)  # sane numbers of samples a second
MAX_SAMPLES = 100_000_000  # of all channels together, as decoded: four bytes each, 35 minutes at 48 kHz
_WAVES = (b"RIFF", b"RIFX", b"RF64")
_FULL_SCALE = {"uint8": 128.0, "int16": 32768.0, "int32": 2147483648.0}


def samples_digest(samples: np.ndarray, rate: int) -> str:
    """Identity of mono samples ``[N]`` float32 at ``rate`` samples a second."""
    import numpy as np

    return digest("samples", "float32", rate, len(samples), np.ascontiguousarray(samples).tobytes())


def as_samples(
    audio: Any, sampling_rate: int | None = None, start: float | None = None, end: float | None = None
) -> tuple[np.ndarray, int]:
    """Mono float32 samples ``[N]`` of ``[start, end)`` seconds, and how many there are a second; channels are averaged.

    Args:
        audio: path, encoded bytes, or float32 array ``[N]``.
        sampling_rate: of an array; a file says it itself.
        start, end: seconds; None: from the beginning, to the end.

    Raises:
        BadMedia: empty, undecodable, not finite, outside `RATES` or over `MAX_SAMPLES` (read from a header before anything is
            decoded), or a range outside the sound.
        MissingExtra: SciPy is not installed, or soundfile for a format other than WAV.
    """
    import numpy as np

    if isinstance(audio, np.ndarray):
        if audio.ndim != 1 or audio.dtype != np.float32:
            raise BadMedia(
                f"an audio array must be [N] float32 mono, got shape {audio.shape} dtype {audio.dtype}; convert it first, "
                "e.g. (x / 32768).mean(axis=0).astype('float32')"
            )
        if sampling_rate is None:
            raise BadMedia("an audio array needs its sampling_rate, got none; pass e.g. sampling_rate=16000")
        rate = _checked(sampling_rate, len(audio))
        first, last = _range(start, end, rate, len(audio))
        samples = np.ascontiguousarray(audio[first:last])
    else:
        if sampling_rate is not None:
            raise BadMedia("sampling_rate is for arrays; a file says its own, so leave it out")
        samples, rate = _decoded(audio, start, end)
    if not np.isfinite(samples).all():
        raise BadMedia("audio samples must be finite, got NaN or infinity")
    return samples, rate


def resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """The same sound at ``wanted`` samples a second, by SciPy's polyphase filter; as it is where that is ``rate``."""
    if rate == wanted:
        return samples
    import numpy as np

    with optional_imports("audio"):
        from scipy.signal import resample_poly
    common = math.gcd(rate, wanted)
    return np.asarray(resample_poly(samples, wanted // common, rate // common), dtype=np.float32)


def pack_samples(samples: np.ndarray, rate: int) -> bytes:
    """Lossless bytes of mono samples: a WAV file of float32."""
    with optional_imports("audio"):
        from scipy.io import wavfile
    buffer = io.BytesIO()
    wavfile.write(buffer, rate, samples)
    return buffer.getvalue()


def _checked(rate: Any, frames: int) -> int:
    if not isinstance(rate, int) or not RATES[0] <= rate <= RATES[1]:
        raise BadMedia(
            f"the sampling rate must be a whole number from {RATES[0]:,} to {RATES[1]:,} a second, got {rate}"
        )
    if frames < 1:
        raise BadMedia("audio must hold at least one sample, got none")
    return rate


def _range(start: float | None, end: float | None, rate: int, frames: int, channels: int = 1) -> tuple[int, int]:
    """First sample and the one behind the last."""
    begin = 0.0 if start is None else float(start)
    if begin < 0 or (end is not None and not begin < end):
        raise BadMedia(f"an audio range must be 0 <= start < end, got start={start} end={end}")
    first, last = round(begin * rate), frames if end is None else round(end * rate)
    if first >= frames or last > frames:
        raise BadMedia(
            f"the sound ends after {frames / rate:.3f} s, got start={start} end={end}; pass a range inside of it"
        )
    if (last - first) * channels > MAX_SAMPLES:
        raise BadMedia(
            f"audio must have at most {MAX_SAMPLES:,} samples in all channels, got {(last - first) * channels:,}; pass a "
            "shorter range by start and end"
        )
    if first == last:
        raise BadMedia(f"an audio range must hold at least one sample, got start={start} end={end}")
    return first, last


def _decoded(audio: Any, start: float | None, end: float | None) -> tuple[np.ndarray, int]:
    if not isinstance(audio, str | Path | bytes | bytearray):
        raise BadMedia(f"audio must be a path, bytes or a float32 array, got {type(audio).__name__}")
    if isinstance(audio, str | Path) and not Path(audio).is_file():
        raise BadMedia(f"an audio path must be a readable file, got {str(audio)!r}")
    if not audio:
        raise BadMedia("audio must not be empty, got 0 bytes")
    name = repr(str(audio)) if isinstance(audio, str | Path) else "audio in memory"
    try:
        with Path(audio).open("rb") if isinstance(audio, str | Path) else io.BytesIO(audio) as file:
            head = file.read(4)
            file.seek(0)
            return (_wave if head in _WAVES else _other)(file, start, end)
    except (BadMedia, MissingExtra):
        raise
    except Exception as error:  # whatever a reader raises on a file that somebody made up, MemoryError included
        raise BadMedia(f"audio must be decodable, got {name}: {error}") from error


def _wave(file: Any, start: float | None, end: float | None) -> tuple[np.ndarray, int]:
    """Of a WAV file, which is read as a whole; 24 bits come as the upper ones of 32."""
    import numpy as np

    with optional_imports("audio"):
        from scipy.io import wavfile
    with warnings.catch_warnings():  # chunks it does not know, and a file that is cut off: what is there counts
        warnings.simplefilter("ignore", wavfile.WavFileWarning)
        rate, held = wavfile.read(file)
    channels = 1 if held.ndim == 1 else held.shape[1]
    rate = _checked(int(rate), len(held))
    first, last = _range(start, end, rate, len(held), channels)
    taken = held[first:last]
    if taken.dtype.kind == "f":
        samples = taken.astype(np.float32)
    elif taken.dtype.name in _FULL_SCALE:
        scale = np.float32(_FULL_SCALE[taken.dtype.name])
        samples = (taken.astype(np.float32) - (scale if taken.dtype == np.uint8 else 0)) / scale
    else:
        raise BadMedia(f"a WAV file must have samples of 8, 16, 24 or 32 bits or floats, got {taken.dtype.name}")
    return samples if samples.ndim == 1 else samples.mean(axis=1, dtype=np.float32), rate


def _other(file: Any, start: float | None, end: float | None) -> tuple[np.ndarray, int]:
    """Of FLAC, Ogg, MP3 and what else libsndfile reads."""
    import numpy as np

    with optional_imports("audio"):
        import soundfile
    with soundfile.SoundFile(file) as opened:
        rate = _checked(int(opened.samplerate), int(opened.frames))
        first, last = _range(start, end, rate, int(opened.frames), int(opened.channels))
        opened.seek(first)
        held = opened.read(last - first, dtype="float32", always_2d=True)
    if len(held) < last - first:
        raise BadMedia(f"the file ended after {len(held)} of {last - first} samples: it is truncated")
    return held.mean(axis=1, dtype=np.float32), rate

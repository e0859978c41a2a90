"""From files to passages: what is found and placed as one chunk."""

import re
from collections.abc import Iterator
from pathlib import Path

from ctxwin.chunk import Chunk
from ctxwin.errors import BadMedia
from ctxwin.extras import optional_imports
from ctxwin.library.records import Passage
from ctxwin.video import decode_video

PICTURES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".ppm", ".avif"})
TEXTS = frozenset({".txt", ".md", ".rst", ".csv", ".json", ".html", ".xml", ".py", ".log"})
VIDEOS = frozenset({".mp4", ".m4v", ".avi", ".mov", ".mkv", ".webm", ".ts", ".m2ts"})
MAX_FILE_BYTES = 256 << 20
MAX_PAGES = 2000
MAX_TEXT = 1200  # characters of a passage; a paragraph that is longer is cut at ends of lines and blanks
_NOT_BLANK = re.compile(r"\S")
_PDF_SCALE = 1.0  # pixels a point: a page of A4 is 595 x 842
_CLIP_SECONDS = 4


def passages_of(name: str, data: bytes, caption: str = "") -> list[Passage]:
    """Cut a file, which its name's ending describes, into passages: paragraphs, its picture, its pages, clips of four seconds.

    ``caption`` is what search by words reads beside what stands in the file. Raises BadMedia for another type, a broken, empty or
    huge file, MissingExtra for a PDF without ``ctxwin[pdf]`` and a video without ``ctxwin[video]``.
    """
    ending = Path(name).suffix.lower()
    if len(data) > MAX_FILE_BYTES:
        raise BadMedia(f"a file must have at most {MAX_FILE_BYTES:,} bytes, got {len(data):,} in {name!r}; split it")
    if not data:
        raise BadMedia(f"a file must not be empty, got 0 bytes in {name!r}")
    if ending in PICTURES:
        return [Passage(chunk=Chunk.image(data, label=name), text=caption)]
    if ending in VIDEOS:
        return [Passage(chunk=clip, text=f"{caption} {clip.label}".strip()) for clip in _clips(name, data)]
    if ending == ".pdf":
        return [Passage(chunk=page, text=f"{caption} {written}".strip()) for page, written in _pages(name, data)]
    if ending in TEXTS:
        return [Passage(chunk=Chunk.text(t, label=name), text=f"{caption} {t}".strip()) for t in _texts(name, data)]
    suffixes = sorted(PICTURES | TEXTS | VIDEOS | {".pdf"})
    raise BadMedia(f"a file's name must end with one of {' '.join(suffixes)}, got {name!r}; convert it, or add a Chunk")


def cut(source: str | Path | bytes | Chunk, name: str, caption: str) -> tuple[list[Passage], int]:
    """Return the passages of a path, of the bytes of a file or of a chunk, and its size in bytes; raises as `passages_of`."""
    if isinstance(source, Chunk):
        words = " ".join(part.text for part in source.parts if part.kind == "text")
        size = len(words.encode()) + sum(m.shape[0] * m.shape[1] * m.shape[2] * 3 for m in source.media)
        chunk = source if source.label else source.model_copy(update={"label": name})
        return [Passage(chunk=chunk, text=f"{caption} {words}".strip())], size
    if isinstance(source, bytes):
        return passages_of(name, source, caption), len(source)
    path = Path(source)
    if not path.is_file():
        raise BadMedia(f"a file must be there and readable, got {str(path)!r}")
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise BadMedia(f"a file must have at most {MAX_FILE_BYTES:,} bytes, got {size:,} in {name!r}; split it")
    return passages_of(name, path.read_bytes(), caption), size


def _texts(name: str, data: bytes) -> list[str]:
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise BadMedia(f"a text file must be UTF-8, got {name!r}: {error}; convert it, e.g. with iconv") from None
    parts: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        for piece in _pieces(paragraph.strip()):
            if parts and len(parts[-1]) + len(piece) + 2 <= MAX_TEXT:
                parts[-1] += "\n\n" + piece
            else:
                parts.append(piece)
    if not parts:
        raise BadMedia(f"a text file must have text, got only blanks in {name!r}")
    return parts


def _pieces(paragraph: str) -> Iterator[str]:
    """Yield a paragraph, which begins and ends in no blank, in pieces: cut at the end of a line if there is one in the latter
    half of a piece, so that rows stay whole, else at a blank."""
    at = 0
    while len(paragraph) - at > MAX_TEXT:
        end = at + MAX_TEXT
        cut = paragraph.rfind("\n", at + MAX_TEXT // 2, end)
        cut = cut if cut >= 0 else max(paragraph.rfind(blank, at + 1, end) for blank in " \t\n")
        cut = cut if cut >= 0 else end
        yield paragraph[at:cut]
        at = _NOT_BLANK.search(paragraph, cut).start()  # type: ignore[union-attr]  # it ends in one
    if paragraph:
        yield paragraph[at:]


def _pages(name: str, data: bytes) -> Iterator[tuple[Chunk, str]]:
    with optional_imports():
        import pypdfium2 as pdfium

    try:
        with pdfium.PdfDocument(data) as pdf:
            if not 0 < len(pdf) <= MAX_PAGES:
                raise BadMedia(f"a PDF must have 1 to {MAX_PAGES} pages, got {len(pdf)} in {name!r}; split it")
            for number, page in enumerate(pdf, 1):
                label = f"{name}, page {number}"
                picture = page.render(scale=_PDF_SCALE).to_pil().convert("RGB")
                yield Chunk.image(picture, text=label, label=label), page.get_textpage().get_text_bounded()
    except pdfium.PdfiumError as error:
        raise BadMedia(f"a PDF must be readable, got {name!r}: {error}") from error


def _clips(name: str, data: bytes) -> Iterator[Chunk]:
    frames, _ = decode_video(data, fps=1.0, name=name)
    for begin in range(0, len(frames), _CLIP_SECONDS):
        label = f"{name}, {begin} s"
        yield Chunk.video(list(frames[begin : begin + _CLIP_SECONDS]), fps=1.0, text=label, label=label)

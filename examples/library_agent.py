"""Three readers ask a shelf of pictures and a PDF: what a search finds is linked into the reader's window, and asked about.

The shelf is a `Library`: each file is encoded and its KV computed once, when it is put there. For a question the window
places the two passages that the search finds; those that were read longest ago leave. The picture that is written shows
what was linked for every question, and what that cost. Without FILES the shelf holds pictures of the bundled model's
world, half of them as pages of a PDF, whose right answers are known.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import agent_options
import matplotlib
import numpy as np
import pypdfium2 as pdfium
import pypdfium2.raw as pdfium_c
from PIL import Image

from ctxwin import Answer, Chunk, Library, Window
from ctxwin.errors import CtxwinError
from ctxwin.policies import LeastRecentlyRead
from ctxwin.tiny import world

matplotlib.use("Agg")
import matplotlib.pyplot as plt

READERS = ("You read a catalogue.", "You answer visitors.", "You check facts.")
FILES, OPEN, QUESTIONS = 16, 4, 24  # on the shelf, in a window, by each reader
LANES = {
    "computed": "#c44e52",
    "formed": "#dd8452",
    "patched": "#55a868",
    "survivor": "#8172b3",
    "canonical": "#64b5cd",
}


@dataclass(frozen=True)
class Asked:
    """A question, the files that were linked for it, and its answer."""

    question: str
    linked: tuple[str, ...]
    answer: Answer


def write_pdf(path: Path, pages: Sequence[tuple[np.ndarray, str]]) -> None:
    """Write a PDF of one picture per page, a pixel per point, with invisible words that search finds."""
    with pdfium.PdfDocument.new() as pdf:
        for pixels, words in pages:
            height, width, _ = pixels.shape
            picture = pdfium.PdfImage.new(pdf)
            picture.set_bitmap(pdfium.PdfBitmap.from_pil(Image.fromarray(pixels)))
            picture.set_matrix(pdfium.PdfMatrix().scale(width, height))
            page = pdf.new_page(width, height)
            page.insert_obj(picture)
            text = pdfium_c.FPDFPageObj_NewTextObj(pdf, b"Helvetica", 6.0)
            raw = (words + "\0").encode("utf-16-le")
            pdfium_c.FPDFText_SetText(text, (ctypes.c_ushort * (len(raw) // 2)).from_buffer_copy(raw))
            pdfium_c.FPDFTextObj_SetTextRenderMode(text, pdfium_c.FPDF_TEXTRENDERMODE_INVISIBLE)
            pdfium_c.FPDFPage_InsertObject(page, text)
            page.gen_content()
        pdf.save(path)


def generated(shelf: Library, frames: Sequence[world.Frame]) -> None:
    """Half of the frames as pictures, half as pages of one PDF; the numbers on a frame are its words."""
    words = [" ".join(f"{mark:02d}" for mark in sorted(set(frame.mark.ravel()) - {world.NO_MARK})) for frame in frames]
    pictures = [(world.render(frame), text) for frame, text in zip(frames, words, strict=True)]
    half = len(pictures) // 2
    for i, (pixels, text) in enumerate(pictures[:half]):
        shelf.add(Chunk.image(pixels, label=f"picture-{i}.png"), f"picture-{i}.png", caption=text)
    with tempfile.TemporaryDirectory() as folder:
        write_pdf(Path(folder) / "catalogue.pdf", pictures[half:])
        shelf.add(Path(folder) / "catalogue.pdf")


def script(frames: Sequence[world.Frame], seed: int) -> list[tuple[str, str]]:
    """Questions that one frame answers, with their answers; some frames are asked about more often than others."""
    rng = np.random.default_rng(seed)
    popular = rng.zipf(1.3, QUESTIONS) % len(frames)
    drawn = [world.questions_for([frames[i]], 1, rng, kinds=("single_hop",))[0] for i in popular]
    return [(question.text, question.answer) for question in drawn]


def draw(path: Path, questions: Sequence[Asked]) -> None:
    """Draw a bar for each question: its prompt's tokens by lane, and the linked files."""
    figure, axes = plt.subplots(figsize=(11, 0.24 * len(questions) + 1.2))
    lanes = Counter[str]()
    for entry in questions:
        lanes.update(entry.answer.usage.reused_tokens)
    names = sorted(lanes, key=lambda lane: lane not in ("computed", "formed"))
    for row, entry in enumerate(questions):
        start = 0
        query = entry.answer.usage.prompt_tokens - sum(entry.answer.usage.reused_tokens.values())
        for lane in names:
            tokens = entry.answer.usage.reused_tokens.get(lane, 0) + query * (lane == "computed")
            axes.barh(row, tokens, left=start, color=LANES.get(lane, "#bbbbbb"), height=0.8)
            start += tokens
        axes.text(start + 4, row, ", ".join(entry.linked), va="center", fontsize=7)
    axes.set_yticks(range(len(questions)), [entry.question for entry in questions], fontsize=7)
    axes.set_ylim(len(questions) - 0.5, -0.5)
    axes.set_xlabel("tokens of the prompt; beside each bar: linked files")
    axes.set_xlim(0, 1.35 * max(entry.answer.usage.prompt_tokens for entry in questions))
    handles = [plt.Rectangle((0, 0), 1, 1, color=LANES.get(lane, "#bbbbbb")) for lane in names]
    axes.legend(handles, names, loc="lower right", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = agent_options.parser(__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="put these on the shelf; take a real model with them")
    parser.add_argument("--ask", action="append", metavar="QUESTION", help="about FILES; may be given often")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="default: library_agent.png, and none with --json")
    options = parser.parse_args()
    if bool(options.files) != bool(options.ask):
        parser.error("files and at least one --ask go together")
    picture = options.picture or (None if options.json else Path("library_agent.png"))

    with agent_options.running(options, scripted=not options.files) as run:
        shelf = Library(run.engine.repo.store, "shelf")
        frames = world.make_stream(options.seed, FILES, anchors=96 // FILES)
        try:
            for path in options.files:
                shelf.add(path)
        except (CtxwinError, OSError) as error:
            parser.error(str(error))
        if not options.files:
            generated(shelf, frames)
        ahead = 0 if options.mode == "exact" else shelf.prepare(run.engine)  # exact windows compute passages in place
        run.say(f"the shelf holds {len(shelf.files())} files; {ahead} passages were computed ahead")
        like = next((hit.passage.chunk for hit in shelf.search("a", 1)), Chunk.image(world.render(frames[0])))
        questions: list[Asked] = []
        for reader, system_prompt in enumerate(READERS if run.scripted else READERS[:1]):
            budget = run.budget(system_prompt, like, OPEN)
            window = Window(run.engine, system_prompt, budget, **run.serving, eviction=LeastRecentlyRead())
            run.watch(window)
            tasks = script(frames, 10 * options.seed + reader) if run.scripted else [(q, None) for q in options.ask]
            for question, truth in tasks:
                placements = window.retrieve(question, shelf, k=2, reserve_tokens=run.reserve_tokens)
                answer = window.ask(question, max_tokens=4 if run.scripted else 48)
                run.truth(truth)
                linked = tuple(window.chunk(placement).label or "picture" for placement in placements)
                questions.append(Asked(question, linked, answer))
                run.say(f"{question} {answer.text.strip()} (linked: {', '.join(linked)})")
            window.close()
        if picture:
            draw(picture, questions)
            run.say(f"what was linked, and what it cost: {picture}")
        run.figures |= {"files": len(shelf.files()), "readers": len(READERS)}


if __name__ == "__main__":
    main()

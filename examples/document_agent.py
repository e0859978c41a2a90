"""An agent answers questions about a PDF, coarse to fine: it skims every page once, then opens candidate pages in forks.

Coarse: the pages pass through a sliding window, and a note is taken of each. Fine: for every question the notes name candidate
pages. Each comes back into a fork of the window (copy on write, no KV bytes), the fork that answers best is adopted, and
the others are closed. The pages that were read last stay open, in page order. Without PDF the agent makes one of pages
of the bundled model's world, where the right answers are known.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import agent_options
import numpy as np
import pypdfium2 as pdfium
from PIL import Image

from ctxwin import Chunk, Window
from ctxwin.policies import LeastRecentlyRead
from ctxwin.tiny import world

SYSTEM_PROMPT = "You read a document."
OPEN = 6  # pages in the window
RESERVED = 128  # tokens kept free for a question and its answer
NOTE = 40  # most tokens of a note with its page number
Asking = Callable[[str], str]


def read_pdf(path: Path, scale: float) -> list[Image.Image]:
    """Return the pages as pictures of ``scale`` pixels per point."""
    with pdfium.PdfDocument(path) as pdf:
        return [page.render(scale=scale).to_pil().convert("RGB") for page in pdf]


def write_pdf(path: Path, pages: Sequence[np.ndarray]) -> None:
    """Write a PDF of one picture per page, a pixel per point; lossless, so that scale 1 returns the same pixels."""
    with pdfium.PdfDocument.new() as pdf:
        for pixels in pages:
            height, width, _ = pixels.shape
            picture = pdfium.PdfImage.new(pdf)
            picture.set_bitmap(pdfium.PdfBitmap.from_pil(Image.fromarray(pixels)))
            picture.set_matrix(pdfium.PdfMatrix().scale(width, height))
            page = pdf.new_page(width, height)
            page.insert_obj(picture)
            page.gen_content()
        pdf.save(path)


@dataclass(frozen=True)
class Task:
    """A question; the page that answers it and the right answer, if they are known."""

    question: str
    page: int | None = None
    truth: str | None = None


class Scripted:
    """Asks about things whose answers are known, and adds a wrong page to the right one.

    A page takes its colours from the newest legend before it, as figures do from the key of their section; so the key
    is opened together with the page.
    """

    def __init__(self, seed: int, pages: int = 16, questions: int = 24) -> None:
        self._rng = np.random.default_rng(seed)
        self.frames = world.make_stream(seed, pages, anchors=96 // pages)  # every number is on one page only
        about = [int(page) for _ in range(questions) for page in self._rng.permutation(pages)][:questions]
        self.tasks = [self._task(self._with_key(page)) for page in about]

    def note(self, pages: list[int]) -> Task:
        """A question about the last of the pages in view."""
        return self._task(pages)

    def noted(self, note: str) -> None:
        """Do nothing: the script knows the pages."""

    def candidates(self, task: Task, ask: Asking) -> list[list[int]]:
        """Pages to open in each fork; the last one is the candidate."""
        wrong = self._rng.choice([page for page in range(len(self.frames)) if page != task.page])
        return [self._with_key(int(page)) for page in self._rng.permutation([task.page, wrong])]

    def best(self, task: Task, surest: int) -> int:
        assert task.page is not None
        return task.page

    def truth(self, task: Task, pages: list[int]) -> str | None:
        """Return the right answer, or None if the page that decides it is not in view."""
        return task.truth if world.answer([self.frames[page] for page in pages], task.question) == task.truth else None

    def _with_key(self, page: int) -> list[int]:
        key = max(p for p in range(page + 1) if self.frames[p].role == "legend")
        return sorted({key, page})

    def _task(self, pages: list[int]) -> Task:
        questions = world.questions_for([self.frames[page] for page in pages], 999, self._rng)
        chosen = next(q for q in questions if pages[q.frame] == pages[-1])
        return Task(chosen.text, pages[-1], chosen.answer)


class Model:
    """The model takes the notes, names the candidates by them, and its surest answer is taken."""

    def __init__(self, questions: list[str]) -> None:
        self.tasks = [Task(question) for question in questions]
        self._notes: list[str] = []

    def note(self, pages: list[int]) -> Task:
        return Task(f"What is on page {pages[-1] + 1}? Answer in one line.")

    def noted(self, note: str) -> None:
        self._notes.append(f"page {len(self._notes) + 1}: {note}\n")

    def candidates(self, task: Task, ask: Asking) -> list[list[int]]:
        """Return the first three pages that the model names, by default the first pages."""
        query = f"{''.join(self._notes)}Which pages answer this, best first? Give their numbers. {task.question}"
        named = dict.fromkeys(int(number) - 1 for number in re.findall(r"\d+", ask(query)))
        valid = [page for page in named if 0 <= page < len(self._notes)] or range(len(self._notes))
        return [[page] for page in valid[:3]]

    def best(self, task: Task, surest: int) -> int:
        return surest

    def truth(self, task: Task, pages: list[int]) -> None:
        return None


@dataclass
class Reader:
    """The agent: a window over the pages, and the placement of each page."""

    run: agent_options.Run
    policy: Scripted | Model
    window: Window
    reserve_tokens: int
    placements: list[str] = field(default_factory=list)
    surest_was_best: int = 0

    def skim(self, page: Chunk) -> None:
        """Coarse: append a page, evict the least recently read one, and take a note."""
        self.placements.append(self.window.append(page))
        self.window.slide(reserve_tokens=self.reserve_tokens)
        note, _ = self.ask(self.window, self.policy.note(self.pages_in(self.window)))
        self.policy.noted(note)

    def answer(self, task: Task) -> str:
        """Fine: recall each candidate in a fork; adopt the best fork, and close the others."""
        with ExitStack() as closing:
            answers, sure, forks = {}, {}, {}
            for pages in self.policy.candidates(task, lambda query: self.ask(self.window, Task(query))[0]):
                fork = closing.enter_context(self.window.fork())
                for page in pages:
                    if self.placements[page] in fork.ids:
                        fork.maintenance.touch(self.placements[page])
                    else:
                        fork.recall(
                            self.placements[page]
                        )  # to its place in page order, in exact mode where that costs least
                fork.slide(reserve_tokens=self.reserve_tokens)
                forks[pages[-1]] = fork
                answers[pages[-1]], sure[pages[-1]] = self.ask(fork, task)
            surest = max(sure, key=sure.__getitem__)
            best = self.policy.best(task, surest)
            self.surest_was_best += best == surest
            self.window.adopt(forks[best])
        self.run.say(f"{task.question} {answers[best]} (page {best + 1}; looked at {[page + 1 for page in forks]})")
        return answers[best]

    def ask(self, window: Window, task: Task) -> tuple[str, float]:
        """Return the answer, and the probability of its first token."""
        answer = window.ask(task.question, max_tokens=4 if self.run.scripted else 24, logprobs=1)
        self.run.truth(self.policy.truth(task, self.pages_in(window)))
        return answer.text.strip(), math.exp(max(answer.first_token_logprobs.values()))

    def pages_in(self, window: Window) -> list[int]:
        return [self.placements.index(placement) for placement in window.ids]


def main() -> None:
    parser = agent_options.parser(__doc__)
    parser.add_argument("pdf", nargs="?", type=Path, help="read this instead; take a real model with it")
    parser.add_argument("--ask", action="append", metavar="QUESTION", help="about PDF; may be given often")
    parser.add_argument(
        "--scale", type=float, default=2.0, help="of PDF: pixels a point (72 to the inch); default: %(default)s"
    )
    options = parser.parse_args()
    if bool(options.pdf) != bool(options.ask) or options.scale <= 0:
        parser.error("a PDF and at least one --ask go together, --scale must be above 0")
    policy: Scripted | Model
    if options.pdf:
        policy = Model(options.ask)
        try:
            pictures = read_pdf(options.pdf, options.scale)
        except (OSError, pdfium.PdfiumError) as error:
            parser.error(f"PDF must be a document that can be read, got {options.pdf}: {error}")
    else:
        policy = Scripted(options.seed)
        with tempfile.TemporaryDirectory() as folder:
            write_pdf(Path(folder) / "document.pdf", [world.render(frame) for frame in policy.frames])
            pictures = read_pdf(Path(folder) / "document.pdf", scale=1)
    pages = [Chunk.image(picture, text=f"page {number}") for number, picture in enumerate(pictures, start=1)]

    with agent_options.running(options, scripted=not options.pdf) as run:
        reserve_tokens = RESERVED if run.scripted else RESERVED + NOTE * len(pages)  # the notes are part of a question
        largest = max(pages, key=lambda page: run.engine.encode(page).tokens)
        budget = run.budget(SYSTEM_PROMPT, largest, OPEN, reserve_tokens)
        window = Window(run.engine, SYSTEM_PROMPT, budget, **run.serving, eviction=LeastRecentlyRead())
        run.watch(window, reserve_tokens)
        reader = Reader(run, policy, window, reserve_tokens)
        for page in pages:
            reader.skim(page)
        run.say(f"skimmed {len(pages)} pages")
        for task in policy.tasks:
            reader.answer(task)
        run.figures |= {"questions": len(policy.tasks), "surest_was_best": reader.surest_was_best}
        run.say(f"the surest fork was the adopted one for {reader.surest_was_best} of {len(policy.tasks)} questions")


if __name__ == "__main__":
    main()

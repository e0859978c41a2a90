"""An agent searches a large picture for details, as ZoomEye does: a tree of crops, each explored in a fork of the window.

The whole picture fits into one view only when it is shrunk; its quarters show more, and their quarters show everything. The
agent goes on where it is most promising: it zooms into a crop in a fork (copy on write, no KV bytes), and the crop that it
zoomed into leaves. The fork that finds the answer is adopted, so the crops that were used last stay in view, and what was
seen before comes back without being computed again. Without PICTURE the agent searches a picture of the bundled model's
world, where the right answers are known.
"""

from __future__ import annotations

import itertools
import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path

import agent_options
import numpy as np
from PIL import Image, ImageOps

from ctxwin import Chunk, Window
from ctxwin.policies import LeastRecentlyRead
from ctxwin.tiny import world

SYSTEM_PROMPT = "You look at a large picture, part by part."
IN_VIEW = 6  # pictures in the window
RESERVED = 128  # tokens kept free for a question and its answer
DEPTH = 2  # the whole picture, its quarters, their quarters
SURE = 0.5  # a view whose answer is surer than this ends the search
LOOKS = 16  # maximum crops to try for a question
QUARTERS = ("top left", "top right", "bottom left", "bottom right")


@dataclass(frozen=True)
class Crop:
    """A part of the picture: the quarters that lead to it, from the whole picture on."""

    path: tuple[int, ...] = ()

    @property
    def parts(self) -> list[Crop]:
        return [Crop((*self.path, quarter)) for quarter in range(4)] if len(self.path) < DEPTH else []

    def box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Left, top, right and bottom in pixels."""
        n, x, y = 2 ** len(self.path), 0, 0
        for quarter in self.path:
            x, y = 2 * x + quarter % 2, 2 * y + quarter // 2
        return x * width // n, y * height // n, (x + 1) * width // n, (y + 1) * height // n

    def __str__(self) -> str:
        return " ".join(["view", ".".join(str(quarter + 1) for quarter in self.path)]).strip()


@dataclass(frozen=True)
class Task:
    """A question; the view that answers it and the right answer, if they are known."""

    question: str
    view: Crop | None = None
    truth: str | None = None


class Scripted:
    """Searches a picture of 4 x 4 frames whose first one is its legend, and looks at the wrong part first now and then.

    A grey thing has the colour that the legend gives its shape, so the legend stays in view.
    """

    def __init__(self, seed: int, questions: int = 32) -> None:
        self._rng = np.random.default_rng(seed)
        roles: list[world.Role] = ["legend"]
        roles += ["scene"] * 15
        frames = world.sample_frames(self._rng, roles)  # every number is in one frame only
        tiles = [world.render(frame) for frame in frames]
        self.picture = Image.fromarray(np.vstack([np.hstack(tiles[row : row + 4]) for row in range(0, 16, 4)]))
        views = [view for quarter in Crop().parts for view in quarter.parts]
        self.frames = {view: frames[column + 4 * row] for view in views for column, row, *_ in [view.box(4, 4)]}
        self.always = [Crop(), views[0]]
        about = [view for _ in range(questions) for view in self._rng.permutation(16)][:questions]
        self.tasks = [self._task(views[view]) for view in about]

    def query(self, task: Task, crop: Crop) -> str:
        return task.question

    def promise(self, task: Task, crop: Crop, sure: float) -> float:
        """Return how promising the parts of a crop are: 0 to 1."""
        return 1.0 if self._shows(crop, task) else 0.1

    def best_first(self, task: Task, crop: Crop, reply: str) -> list[Crop]:
        """Return the parts of a crop in the order to try them."""
        parts = sorted((crop.parts[i] for i in self._rng.permutation(4)), key=lambda part: not self._shows(part, task))
        if self._rng.random() < 0.25:
            parts[:2] = parts[1::-1]  # a wrong one first
        return parts

    def truth(self, task: Task, in_view: list[Crop]) -> str | None:
        """Return the right answer, or None if it is not in view."""
        return world.answer([self.frames[crop] for crop in in_view if crop in self.frames], task.question)

    def _shows(self, crop: Crop, task: Task) -> bool:
        assert task.view is not None
        return task.view.path[: len(crop.path)] == crop.path

    def _task(self, view: Crop) -> Task:
        in_view = [*dict.fromkeys((self.always[1], view))]
        questions = world.questions_for([self.frames[crop] for crop in in_view], 999, self._rng)
        chosen = next(q for q in questions if in_view[q.frame] == view)
        return Task(chosen.text, view, chosen.answer)


class Model:
    """The model chooses the part to look at first, and continues where it is sure."""

    def __init__(self, picture: Image.Image, questions: list[str]) -> None:
        self.picture, self.always = picture, [Crop()]
        self.tasks = [Task(question) for question in questions]

    def query(self, task: Task, crop: Crop) -> str:
        if not crop.parts:
            return task.question
        return f"Which part of {crop} do you need to see larger: {', '.join(QUARTERS)}? {task.question}"

    def promise(self, task: Task, crop: Crop, sure: float) -> float:
        return sure

    def best_first(self, task: Task, crop: Crop, reply: str) -> list[Crop]:
        """Return the parts that the model names, in that order, then the others."""
        at = [reply.lower().find(quarter) for quarter in QUARTERS]
        return sorted(crop.parts, key=lambda part: (at[part.path[-1]] < 0, at[part.path[-1]]))

    def truth(self, task: Task, in_view: list[Crop]) -> None:
        return None


@dataclass
class Searcher:
    """The agent: a window over the crops of one picture. ``side``: pixels of a view's longer side."""

    run: agent_options.Run
    policy: Scripted | Model
    side: int
    sure_and_shown: list[tuple[float, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.crops: dict[str, Crop] = {}  # by chunk id
        longest_name = Chunk.image(self.view(Crop()), text=str(Crop((3,) * DEPTH)))
        budget = self.run.budget(SYSTEM_PROMPT, longest_name, IN_VIEW, RESERVED)
        window = Window(self.run.engine, SYSTEM_PROMPT, budget, **self.run.serving, eviction=LeastRecentlyRead())
        self.window = self.run.watch(window, RESERVED)
        self.window.extend([self.chunk(crop, pin=True) for crop in self.policy.always])

    def view(self, crop: Crop) -> Image.Image:
        """Return the crop as large as a view allows."""
        picture = self.policy.picture
        return ImageOps.contain(picture.crop(crop.box(*picture.size)), (self.side, self.side))

    def chunk(self, crop: Crop, pin: bool = False) -> Chunk:
        chunk = Chunk.image(self.view(crop), text=str(crop), pin=pin)
        self.crops[chunk.id] = crop
        return chunk

    def search(self, task: Task) -> str:
        """Search best-first. The branch that finds the answer is adopted, the others are closed."""
        count, best, best_branch, answer = itertools.count(), 0.0, None, "not found"
        looked: list[str] = []
        with ExitStack() as closing:
            frontier = [(-1.0, next(count), Crop(), self.window)]  # a heap: the most promising comes first
            while frontier and best <= SURE and len(looked) < LOOKS:
                _, _, crop, parent = heappop(frontier)
                branch = closing.enter_context(parent.fork())
                self.zoom(branch, crop)
                reply, sure = self.ask(branch, task, crop)
                looked.append(str(crop))
                promise = self.policy.promise(task, crop, sure)
                for rank, part in enumerate(self.policy.best_first(task, crop, reply) if crop.parts else ()):
                    heappush(frontier, (-promise * 0.9**rank, next(count), part, branch))
                if not crop.parts and promise > best:
                    best, best_branch, answer = promise, branch, reply
            if best_branch is not None:
                self.window.adopt(best_branch, force=True)  # a fork of a fork
        self.run.say(f"{task.question} {answer} (looked at {', '.join(looked)})")
        return answer

    def zoom(self, window: Window, crop: Crop) -> None:
        """Append or recall a crop; evict the quarter that it is a part of."""
        chunk = self.chunk(crop)
        placements = {window.chunk(i).id: i for i in (*window.evicted, *window.ids)}
        if len(crop.path) > 1:
            window.evict(placements[self.chunk(Crop(crop.path[:-1])).id])
        if chunk.id not in placements:
            window.append(chunk)
        elif placements[chunk.id] in window.ids:
            window.maintenance.touch(placements[chunk.id])
        else:
            window.recall(placements[chunk.id])
        window.slide(reserve_tokens=RESERVED)

    def ask(self, window: Window, task: Task, crop: Crop) -> tuple[str, float]:
        """Return the model's answer, and the probability of its first token."""
        answer = window.ask(self.policy.query(task, crop), max_tokens=4 if self.run.scripted else 24, logprobs=1)
        sure = math.exp(max(answer.first_token_logprobs.values()))
        truth = self.policy.truth(task, [self.crops[window.chunk(i).id] for i in window.ids])
        self.run.truth(truth)
        self.sure_and_shown.append((sure, truth is not None))
        return answer.text.strip(), sure


def separation(sure_and_shown: list[tuple[float, bool]]) -> float:
    """Return the AUC of the confidence as a predictor of views with the answer: 1 always, 0.5 by chance."""
    visible = np.array([sure for sure, is_shown in sure_and_shown if is_shown])[:, None]
    hidden = np.array([sure for sure, is_shown in sure_and_shown if not is_shown])
    return float(np.mean((visible > hidden) + 0.5 * (visible == hidden)))


def main() -> None:
    parser = agent_options.parser(__doc__)
    parser.add_argument("picture", nargs="?", type=Path, help="search this instead; take a real model with it")
    parser.add_argument("--ask", action="append", metavar="QUESTION", help="about PICTURE; may be given often")
    parser.add_argument("--side", type=int, default=448, help="of PICTURE: pixels of a view; default: %(default)s")
    options = parser.parse_args()
    if bool(options.picture) != bool(options.ask) or options.side < 1:
        parser.error("a PICTURE and at least one --ask go together, --side must be at least 1")
    policy: Scripted | Model = Scripted(options.seed)
    if options.picture:
        try:
            policy = Model(Image.open(options.picture).convert("RGB"), options.ask)
        except OSError as error:
            parser.error(f"PICTURE must be an image file that can be read, got {options.picture}: {error}")
    with agent_options.running(options, scripted=not options.picture) as run:
        searcher = Searcher(run, policy, options.side if options.picture else 224)
        for task in policy.tasks:
            searcher.search(task)
        if run.scripted:
            auc = separation(searcher.sure_and_shown)
            run.figures |= {"questions": len(policy.tasks), "confidence_auc": auc}
            run.say(f"being sure tells views with the answer from others in {auc:.0%} of pairs: the script steers")


if __name__ == "__main__":
    main()

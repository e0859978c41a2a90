"""Two agents, one stream: a planner and a grounder, each with its own system prompt, share every frame on one engine.

Every second the planner says what is worth a look and the grounder looks for it; now and then at something older. The
vision tower sees a frame once, whoever looks at it or looks back at it. Without VIDEO they watch a stream of the bundled
model's world, where the right answers are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import agent_options
import numpy as np

from ctxwin import Chunk, Window
from ctxwin.tiny import world

PLANNER = "You are the planner. Say what is worth a look."
GROUNDER = "You are the grounder. Answer with one word."
RESERVED = 96  # tokens kept free for a question and its answer
Asking = Callable[
    [list[int], int, str], tuple[str, str | None]
]  # (seconds in view, about, previous_answer) -> question, truth


class Agent:
    """A window over the stream, and the placement that shows each second."""

    def __init__(self, name: str, window: Window) -> None:
        self.name, self.window = name, window
        self.shown: list[str] = []

    def see(self, shot: Chunk) -> None:
        self.shown.append(self.window.append(shot))
        self.window.slide(reserve_tokens=RESERVED)

    @contextmanager
    def looking_at(self, second: int) -> Iterator[Window]:
        """Provide the window if that second is in view, else a branch that recalls it."""
        if self.shown[second] in self.window.ids:
            yield self.window
            return
        with self.window.fork() as branch:
            branch.look_back(self.shown[second], reserve_tokens=RESERVED)
            yield branch


def scripted(seed: int, stream: list[world.Frame]) -> Asking:
    """Return a function that asks about things in a second whose answers are known."""
    rng = np.random.default_rng(seed)

    def question(in_view: list[int], about: int, previous_answer: str) -> tuple[str, str | None]:
        questions = world.questions_for([stream[second] for second in in_view], 999, rng)
        chosen = next(q for q in questions if in_view[q.frame] == about)
        return chosen.text, chosen.answer

    return question


def free(in_view: list[int], about: int, previous_answer: str) -> tuple[str, str | None]:
    """The planner names something, and the grounder is asked where it is."""
    if previous_answer:
        return f"Where in the picture at t={about} s is this: {previous_answer}", None
    return f"Name one thing in the picture at t={about} s that is worth a closer look.", None


def talk(run: agent_options.Run, team: tuple[Agent, ...], about: int, asking: Asking) -> None:
    """Ask each agent about one second; each gets the answer of the previous one."""
    previous_answer = ""
    for agent in team:
        with agent.looking_at(about) as window:
            question, truth = asking([agent.shown.index(i) for i in window.ids], about, previous_answer)
            answer = window.ask(question, max_tokens=4 if run.scripted else 24)
            run.truth(truth)
        previous_answer = answer.text
        run.say(
            f"t={about} s, {agent.name}: {question} {previous_answer} ({answer.usage.computed_tokens} tokens computed)"
        )


def main() -> None:
    parser = agent_options.parser(__doc__)
    parser.add_argument("video", nargs="?", type=Path, help="watch this instead; take a real model with it")
    parser.add_argument(
        "--frames", type=agent_options.at_least(1), default=30, help="most frames to watch, one a second"
    )
    options = parser.parse_args()
    if options.video is None:
        stream = world.make_stream(options.seed, n_frames=options.frames)
        frames, asking = [world.render(frame) for frame in stream], scripted(options.seed, stream)
    else:
        with agent_options.report_refusals(options):
            frames, asking = agent_options.decoded(options.video, options.frames), free
    shots = [Chunk.image(frame, text=f"t={second} s") for second, frame in enumerate(frames)]
    rng = np.random.default_rng(options.seed)

    with agent_options.running(options, scripted=not options.video) as run:
        budget = run.budget(PLANNER, shots[-1], count=6, reserve_tokens=RESERVED)
        planner = Agent("planner", run.watch(Window(run.engine, PLANNER, budget, **run.serving), RESERVED))
        grounder = Agent("grounder", planner.window.fork(system_prompt=GROUNDER))  # counted, too, as all forks are
        team = (planner, grounder)
        for second, shot in enumerate(shots):
            for agent in team:
                agent.see(shot)
            talk(run, team, second, asking)
            if second % 3 == 2 and second > 5:
                talk(run, team, int(rng.integers(second - 5)), asking)
        placements, encoded = sum(len(agent.shown) for agent in team), run.engine.counters.vision_encodes
        run.figures |= {"frames_placed": placements, "encodes_saved_by_sharing": placements - encoded}
        run.say(f"sharing: {placements} frames placed, {encoded} encoded; apart they would have encoded {placements}")


if __name__ == "__main__":
    main()

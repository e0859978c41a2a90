"""A LangGraph agent watches a video through a sliding window, and looks back if a question is about an evicted frame.

Its graph: watch -> think -> (look_back ->) answer -> think -> ... -> watch. The state holds a small reference to the
window; the engine travels in the run's context, so every step is a checkpoint of a few KB. Without VIDEO it watches a clip
of the bundled model's world, where the right answers are known.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, TypedDict

import agent_options
import numpy as np
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime

from ctxwin import Chunk, Window
from ctxwin.tiny import world
from ctxwin.tiny.clip import write_clip
from ctxwin.tiny.sprites import COLORS
from ctxwin.video import decode_video
from langchain_ctxwin.langgraph import WindowContext, merge_windows, open_window

SYSTEM_PROMPT = "You watch a camera."
FRAMES = 6  # in the window
QUESTIONS = ("What is happening?", "What changed since the beginning?", "Which objects can be seen?")


class Task(TypedDict):
    """A question, the seconds to look back at first, and the right answer, if it is known."""

    question: str
    back: list[int]
    truth: str | None


class State(TypedDict, total=False):
    """State of the graph, stored in checkpoints."""

    window: Annotated[dict[str, Any], merge_windows]
    second: int  # shown last
    questions_asked: int  # questions since then
    todo: list[Task]  # at most one


class Policy(Protocol):
    """Decides the next action. ``longest``: a question as long as any it asks."""

    longest: str

    def next(self, second: int, questions_asked: int, window: Window, in_view: list[int]) -> Task | None:
        """Return the next question with the seconds ``in_view``, after ``questions_asked`` ones in it; None: watch on."""


@dataclass(kw_only=True)
class Context(WindowContext):
    """Objects for the nodes that must not be in the state."""

    frames: list[np.ndarray]  # one a second
    policy: Policy
    budget: int
    serving: dict[str, Any]  # options of the window
    reserve_tokens: int  # tokens kept free for a question and its answer
    max_tokens: int


def watch(state: State, runtime: Runtime[Context]) -> State:
    """Append the next frame; the oldest leave, and the others move up without being computed again."""
    context, second = runtime.context, state.get("second", -1) + 1
    new = {"system_prompt": SYSTEM_PROMPT, "budget": context.budget, **context.serving}
    with open_window(state.get("window"), runtime, **new) as window:
        window.append(Chunk.image(context.frames[second], text=f"t={second} s"))
        window.slide(reserve_tokens=context.reserve_tokens)
        return {"window": window.ref(), "second": second, "questions_asked": 0}


def think(state: State, runtime: Runtime[Context]) -> State:
    """Decide the question, and if it needs a look back."""
    with open_window(state["window"], runtime) as window:
        in_view = [p.arrival for p in window.snapshot().placed]  # a frame arrives every second
        task = runtime.context.policy.next(state["second"], state["questions_asked"], window, in_view)
        return {"window": window.ref(), "todo": [task] if task else [], "questions_asked": state["questions_asked"] + 1}


def look_back(state: State, runtime: Runtime[Context]) -> State:
    """Recall frames to their places; nothing is encoded again. They are the oldest, so the next slide evicts them."""
    with open_window(state["window"], runtime) as window:
        evicted = {p.arrival: p.id for p in window.snapshot().evicted}
        window.look_back(
            " ".join(evicted[second] for second in state["todo"][0]["back"]),
            reserve_tokens=runtime.context.reserve_tokens,
        )
        return {"window": window.ref()}


def answer(state: State, runtime: Runtime[Context]) -> State:
    """Answer over the frames in view."""
    task, context = state["todo"][0], runtime.context
    with open_window(state["window"], runtime) as window:
        window.ask(task["question"], max_tokens=context.max_tokens)
        context.ledger.truth(task["truth"])
        return {"window": window.ref()}


def after_think(state: State, runtime: Runtime[Context]) -> str:
    if state["todo"]:
        return "look_back" if state["todo"][0]["back"] else "answer"
    return "watch" if state["second"] + 1 < len(runtime.context.frames) else END


class Scripted:
    """Asks about something in view every second, and every third second about an evicted frame.

    In this world a grey thing has the colour that the last legend before it gave its shape, so a look back at one brings
    that legend back, too. It asks only questions that the frames in view answer.
    """

    longest = "color of 10?"

    def __init__(self, stream: list[world.Frame], seed: int) -> None:
        self._stream, self._seed = stream, seed
        self._colors = world.bound_colors(stream)

    def next(self, second: int, questions_asked: int, window: Window, in_view: list[int]) -> Task | None:
        rng = np.random.default_rng([self._seed, second, questions_asked])
        if questions_asked == 0:
            question = next(self._questions(in_view, rng))
            return Task(question=question.text, back=[], truth=question.answer)
        evicted = sorted(set(range(second)) - set(in_view))
        if questions_asked > 1 or second % 3 != 2 or not evicted:
            return None
        target = int(rng.choice(evicted))
        needed = {target} if self._stream[target].role == "legend" else {target, self._legend_before(target)}
        back = sorted(needed - set(in_view))
        view = sorted({*in_view[len(back) :], *needed})  # the oldest make room
        question = next(q for q in self._questions(view, rng) if view[q.frame] == target)
        return Task(question=question.text, back=back, truth=question.answer)

    def _legend_before(self, second: int) -> int:
        return max(s for s in range(second) if self._stream[s].role == "legend")

    def _questions(self, in_view: list[int], rng: np.random.Generator) -> Iterator[world.Question]:
        """Yield questions whose answer by the frames in view is the answer by the entire video."""
        for question in world.questions_for([self._stream[s] for s in in_view], 999, rng):
            second = in_view[question.frame]
            (color,) = self._colors[second][self._stream[second].mark == question.mark]
            if question.kind == "single_hop" or COLORS[color] == question.answer:
                yield question


class Model:
    """Asks the user's questions in turn, one every few seconds; the model decides if it looks back, and where."""

    def __init__(self, questions: tuple[str, ...], last: int, every: int = 2) -> None:
        self._questions, self._last, self._every = questions, last, every
        self.longest = max((self._where(question, [last, last]) for question in questions), key=len)

    def next(self, second: int, questions_asked: int, window: Window, in_view: list[int]) -> Task | None:
        if questions_asked or ((second + 1) % self._every and second != self._last):
            return None
        question = self._questions[second // self._every % len(self._questions)]
        reply = window.ask(self._where(question, in_view), max_tokens=16).text
        named = [int(digits) for digits in re.findall(r"t=(\d+)", reply)]
        back = [s for s in named if s < second and s not in in_view]
        return Task(question=question, back=back[:1], truth=None)

    def _where(self, question: str, in_view: list[int]) -> str:
        return (
            f"In view: t={in_view[0]} s to t={in_view[-1]} s. Earlier pictures were shown from t=0 s on. Which of those, like "
            f"t=3 s, must be seen again for this question, or none? {question}"
        )


def graph() -> StateGraph[State, Context]:
    built = StateGraph(State, context_schema=Context)
    for node in (watch, think, look_back, answer):
        built.add_node(node)
    built.add_edge(START, "watch")
    built.add_edge("watch", "think")
    built.add_conditional_edges("think", after_think, ["look_back", "answer", "watch", END])
    built.add_edge("look_back", "answer")
    built.add_edge("answer", "think")
    return built


def film(stream: list[world.Frame]) -> list[np.ndarray]:
    """Write the stream to a video file and return its decoded frames."""
    with tempfile.TemporaryDirectory() as folder:
        clip = Path(folder) / "clip.mp4"
        write_clip(clip, stream)
        return list(decode_video(clip, fps=1.0)[0])


def main() -> None:
    parser = agent_options.parser(__doc__)
    parser.add_argument("video", nargs="?", type=Path, help="watch this instead; take a real model with it")
    parser.add_argument("--ask", action="append", metavar="QUESTION", help="about VIDEO; may be given often")
    parser.add_argument(
        "--frames", type=agent_options.at_least(1), default=30, help="most frames to watch, one a second"
    )
    options = parser.parse_args()
    if options.ask and not options.video:
        parser.error("--ask needs a VIDEO: the questions about the generated scene are its own")
    if options.video:
        with agent_options.report_refusals(options):
            frames = agent_options.decoded(options.video, options.frames)
        policy: Policy = Model(tuple(options.ask or QUESTIONS), last=len(frames) - 1)
    else:
        stream = world.make_stream(options.seed, options.frames, window=FRAMES)
        frames, policy = film(stream), Scripted(stream, options.seed)
    with agent_options.running(options, scripted=not options.video) as run:
        max_tokens = 32 if options.video else 4
        run.reserve_tokens = run.engine.encode_query(policy.longest).tokens + max_tokens
        widest = Chunk.image(frames[-1], text=f"t={len(frames) - 1} s")
        context = Context(
            engine=run.engine,
            ledger=run,  # sees every window that a node opens
            frames=frames,
            policy=policy,
            budget=run.budget(SYSTEM_PROMPT, widest, FRAMES),
            serving=run.serving,
            reserve_tokens=run.reserve_tokens,
            max_tokens=max_tokens,
        )
        agent = graph().compile(checkpointer=InMemorySaver())
        config = {"configurable": {"thread_id": "camera"}, "recursion_limit": 10 * options.frames}
        for event in agent.stream({}, config, context=context, stream_mode="custom"):
            if event["op"] == "ask":
                run.say(f"{event['query']} {event['answer']} ({event['computed_tokens']} tokens computed)")
            elif event["op"] == "look_back":
                run.say("looks back")


if __name__ == "__main__":
    main()

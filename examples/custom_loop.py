"""An agent loop of your own, without a framework: slide, look back in a branch, ask. Thirty lines; downloads nothing."""

import agent_options
import numpy as np

from ctxwin import Chunk, Window
from ctxwin.tiny import world

RESERVED = 32  # tokens kept free for a question and its answer
options = agent_options.parser(__doc__).parse_args()
rng = np.random.default_rng(options.seed)
frames = world.make_stream(options.seed, n_frames=30)  # stands in for your camera
shots = [Chunk.image(world.render(frame), text=f"t={second} s") for second, frame in enumerate(frames)]


def ask(window: Window, about: str) -> None:
    """Ask something about one placed frame; in this world the answer is known."""
    in_view = [frames[second_of[i]] for i in window.ids]
    questions = world.questions_for(in_view, 999, rng)
    question = next(q for q in questions if q.frame == window.ids.index(about))
    answer = window.ask(question.text, max_tokens=4)
    run.truth(question.answer)
    run.say(f"frame {second_of[about]}: {question.text} {answer.text}, computed {answer.usage.computed_tokens} tokens")


second_of: dict[str, int] = {}  # placement id -> second
with agent_options.running(options) as run:
    budget = run.budget("You watch a camera.", shots[-1], count=6, reserve_tokens=RESERVED)
    window = run.watch(Window(run.engine, "You watch a camera.", budget, **run.serving), RESERVED)
    for second, shot in enumerate(shots):
        second_of[window.append(shot)] = second
        window.slide(reserve_tokens=RESERVED)  # the oldest leave; the others move up without being computed again
        ask(window, about=str(rng.choice(window.ids)))
        if second % 3 == 2 and window.evicted:
            with window.fork() as branch:  # no copy: the window itself stays as it is
                [back] = branch.look_back(str(rng.choice(window.evicted)), reserve_tokens=RESERVED)
                ask(branch, about=back)

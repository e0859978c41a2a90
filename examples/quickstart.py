"""A window over a stream of frames, on the bundled model: slide, look back, ask. Runs on a CPU, downloads nothing."""

from ctxwin import Chunk, Window, open_engine
from ctxwin.tiny import world

frames = world.make_stream(seed=3, n_frames=10)  # stands in for your camera
questions = [world.question_about(frames, i) for i in range(10)]  # like "color of 84?", with the world's own answers
with open_engine("tiny") as engine, Window(engine, system_prompt="You watch a camera.", budget=540) as window:
    for second, (frame, q) in enumerate(zip(frames, questions, strict=True)):
        window.append(Chunk.image(world.render(frame), text=f"t={second} s"))
        window.slide(reserve_tokens=32)  # six frames fit: the oldest leaves, the others move up
        answer = window.ask(q.text, max_tokens=4)
        print(f"t={second}: {q.text} {answer.text} (right: {q.answer}),", end=" ")
        print(f"computed {answer.usage.computed_tokens} of {answer.usage.prompt_tokens} tokens")

    window.recall(window.evicted[0])  # look back at the first frame: its picture is not encoded again
    print(window.plan())
    answer = window.ask(questions[0].text, max_tokens=4)
    print(f"look back: {questions[0].text} {answer.text} (right: {questions[0].answer})")

"""A window over a stream of frames, on the bundled model: slide, look back, ask. Runs on a CPU, downloads nothing."""

from ctxwin import Chunk, Window, open_engine
from ctxwin.tiny import world

frames = world.make_stream(seed=3, n_frames=10)  # stands in for your camera
with open_engine("tiny") as engine, Window(engine, system_prompt="You watch a camera.", budget=600) as window:
    for second, frame in enumerate(frames):
        window.append(Chunk.image(world.render(frame), text=f"t={second} s"))
        window.slide(reserve_tokens=32)  # the oldest frames leave; the others move up
        answer = window.ask(f"color of {frame.marks[0]:02d}?", max_tokens=4)
        print(f"t={second}: {answer.text}, computed {answer.usage.computed_tokens} of {answer.usage.prompt_tokens}")

    back = window.evicted[0]  # look back: its picture is not encoded again
    window.recall(back)
    print(window.plan())
    print(window.ask(f"shape of {frames[0].marks[0]:02d}?", max_tokens=4).text, "is what stood there at the start")

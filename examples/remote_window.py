"""A window on a server, through the official OpenAI client: slide, look back, ask, and a chat that names chunks.

Start one first (the bundled model, no download, no GPU): `ctxwin serve tiny --host 127.0.0.1 --port 8000`. Then
`python examples/remote_window.py --base-url http://127.0.0.1:8000/v1`.
"""

import argparse

from openai import OpenAI

from ctxwin import Chunk
from ctxwin.adapters.openai import RemoteWindow, chunk_part, upload
from ctxwin.tiny import world

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
options.add_argument("--api-key", default="none", help="Decides the tenant where the server has tenants.")
options.add_argument("--frames", type=int, default=8)
given = options.parse_args()

client = OpenAI(base_url=given.base_url, api_key=given.api_key)
frames = world.make_stream(seed=3, n_frames=given.frames)  # stands in for your camera
chunks = [Chunk.image(world.render(frame), text=f"t={second} s") for second, frame in enumerate(frames)]
with RemoteWindow(client, system_prompt="You watch a camera.", budget=600) as window:
    for second, (frame, chunk) in enumerate(zip(frames, chunks, strict=True)):
        window.append(chunk)  # its pixels travel once, whatever happens to it later
        window.slide(reserve_tokens=32)
        question = f"color of {frame.marks[0]:02d}?"
        answer = window.ask(question, max_tokens=4)
        usage = answer.usage
        print(f"t={second}: {question} {answer.text}, computed {usage.computed_tokens} of {usage.prompt_tokens}")

    if window.evicted:
        window.recall(window.evicted[0])  # look back: no upload, no vision encode
        print("first frame again:", "".join(window.stream(f"shape of {frames[0].marks[0]:02d}?", max_tokens=4)))

# The same chunks in a chat completion, in any order and mixed with text.
for chunk in chunks[-3:]:
    upload(client, chunk)
asked = {"type": "text", "text": f"color of {frames[-1].marks[0]:02d}?"}
made = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": [*(chunk_part(chunk) for chunk in reversed(chunks[-3:])), asked]}],
    max_tokens=4,
    temperature=0,
)
print("chat:", made.choices[0].message.content, made.usage)

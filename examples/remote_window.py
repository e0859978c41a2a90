"""A window on a server, through the official OpenAI client: slide, look back, ask, and a chat that names chunks.

Start one first (the bundled model, no download, no GPU): `ctxwin serve tiny --host 127.0.0.1 --port 8000`. Then
`python examples/remote_window.py --base-url http://127.0.0.1:8000/v1`.
"""

import argparse

from openai import APIConnectionError, OpenAI

from ctxwin import Chunk
from ctxwin.tiny import world
from ctxwin_client import RemoteWindow, chunk_part, upload

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
parser.add_argument("--api-key", default="none", help="Decides the tenant where the server has tenants.")
parser.add_argument("--frames", type=int, default=8)
options = parser.parse_args()
if options.frames < 1:
    parser.error(f"--frames must be at least 1, got {options.frames}")

client = OpenAI(base_url=options.base_url, api_key=options.api_key)
frames = world.make_stream(seed=3, n_frames=options.frames)  # stands in for your camera
chunks = [Chunk.image(world.render(frame), text=f"t={second} s") for second, frame in enumerate(frames)]
try:
    window = RemoteWindow(client, system_prompt="You watch a camera.", budget=600)
except APIConnectionError:
    parser.error(f"no server at {options.base_url}; start one: ctxwin serve tiny --host 127.0.0.1 --port 8000")
with window:
    for second, chunk in enumerate(chunks):
        window.append(chunk)  # its pixels are uploaded once
        window.slide(reserve_tokens=32)
        question = world.question_about(frames, second).text
        answer = window.ask(question, max_tokens=4)
        usage = answer.usage
        print(f"t={second}: {question} {answer.text}, computed {usage.computed_tokens} of {usage.prompt_tokens}")

    if window.evicted:
        window.recall(window.evicted[0])  # look back: no upload, no vision encode
        print("first frame again:", "".join(window.stream(world.question_about(frames, 0).text, max_tokens=4)))

# The same chunks in a chat completion, in any order and mixed with text.
for chunk in chunks[-3:]:
    upload(client, chunk)
question = world.question_about(frames, len(frames) - 1).text
completion = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[
        {"role": "user", "content": [*map(chunk_part, reversed(chunks[-3:])), {"type": "text", "text": question}]}
    ],
    max_tokens=4,
    temperature=0,
)
print("chat:", completion.choices[0].message.content, completion.usage)

"""A camera as a live stream: frames are pushed at the camera's pace, questions are asked meanwhile, and one looks back.

Reads a video with OpenCV; without `--video` it first writes one of a generated scene. Start a server first (the bundled model, no
download, no GPU): `ctxwin serve tiny --host 127.0.0.1 --port 8000`. Then `python examples/live_camera.py`.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import cv2
from openai import OpenAI

from ctxwin.adapters.openai import LiveStream, RemoteWindow
from ctxwin.tiny import world
from ctxwin.tiny.clip import write_clip

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
options.add_argument("--api-key", default="none", help="Decides the tenant where the server has tenants.")
options.add_argument("--video", type=Path, help="A video to play in the place of the generated one.")
options.add_argument("--question", help="What to ask every second; by default about the generated scene.")
options.add_argument("--seconds", type=int, default=12)
options.add_argument("--fps", type=float, default=4.0, help="Frames a second that are pushed.")
options.add_argument("--budget", type=int, default=600)
given = options.parse_args()

scene = world.make_stream(seed=3, n_frames=round(given.seconds * given.fps))
path = given.video or Path(tempfile.mkdtemp()) / "camera.avi"
if given.video is None:
    write_clip(path, scene, fps=given.fps, seconds_per_frame=1 / given.fps, fourcc="FFV1")  # lossless

client = OpenAI(base_url=given.base_url, api_key=given.api_key)
camera = cv2.VideoCapture(str(path))
step = max(1, round((camera.get(cv2.CAP_PROP_FPS) or given.fps) / given.fps))
first_token, right, asked = [], 0, 0
with (
    RemoteWindow(client, system_prompt="You watch a camera.", budget=given.budget) as window,
    LiveStream(client, window.id, reserve_tokens=48) as live,
):
    began = time.monotonic()
    for i in range(round(given.seconds * given.fps)):
        for _ in range(step):
            taken, pixels = camera.read()
        if not taken:
            break
        time.sleep(max(0.0, began + i / given.fps - time.monotonic()))  # a camera does not wait, and does not hurry
        _, encoded = cv2.imencode(".png", pixels)
        live.push(encoded.tobytes(), text=f"t={i / given.fps:g} s", time=i / given.fps)
        if i % max(1, round(given.fps)) == 0:
            mark = scene[i].marks[0]
            question = given.question or f"{('color', 'shape')[asked % 2]} of {mark:02d}?"
            sent, text = time.monotonic(), ""
            for part in live.stream(question, max_tokens=8):
                first_token += [] if text else [time.monotonic() - sent]
                text += part
            asked += 1
            right += given.video is None and text == world.answer(scene[: i + 1], question)
            print(f"t={i / given.fps:g}: {question} {text}")
    live.settle()
    state = live.state
    print(
        f"{len(state.placed)} frames placed, {state.dropped} dropped; {len(window.ids)} in the window of {given.budget} tokens"
    )
    print(
        f"first token after {1e3 * statistics.median(first_token):.0f} ms at the median, the last frame's placing included"
    )
    if given.video is None:
        print(f"{right} of {asked} answers right")
    if window.evicted:
        live.recall(time=1.0)
        question = given.question or f"shape of {scene[round(given.fps)].marks[0]:02d}?"
        print(f"one second after the start again: {question} {live.ask(question, 8).text}")

"""A camera as a live stream: frames are pushed at the camera's pace, questions are asked meanwhile, and one looks back.

Reads a video with OpenCV; without `--video` it first writes one of a generated scene. Start a server first (the bundled model, no
download, no GPU): `ctxwin serve tiny --host 127.0.0.1 --port 8000`. Then `python examples/live_camera.py`.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import cv2
from openai import APIConnectionError, OpenAI

from ctxwin.tiny import world
from ctxwin.tiny.clip import write_clip
from ctxwin_client import LiveStream, RemoteWindow

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
parser.add_argument("--api-key", default="none", help="Decides the tenant where the server has tenants.")
parser.add_argument("--video", type=Path, help="A video to play in the place of the generated one.")
parser.add_argument("--question", help="What to ask every second; by default about the generated scene.")
parser.add_argument("--seconds", type=int, default=12)
parser.add_argument("--fps", type=float, default=4.0, help="Frames a second that are pushed.")
parser.add_argument("--budget", type=int, default=600)
options = parser.parse_args()
if options.video is not None and options.question is None:
    parser.error("--video needs a --question: the generated ones are about the generated scene")
if options.seconds * options.fps < 1 or options.fps <= 0:
    parser.error("--seconds and --fps must make a frame at least")

scene = world.make_stream(seed=3, n_frames=round(options.seconds * options.fps))
path = options.video or Path(tempfile.mkdtemp()) / "camera.avi"
if options.video is None:
    write_clip(path, scene, fps=options.fps, seconds_per_frame=1 / options.fps, fourcc="FFV1")  # lossless

camera = cv2.VideoCapture(str(path))
if not camera.isOpened():
    parser.error(f"--video must be a video file that OpenCV reads, got {path}")
client = OpenAI(base_url=options.base_url, api_key=options.api_key)
first_token, right, question_count, pushed, due, ask_at = [], 0, 0, 0, 0.0, 0.0
with ExitStack() as stack:
    try:
        window = stack.enter_context(RemoteWindow(client, "You watch a camera.", options.budget))
    except APIConnectionError:
        parser.error(f"no server at {options.base_url}; start one: ctxwin serve tiny --host 127.0.0.1 --port 8000")
    live = stack.enter_context(LiveStream(client, window.id, reserve_tokens=48))
    began = time.monotonic()
    while (frame := camera.read())[0]:
        seconds = camera.get(cv2.CAP_PROP_POS_MSEC) / 1e3  # by the video's own clock
        clock = seconds + 1e-3  # containers round times
        if clock < due:
            continue
        if clock >= options.seconds:
            break
        due = (clock * options.fps // 1 + 1) / options.fps
        time.sleep(max(0.0, began + seconds - time.monotonic()))  # a camera keeps its own pace
        _, encoded = cv2.imencode(".png", frame[1])
        live.push(encoded.tobytes(), text=f"t={seconds:g} s", time=seconds)
        pushed += 1
        if clock >= ask_at:
            ask_at = clock // 1 + 1
            question = options.question or (
                f"{('color', 'shape')[question_count % 2]} of {scene[pushed - 1].marks[0]:02d}?"
            )
            sent, text = time.monotonic(), ""
            for part in live.stream(question, max_tokens=8):
                first_token += [] if text else [time.monotonic() - sent]
                text += part
            question_count += 1
            right += options.video is None and text == world.answer(scene[:pushed], question)
            print(f"t={seconds:g}: {question} {text}")
    live.settle()
    state = live.state
    print(
        f"{len(state.placed)} frames placed, {state.dropped} dropped; {len(window.ids)} in the window of {options.budget} tokens"
    )
    if first_token:
        median = 1e3 * statistics.median(first_token)
        print(f"first token after {median:.0f} ms at the median, the last frame's placing included")
    if options.video is None:
        print(f"{right} of {question_count} answers right")
    if window.evicted:
        live.recall(time=1.0)
        question = options.question or f"shape of {scene[round(options.fps)].marks[0]:02d}?"
        print(f"one second after the start again: {question} {live.ask(question, 8).text}")

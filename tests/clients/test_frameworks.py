"""Client frameworks, as released, against ``ctxwin serve --windows auto`` with the bundled model and profile.

``make clients`` installs them into environments of their own, pinned in ``requirements``, and runs this file.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from adapters.server.vllm.processes import Process, running_server
from ctxwin.tiny import world

HERE = Path(__file__).parent
ENVIRONMENTS = Path(os.environ.get("CTXWIN_CLIENTS", Path(__file__).parents[2] / ".venv-clients"))
SHOWN, STEPS = 4, 10
FRAMES = world.make_stream(seed=11, n_frames=SHOWN + STEPS - 1)
"""At every step the newest picture has come and the oldest has left."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.vllm,
    pytest.mark.skipif(not ENVIRONMENTS.is_dir(), reason="the frameworks are not installed (run `make clients`)"),
]

FRAMEWORKS = {
    "openai_chat": "main",
    "openai_responses": "main",
    "anthropic_messages": "main",
    "openai_agents": "main",
    "pydantic_ai_agent": "main",
    "litellm_completion": "main",
    "langchain_openai_model": "main",
    "langchain_anthropic_model": "main",
    "smolagents_model": "main",
    "llama_index_llm": "llama-index",
    "browser_use_model": "browser-use",
}
"""The environment that each program runs in: the frameworks' pins exclude one another."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with running_server(tmp_path_factory.mktemp("server"), "--windows", "auto") as running:
        yield running


def data_url(frame: world.Frame) -> str:
    file = io.BytesIO()
    Image.fromarray(world.render(frame)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def steps() -> tuple[list[dict[str, Any]], list[str]]:
    """What is shown and asked at each step, and the right answers."""
    shown, right = [], []
    for last in range(SHOWN, len(FRAMES) + 1):
        frames = FRAMES[last - SHOWN : last]
        question = world.question_about(frames, SHOWN - 1, "shape")
        shown.append({"pictures": [data_url(frame) for frame in frames], "question": question.text})
        right.append(question.answer)
    return shown, right


def run(name: str, environment: str, server: Process, given: list[dict[str, Any]], timeout: float = 600) -> list[str]:
    """What the program prints, with nothing of this process's settings in its environment."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    ended = subprocess.run(
        [ENVIRONMENTS / environment / "bin/python", HERE / "programs" / f"{name}.py"],
        input=json.dumps({"url": server.url, "steps": given}),
        env={**kept, "ANONYMIZED_TELEMETRY": "false"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.strip().splitlines()[-1])


def chats(server: Process) -> float:
    """Chats that had a window behind them."""
    return sum(v for n, v in server.metrics().items() if n.startswith("ctxwin_chats_total{") and 'behind="window"' in n)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_gets_right_answers_with_a_window_behind_every_request(name: str, server: Process) -> None:
    given, right = steps()
    before = chats(server)
    answers = run(name, FRAMEWORKS[name], server, given)
    assert [answer.strip() for answer in answers] == right
    assert chats(server) - before == STEPS


def test_every_request_of_a_browser_agent_is_answered(server: Process) -> None:
    """The model cannot use a browser; the requests that its agent makes are structured, long and carry screenshots."""
    server_log = server.log.read_text(errors="replace")
    run("browser_use_agent", "browser-use", server, [])
    requests = re.findall(r'"POST /v1/chat/completions HTTP/1.1" (\d+)', server.log.read_text()[len(server_log) :])
    assert len(requests) >= 4 and set(requests) == {"200"}

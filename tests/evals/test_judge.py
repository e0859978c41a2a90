"""A judge behind an OpenAI-compatible address: asked once for equal texts, kept, without sight of the arm."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from typer.testing import CliRunner

from ctxwin_evals.cli import app
from ctxwin_evals.judge import FILE, Judge, judged
from ctxwin_evals.samples import open_samples, read_samples
from eval_rows import CONFIG, row


class Server:
    """Rates by what it finds between "[Answer]" and the end; counts."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fail_after: int | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.asked.append(body["messages"][0]["content"])
                if outer.fail_after is not None and len(outer.asked) > outer.fail_after:
                    self.send_response(400)
                    self.end_headers()
                    return
                answer = outer.asked[-1].partition("[Answer]\n")[2].partition("\n\n")[0]
                said = {"red": "It fits.\nRating: 10", "blue": "Rating: [[2]]", "odd": "Rating: 11"}.get(
                    answer, "I cannot say"
                )
                message = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
                made = {
                    "id": "1",
                    "object": "chat.completion",
                    "created": 0,
                    "model": body["model"],
                    "choices": [message],
                }
                data = json.dumps(made).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with open_samples(tmp_path / "run", CONFIG) as samples:
        for i, (blind, patched) in enumerate((("blue", "red"), ("odd", "red"), ("red", "red"), ("green", "blue"))):
            samples.add([row("blind", i, blind, question=f"color of {i}?")])
            samples.add([row("patched:8", i, patched, question=f"color of {i}?")])
    return tmp_path / "run"


def test_arms_are_rated_and_equal_texts_asked_once(server: Server, run: Path) -> None:
    with OpenAI(base_url=server.url, api_key="x") as client:
        found = judged(read_samples(run), Judge(client, "a-judge", run))
        blind, patched = found["rows"]
        assert (blind["arm"], blind["n"], blind["rating"], blind["unrated"], blind["equal"]) == (
            "blind",
            2,
            6.0,
            2,
            0.25,
        )
        assert (patched["n"], patched["rating"], patched["equal"]) == (4, 8.0, 0.75)
        assert patched["ci95"][0] <= 8.0 <= patched["ci95"][1]
        assert len(server.asked) == 7, "of the third item both arms give the same answer"
        assert not any("blind" in text or "patched" in text for text in server.asked)
        judged(read_samples(run), Judge(client, "a-judge", run))
        assert len(server.asked) == 7, "all of it is kept"
        judged(read_samples(run), Judge(client, "another", run))
        assert len(server.asked) == 14, "another judge is another opinion"


def test_the_command_goes_on_where_it_was_stopped(server: Server, run: Path) -> None:
    command = ["judge", str(run), "--model", "a-judge", "--url", server.url, "--json"]
    server.fail_after = 3
    stopped = CliRunner().invoke(app, command)
    assert stopped.exit_code == 2 and "what it has said is kept" in stopped.output
    assert len((run / FILE).read_text().splitlines()) == 3
    with (run / FILE).open("a") as file:
        file.write('{"judge": "a-ju')  # a writer that was killed
    server.fail_after, before = None, len(server.asked)
    made = CliRunner().invoke(app, command)
    assert made.exit_code == 0, made.output
    assert len(server.asked) == before + 4
    assert [r["n"] for r in json.loads(made.stdout)["rows"]] == [2, 4]
    shown = CliRunner().invoke(app, command[:-1])
    assert "rated by a-judge" in shown.output and "8.00" in shown.output


def test_a_run_without_texts_is_refused(server: Server, tmp_path: Path) -> None:
    with open_samples(tmp_path / "run", CONFIG) as samples:
        samples.add([row("blind", 0, target={"answer": "A"})])
    made = CliRunner().invoke(app, ["judge", str(tmp_path / "run"), "--model", "m", "--url", server.url])
    assert made.exit_code == 2 and "a text as reference" in made.output and not server.asked

"""A judge behind an OpenAI-compatible address: asked once for equal texts, kept, without sight of the arm."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from typer.testing import CliRunner

from ctxwin.cli.main import app
from ctxwin_evals.judge import DIMENSIONS, FILE, Judge, judged
from ctxwin_evals.samples import open_samples, read_samples
from eval_rows import CONFIG, row


def rate(prompt: str) -> str:
    """Rates by what stands between "[Answer]" and the end."""
    answer = prompt.partition("[Answer]\n")[2].partition("\n\n")[0]
    return {"red": "It fits.\nRating: 10", "blue": "Rating: [[2]]", "odd": "Rating: 11"}.get(answer, "I cannot say")


class Server:
    """Replies as ``say`` does; counts."""

    def __init__(self) -> None:
        self.say: Callable[[str], str] = rate
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
                said = outer.say(outer.asked[-1])
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


def test_a_rating_is_read_as_judges_write_it(server: Server, run: Path) -> None:
    said = (
        "Rating: 8",
        "**Rating:** 8",
        "Rating: **8**",
        "Rating (1-10): 8",
        "Rating = 8",
        "__Rating__: [[8]]",
        "Rating: 8/10",
    )
    with OpenAI(base_url=server.url, api_key="x") as client:
        for text in said:
            server.say = lambda prompt, text=text: text  # type: ignore[misc]
            blind, patched = judged(read_samples(run), Judge(client, text, run))["rows"]
            assert (blind["rating"], patched["rating"], blind["unrated"]) == (8, 8, 0), text


def test_the_command_goes_on_where_it_was_stopped(server: Server, run: Path) -> None:
    command = ["judge", str(run), "--model", "a-judge", "--url", server.url, "--json"]
    server.fail_after = 3
    stopped = CliRunner().invoke(app, ["eval", *command])
    assert stopped.exit_code == 2 and "answers are kept" in stopped.output
    assert len((run / FILE).read_text().splitlines()) == 3
    with (run / FILE).open("a") as file:
        file.write('{"judge": "a-ju')  # a writer that was killed
    server.fail_after, before = None, len(server.asked)
    made = CliRunner().invoke(app, ["eval", *command])
    assert made.exit_code == 0, made.output
    assert len(server.asked) == before + 4
    assert [r["n"] for r in json.loads(made.stdout)["rows"]] == [2, 4]
    shown = CliRunner().invoke(app, ["eval", *command[:-1]])
    assert "judged by a-judge" in shown.output and "8.00" in shown.output


def test_replies_are_kept_whatever_their_letters(server: Server, run: Path) -> None:
    server.say = lambda prompt: "It\u2028fits\x85well.\nRating: 7"
    with OpenAI(base_url=server.url, api_key="x") as client:
        first = judged(read_samples(run), Judge(client, "a-judge", run))
        with (run / FILE).open("ab") as file:
            file.write('{"judge": "a-judge", "said": "é'.encode()[:-1])  # a writer whose disk was full
        before = len(server.asked)
        assert judged(read_samples(run), Judge(client, "a-judge", run)) == first and len(server.asked) == before


def test_a_run_without_texts_is_refused(server: Server, tmp_path: Path) -> None:
    with open_samples(tmp_path / "run", CONFIG) as samples:
        samples.add([row("blind", 0, target={"answer": "A"})])
    made = CliRunner().invoke(app, ["eval", "judge", str(tmp_path / "run"), "--model", "m", "--url", server.url])
    assert made.exit_code == 2 and "a text as reference" in made.output and not server.asked


def test_mmdus_dimensions_are_all_marked_or_none(server: Server, run: Path) -> None:
    def mark(prompt: str) -> str:
        assert all(f"- {name}: " in prompt for name in DIMENSIONS) and "[Reference answer]\nred" in prompt
        answer = prompt.partition("[Answer]\n")[2].partition("\n\n")[0]
        marks = {name: i + (3 if answer == "red" else 1) for i, name in enumerate(DIMENSIONS)}
        if answer == "odd":
            return "\n".join(f"{name}: {mark}" for name, mark in marks.items() if name != "overall")
        if answer == "green":
            marks["richness"] = 11
        if answer == "red":  # as the paper asks for them
            said = str({name.title(): mark for name, mark in marks.items()}).replace("Overall", "Overall Score")
            return f"Creativity: it has 2.\n{said}"
        return "\n".join(f"**{name}**: {mark}" for name, mark in marks.items())

    server.say = mark
    with OpenAI(base_url=server.url, api_key="x") as client:
        blind, patched = judged(read_samples(run), Judge(client, "a-judge", run), "dimensions")["rows"]
        assert (blind["n"], blind["unrated"], patched["n"]) == (2, 2, 4)
        assert {name: blind[name] for name in DIMENSIONS} == {name: i + 2.0 for i, name in enumerate(DIMENSIONS)}
        assert patched["overall"] == pytest.approx((9 * 3 + 7) / 4)
        assert patched["ci95"][0] <= patched["overall"] <= patched["ci95"][1]
        assert len(server.asked) == 7
    shown = CliRunner().invoke(
        app, ["eval", "judge", str(run), "--model", "a-judge", "--url", server.url, "--by", "dimensions"]
    )
    assert shown.exit_code == 0 and "image" in shown.output and len(server.asked) == 7


@pytest.mark.parametrize(
    ("better", "shares"),
    [
        (
            lambda first, second: "**1**" if first < second else "Answer 2",
            (0.75, 0.25, 0.0),
        ),  # one taste, whatever the order
        (lambda first, second: "1", (0.0, 1.0, 0.0)),  # always the first
        (lambda first, second: "tie" if "blue" in (first, second) else "2" if first == "red" else "1", (0.5, 0.5, 0.0)),
        (lambda first, second: "1" if first == "red" else "2", (0.0, 0.25, 0.75)),  # re-prefill's
    ],
)
def test_a_win_is_preferred_in_both_orders(
    server: Server, run: Path, better: Callable[[str, str], str], shares: tuple[float, ...]
) -> None:
    def compare(prompt: str) -> str:
        first, second = (prompt.partition(f"[Answer {i}]\n")[2].partition("\n\n")[0] for i in (1, 2))
        return f"Better: {better(first, second)}"

    server.say = compare
    with OpenAI(base_url=server.url, api_key="x") as client:
        blind, patched = judged(read_samples(run), Judge(client, "a-judge", run), "wins")["rows"]
    assert (blind["wins"], blind["ties"], blind["losses"]) == shares
    assert blind["ci95"][0] <= blind["wins"] <= blind["ci95"][1] and blind["ci95"][0] < blind["ci95"][1]
    assert patched["ties"] >= 0.75, "three of its answers are re-prefill's"
    assert len(server.asked) == 2 * 4, "answers that are re-prefill's are not asked about"


def test_a_comparison_without_a_verdict_is_unrated(server: Server, run: Path) -> None:
    server.say = lambda prompt: "Both are fine. Better: 10"
    made = CliRunner().invoke(
        app, ["eval", "judge", str(run), "--model", "m", "--url", server.url, "--by", "wins", "--json"]
    )
    blind, patched = json.loads(made.stdout)["rows"]
    assert (blind["n"], blind["unrated"], patched["n"], patched["unrated"]) == (1, 3, 3, 1) and patched["ties"] == 1
    made = CliRunner().invoke(app, ["eval", "judge", str(run), "--model", "m", "--url", server.url, "--by", "taste"])
    assert made.exit_code == 2 and "must be one of rating, dimensions, wins" in made.output

"""`ctxwin view` on the command line."""

from __future__ import annotations

import json
import socket
import webbrowser
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ctxwin.cli.main import app
from ctxwin.view.trace import read_trace


def view(*args: object) -> Result:
    return CliRunner().invoke(app, ["view", *map(str, args)], prog_name="ctxwin")


def test_it_writes_a_page_beside_the_trace(run: Path) -> None:
    result = view(run)
    assert result.exit_code == 0, result.output
    assert f"wrote {run.with_suffix('.html')}" in result.output
    assert "6 asks; " in result.output
    page = run.with_suffix(".html").read_text()
    assert page.startswith("<!doctype html>")
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in page


def test_it_prints_totals_as_json(run: Path, tmp_path: Path) -> None:
    result = view(run, "--json", "--out", tmp_path / "other.html")
    assert result.exit_code == 0, result.output
    numbers = json.loads(result.stdout)
    asks = [event for event in read_trace(run).events if event["op"] == "ask" and "test" not in event]
    assert numbers["asks"] == len(asks) == 6
    assert numbers["prompt_tokens"] == sum(ask["usage"]["prompt_tokens"] for ask in asks)
    assert (tmp_path / "other.html").is_file()
    assert not run.with_suffix(".html").exists()


def test_it_opens_a_browser(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) is None)
    assert view(run, "--open").exit_code == 0
    assert opened == [run.with_suffix(".html").as_uri()]


def test_bad_input_is_one_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            ([tmp_path / "absent.jsonl"], "absent.jsonl"),
            ([tmp_path / "notes.txt"], "must be a trace of ctxwin"),
            ([run, "--out", tmp_path], "directory"),
            ([run, "--out", run], "out must be another file than the trace"),
            ([run, "--serve", "--json"], "drop --out and --json"),
            (
                [run, "--serve", "--port", port],
                f"cannot serve at 127.0.0.1:{port}: Address already in use; take another",
            ),
            ([run, "--serve", "--port", 80000], "port must be between 0 and 65535"),
        ]
        for args, words in cases:
            result = view(*args)
            assert result.exit_code == 2, result.output
            assert len(result.stderr.strip().splitlines()) == 1
            assert words in result.stderr

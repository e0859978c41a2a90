"""What pages show is run: Python from top to bottom of each page, command lines against the commands themselves.

A Python block with a title says what it needs; those that need a server are run against one, the others are compiled.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from doc_pages import PAGES, ROOT, Block, blocks, name_of
from twins import guard

SERVED = "needs a server"
TITLES = {SERVED, "needs a GPU", "needs Redis", "your model"}
BASE = "http://127.0.0.1:8000"


def run(found: list[Block], namespace: dict[str, Any]) -> None:
    """Runs blocks one after the other; a traceback names the page and its line."""
    for block in found:
        exec(compile("\n" * (block.line - 1) + block.code, name_of(block.page), "exec", dont_inherit=True), namespace)


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if p.name != "README.md" and any(not b.title for b in blocks(p, "python"))],  # see `test_readme`
    ids=lambda p: name_of(p),
)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "vllm", None)  # the bundled model answers on transformers, at once
    run([block for block in blocks(page, "python") if not block.title], {"__name__": "__main__"})
    for line in capsys.readouterr().out.splitlines():
        if shown := re.search(r"\? (\w*) [-(] ?right: (\w+)", line):
            assert shown[1] == shown[2], line


def test_what_pages_and_examples_ask_has_one_answer() -> None:
    shown = {name_of(p): p.read_text(encoding="utf-8") for p in [*PAGES, *(ROOT / "examples").rglob("*.py")]}
    asked = [name for name, text in shown.items() if ".marks[0]" in text and name != "examples/live_camera.py"]
    assert not asked, "other frames of a stream bear the same marks: ask world.question_about(frames, index).text"


def titled() -> list[Block]:
    return [block for page in PAGES for block in blocks(page, "python") if block.title]


@pytest.mark.parametrize("block", titled(), ids=lambda b: f"{name_of(b.page)}:{b.line}")
def test_code_that_needs_something_says_what_and_compiles(block: Block) -> None:
    assert block.title in TITLES
    compile(block.code, name_of(block.page), "exec")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server of the page about servers: its tenants file, its command."""
    folder = tmp_path_factory.mktemp("server")
    [tenants] = blocks(ROOT / "docs" / "guides" / "server.md", "toml")
    (folder / tenants.title).write_text(tenants.code)
    shown = next(b.code for b in blocks(tenants.page, "bash") if f"--tenants {tenants.title}" in b.code)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = shlex.split(shown.strip().replace("8000", str(port)))
    assert command[0] == "ctxwin"
    log = folder / "log"
    with log.open("w") as out:
        running = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=folder, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )  # fmt: skip
    base = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1800):
            assert running.poll() is None, log.read_text()
            try:
                urllib.request.urlopen(f"{base}/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        else:
            pytest.fail(f"the server does not answer: {log.read_text()}")
        yield base
    finally:
        running.send_signal(signal.SIGINT)
        try:
            running.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({b.page for b in titled() if b.title == SERVED}), ids=lambda p: name_of(p))
def test_the_code_for_a_server_runs_against_one(page: Path, server: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = [replace(b, code=b.code.replace(BASE, server)) for b in blocks(page, "python") if b.title == SERVED]
    run(found, {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


def shell_lines(page: Path) -> Iterator[list[str]]:
    for block in blocks(page, "bash"):
        for line in block.code.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def test_command_lines_on_pages_are_ones_that_exist() -> None:
    from ctxwin.cli.main import app
    from ctxwin_evals.cli import app as harness

    wholes: Any = typer.main.get_command(app)
    seen = 0
    for page in PAGES:
        for words in shell_lines(page):
            if words[0] != "ctxwin":
                continue
            command, options = wholes, words[1:]
            while options and options[0] in getattr(command, "commands", {}):
                command = command.commands[options[0]]
                command = typer.main.get_command(harness) if options[0] == "eval" else command
                options = options[1:]
            assert not getattr(command, "commands", None), f"{name_of(page)}: {' '.join(words)} names no command"
            known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
            if command.name == "serve":
                known |= {"--host", "--port"}  # vLLM's
            unknown = [o for o in options if o.startswith("--") and o.partition("=")[0] not in known]
            assert not unknown, f"{name_of(page)}: {' '.join(words)}"
            seen += 1
    assert seen > 12


def test_make_targets_extras_and_scripts_on_pages_exist() -> None:
    import tomllib

    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    text = {page: page.read_text(encoding="utf-8") for page in PAGES}
    for page, whole in text.items():
        for target in re.findall(r"(?:`|^)make ([a-z][a-z-]*)", whole, re.M):
            assert target in targets, f"{name_of(page)}: make {target}"
        for named in re.findall(r"ctxwin\[([a-z,-]+)\]", whole):
            assert set(named.split(",")) <= extras, f"{name_of(page)}: ctxwin[{named}]"
        for words in shell_lines(page):
            if words[0] == "python" and words[1] != "-m":
                assert (ROOT / words[1]).exists(), f"{name_of(page)}: {words[1]}"
            if words[:2] == ["python", "-m"]:
                assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").exists() or (
                    ROOT / words[2].replace(".", "/")
                ).is_dir(), f"{name_of(page)}: {words[2]}"


@guard
def test_the_generated_parts_of_the_reference_are_what_the_code_says() -> None:
    """As `make docs` compares them in every run of continuous integration."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "reference_pages.py"), "--check"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr

"""The command line: what it refuses, in one line, and what it prints."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

import ctxwin
from ctxwin.cli.main import app
from ctxwin.demo.footage import WorldFootage
from ctxwin.errors import EngineFailed
from ctxwin.store import open_store


def invoke(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], prog_name="ctxwin")


def refused(result: Result, *words: str) -> None:
    """One line on stderr, exit code 2, no traceback."""
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


def test_help_names_every_command() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("demo", "view", "store", "eval", "bench", "doctor", "serve"):
        assert f"  {command} " in result.output


@pytest.mark.parametrize(
    "command",
    [
        "",
        "demo",
        "view",
        "doctor",
        "serve",
        "store",
        "store ls",
        "bench",
        "bench reuse",
        "eval",
        "eval run",
        "eval probe",
    ],
)
def test_help_has_one_style(command: str) -> None:
    shown = invoke(*command.split(), "--help")
    assert shown.exit_code == 0
    assert shown.output.startswith(f"Usage: {f'ctxwin {command}'.strip()} ")
    assert "\nOptions:\n" in shown.output
    assert "╭" not in shown.output
    assert invoke(*command.split(), "-h").output == shown.output


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (["srve"], "'serve'"),
        (["store", "stat"], "'stats'"),
        (["eval", "rnu"], "'run'"),
        (["demo", "--frmes", "3"], "--frames"),
        (["eval", "run", "--arsm", "blind"], "--arms"),
    ],
)
def test_a_misspelt_word_is_answered_by_what_was_meant(args: list[str], meant: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert "Did you mean" in result.stderr and meant in result.stderr


def test_ctrl_c_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import ctxwin.opening

    def stop(name: str, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ctxwin.opening, "open_engine", stop)
    stopped = invoke("eval", "run", "tiny/single_hop", "--n", "1", "--output", tmp_path / "run")
    assert stopped.exit_code == 130
    assert "the same command" in stopped.stderr and "Traceback" not in stopped.stderr
    stopped = invoke("demo", "--out", tmp_path / "out", "--frames", "6")
    assert stopped.exit_code == 130
    assert "the same command" in stopped.stderr


def test_version() -> None:
    assert invoke("--version").output.strip() == ctxwin.__version__


def test_the_command_line_loads_nothing_heavy() -> None:
    code = (
        "import sys, ctxwin.cli.main; "
        "print([m for m in ('torch', 'vllm', 'transformers', 'cv2', 'matplotlib', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "ctxwin", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ctxwin.__version__


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--engine", "llama"], ["--engine must be vllm or hf", "'llama'"]),
        (["--mode", "best"], ["--mode must be", "'best'"]),
        (["--rank", "8"], ["--rank needs --mode patched"]),
        (["--seeds", "1,x"], ["--seeds must be integers"]),
        (["--seeds", "1,1"], ["seeds must be different"]),
        (["--steps", "0"], ["steps must be at least 1"]),
        (["--window", "1"], ["window must be at least 3"]),
        (["--ask", "why?"], ["--ask needs a video"]),
        (["no-such-video.mp4"], ["no-such-video.mp4"]),
    ],
)
def test_demo_refuses_bad_options(args: list[str], words: list[str], tmp_path: Path) -> None:
    refused(invoke("demo", *args, "--out", tmp_path / "out"), *words)


def test_demo_refuses_a_truncated_video(tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    assert len(WorldFootage(clip, 0, 8, 4).chunks) == 8
    whole = clip.read_bytes()
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(whole[: len(whole) // 2])
    refused(invoke("demo", cut, "--out", tmp_path / "out"), "cut.mp4")


def test_demo_refuses_a_file_that_is_no_video(tmp_path: Path) -> None:
    notes = tmp_path / "notes.mp4"
    notes.write_text("not a video")
    refused(invoke("demo", notes, "--out", tmp_path / "out"), "notes.mp4")


def test_demo_refuses_an_output_folder_that_is_a_file(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    refused(invoke("demo", "--out", taken), "taken")


def test_demo_refuses_a_model_that_is_not_there(tmp_path: Path) -> None:
    args = ["--model", tmp_path / "no-model", "--engine", "hf", "--out", tmp_path / "out", "--frames", "6"]
    told, error = invoke("demo", *args).stderr.strip().splitlines()
    assert told == "opening the engine"
    assert error.startswith("error: ") and "no-model" in error


def test_demo_on_transformers(vision_dir: Path, tmp_path: Path) -> None:
    args = [
        "--model",
        vision_dir,
        "--engine",
        "hf",
        "--out",
        tmp_path,
        "--steps",
        "5",
        "--window",
        "3",
        "--frames",
        "6",
    ]
    shown = invoke("demo", *args)
    assert shown.exit_code == 0, shown.output
    assert "5 asks on hf" in shown.output
    assert "tokens computed" in shown.output
    printed = invoke("demo", *args, "--json")
    assert printed.exit_code == 0, printed.output
    summary = json.loads(printed.stdout)
    assert summary == json.loads((tmp_path / "result.json").read_text())["summary"]


def test_the_traceback_is_there_on_request(tmp_path: Path) -> None:
    result = invoke("--debug", "demo", "--engine", "llama", "--out", tmp_path)
    assert isinstance(result.exception, ValueError)


def test_an_engine_that_fails_is_not_the_inputs_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import ctxwin.opening

    def fail(name: str) -> None:
        raise EngineFailed("no memory\nat all")

    monkeypatch.setattr(ctxwin.opening, "open_engine", fail)
    result = invoke("demo", "--out", tmp_path, "--frames", "6")
    assert result.exit_code == 1
    assert result.stderr.strip().splitlines()[-1] == "error: no memory at all"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = open_store(f"disk:{tmp_path / 'kv'}")
    for i in range(5):
        store.put(f"span/{i:064x}", bytes([i]) * 5000)
    store.put(f"patch/{9:064x}", b"p" * 700)
    store.close()
    return tmp_path / "kv"


@pytest.mark.parametrize("name", ["disk:{}", "{}"])
def test_store_ls(folder: Path, name: str) -> None:
    result = invoke("store", "ls", name.format(folder))
    assert result.exit_code == 0, result.output
    assert len(result.stdout.split()) == 6
    listed = json.loads(invoke("store", "ls", folder, "--kind", "patch", "--json").stdout)
    assert listed == {"keys": [f"patch/{9:064x}"], "more": False}
    assert json.loads(invoke("store", "ls", folder, "--limit", "2", "--json").stdout)["more"] is True


def test_store_stats(folder: Path) -> None:
    found = json.loads(invoke("store", "stats", folder, "--json").stdout)
    assert found["items"] == 6
    assert found["kinds"] == {"patch": 1, "span": 5}
    shown = invoke("store", "stats", folder)
    assert shown.exit_code == 0
    assert "span" in shown.output


def test_an_empty_store_beside_those_of_tenants_names_them(tmp_path: Path) -> None:
    for tenant in ("", "acme"):
        open_store(f"disk:{tmp_path}", tenant=tenant).close()
    for command in ("ls", "stats", "verify"):
        assert "one with --tenant" in invoke("store", command, tmp_path).stderr
        assert not invoke("store", command, tmp_path, "--tenant", "acme").stderr


def test_store_verify_finds_what_is_corrupt(folder: Path) -> None:
    assert json.loads(invoke("store", "verify", folder, "--json").stdout) == {"good": 6, "corrupt": 0, "foreign": 0}
    blob = max((p for p in folder.rglob("*") if p.is_file() and "blob" in str(p)), key=lambda p: p.stat().st_size)
    raw = bytearray(blob.read_bytes())
    raw[len(raw) // 2] ^= 255
    blob.write_bytes(raw)
    result = invoke("store", "verify", folder)
    assert result.exit_code == 1
    assert "5 good, 1 corrupt (deleted; " in result.stdout


def test_a_store_that_is_read_only_keeps_what_is_corrupt(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    invoke("store", "export", folder, tmp_path / "all.ctxwin")
    store = open_store(f"disk:{folder}")
    store.delete(f"patch/{9:064x}")
    store.close()
    blob = max(folder.rglob("*.blob"), key=lambda p: p.stat().st_size)
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
    for url in (folder, f"tiered:memory:,disk:{folder}"):
        result = invoke("store", "verify", url)
        assert "4 good, 1 corrupt (they stay: the folder is read only)" in result.stdout and blob.exists()
    assert "is corrupt: " in caplog.text and "deleted" not in caplog.text
    result = invoke("store", "import", folder, tmp_path / "all.ctxwin")
    assert result.exit_code == 1 and "were refused: the store is full or read only" in result.stdout
    result = invoke("library", "add", folder, "notes", __file__)
    assert result.exit_code == 1 and "is full or read only" in result.stderr


def test_store_gc(folder: Path) -> None:
    stray = next(p for p in folder.rglob("*") if p.is_file() and "blob" in str(p)).with_name("stray.bin")
    stray.write_bytes(b"x" * 10)
    result = invoke("store", "gc", folder, "--min-age", "0", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"files": 1, "bytes": 10}
    assert not stray.exists()
    assert json.loads(invoke("store", "stats", folder, "--json").stdout)["items"] == 6


@pytest.mark.parametrize("command", ["ls", "stats", "gc", "verify"])
def test_looking_into_a_store_makes_none(command: str, tmp_path: Path, folder: Path) -> None:
    refused(invoke("store", command, tmp_path / "absent"), "existing folder", "absent")
    assert not (tmp_path / "absent").exists()
    refused(invoke("store", command, "memory:"), "memory")
    refused(invoke("store", command, folder, "--tenant", "else"), "no store of tenant 'else'")
    refused(invoke("store", command, "redis://host"), "redis")
    refused(invoke("store", command, "mooncake://host"), "mooncake")
    refused(invoke("store", command, "s3://bucket"), "a store must be 'memory:'")


def test_a_kind_that_no_store_has_is_refused(folder: Path, tmp_path: Path) -> None:
    refused(invoke("store", "ls", folder, "--kind", "spans"), "must be one of", "span,", "got 'spans'")
    (tmp_path / "a.ctxwin").write_text("an older archive")
    refused(invoke("store", "export", folder, tmp_path / "a.ctxwin", "--kind", "spans"), "must be one of")
    assert (tmp_path / "a.ctxwin").read_text() == "an older archive"
    assert invoke("store", "ls", folder, "--kind", "orbit").exit_code == 0  # there are some elsewhere


@pytest.mark.parametrize("command", ["store ls", "store stats --json"])
def test_a_command_whose_reader_leaves_ends_without_a_word(command: str, folder: Path) -> None:
    """As `| head` does once it has its lines."""
    reader, writer = os.pipe()
    os.close(reader)
    first, second, *options = command.split()
    arguments = [sys.executable, "-m", "ctxwin", first, second, str(folder), *options]
    done = subprocess.run(arguments, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_a_full_disk_is_no_bad_input(folder: Path) -> None:
    arguments = [sys.executable, "-m", "ctxwin", "store", "ls", str(folder)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def test_a_full_disk_names_the_file_and_what_to_do(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ctxwin.store.archive.Seal.close", full)
    done, path = invoke("store", "export", folder, tmp_path / "all.ctxwin"), str(tmp_path / "all.ctxwin")
    assert done.exit_code == 1
    assert f"No space left on device: {path!r}; make room and give the same command again" in done.stderr


def test_a_comma_in_a_path_is_part_of_it(tmp_path: Path) -> None:
    store = open_store(f"disk:{tmp_path / 'a,b'}")
    store.put(f"span/{1:064x}", b"x")
    store.close()
    shown = invoke("store", "stats", f"tiered:memory:,disk:{tmp_path / 'a,b'}", "--json")
    assert json.loads(shown.stdout)["items"] == 1


def test_eval_passes_its_arguments_and_exit_code_on(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = typer.Typer()
    seen: list[tuple[str, int]] = []

    @harness.command()
    def run(task: str, n: int = 1) -> None:
        seen.append((task, n))
        raise typer.Exit(3)

    @harness.command()
    def bad() -> None:
        raise ValueError("arms must be known")

    module = types.ModuleType("ctxwin_evals.cli")
    module.app = harness  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ctxwin_evals", types.ModuleType("ctxwin_evals"))
    monkeypatch.setitem(sys.modules, "ctxwin_evals.cli", module)
    assert invoke("eval", "run", "tiny", "--n", "5").exit_code == 3
    assert seen == [("tiny", 5)]
    assert invoke("eval", "--help").exit_code == 0
    refused(invoke("eval", "bad"), "arms must be known")

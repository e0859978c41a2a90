"""Options of long commands from a YAML file, presets of them, and progress where nobody looks at a terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner, Result

from ctxwin.cli.commands import Commands
from ctxwin.progress import progress, progress_line, stages
from ctxwin_evals.console import Config, quick_option

app = typer.Typer(cls=Commands, add_completion=False)


@app.callback()
def commands() -> None:
    """Commands of a test."""


@app.command()
def measure(
    task: Annotated[str, typer.Argument()] = "tiny",
    max_tokens: int = 8,
    sizes: str = "1,2",
    decoded: bool = False,
    quick: Annotated[bool, quick_option("Less.", max_tokens=2, sizes="1")] = False,
    config: Config = None,
) -> None:
    typer.echo(f"{task} {max_tokens} {sizes} {decoded} {quick}")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["measure", *map(str, args)])


@pytest.mark.parametrize(
    ("text", "args", "told"),
    [
        ("max-tokens: 5\nsizes: [3, 4]\ndecoded: true\ntask: order\n", [], "order 5 3,4 True False"),
        ("max_tokens: 5\n", ["--max-tokens", 6, "other"], "other 6 1,2 False False"),
        ("", [], "tiny 8 1,2 False False"),
        ("max-tokens: 5\n", ["--quick"], "tiny 5 1 False True"),
        ("quick: true\n", ["--sizes", "9"], "tiny 2 9 False True"),
    ],
)
def test_flags_win_over_the_file_and_the_file_over_a_preset(
    written: Path, text: str, args: list[object], told: str
) -> None:
    written.write_text(text)
    for order in ([*args, "--config", written], ["--config", written, *args]):
        made = run(*order)
        assert (made.exit_code, made.stdout.strip()) == (0, told), made.output


def test_a_home_is_written_as_in_a_shell(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    written.write_text("task: ~/data\nsizes: [~/a, 2]\n")
    assert run("--config", written).stdout == "/home/ann/data 8 /home/ann/a,2 False False\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max-token: 5\n", "'max-token' is no option of this command; did you mean 'max-tokens'?"),
        ("zzzz: 5\n", "'zzzz' is no option of this command; options are decoded, max-tokens, quick, sizes, task"),
        ("- 1\n", "must hold option names and values, got list"),
        ("sizes: {a: 1}\n", "sizes must be one value or a list, got a mapping"),
        ("a: [\n", "must be a YAML file"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line_and_exit_code_2(written: Path, text: str, told: str) -> None:
    written.write_text(text)
    made = run("--config", written)
    assert made.exit_code == 2 and told in made.stderr
    assert made.stderr.count("\n") == 1


def test_a_value_of_the_wrong_type_names_the_option(written: Path) -> None:
    written.write_text("max-tokens: many\n")
    made = run("--config", written)
    assert made.exit_code == 2 and "max-tokens" in made.stderr


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    made = run("--config", tmp_path / "none.yaml")
    assert made.exit_code == 2 and "none.yaml" in made.stderr


@pytest.mark.parametrize("command", [["eval", "run"], ["eval", "probe"], ["bench", "reuse"]])
def test_long_commands_take_a_file_and_name_the_nearest_option(written: Path, command: list[str]) -> None:
    from ctxwin.cli.main import app as ctxwin

    written.write_text("sed: 1\nmodl: tiny\n" if command[1] != "probe" else "modl: tiny\n")
    made = CliRunner().invoke(ctxwin, [*command, "--config", str(written)])
    assert made.exit_code == 2
    assert "did you mean" in made.stderr and made.stderr.count("\n") == 1


def test_progress_off_a_terminal_says_what_is_done_and_left(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("samples", 3) as advance:
        advance(1)
    out = capsys.readouterr()
    assert out.out == "" and out.err == "samples: 0 of 3\n"  # the next line is due in ten seconds
    assert progress_line("samples", 25, 100, 30.0) == "samples: 25 of 100, about 90 s left"
    assert progress_line("samples", 1, 100, 30.0) == "samples: 1 of 100, about 50 min left"
    assert progress_line("samples", 100, 100, 30.0) == "samples: 100 of 100"
    assert progress_line("starting vLLM", 0, 0, 1.0) == "starting vLLM"


def test_a_stage_that_begins_is_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with stages() as tell:
        for stage in ("read", "compare"):
            for done in range(3):
                tell(stage, done, 2)
    assert capsys.readouterr().err == "read: 0 of 2\ncompare: 0 of 2\n"


def test_what_an_earlier_run_has_kept_says_nothing_of_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with progress("samples", 300) as advance:
        for seconds in [0.001] * 240 + [30.0, 30.0]:
            now[0] += seconds
            advance(1)
    assert capsys.readouterr().err.splitlines()[1:] == [
        "samples: 241 of 300, about 30 min left",
        "samples: 242 of 300, about 29 min left",
    ]

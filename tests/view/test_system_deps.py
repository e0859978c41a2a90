"""`make system-deps` and what `make test` does of it, with a PATH on which programs are missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import system

MAKEFILE = Path(__file__).parents[2] / "Makefile"
pytestmark = pytest.mark.skipif(
    shutil.which("make") is None or not MAKEFILE.is_file(), reason="needs make and a checkout"
)


def make(target: str, folder: Path, *programs: str, uid: int = 0, apt: str | None = "") -> tuple[int, str, str]:
    """Runs a target with ``programs`` installed; ``apt`` is what apt-get does besides noting its arguments (None: absent).

    Returns exit code, output, and the arguments apt-get was called with.
    """
    tools = folder / "bin"
    tools.mkdir()
    for tool in ("sh", "find", "grep", "echo", "test", "cat"):
        (tools / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
    scripts = {program: "" for program in programs} | {"id": f"echo {uid}"}
    if "fc-list" in scripts:
        scripts["fc-list"] = "echo DejaVu"
    if apt is not None:
        scripts["apt-get"] = f'echo "$@" >> {folder}/called\n{apt}'
    for name, script in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    (tools / "make").symlink_to(shutil.which("make") or "")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))} | {"PATH": str(tools)}
    done = subprocess.run(
        [str(tools / "make"), target], env=environment, cwd=MAKEFILE.parent, capture_output=True, text=True
    )
    called = folder / "called"
    return done.returncode, done.stdout + done.stderr, called.read_text() if called.exists() else ""


@pytest.mark.parametrize("target", ["system-deps", "system-deps-if-root"])
@pytest.mark.parametrize("uid", [0, 1000])
def test_nothing_is_done_where_everything_is_there(target: str, uid: int, tmp_path: Path) -> None:
    code, output, called = make(target, tmp_path, "chromium", "redis-server", "fc-list", uid=uid)
    assert (code, called) == (0, "")
    assert "apt-get" not in output


@pytest.mark.parametrize("target", ["system-deps", "system-deps-if-root"])
def test_root_installs_only_what_is_missing(target: str, tmp_path: Path) -> None:
    code, _, called = make(target, tmp_path, "redis-server")
    assert code == 0
    assert called.splitlines() == ["update -qq", "install -y --no-install-recommends -qq chromium fonts-dejavu-core"]


def test_others_are_told_the_command(tmp_path: Path) -> None:
    code, output, called = make("system-deps", tmp_path, "chromium", "fc-list", uid=1000)
    assert (code, called) == (2, "")
    assert "sudo apt-get install -y --no-install-recommends redis-server" in output


def test_without_apt_get_it_names_what_is_missing(tmp_path: Path) -> None:
    code, output, _ = make("system-deps", tmp_path, "fc-list", apt=None)
    assert code == 2
    assert "apt-get" in output
    assert "chromium redis-server" in output


@pytest.mark.parametrize(("uid", "apt"), [(1000, ""), (0, None)])
def test_the_tests_run_on_without_them(uid: int, apt: str | None, tmp_path: Path) -> None:
    code, output, called = make("system-deps-if-root", tmp_path, "fc-list", uid=uid, apt=apt)
    assert (code, called) == (0, "")
    assert "without chromium redis-server some tests are skipped" in output
    assert "make system-deps" in output


def test_the_tests_run_on_when_the_installation_fails(tmp_path: Path) -> None:
    code, output, called = make("system-deps-if-root", tmp_path, "fc-list", apt="exit 100")
    assert code == 0
    assert called == "update -qq\n"
    assert "could not install chromium redis-server" in output


def test_a_missing_program_skips_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    for need, name in ((system.need_chromium, "Chromium"), (system.need_redis, "Redis")):
        with pytest.raises(pytest.skip.Exception, match=f"{name} is not installed; run `make system-deps`"):
            need()

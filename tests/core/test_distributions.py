"""The distributions: what each wheel holds, imports and may need; one version; commands found by entry points."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import ctxwin
from ctxwin.extras import COMMAND_EXTRAS, EXTRA_OF

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "ctxwin": ROOT,
    "ctxwin_chats": ROOT / "adapters" / "chats",
    "ctxwin_client": ROOT / "adapters" / "client",
    "ctxwin_ray": ROOT / "adapters" / "ray",
    "ctxwin_server": ROOT / "adapters" / "server",
    "ctxwin_vllm": ROOT / "adapters" / "vllm",
    "langchain_ctxwin": ROOT / "adapters" / "langchain",
    "ctxwin_evals": ROOT / "evals",
}
NEEDS = {
    "ctxwin": set(),
    "ctxwin_chats": {"ctxwin"},
    "ctxwin_client": {"ctxwin"},
    "ctxwin_ray": {"ctxwin", "ctxwin_chats", "ctxwin_client", "ctxwin_server"},
    "ctxwin_server": {"ctxwin", "ctxwin_chats", "ctxwin_client", "ctxwin_vllm"},
    "ctxwin_vllm": {"ctxwin"},
    "langchain_ctxwin": {"ctxwin"},
    "ctxwin_evals": {"ctxwin"},
}
"""Which wheels each one imports: never one above it."""
IMPORT_ALL = """
import importlib, json, pkgutil, sys
name, blocked = sys.argv[1], json.loads(sys.argv[2])
sys.modules.update(dict.fromkeys(blocked))
package = importlib.import_module(name)
lacking = {}
for module in pkgutil.walk_packages(package.__path__, name + ".", onerror=lambda _: None):
    moved = ("ctxwin.adapters", "ctxwin.engines.vllm", "ctxwin.evals", "ctxwin.serve", "ctxwin.trust", "ctxwin_server.ray")
    if module.name.endswith("__main__") or module.name in moved:
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        lacking[module.name] = (error.name or "").partition(".")[0]
print(json.dumps([package.__file__, lacking]))
"""


def project(name: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((FOLDERS[name] / "pyproject.toml").read_text())["project"]
    return found


def source(name: str) -> Path:
    return FOLDERS[name] / ("src" if name == "ctxwin_evals" else "") / name


def imported(name: str) -> Iterator[tuple[Path, str]]:
    """Top-level packages that the modules of a distribution import, those for type checkers among them."""
    for path in source(name).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name.partition(".")[0]) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                yield path, str(node.module).partition(".")[0]


@pytest.mark.parametrize("name", FOLDERS)
def test_imports_run_one_way(name: str) -> None:
    allowed = {name} | NEEDS[name]
    upward = sorted(f"{path.name}: {top}" for path, top in imported(name) if top in FOLDERS and top not in allowed)
    assert not upward
    links = [path for path in source(name).rglob("*") if path.is_symlink()]
    assert not links
    declared = {line.partition("==")[0].partition("[")[0].replace("-", "_") for line in project(name)["dependencies"]}
    assert declared & set(FOLDERS) == NEEDS[name]


def test_there_is_one_version() -> None:
    pins = {f"=={ctxwin.__version__}"}
    for name in FOLDERS:
        about = project(name)
        assert name == "ctxwin" or about["version"] == ctxwin.__version__
        lines = [
            *about["dependencies"],
            *(line for extra in about.get("optional-dependencies", {}).values() for line in extra),
        ]
        for line in lines:
            if line.partition("=")[0].partition("[")[0].replace("-", "_") in FOLDERS:
                assert line.removeprefix(line.partition("==")[0]) in pins, line


def test_every_command_of_another_distribution_is_found_and_has_an_extra() -> None:
    points = {point.name for point in entry_points(group="ctxwin.commands")}
    assert points == set(COMMAND_EXTRAS)
    extras = project("ctxwin")["optional-dependencies"]
    named = {
        name for about in map(project, FOLDERS) for name in about.get("entry-points", {}).get("ctxwin.commands", {})
    }
    assert named == points and set(COMMAND_EXTRAS.values()) <= set(extras)


@pytest.mark.parametrize(
    "module", ["adapters.langgraph", "adapters", "engines.vllm.engine", "serve.routes", "evals.cli"]
)
def test_old_names_tell_the_new_one(module: str) -> None:
    with pytest.raises(ImportError, match=r"has become .*pip install 'ctxwin\["):
        __import__(f"ctxwin.{module}")


@pytest.mark.parametrize("module", ["ray", "ray.hints"])
def test_the_old_name_of_the_fleet_tells_the_new_one(module: str) -> None:
    with pytest.raises(ImportError, match=r"has become ctxwin_ray; pip install 'ctxwin\[ray\]'"):
        __import__(f"ctxwin_server.{module}")


@pytest.mark.parametrize("module", ["trust", "trust.simulate"])
def test_the_old_name_of_audits_tells_the_new_one(module: str) -> None:
    with pytest.raises(ImportError, match=r"has become ctxwin\.audit"):
        __import__(f"ctxwin.{module}")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each distribution built from this tree, and unpacked."""
    place = tmp_path_factory.mktemp("wheels")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-index",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(place),
    ]
    subprocess.run([*command, *map(str, FOLDERS.values())], check=True, cwd=place)
    unpacked = {}
    for name in FOLDERS:
        (wheel,) = place.glob(f"{name}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            tops = {entry.partition("/")[0] for entry in archive.namelist()}
            facts = f"{name}-{ctxwin.__version__}.dist-info"
            assert tops == {name, facts}
            assert {f"{name}/py.typed", f"{facts}/licenses/LICENSE"} <= {*archive.namelist()}
            archive.extractall(place / name)
        unpacked[name] = place / name
    return unpacked


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wheel_imports_with_its_own_dependencies_alone(name: str, wheels: dict[str, Path]) -> None:
    """Every module imports, or lacks a package of an extra; none lacks another distribution of ours."""
    others = [other for other in FOLDERS if other != name and other not in NEEDS[name]]
    optional = {module for module in EXTRA_OF if module not in FOLDERS} | {"vllm", "ray"}
    declared = {line.split(">")[0].split("=")[0].split("[")[0] for line in project(name)["dependencies"]}
    modules = {"opencv-python-headless": "cv2", "rouge-score": "rouge_score", "langchain-core": "langchain_core"}
    own = {modules.get(line, line.replace("-", "_")) for line in declared}
    own |= (
        {"fastapi", "prometheus_client", "sse_starlette", "uvicorn", "httptools", "openai"}
        if name == "ctxwin_server"
        else set()
    )
    blocked = json.dumps(sorted({*others, *(optional - own)}))
    paths = os.pathsep.join(str(wheels[n]) for n in (name, *sorted(NEEDS[name])))
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, name, blocked], capture_output=True, text=True, check=False,
        cwd=wheels[name], env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    file, lacking = json.loads(done.stdout.splitlines()[-1])
    assert Path(file).is_relative_to(wheels[name])
    assert not set(lacking.values()) & set(FOLDERS), lacking
    assert set(lacking.values()) <= optional | {"redis", "mcp"}, lacking

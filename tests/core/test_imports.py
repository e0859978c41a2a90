"""Imports run one way: no module depends on itself through others, and none on a layer above its own.

Read from the sources without running them. Imports inside functions and those for type checkers count: each is a dependency
that a reader has to follow.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import ctxwin
from distributions import DISTRIBUTIONS

LAYERS: list[set[str]] = [
    {"errors", "extras", "files", "hashing", "fidelity", "process_exit", "progress", "tracing", "validation"},
    {"audio", "media", "video", "video_container", "kv"},
    {"chunk"},
    {"store"},
    {"engines", "profiles", "tiny"},
    {"window"},
    {"audit", "policies"},
    {"opening"},
    {"library"},
    {"baselines", "view"},
    {"demo", "doctor"},
    {"cli"},
    {"__main__", "adapters", "evals", "serve", "trust"},  # the last four only say where their contents have gone
    {"ctxwin_chats", "ctxwin_client", "ctxwin_vllm"},
    {"ctxwin_evals", "ctxwin_server", "langchain_ctxwin"},
    {"ctxwin_ray"},
]
"""The parts of `ctxwin` from the bottom up, and the other distributions.

Parts of one layer may use each other, single modules never in a circle."""

ROOMS: list[set[str]] = [
    {"protocol"},
    {"process"},
    {"sandbox"},
    {"registry"},
    {"chat"},
    {"app"},
    {"http"},
    {"vllm"},
    {"command", "ray"},  # the second only says where it has gone
]
"""The packages of `ctxwin_server` from the bottom up, and its single modules."""


def _modules() -> dict[str, Path]:
    """Every module of all distributions by dotted name, without ``ctxwin.``; ``ctxwin`` itself left out."""
    named = {}
    for package in DISTRIBUTIONS:
        root = Path(str(package.__file__)).parent
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            inner = parts[:-1] if parts[-1] == "__init__" else parts
            named[".".join(inner if package is ctxwin else (package.__name__, *inner))] = path
    return {name: path for name, path in named.items() if name}


def _imports(path: Path) -> set[str]:
    """Return what a file imports of our distributions, for type checkers only or late included, without ``ctxwin.``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{a.name}" for a in node.names}
    return {name.removeprefix("ctxwin.") for name in names if name.startswith(("ctxwin", "langchain_ctxwin"))}


def _graph() -> dict[str, set[str]]:
    modules = _modules()

    def home(name: str) -> str:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    return {m: {h for h in map(home, _imports(path)) if h and h != m} for m, path in modules.items()}


def _package_graph() -> dict[str, set[str]]:
    """Return which packages and single modules of `ctxwin`, and which other distributions, import which."""
    packages: dict[str, set[str]] = {}
    for module, imported in _graph().items():
        package = module.split(".")[0]
        packages.setdefault(package, set()).update({name.split(".")[0] for name in imported} - {package})
    return packages


def _circles(graph: Mapping[str, Set[str]]) -> set[frozenset[str]]:
    """Return the sets of nodes that all reach one another."""
    reached: dict[str, set[str]] = {}
    for node in graph:
        reached[node], pending = set(), [node]
        while pending:
            new = graph[pending.pop()] - reached[node]
            reached[node] |= new
            pending += new
    return {frozenset(m for m in reached[n] if n in reached[m]) for n in graph if n in reached[n]}


_NODES = "abcdefg"


@given(st.fixed_dictionaries({node: st.sets(st.sampled_from(_NODES)) for node in _NODES}))
def test_circles_are_found(graph: dict[str, set[str]]) -> None:
    circles = _circles(graph)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        assert any(circle >= set(error.args[1]) for circle in circles)
    else:
        assert not circles
    home = {node: next((c for c in circles if node in c), frozenset(node)) for node in graph}
    merged: dict[frozenset[str], set[frozenset[str]]] = {}
    for node, imported in graph.items():
        merged.setdefault(home[node], set()).update({home[name] for name in imported} - {home[node]})
    TopologicalSorter(merged).prepare()  # a circle that was cut short would still close here


def test_late_and_type_checking_imports_count(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(
        "import ctxwin.chunk\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from ctxwin.window.window import Window\n"
        "def late():\n    from ctxwin_server.app import service\n"
    )
    assert _imports(source) == {"chunk", "window.window.Window", "ctxwin_server.app.service"}


def test_no_module_imports_itself_through_others() -> None:
    graph = _graph()
    assert len(graph) > 200
    assert not _circles(graph)


def test_no_package_imports_itself_through_others() -> None:
    graph = _package_graph()
    assert {"window", "audit", "policies", "ctxwin_server"} <= set(graph)
    assert not _circles(graph)


def test_no_layer_imports_a_higher_one() -> None:
    rank = {part: i for i, parts in enumerate(LAYERS) for part in parts}
    graph = _graph()
    assert {m.split(".")[0] for m in graph} == set(rank), "a part without a layer, or a layer without its part"
    upward = {(m, d) for m, seen in graph.items() for d in seen if rank[d.split(".")[0]] > rank[m.split(".")[0]]}
    assert not upward


def test_no_room_of_the_server_imports_a_higher_one() -> None:
    rank = {room: i for i, rooms in enumerate(ROOMS) for room in rooms}
    rooms: dict[str, set[str]] = {}
    for module, imported in _graph().items():
        if module.startswith("ctxwin_server."):
            names = {name.split(".")[1] for name in imported if name.startswith("ctxwin_server.")}
            rooms.setdefault(module.split(".")[1], set()).update(names)
    assert set(rooms) == set(rank), "a room without a floor, or a floor without its room"
    assert not {(room, used) for room, names in rooms.items() for used in names if rank[used] > rank[room]}
    assert not _circles({room: names - {room} for room, names in rooms.items()})

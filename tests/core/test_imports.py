"""Imports run one way: no module depends on itself through others, and none on a layer above its own.

Read from the sources without running them, imports inside functions included: what is imported late is a dependency, too.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import ctxwin

ROOT = Path(ctxwin.__file__).parent
LAYERS: list[set[str]] = [
    {"errors", "extras", "files", "hashing", "fidelity", "tracing"},
    {"audio", "media", "kv"},
    {"chunk"},
    {"store"},
    {"engines", "profiles", "tiny"},
    {"library", "policies", "trust", "window"},
    {"baselines", "view"},
    {"adapters", "demo", "doctor", "evals", "serve"},
    {"cli"},
    {"__main__"},
]
"""The parts of `ctxwin` from the bottom up. Parts of one layer may use each other, single modules never in a circle."""


def _modules() -> dict[str, Path]:
    """Every module of the package by dotted name, behind links too, ``ctxwin`` itself left out."""
    named = {}
    for path in (p for top in [ROOT, ROOT / "adapters", ROOT / "evals"] for p in top.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: path for name, path in named.items() if name and "studies" not in name.split(".")}


def _imports(path: Path) -> set[str]:
    """What a file imports of ``ctxwin``, without that prefix; imports for type checkers only are none."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{a.name}" for a in node.names}
    return {name.removeprefix("ctxwin.") for name in names if name.startswith("ctxwin.")}


def _graph() -> dict[str, set[str]]:
    modules = _modules()

    def home(name: str) -> str:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    return {m: {h for h in map(home, _imports(path)) if h and h != m} for m, path in modules.items()}


def test_no_module_imports_itself_through_others() -> None:
    graph = _graph()
    assert len(graph) > 200
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_no_layer_imports_a_higher_one() -> None:
    rank = {part: i for i, parts in enumerate(LAYERS) for part in parts}
    graph = _graph()
    assert {m.split(".")[0] for m in graph} == set(rank), "a part without a layer, or a layer without its part"
    upward = {(m, d) for m, seen in graph.items() for d in seen if rank[d.split(".")[0]] > rank[m.split(".")[0]]}
    assert not upward

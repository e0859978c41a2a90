"""Every mechanism of the papers has a row, and each row names code, tests and figures that exist.

Names are looked up in the sources: nothing is imported, so that rows may name modules of vLLM's engine and of the harness.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from doc_pages import ROOT

PAPERS: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "docs" / "reference" / "papers.toml").read_text())
ROWS = [(paper, row) for paper in PAPERS.values() for row in paper["rows"]]
ENGINES = {"transformers", "vllm"}
FIELDS = {"at", "what", "status", "engines", "code", "tests", "result", "note"}
SOURCES = [
    ROOT,
    *(ROOT / "adapters" / name for name in ("chats", "client", "langchain", "ray", "server", "vllm")),
    ROOT / "evals" / "src",
]

NAMES = {"Kamera": "kamera", "MPIC": "mpic", "Elastic Cache": "elastic"}
NAMES |= {paper["arxiv"]: key for key, paper in PAPERS.items() if paper["arxiv"]}
KINDS = {
    "section": "section", "sections": "section", "appendix": "appendix", "appendices": "appendix", "eq.": "eq.",
    "equation": "eq.", "equations": "eq.", "table": "table", "tables": "table", "figure": "figure", "figures": "figure",
    "fig.": "figure", "algorithm": "algorithm", "insight": "insight",
}  # fmt: skip
_NAME = re.compile("|".join(map(re.escape, NAMES)))
_FIRST = re.compile(r"[^.]{0,60}?\b(?=(?:" + "|".join(map(re.escape, KINDS)) + r") [A-E0-9])", re.I)
_TOKEN = re.compile(
    r"\s*(?:(?P<kind>" + "|".join(map(re.escape, sorted(KINDS, key=len, reverse=True))) + r")(?=\s)"
    r"|(?P<place>[A-E](?:\.\d)?|\d+(?:\.\d)?)[a-d]?(?!\w)"
    r"|(?P<quote>'[^']{3,60}'|\"[^\"]{3,60}\")"
    r"|(?P<aside>\([^()]*\))"
    r"|(?P<joint>,|:|-|and\b|to\b))",
    re.I,
)  # fmt: skip


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def members(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Definitions of a module or a class, by name."""
    for child in getattr(node, "body", ()):
        match child:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, child
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, child
            case ast.Assign(targets=targets):
                names = (name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
                yield from ((name.id, child) for name in names)


def member(module: ast.Module, node: ast.AST, name: str) -> ast.AST | None:
    """The definition of ``name`` in ``node``, or in one of its bases that ``module`` defines."""
    bases = [dict(members(module)).get(ast.unparse(base)) for base in getattr(node, "bases", ())]
    inherited = (member(module, base, name) for base in bases if base is not None)
    return dict(members(node)).get(name) or next(filter(None, inherited), None)


def defined(module: ast.Module, names: list[str]) -> bool:
    node: ast.AST | None = module
    for name in names:
        node = node and member(module, node, name)
    return node is not None


def exists(name: str) -> bool:
    """Return True if a dotted name is defined in the sources, or a path is a file of the repository."""
    if "/" in name:
        return (ROOT / name).is_file()
    parts = name.split(".")
    for source in SOURCES:
        for length in range(len(parts), 0, -1):
            module = source.joinpath(*parts[:length])
            for path in (module.with_suffix(".py"), module / "__init__.py"):
                if path.is_file():
                    return defined(parsed(path), parts[length:])
    return False


def citations(text: str) -> Iterator[tuple[str, str, str]]:
    """(paper, place, quoted heading or "") of what a text cites; ranges by their ends."""
    text = " ".join(text.split())
    names = list(_NAME.finditer(text))
    for i, name in enumerate(names):
        end = names[i + 1].start() if i + 1 < len(names) else len(text)
        rest = re.sub(r"^ ?\([^()]*(?:arXiv|et al)[^()]*\)", "", text[name.end() : end])
        first = _FIRST.match(rest)
        if first is None:
            continue
        kind, place, at = "", "", first.end()
        while token := _TOKEN.match(rest, at):
            at = token.end()
            if token["kind"]:
                kind = KINDS[token["kind"].lower()]
            elif token["place"]:
                place = f"{kind} {token['place']}"
                yield NAMES[name[0]], place, ""
            elif token["quote"] and place:
                yield NAMES[name[0]], place, token["quote"][1:-1].rstrip(",")


def has_place(paper: dict[str, Any], place: str, heading: str) -> bool:
    def fits(one: str) -> bool:
        number, _, title = one.partition(", ")
        return (number == place or number.startswith(f"{place}.")) and (not heading or title.startswith(heading))

    return any(fits(one) for row in paper["rows"] for one in row["at"])


def cited() -> Iterator[tuple[Path, str]]:
    for folder in ("ctxwin", "adapters", "evals"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not _NAME.search(path.read_text(encoding="utf-8")):
                continue
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.search(node.value):
                    yield path, node.value


def test_citations_are_read() -> None:
    text = """Kamera, section 5 "Reorder", appendices A to D; MPIC (Zhao et al. 2025), sections 4.1 (dummy cache) and 4.2.
    Elastic Cache, eq. 1-3 and algorithm 1. Kamera's figure 7b is measured on it (arXiv 2606.23581, section 6 and table 3),
    as in MPIC (section 3.1, files)."""
    assert list(citations(text)) == [
        ("kamera", "section 5", ""), ("kamera", "section 5", "Reorder"), ("kamera", "appendix A", ""),
        ("kamera", "appendix D", ""), ("mpic", "section 4.1", ""), ("mpic", "section 4.2", ""), ("elastic", "eq. 1", ""),
        ("elastic", "eq. 3", ""), ("elastic", "algorithm 1", ""), ("kamera", "figure 7", ""), ("kamera", "section 6", ""),
        ("kamera", "table 3", ""), ("mpic", "section 3.1", ""),
    ]  # fmt: skip
    assert not list(citations("Kamera's operator. The table 3 of another page, and MPIC-32 in section heads."))
    assert exists("ctxwin.kv.patch.Patch.nbytes") and exists("ctxwin.engines.base") and exists("evals/studies/drift.py")
    assert (
        not exists("ctxwin.kv.patch.Patch.bytes_of") and not exists("ctxwin.kv.nowhere") and not exists("evals/none.py")
    )


def test_what_docstrings_cite_has_a_row() -> None:
    missing, seen = [], 0
    for path, text in cited():
        for name, place, heading in citations(text):
            seen += 1
            if not has_place(PAPERS[name], place, heading):
                missing.append(f"{path.relative_to(ROOT)}: {PAPERS[name]['name']}, {place} {heading}".strip())
    assert seen > 60
    assert not missing, f"add a row to docs/reference/papers.toml, or mend the citation: {missing}"


@pytest.mark.parametrize("paper", PAPERS.values(), ids=lambda paper: paper["name"])
def test_every_place_of_a_paper_has_a_row(paper: dict[str, Any]) -> None:
    contents = paper["contents"]
    assert len(set(contents)) == len(contents)
    at = {place for row in paper["rows"] for place in row["at"]}
    assert at | set(paper["background"]) <= set(contents), sorted(at - set(contents))
    without = [place for place in contents if place not in at and place not in paper["background"]]
    # A section is there where a part of it is.
    assert not [place for place in without if not any(one.startswith((f"{place}, ", f"{place}.")) for one in at)]
    whats = [row["what"] for row in paper["rows"]]
    assert len(set(whats)) == len(whats)


@pytest.mark.parametrize(("paper", "row"), ROWS, ids=[f"{p['name']}: {row['what'][:60]}" for p, row in ROWS])
def test_a_row_says_what_is_there(paper: dict[str, Any], row: dict[str, Any]) -> None:
    assert row.keys() <= FIELDS and {"at", "what", "status"} <= row.keys()
    status, engines, tests = row["status"], set(row.get("engines", ())), row.get("tests", ())
    if status == "not built":
        assert row["note"] and not engines and not tests and "code" not in row
    elif status == "study":
        page, _, anchor = row["result"].partition("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.M)
        assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not tests and "code" not in row
    else:
        assert status in ("served", "harness", "laboratory")
        assert engines and engines <= ENGINES and row["code"] and tests
        assert "note" in row or status != "laboratory", "a row that is in the laboratory only says why"
    assert not [name for name in row.get("code", ()) if not exists(name)]
    for test in tests:
        file, *names = test.split("::")
        assert names and defined(parsed(ROOT / file), names), test
    if "vllm" in engines:
        assert any("vllm" in (ROOT / test.partition("::")[0]).read_text() for test in tests), "no test on vLLM"

"""Names on pages exist: modules and their members, files of the repository, links."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from doc_pages import PAGES, ROOT, name_of

TOLD = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "llms.txt", ROOT / "ctxwin" / "tiny" / "MODEL_CARD.md"]
_NAME = re.compile(
    r"(?<![\w./-])((?:ctxwin|langchain_ctxwin|ctxwin_chats|ctxwin_client|ctxwin_ray|ctxwin_server|ctxwin_vllm|ctxwin_evals|evals|tools)(?:\.[A-Za-z_]\w*)+)(?!\w*\()"
)
_FILE = re.compile(r"(?<![\w/.:-])((?:adapters|ctxwin|docs|evals|examples|tests|tools)/[\w./-]*[\w/])")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_SPANS = {f"ctxwin.{name}" for name in ("request", "ask", "lay_out", "read", "run", "settle")}
_GONE = {
    "ctxwin.adapters",
    "ctxwin.engines.vllm",
    "ctxwin.serve",
    "ctxwin.evals",
    "ctxwin_server.ray",
}  # importing one says where its contents have gone
_NO_NAMES = {"ctxwin.git", "ctxwin.readthedocs.io", "ctxwin.commands", "ctxwin.stores", *_SPANS, *_GONE}


def resolved(name: str) -> Any:
    """The module or member that a dotted name is; raises where there is none."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                pytest.skip(f"{path} needs {error.name}")
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def in_code(text: str) -> str:
    """What stands in backticks, in blocks and behind mkdocstrings' colons."""
    pieces = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    pieces += re.findall(r"^```\w+[^\n]*\n(.*?)^```$", text, flags=re.M | re.S)
    pieces += re.findall(r"^::: (\S+)", text, flags=re.M)
    return "\n".join(pieces)


# What the page about the papers names is looked up in the sources, since much of it needs vLLM: test_papers.py.
@pytest.mark.parametrize("page", [page for page in TOLD if page.stem != "papers"], ids=lambda p: name_of(p))
def test_dotted_names_exist(page: Path) -> None:
    code = in_code(page.read_text(encoding="utf-8"))
    for name in sorted(set(_NAME.findall(code)) - _NO_NAMES):
        if name.startswith(("evals.studies", "tools.")):
            assert any((ROOT / name.replace(".", "/")).with_suffix(s).exists() for s in ("", ".py")), name
            continue
        try:
            resolved(name)
        except (AttributeError, ModuleNotFoundError) as error:
            pytest.fail(f"{name_of(page)} names {name}: {error}")


@pytest.mark.parametrize("page", TOLD, ids=lambda p: name_of(p))
def test_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(_FILE.findall(in_code(text))) | set(re.findall(r"/blob/main/([\w./-]+)", text))
    gone = sorted(path for path in named if not (ROOT / path).exists())
    assert not gone, f"{name_of(page)} names {gone}"


@pytest.mark.parametrize("page", [p for p in TOLD if p.suffix == ".md"], ids=lambda p: name_of(p))
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        if not target.startswith(("http", "../security/advisories")):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


def test_environment_variables_are_those_of_the_code() -> None:
    """Every variable that pages name is read, by tests too, and the configuration page names every one that the code reads."""

    def read_in(*folders: str) -> set[str]:
        sources = [p.read_text() for folder in folders for p in (ROOT / folder).rglob("*.py")]
        return set(re.findall(r'"(CTXWIN_[A-Z_]+)"', "\n".join(sources)))

    read, tested = read_in("ctxwin", "adapters", "evals"), read_in("tests")
    told = set(re.findall(r"CTXWIN_[A-Z_]+", (ROOT / "docs" / "reference" / "configuration.md").read_text()))
    assert told == read
    for page in TOLD:
        assert set(re.findall(r"CTXWIN_[A-Z_]+", page.read_text(encoding="utf-8"))) <= read | tested, name_of(page)

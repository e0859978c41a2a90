"""The lines that install ctxwin work before a release, too: the first that a reader meets takes a checkout or a wheel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import InvalidRequirement, Requirement

from doc_pages import ROOT, blocks

FIRST_PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "start.md"]


def install_lines(page: Path) -> list[str]:
    """The lines of a page's shell blocks that install ctxwin itself."""
    lines = [line.strip() for block in blocks(page, "bash") for line in block.code.splitlines()]
    return [line for line in lines if line.startswith("pip install") and re.search(r"""['"](\.|ctxwin)\[""", line)]


@pytest.mark.parametrize("page", FIRST_PAGES, ids=lambda page: page.name)
def test_the_first_install_line_needs_no_release(page: Path) -> None:
    lines = install_lines(page)
    assert lines
    assert lines[0].startswith("pip install '.[video]'")
    for line in lines:
        if line.startswith("pip install 'ctxwin["):
            assert "from the first release on" in line


def test_every_distribution_is_built_before_extras_find_it() -> None:
    page = ROOT / "docs" / "start.md"
    [built] = [
        line for block in blocks(page, "bash") for line in block.code.splitlines() if line.startswith("pip wheel")
    ]
    folders = {(ROOT / word).resolve() for word in built.partition("#")[0].split() if word.startswith(".")}
    assert folders == {
        path.parent
        for path in (ROOT / "pyproject.toml", *ROOT.glob("*/pyproject.toml"), *ROOT.glob("adapters/*/pyproject.toml"))
    }
    assert any(line.startswith("pip install --find-links dist 'ctxwin[") for line in install_lines(page))


def test_extras_that_install_lines_name_are_requirements() -> None:
    for page in FIRST_PAGES:
        for line in install_lines(page):
            named = line.split("'")[1] if "'" in line else line.split('"')[1]
            try:
                Requirement(named.replace(".[", "ctxwin[").partition(" @ ")[0])
            except InvalidRequirement as error:
                pytest.fail(f"{page.name}: {line}: {error}")

"""The site loads nothing from other hosts, and names things as their users import them."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

from doc_pages import ROOT

PACKAGES = ("ctxwin", "langchain_ctxwin", "langchain_ctxwin.langgraph", "ctxwin_client", "ctxwin.store")
CONFIG = (ROOT / "mkdocs.yml").read_text()


def test_no_page_asks_another_host() -> None:
    assert "font: false" in CONFIG
    assert not re.search(r"^repo_url:", CONFIG, re.M), (
        "the theme asks the host of a repository for its stars from every page"
    )
    styles = (ROOT / "docs" / "assets" / "pages.css").read_text()
    assert "url(" not in styles and "@import" not in styles
    assert "assets/pages.css" in CONFIG and "thead" in styles


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "reference" / "api").glob("*.md")), ids=lambda page: page.stem)
def test_the_api_shows_names_as_they_are_imported(page: object) -> None:
    text = page.read_text()  # type: ignore[attr-defined]
    for path, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", text, re.M):
        module, _, name = path.rpartition(".")
        shown = getattr(importlib.import_module(module), name)
        public = [p for p in PACKAGES if name in importlib.import_module(p).__all__]
        if inspect.ismodule(shown) or not public or path == f"{public[0]}.{name}":
            continue
        assert f"heading: {public[0]}.{name}\n" in options, f"{path} is imported from {public[0]}"


def test_the_first_screen_of_the_site_installs_and_shows_code() -> None:
    opening = (ROOT / "docs" / "index.md").read_text().partition("![")[0]
    assert "pip install '.[video]'" in opening and "```python" in opening

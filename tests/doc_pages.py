"""Documentation pages and their code blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "evals" / "results").glob("*.md"),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
    ]
)
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.M | re.S)
_SNIPPET = re.compile(r'^--8<-- "([^"]+)"$', re.M)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        title: shown above it; a Python block with one is not run on its own.
        line: of its first line of code, for messages.
    """

    page: Path
    language: str
    title: str
    code: str
    line: int


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[Block]:
    """The blocks of a page in one language, with included files put in."""
    text, found = page.read_text(encoding="utf-8"), []
    for match in _BLOCK.finditer(text):
        if match[1] == language:
            title = re.search(r'title="([^"]*)"', match[2])
            code = _SNIPPET.sub(lambda snippet: (ROOT / snippet[1]).read_text(encoding="utf-8"), match[3])
            found.append(Block(page, language, title[1] if title else "", code, text.count("\n", 0, match.start()) + 2))
    return found

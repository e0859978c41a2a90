"""Lets transformers import beside a CPU build of torch; random models of each family, for the tests of several files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ctxwin.engines.torchvision_repair import repair

repair()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a family's random model, written once."""
    from engines import families, hybrids

    writers = families.WRITERS | hybrids.WRITERS
    base, made = tmp_path_factory.mktemp("families"), dict[str, Path]()

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = writers[name](base / name)
        return made[name]

    return folder

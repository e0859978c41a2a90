"""In every Python process of a server of these tests, by PYTHONPATH: what calls take on a busy machine changes no price.

`_fixed_prices` of ``tests/conftest.py`` does so in the tests' own process. The module is changed when it is imported, so that
nothing is imported sooner than in a user's server.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _CostFinder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == "ctxwin.engines.cost" else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                module.Fit.observe = lambda self, amounts, ms: False

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _CostFinder())

"""Answers that keep a share of the KV, for tests on vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from adapters.vllm.layouts import encoded, laid
from ctxwin.engines.sampling import Sampling


def question(engine: Any, seeds: list[int]) -> tuple[list[Any], Any]:
    return laid(encoded(engine, seeds), capture=False), engine.encode_query("what color is the left one")


def answers(engine: Any, sampling: Sampling, whole: bool, **options: Any) -> tuple[Any, int]:
    """An answer in one request behind the prompt's, or in pieces; and the number of requests."""
    layout, query = question(engine, [1, 2])
    with (
        mock.patch.object(engine._core, "shortens", whole),
        mock.patch.object(engine._core.driver, "submit", wraps=engine._core.driver.submit) as submitted,
    ):
        return engine.generate(layout, query, sampling, salt="shorter", **options), submitted.call_count


def once(move: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method that fails the first time."""
    fails = iter([OSError("once")])

    def moved(*args: Any) -> Any:
        for error in fails:
            raise error
        return move(*args)

    return moved

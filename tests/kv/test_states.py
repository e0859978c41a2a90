"""Chunks as maps on the states of recurrent layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ctxwin.kv.states import compose_states, since_exact, transition


def tokens(count: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    noise = torch.Generator().manual_seed(count)
    keys = torch.nn.functional.normalize(torch.randn(count, 3, 16, generator=noise, dtype=torch.float64), dim=-1)
    decay, beta = (torch.rand(count, 3, generator=noise, dtype=torch.float64) for _ in range(2))
    values = torch.randn(count, 3, 8, generator=noise, dtype=torch.float64)
    return tuple(x.to(dtype) for x in (keys, -0.3 * decay, beta, values))


def stepped(
    state: torch.Tensor, keys: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """The rule token by token."""
    for k, g, b, v in zip(keys, log_decay, beta, values, strict=True):
        state = g.exp()[:, None, None] * state
        state = state + b[:, None, None] * k[:, :, None] * (v - (k[:, None] @ state)[:, 0])[:, None]
    return state


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_a_transition_is_the_rule_without_values(count: int) -> None:
    keys, decay, beta, _ = tokens(count)
    eye = torch.eye(16, dtype=torch.float64).expand(3, -1, -1)
    want = stepped(eye, keys, decay, beta, torch.zeros(count, 3, 16, dtype=torch.float64))
    torch.testing.assert_close(transition(keys, decay, beta), want, rtol=1e-9, atol=1e-12)
    rounded = transition(*(x.float() for x in (keys, decay, beta)))
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded.double(), want, rtol=0, atol=1e-5)


def test_states_are_composed_of_maps() -> None:
    parts = [tokens(count) for count in (5, 70, 1)]
    state, front = torch.zeros(3, 16, 8, dtype=torch.float64), dict[str, torch.Tensor]()
    for keys, decay, beta, values in parts:
        own = stepped(torch.zeros_like(state), keys, decay, beta, values)
        state = stepped(state, keys, decay, beta, values)
        chunk = {"0.map": transition(keys, decay, beta), "0.own": own, "0.recurrent": own, "0.conv": values[-1]}
        front = compose_states(front, chunk)
    torch.testing.assert_close(front["0.recurrent"], state, rtol=1e-9, atol=1e-12)
    assert torch.equal(front["0.conv"], parts[-1][-1][-1])


@pytest.mark.parametrize(("approximate", "count"), [("", 0), ("0", 1), ("01", 2), ("011", 3), ("0110", 1), ("11", 2)])
def test_a_state_is_made_of_the_last_exact_one_and_what_follows(approximate: str, count: int) -> None:
    parts = [SimpleNamespace(approximate=flag == "1") for flag in approximate]
    assert list(since_exact(parts)) == parts[len(parts) - count :]

from __future__ import annotations

import torch

from ctxwin.kv.layout import SpanKV
from ctxwin_evals.measure import by_layer


def span(tokens: int, seed: int) -> SpanKV:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(3, tokens, 2, 4, generator=generator) for _ in range(2))
    return SpanKV(k, v, torch.zeros(3, tokens, dtype=torch.int64), 0)


def test_the_error_of_a_layer_is_its_own() -> None:
    exact = [span(5, 1), span(2, 2)]
    assert by_layer(exact, exact) == [0.0, 0.0, 0.0]
    k, v = exact[1].k.clone(), exact[1].v.clone()
    v[2] += 0.5
    wrong = SpanKV(k, v, exact[1].positions, 0)
    whole = sum(float(x[2].double().pow(2).sum()) for s in exact for x in (s.k, s.v))
    found = by_layer([exact[0], wrong], exact)
    assert found is not None
    assert found[:2] == [0.0, 0.0]
    assert found[2] == float(f"{(0.25 * v[2].numel() / whole) ** 0.5:.6g}")


def test_other_tokens_have_no_error_by_layer() -> None:
    assert by_layer([span(4, 1)], [span(5, 1)]) is None
    assert by_layer([span(5, 1)], [span(5, 1), span(2, 2)]) is None

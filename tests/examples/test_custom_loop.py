"""The loop without a framework: thirty lines, and what its window saves."""

from __future__ import annotations

import io
import tokenize

from examples.agent_runs import EXAMPLES, check_figures, figures_of

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def test_it_answers_like_a_re_prefill_and_computes_a_fraction() -> None:
    figures = figures_of("custom_loop")
    check_figures(figures)
    assert figures["asks"] == 38  # one a second, and eight look-backs
    assert figures["vision_encodes"] == 30  # a frame each: none for a recall, none for a fork


def test_it_has_thirty_lines_of_code() -> None:
    source = (EXAMPLES / "custom_loop.py").read_text()
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in LAYOUT]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    assert len(lines) <= 30

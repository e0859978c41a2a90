"""What is shown of an arm: its columns with what they mean, and how figures are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ctxwin.evals.metrics import Figures


@dataclass(frozen=True)
class Cell:
    """One entry: what is shown, and a number to sort by (None sorts last)."""

    text: str
    key: float | None = None


@dataclass(frozen=True)
class Column:
    """A column of figures.

    Attributes:
        name: its head.
        about: what it means, a sentence.
        cell: from an arm's figures to the entry.
        short: in the main table, and in terminals and markdown, where there is less room.
    """

    name: str
    about: str
    cell: Callable[[Figures], Cell]
    short: bool = False

    def held(self, figures: Sequence[Figures]) -> bool:
        """Whether any arm has it; a column that nobody has is left out."""
        return any(self.cell(f).text != NONE for f in figures)


NONE = "-"


def share(value: float | None) -> Cell:
    return Cell(NONE) if value is None else Cell(f"{value:.1%}", value)


def number(value: float | None) -> Cell:
    """Three decimals; small ones by their order of magnitude."""
    if value is None:
        return Cell(NONE)
    return Cell(f"{value:.3f}" if abs(value) >= 0.001 or value == 0 else f"{value:.0e}", value)


def signed(value: float | None) -> Cell:
    if value is None:
        return Cell(NONE)
    return Cell(f"{value:+.3f}" if abs(value) >= 0.001 or value == 0 else f"{value:+.0e}", value)


def count(value: int | None) -> Cell:
    return Cell(NONE) if value is None else Cell(str(value), value)


def between(value: Cell, interval: Sequence[float] | None, show: Callable[[float | None], Cell] = number) -> Cell:
    """A figure with its interval."""
    if interval is None or value.text == NONE:
        return value
    return Cell(f"{value.text} [{show(interval[0]).text}, {show(interval[1]).text}]", value.key)


def _fixed(value: float | None) -> Cell:
    return Cell(NONE) if value is None else Cell(f"{value:.3f}", value)


def _flips(f: Figures) -> Cell:
    if f["flip_recover"] is None:
        return Cell(NONE)
    return Cell(f"{f['flip_recover']:.3f} of {f['flips']}", f["flip_recover"])


def _mean(value: float) -> Cell:
    return Cell(f"{value:,.1f}".removesuffix(".0"), value)


def _left_out(f: Figures) -> Cell:
    unserved, unparsed = f["unscored"], f["unparsed"]
    return Cell(f"{unserved} + {unparsed}", unserved + unparsed) if unserved or unparsed else Cell(NONE)


def _first_token(f: Figures) -> Cell:
    timed = f.get("ttft_s")
    return Cell(NONE) if timed is None else Cell(f"{timed['median']:.3g} s of {timed['n']}", timed["median"])


COLUMNS: tuple[Column, ...] = (
    Column("n", "Items that the arm served.", lambda f: count(f["n"]), short=True),
    Column(
        "accuracy [95 %]",
        "Mean score under the task's own rule.",
        lambda f: between(_fixed(f["accuracy"]), f["ci95"], _fixed),
        short=True,
    ),
    Column(
        "harm",
        "Share of items in which the arm scores lower than re-prefill (re-prefill right, arm wrong).",
        lambda f: share(f["harm_rate"]),
        short=True,
    ),
    Column(
        "bytes",
        "Stored for the patched chunks beyond the KV they are applied to, over their KV in bf16.",
        lambda f: share(f["bytes_share"]),
        short=True,
    ),
    Column(
        "computed",
        "Share of the chunks' tokens that went through the decoder when the question came.",
        lambda f: share(f["recomputed_share"]),
        short=True,
    ),
    Column("KL", "KL(re-prefill || arm) of the next token in nats, mean.", lambda f: number(f["kl"]), short=True),
    Column(
        "eta",
        "Share of the base's KL that is removed; the base is blind reuse, for slides the survivor as it is. "
        "'-' where the base's mean KL is under 0.01.",
        lambda f: _fixed(f["eta"]),
        short=True,
    ),
    Column(
        "flips back",
        "Of the items whose prediction the base changes, the share in which the arm restores re-prefill's.",
        _flips,
        short=True,
    ),
    Column(
        "clusters",
        "Groups of items that depend on each other (questions on one video, one document).",
        lambda f: count(f["clusters"]),
    ),
    Column(
        "left out",
        "Items that the arm has no meaning for + answers that the task's rule could not read. Neither counts as wrong.",
        _left_out,
    ),
    Column(
        "to re-prefill",
        "Accuracy minus re-prefill's on the same items.",
        lambda f: between(signed(f["delta"]), f["delta_ci95"], signed),
    ),
    Column("agrees", "Share of items with re-prefill's prediction, right or wrong.", lambda f: share(f["agreement"])),
    Column("KL [95 %]", "KL with its interval.", lambda f: between(number(f["kl"]), f["kl_ci95"])),
    Column("KL p99", "Its 99th percentile over items.", lambda f: number(f["kl_p99"])),
    Column(
        "KL of answers",
        "As KL, averaged over the tokens of re-prefill's answer, which is forced.",
        lambda f: between(number(f.get("forced_kl")), f.get("forced_kl_ci95")),
    ),
    Column("eta [95 %]", "eta with its interval.", lambda f: between(_fixed(f["eta"]), f["eta_ci95"], _fixed)),
    Column(
        "eta of answers",
        "As eta, by the KL of answers.",
        lambda f: between(_fixed(f.get("forced_eta")), f.get("forced_eta_ci95"), _fixed),
    ),
    Column(
        "spent",
        "Bytes stored or replaced when asked (a token computed anew costs its KV), over the KV that patches are "
        "applied to: the axis on which patches and token arms are compared.",
        lambda f: share(f["spent_share"]),
    ),
    Column("tokens", "Tokens of the prompt, mean.", lambda f: _mean(f["tokens"])),
    Column("tokens computed", "Of them computed when asked, mean, the question apart.", lambda f: _mean(f["computed"])),
    Column("forwards", "Decoder passes for them, mean.", lambda f: _mean(f["forwards"])),
    Column("encodes", "Runs of the vision encoder, mean.", lambda f: _mean(f["encodes"])),
    Column("first token", "Median seconds to the first token, of the items that were timed.", _first_token),
)

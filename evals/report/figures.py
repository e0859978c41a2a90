"""Figures of scored runs, drawn with matplotlib's Agg: arms with intervals, curves over bytes, heat maps."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxwin.evals.groups import DEPTH, LENGTHS
from ctxwin.evals.report.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RUN_COLOURS = ("#4053a8", "#c4572e", "#2c7d59", "#8a4f9e", "#8c6d1f", "#3b8ea5")
PATCH, BASE, REFERENCE, OTHER = "#5b4bb3", "#c0392b", "#3a7d44", "#5f6b78"
TOKEN_COLOURS = ("#d9822b", "#1f8a9c", "#a0862f", "#b0457f", "#6b8e23", "#7a5230")
_WIDTH = 10.0
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True)
class Picture:
    """A figure with what it shows in words.

    Attributes:
        name: file name without its ending; unique within a task.
        caption: what is drawn.
        figure: not yet rendered.
    """

    name: str
    caption: str
    figure: Figure


def render(figure: Figure, kind: str) -> bytes:
    """A figure as ``png`` or ``svg``; the same figures give the same bytes."""
    import matplotlib

    if figure.get_layout_engine() is not None:
        # The layout is solved once, not for every format.
        figure.draw_without_rendering()
        figure.set_layout_engine(None)
    out = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "ctxwin", "svg.fonttype": "path"}):
        figure.savefig(out, format=kind, dpi=144, metadata=metadata)
    return out.getvalue()


def pictures(runs: Sequence[Run], task: str) -> Iterator[Picture]:
    """Every figure that the runs have something to show in.

    Raises ModuleNotFoundError without matplotlib (``pip install 'ctxwin[evals]'``).
    """
    having = [run for run in runs if task in run.tasks]
    yield _arms(having, task)
    for i, run in enumerate(having):
        suffix = f"-{i + 1}" if len(having) > 1 else ""
        whose = f" ({run.label})" if len(having) > 1 else ""
        for name, draw in (("bytes", _curves), ("layers", _layers), ("grid", _grid)):
            if picture := draw(run, task):
                yield Picture(name + suffix, picture.caption + whose, picture.figure)


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, height), layout="constrained")


def _arms(runs: Sequence[Run], task: str) -> Picture:
    """Dots with intervals: one line an arm, one panel a figure, runs side by side."""
    names = list(dict.fromkeys(arm for run in runs for arm in run.arms(task)))
    panels = [
        ("accuracy", "accuracy", "ci95"),
        ("KL to re-prefill, nats", "kl", "kl_ci95"),
        ("flips restored", "flip_recover", "flip_ci95"),
        ("harm", "harm_rate", "harm_ci95"),
    ]
    figure = _figure(1.25 + 0.27 * len(names) * max(1.0, 0.6 * len(runs)))
    axes = figure.subplots(1, len(panels), sharey=True)
    step = 0.7 / len(runs)
    for axis, (title, key, interval) in zip(axes, panels, strict=True):
        for r, run in enumerate(runs):
            arms = run.arms(task)
            for y, name in enumerate(names):
                value = arms[name][key] if name in arms else None
                if value is None:
                    continue
                at = y + (r - (len(runs) - 1) / 2) * step
                colour = _arm_colour(name) if len(runs) == 1 else RUN_COLOURS[r % len(RUN_COLOURS)]
                if span := arms[name].get(interval):
                    axis.plot(span, [at, at], color=colour, linewidth=2.2, alpha=0.55, solid_capstyle="butt")
                axis.plot([value], [at], "o", color=colour, markersize=4.5)
        if all(f[key] is None for run in runs for f in run.arms(task).values()):
            axis.text(0.5, 0.5, "no item\nhas one", transform=axis.transAxes, ha="center", fontsize=8, color=OTHER)
        axis.set_title(title, fontsize=9)
        axis.grid(axis="x", alpha=0.3)
        axis.tick_params(labelsize=8)
        if key != "kl":
            axis.set_xlim(-0.03, 1.03)
        else:
            axis.set_xlim(left=-0.03 * axis.get_xlim()[1])
            axis.locator_params(axis="x", nbins=4)
            axis.ticklabel_format(axis="x", scilimits=(-2, 4))
            axis.xaxis.get_offset_text().set_fontsize(7)
    axes[0].set_yticks(range(len(names)), [_plain(n) for n in names])
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    if len(runs) > 1:
        handles = [
            axes[0].plot([], [], "o", color=RUN_COLOURS[r % len(RUN_COLOURS)], label=_plain(run.label))[0]
            for r, run in enumerate(runs)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(runs)), fontsize=8, frameon=False)
    return Picture("arms", "Accuracy, KL, flips restored and harm by arm, with 95 % intervals.", figure)


def _curves(run: Run, task: str) -> Picture | None:
    """Accuracy and eta over bytes, patches and token arms on one axis; None where there are fewer than two settings."""
    arms = run.arms(task)
    families: dict[str, list[tuple[float, str]]] = {}
    for name, f in arms.items():
        head = name.partition(":")[0]
        token = f.get("recomputed", 0.0) > 0
        if f["spent_share"] and (name.startswith("patched:") or token):
            families.setdefault(head, []).append((f["spent_share"], name))
    if sum(map(len, families.values())) < 2:
        return None
    figure = _figure(3.9)
    left, right = figure.subplots(1, 2)
    others = iter(TOKEN_COLOURS * len(families))
    for head, found in families.items():
        patch = head == "patched"
        style: dict[str, Any] = {
            "color": PATCH if patch else next(others), "marker": "o" if patch else "s", "markersize": 4.5,
            "linewidth": 1.8 if patch else 1.3,
        }  # fmt: skip
        ordered = [(share, arms[name]) for share, name in sorted(found)]
        label = "patch, by rank" if patch else _plain(head)
        _line(left, ordered, "accuracy", "ci95", label, style)
        _line(right, ordered, "eta", "eta_ci95", label, style)
        if patch:
            for share, name in sorted(found):
                if (value := arms[name]["accuracy"]) is not None:
                    left.annotate(
                        name.partition(":")[2], (100 * share, value), textcoords="offset points", xytext=(4, -10),
                        fontsize=7, color=PATCH,
                    )  # fmt: skip
    widest = max(arms.values(), key=lambda f: f["n"])  # an arm that leaves items out has another re-prefill to stand by
    for key, label, colour in (
        ("reference_accuracy", "re-prefill", REFERENCE),
        ("base_accuracy", "nothing done (base)", BASE),
    ):
        if (value := widest[key]) is not None:
            left.axhline(value, color=colour, linestyle="--", linewidth=1, label=label)
    if not right.lines:
        why = "no eta: the base's mean KL is under 0.01"
        right.text(0.5, 0.5, why, transform=right.transAxes, ha="center", fontsize=8, color=OTHER)
    right.axhline(1.0, color=REFERENCE, linestyle="--", linewidth=1)
    right.axhline(0.0, color=BASE, linestyle="--", linewidth=1)
    left.set_ylabel("accuracy", fontsize=9)
    right.set_ylabel("eta (share of the base's KL removed)", fontsize=9)
    spans = [share for found in families.values() for share, _ in found]
    right.sharex(left)
    for axis in (left, right):
        axis.set_xlabel("bytes stored or computed anew, % of the chunks' KV", fontsize=9)
        if max(spans) > 8 * min(spans):
            ticks = [t for t in _TICKS if 70 * min(spans) <= t <= 140 * max(spans)]
            axis.set_xscale("log")
            axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
            axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
    left.set_ylim(-0.04, 1.04)
    right.set_ylim(bottom=max(-1.1, min(right.get_ylim()[0], -0.04)), top=1.06)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return Picture(
        "bytes", "Accuracy and eta over bytes: ranks of the patch (numbers), token arms, with 95 % intervals.", figure
    )


def _line(
    axis: Axes,
    points: Sequence[tuple[float, Mapping[str, Any]]],
    key: str,
    interval: str,
    label: str,
    style: dict[str, Any],
) -> None:
    known = [(100 * share, f) for share, f in points if f[key] is not None]
    if not known:
        return
    axis.plot([x for x, _ in known], [f[key] for _, f in known], label=label, **style)
    spans = [(x, *f[interval]) for x, f in known if f[interval] is not None]
    if spans:
        at, low, high = zip(*spans, strict=True)
        axis.fill_between(at, low, high, alpha=0.13, color=style["color"], linewidth=0)
        if len(spans) == 1:  # a band has no width there
            axis.vlines(at, low, high, color=style["color"], linewidth=1.2, alpha=0.6)


def _layers(run: Run, task: str) -> Picture | None:
    """What arms left for every layer, as a map; None where they left nothing."""
    found = {name: f["by_layer"] for name, f in run.arms(task).items() if f.get("by_layer")}
    if not found:
        return None
    values = np.array(list(found.values()))
    figure = _figure(1.3 + 0.3 * len(found))
    axis = figure.subplots()
    image = axis.imshow(values, aspect="auto", cmap="viridis", vmin=min(0.0, float(values.min())))
    axis.set_yticks(range(len(found)), [_plain(n) for n in found], fontsize=8)
    axis.set_xlabel("layer, first to last", fontsize=9)
    axis.set_xticks(range(values.shape[1]))
    axis.tick_params(labelsize=8)
    if values.shape[1] <= 16:
        _numbers(axis, values, lambda v: f"{v:.2g}", (values - values.min()) / (np.ptp(values) or 1.0))
    else:
        axis.set_xticks(range(0, values.shape[1], 4))
    figure.colorbar(image, ax=axis)
    return Picture("layers", "By layer: mean over items of what each arm measured there.", figure)


def _grid(run: Run, task: str) -> Picture | None:
    """Accuracy over context length and depth of the needle, a map an arm; None where items have neither."""
    found = {name: f["grid"] for name, f in run.arms(task).items() if f.get("grid")}
    if not found:
        return None
    lengths = sorted({c["length"] for cells in found.values() for c in cells})
    depths = round(1 / DEPTH)
    columns = min(len(found), 3 if len(lengths) <= 6 else 2)
    rows = -(-len(found) // columns)
    figure = _figure(0.7 + 1.75 * rows)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    image = None
    for axis, (name, cells) in zip(axes.flat, found.items(), strict=False):
        values = np.full((depths, len(lengths)), np.nan)
        counts = np.zeros_like(values)
        for c in cells:
            at = c["depth"], lengths.index(c["length"])
            counts[at] = c["n"]
            if c["accuracy"] is not None:
                values[at] = c["accuracy"]
        image = axis.imshow(values, aspect="auto", cmap="viridis", vmin=0, vmax=1)
        axis.set_facecolor("#e8eaed")  # cells without items: no figure, rather than a zero
        for (y, x), value in np.ndenumerate(values):
            if not np.isnan(value):
                ink = "black" if value > 0.6 else "white"
                axis.text(x, y, f"{value:.2f}\nn={counts[y, x]:.0f}", ha="center", va="center", fontsize=6, color=ink)
        axis.set_title(_plain(name), fontsize=8)
        axis.set_xticks(range(len(lengths)), [_length(v) for v in lengths], fontsize=7)
        axis.set_yticks(range(depths), [f"{i * DEPTH:.1f} to {(i + 1) * DEPTH:.1f}" for i in range(depths)], fontsize=7)
    figure.supxlabel("context length in tokens, from", fontsize=8)
    figure.supylabel("depth of the needle", fontsize=8)
    figure.colorbar(image, ax=list(axes.flat))  # type: ignore[arg-type]
    return Picture("grid", "Accuracy by context length and depth of the needle; grey: no items.", figure)


def _numbers(axis: Axes, values: np.ndarray, show: Callable[[float], str], brightness: np.ndarray) -> None:
    for (y, x), value in np.ndenumerate(values):
        axis.text(
            x,
            y,
            show(value),
            ha="center",
            va="center",
            fontsize=7,
            color="black" if brightness[y, x] > 0.6 else "white",
        )


def _length(edge: int) -> str:
    return f"{edge // 1000}k" if edge else f"< {LENGTHS[1] // 1000}k"


def _arm_colour(name: str) -> str:
    known = {"patched": PATCH, "reprefill": REFERENCE, "blind": BASE}
    return known.get(name.partition(":")[0], OTHER)


def _plain(text: str) -> str:
    """Text without what matplotlib reads as mathematics."""
    return text.replace("$", r"\$")

"""`report.html`: one file that shows every ask, the window as thumbnails, and what it cost. Readable on a phone."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxwin.demo.live import nats, percent, right
from ctxwin.demo.palette import ENCODES, LANES, POLICIES
from ctxwin.demo.record import Step

if TYPE_CHECKING:
    import numpy as np

_THUMBNAIL = 112
_STYLE = Path(__file__).with_name("report.css")


def write(
    path: Path,
    steps: Sequence[Step],
    summary: Mapping[str, Any],
    pictures: Mapping[int, Sequence[np.ndarray]],
    timeline: Path,
) -> None:
    """Writes the report.

    Args:
        steps: of all seeds, in order.
        pictures: frames ``[H, W, 3]`` RGB by seed.
        timeline: the PNG to include.
    """
    shown = {(step.seed, placed["frame"]) for step in steps for placed in step.placed}
    thumbnails = "".join(
        f".f{seed}-{frame}{{background-image:url({_thumbnail(pictures[seed][frame])})}}\n"
        for seed, frame in sorted(shown)
    )
    picture = _data("png", timeline.read_bytes())
    most = max((getattr(step, field) for step in steps for field in POLICIES), default=1) or 1
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'><title>ctxwin demo</title>",
        f"<style>{_STYLE.read_text(encoding='utf-8')}{thumbnails}</style></head><body><main>",
        _opening(summary),
        "<h2>Over the run</h2>",
        f"<div class='card'><img alt='Tokens by lane, and tokens computed so far' src='{picture}'></div>",
        f"<h2>Lanes</h2><div class='card legend'>{_lanes()}</div>",
    ]
    for seed in dict.fromkeys(step.seed for step in steps):
        mine = [step for step in steps if step.seed == seed]
        parts.append(f"<h2>Every ask{f' of seed {seed}' if len(pictures) > 1 else ''}</h2>")
        parts += [_card(step, most) for step in mine]
    parts.append("</main></body></html>\n")
    path.write_text("\n".join(parts), encoding="utf-8")


def _opening(summary: Mapping[str, Any]) -> str:
    truth = "" if summary["accuracy"] is None else f", {percent(summary['accuracy'])} of them answered right"
    costs = "".join(
        _row(name, f"{summary[field]:,}", percent(_share(summary, field)), summary[ENCODES[field]])
        for field, (name, _) in POLICIES.items()
    )
    kinds = "".join(
        _row(
            kind,
            group["asks"],
            percent(group["accuracy"]),
            percent(group["accuracy_reprefill"]),
            percent(group["accuracy_blind"]),
            nats(group["kl_mean"]),
        )
        for kind, group in {**summary["by_kind"], "all": summary}.items()
    )
    facts = [
        summary["source"], summary["model"], f"fidelity {summary['fidelity']['mode']}",
        f"seeds {', '.join(map(str, summary['seeds']))}",
    ]  # fmt: skip
    return (
        "<h1>A windowed agent watches a video</h1>"
        f"<p>{summary['asks']} asks on <b>{escape(summary['engine'])}</b>{truth}. The window computed "
        f"{summary['computed_tokens']:,} tokens, {percent(summary['share_of_naive'])} of what a sliding prefix-cache "
        f"user computes and {percent(summary['share_of_trim'])} of one who trims.</p>"
        f"<p class='soft'>{escape(' · '.join(facts))}</p>"
        "<div class='card scroll'><table><tr><th></th><th>tokens</th><th>ctxwin's share</th>"
        f"<th>encodes</th></tr>{costs}</table></div>"
        "<div class='card scroll'><table><tr><th>questions</th><th>n</th><th>ctxwin</th><th>re-prefill</th>"
        f"<th>blind</th><th>mean KL</th></tr>{kinds}</table></div>"
    )


def _share(summary: Mapping[str, Any], field: str) -> float | None:
    return summary["computed_tokens"] / summary[field] if summary[field] else None


def _row(*cells: object) -> str:
    return f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"


def _lanes() -> str:
    return "".join(
        f"<span><span class='swatch' style='background:{colour}'></span><b>{lane}</b> {escape(meaning)}</span>"
        for lane, (colour, meaning) in LANES.items()
    )


def _card(step: Step, most: int) -> str:
    facts = (
        f"ask {step.index} · {step.time:g} s · {step.kind} · first token {1000 * step.ttft_s:.0f} ms, re-prefill "
        f"{1000 * step.ttft_reprefill_s:.0f} ms · {step.vision_encodes} vision encodes"
    )
    verdict = {True: " class='good'", False: " class='bad'", None: ""}[right(step)]
    answers = [f"<span>{escape(step.query)}</span>", f"<span>ctxwin <b{verdict}>{escape(step.answer)}</b></span>"]
    others = {"truth": step.truth, "re-prefill": step.answer_reprefill, "blind": step.answer_blind}
    answers += [f"<span>{name} <b>{escape(text)}</b></span>" for name, text in others.items() if text is not None]
    answers.append(f"<span class='soft'>KL {nats(step.kl)}</span>")
    note = f"<p class='soft'>{escape(step.note)}</p>" if step.note else ""
    return (
        f"<section class='card'><div class='head'><span class='op'>{escape(step.op)}</span>"
        f"<span class='soft'>{escape(facts)}</span></div>"
        f"<div class='strip'>{''.join(_frame(step.seed, placed) for placed in step.placed)}</div>"
        f"<div class='qa'>{''.join(answers)}</div>{note}<div class='bars'>{_bars(step, most)}</div></section>"
    )


def _frame(seed: int, placed: Mapping[str, Any]) -> str:
    frame, lane = placed["frame"], placed["lane"]
    return (
        f"<figure><div class='thumb f{seed}-{frame}'></div>"
        f"<figcaption style='background:{LANES[lane][0]}' title='{lane}'>{frame} {lane}</figcaption></figure>"
    )


def _bars(step: Step, most: int) -> str:
    """Tokens computed for one ask, by us and by each opponent; ``most`` is the longest bar of the report."""
    return "".join(
        f"<span>{escape(name)}</span><span><span class='bar' style='background:{colour};"
        f"width:{78 * getattr(step, field) / most:.1f}%'></span>{getattr(step, field)}</span>"
        for field, (name, colour) in POLICIES.items()
    )


def _thumbnail(pixels: np.ndarray) -> str:
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=72)
    return _data("jpeg", buffer.getvalue())


def _data(kind: str, raw: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(raw).decode()}"

"""The result as one self-contained HTML file: the verdict first, then what it rests on, then everything measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ctxwin.evals.probe.svg import lines

_STYLE = """
:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;margin:0;background:Canvas;color:CanvasText}
main{max-width:64rem;margin:auto;padding:1rem}h1{line-height:1.2}h1,code,li{overflow-wrap:anywhere}
.verdict{border-left:6px solid #8d99ae;padding:.6rem 1rem;
font-size:1.15rem}.binds{border-color:#d1495b}.chains{border-color:#3a7d44}.soft{opacity:.75}.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.2rem .7rem;text-align:right;
border-bottom:1px solid #8886}td:first-child,th:first-child{text-align:left}.figures{display:grid;
grid-template-columns:repeat(auto-fit,minmax(min(20rem,100%),1fr));gap:1rem}figure{margin:0}svg{width:100%;height:auto}
svg text{fill:currentColor;font-size:11px}.grid{stroke:#8884}.keys span{margin-right:1rem;white-space:nowrap}
.keys i{display:inline-block;width:.8em;height:.8em;margin-right:.3em;border-radius:2px}code{font-size:.95em}
"""


def html(result: Mapping[str, Any]) -> str:
    """The report. Every number in it is one of ``result``'s."""
    verdict = result["verdict"]
    source, engine = result["source"], result["engine"]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>Probe of {escape(result['model'])}</title><style>{_STYLE}</style></head><body><main>",
        f"<h1>Can {escape(result['model'])} reuse KV out of context?</h1>",
        f"<p class='verdict {verdict['finding']}'>{escape(verdict['sentence'])}</p>",
        f'<p>Safe for it: <code>{escape(_spelled(result["fidelity"]))}</code>, which <code>Fidelity("auto")</code> means '
        "where this probe's profile lies beside the weights or among your own.</p>",
        _list(verdict["reasons"]),
        f"<p class='soft'>{escape(source['about'])}; {source['chunks']} chunks of {_range(source['chunk_tokens'])} tokens; "
        f"{engine['family']}, {engine['layers']} layers, {engine['dtype']}; {result['seconds']:.0f} s; "
        f"{escape(result['date'])}; ctxwin {escape(result['ctxwin'])}</p>",
        "<h2>Does it read its context?</h2>",
        _reading(result["reading"]),
        "<h2>What blind reuse changes</h2>",
        _arms(result["arms"]),
        "<p class='soft'>stepwise: a re-prefill chunk by chunk, the arithmetic noise. oracle: one forward in which no chunk "
        "sees another one, at its own place. Blind reuse should equal the oracle: what differs is position.</p>",
        "<h2>The shape of the loss</h2>",
        _shape(result),
    ]
    if "curve" in result:
        parts += ["<h2>Bytes at equal fidelity</h2>", _compression(result)]
    if result.get("proving"):
        parts += ["<h2>Settings on fresh contexts</h2>", _proving(result)]
    if "survivors" in result:
        parts += ["<h2>What windows do</h2>", _moves(result)]
    parts += [
        "<h2>Computing against loading, on this machine</h2>",
        _costs(result["cost"]),
        "<h2>What was not measured</h2>",
    ]
    parts += [_list([*source["notes"], *NOT_MEASURED]), "</main></body></html>\n"]
    return "".join(parts)


NOT_MEASURED = (
    "Answers longer than the questions here ask for, other kinds of questions, and windows with more chunks.",
    "Other engines than transformers, and other dtypes: a profile holds for the weights, the figures for what is named above.",
)


def _reading(reading: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    head = ("source, questions", "n", "right", "needed chunk swapped", "needed moves further by", "at least", "reads")
    return _table(
        head,
        (
            (f"{name}, {c['kind']}", c["n"], _percent(c["accuracy"]), _percent(c["swapped"]), _number(c["addressed"]),
             _number(c["addressed_low"]), "yes" if c["reads"] else "no")
            for name, found in reading.items()
            for c in found
        ),
    )  # fmt: skip


def _arms(arms: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    head = ("questions, arm", "n", "other answers [95 %]", "KL a token", "KL, next token", "right", "KL to the oracle")
    return _table(
        head,
        (
            (f"{kind}, {name}", a["n"], _interval(a["flips"], a["flips_ci95"]), _number(a["kl"]), _number(a["next_kl"]),
             _percent(a["right"]), _number(a["to_oracle"]))
            for kind, found in arms.items()
            for name, a in found.items()
        ),
    )  # fmt: skip


def _shape(result: Mapping[str, Any]) -> str:
    deficit = result["deficit"]
    names = {"relative_norm": "both", "relative_norm_rope": "rope channel (K)", "relative_norm_content": "content (V)"}
    norms = lines(
        "Size of the loss by layer, relative to the KV", "layer", "relative norm",
        {label: list(enumerate(deficit[key])) for key, label in names.items()},
    )  # fmt: skip
    ranks = lines(
        "Directions that hold 90 % of its energy", "layer", "directions",
        {"per layer": list(enumerate(deficit["energy_rank_by_layer"]))},
    )  # fmt: skip
    facts = [
        f"{deficit['chunks']} chunks of {deficit['tokens']:.0f} tokens; all layers together: "
        f"{deficit['energy_rank_joint']:.1f} directions for 90 % of the energy",
        f"relocation: first-layer keys moved and computed in place differ by {deficit['relocation_error']:.1e} of the largest",
    ]
    for way, found in result.get("functional_rank", {}).items():
        if found is not None:
            low, high = found["ci95"]
            facts.append(
                f"functional rank ({way}): {found['rank']} [{low}, {high}], where the divergence reaches its plateau"
            )
    return f"<div class='figures'>{norms}{ranks}</div>{_list(facts)}"


def _compression(result: Mapping[str, Any]) -> str:
    ways: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["curve"]:
        ways.setdefault(row["way"], []).append(row)
    figure = lines(
        "Divergence to re-prefill over bytes", "share of the chunk's KV bytes", "KL a token (nats)",
        {way: [(r["share"], r["kl"]) for r in rows] for way, rows in ways.items()}, log_x=True, log_y=True,
    )  # fmt: skip
    rows = []
    for way, best in result["cheapest"].items():
        if best is None:
            rows.append((way, ways[way][0]["n"], "none", "", "", "", ""))
        else:
            rows.append((way, best["n"], best["rank"], _percent(best["share"]), _number(best["eta"]),
                         _interval(best["flips"], best["flips_ci95"]), f"{best['basis_bytes']:,}"))  # fmt: skip
    head = ("smallest that is enough", "n", "rank", "bytes", "eta", "other answers [95 %]", "bytes of the basis, once")
    note = (
        "<p class='soft'>Enough by its means on these few contexts, which only chooses what is tried below; KL under a "
        "millionth is drawn at a millionth.</p>"
    )
    return f"<div class='figures'>{figure}</div>{_table(head, rows)}{note}"


def _proving(result: Mapping[str, Any]) -> str:
    head = ("setting", "bytes", "n", "other answers [95 %]", "eta", "eta, 95 %", "safe")
    rows = []
    for s in result["proving"]:
        f = s["figures"]
        served = result["served"] and s["rank"] == result["served"]["rank"]
        rows.append(
            (f"rank {s['rank']}, {s['layers']}{' (served)' if served else ''}", _percent(s["share"]), f["n"],
             _interval(f["flips"], f["flips_ci95"]), _number(f["eta"]), _range(f["eta_ci95"] or []),
             "yes" if s["safe"] else "no")
        )  # fmt: skip
    return _table(head, rows)


def _moves(result: Mapping[str, Any]) -> str:
    survivors = result["survivors"]
    figure = lines(
        "Survivors kept as they are", "slides", "KL a token (nats)",
        {
            "to what is placed now": [(s["slides"], s["kl_window"]) for s in survivors],
            "to what was seen lately": [(s["slides"], s["kl_stream"]) for s in survivors],
            "to the nearer": [(s["slides"], s["kl_nearer"]) for s in survivors],
        },
    )  # fmt: skip
    lost = [
        (f"after {s['slides']} slide{'s' if s['slides'] > 1 else ''}", s["n"], _percent(s["other_than_window"]),
         _percent(s["other_than_stream"]), _interval(s["other_than_both"], s["other_than_both_ci95"]))
        for s in survivors
    ]  # fmt: skip
    rows = [(f"other order, {name} patch", *_row(result["reorder"][name])) for name in ("exact", "transfer", "orbit")]
    for r in result["recall"]:
        rows += [(f"recall, {r['replaced']:.0%} replaced, {name} patch", *_row(r[name])) for name in ("stale", "fresh")]
    head = ("answers other than by", "n", "placed now", "seen lately", "either [95 %]")
    return (
        f"<div class='figures'>{figure}</div>{_table(head, lost)}"
        f"{_table(('move', 'n', 'eta', 'KL a token', 'other answers [95 %]'), rows)}"
    )


def _row(figures: Mapping[str, Any] | None) -> tuple[str, ...]:
    if figures is None:
        return ("0", "-", "-", "-")
    return (
        str(figures["n"]), _number(figures.get("eta")), _number(figures["kl"]),
        _interval(figures["flips"], figures["flips_ci95"]),
    )  # fmt: skip


def _costs(rows: Sequence[Mapping[str, Any]]) -> str:
    head = (
        "tokens",
        "compute",
        "fetch (memory)",
        "fetch (disk)",
        "rotate",
        "rotate + patch",
        "compress",
        "pays from use",
    )
    return _table(
        head,
        (
            (r["tokens"], *(f"{r[f'{name}_ms']:.2f} ms" for name in
                            ("prefill", "memory", "disk", "relocate", "apply", "compress")), r["uses"] or "never")
            for r in rows
        ),
    )  # fmt: skip


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table><tr>{top}</tr>{body}</table></div>"


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>" if items else ""


def _spelled(fidelity: Mapping[str, Any]) -> str:
    rest = "".join(f", {name}={value!r}" for name, value in fidelity.items() if name != "mode")
    return f'Fidelity("{fidelity["mode"]}"{rest})'


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _interval(value: float, interval: Sequence[float]) -> str:
    return f"{value:.1%} [{interval[0]:.1%}, {interval[1]:.1%}]"


def _range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"

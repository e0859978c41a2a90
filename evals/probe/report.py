"""The result as one self-contained HTML file: the verdict first, then what it rests on, then everything measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ctxwin.evals.report.columns import NONE, Cell, between, count, share
from ctxwin.evals.report.figures import Picture, lines, render
from ctxwin.evals.report.page import Section, render_page
from ctxwin.evals.report.tables import Table

Row = Sequence[Cell | str]
NOT_MEASURED = (
    "Answers longer than the questions here ask for, other kinds of questions, and windows with more chunks.",
    "Other engines than transformers, and other dtypes: a profile holds for the weights, the figures for what is named above.",
)


def html(result: Mapping[str, Any]) -> str:
    """The report. Every number in it is one of ``result``'s."""
    verdict, source, engine = result["verdict"], result["source"], result["engine"]
    about = (
        f"{source['about']}; {source['chunks']} chunks of {_range(source['chunk_tokens'])} tokens; {engine['family']}, "
        f"{engine['layers']} layers, {engine['dtype']}; {result['seconds']:.0f} s; {result['date']}"
    )
    safe = (
        f'Safe for it: {_spelled(result["fidelity"])}, which Fidelity("auto") means where this probe\'s profile lies beside '
        "the weights or among your own."
    )
    sections = [_reading(result["reading"]), _arms(result["arms"]), _shape(result)]
    if "curve" in result:
        sections.append(_compression(result))
    if result.get("proving"):
        sections.append(_proving(result))
    if "survivors" in result:
        sections.append(_moves(result))
    sections.append(_costs(result["cost"]))
    sections.append(Section("What was not measured", facts=[*source["notes"], *NOT_MEASURED]))
    return render_page(
        f"Can {result['model']} reuse KV out of context?", about, [safe, *verdict["reasons"]], sections,
        verdict=(verdict["finding"], verdict["sentence"]),
    )  # fmt: skip


def _reading(reading: Mapping[str, Sequence[Mapping[str, Any]]]) -> Section:
    head = ("source, questions", "n", "right", "needed chunk swapped", "needed moves further by", "at least", "reads")
    rows = [
        (f"{name}, {c['kind']}", count(c["n"]), share(c["accuracy"]), share(c["swapped"]), _number(c["addressed"]),
         _number(c["addressed_low"]), "yes" if c["reads"] else "no")
        for name, found in reading.items()
        for c in found
    ]  # fmt: skip
    facts = [
        f"Your questions do not say what they need: swapping a chunk changes {c['changed']:.0%} of the answers (at least "
        f"{c['changed_low']:.0%})."
        for found in reading.values()
        for c in found
        if c["changed"] is not None
    ]
    return Section("Does it read its context?", tables=[_table("Reading", head, rows)], facts=facts)


def _arms(arms: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Section:
    head = ("questions, arm", "n", "other answers [95 %]", "KL a token", "KL, next token", "right", "KL to the oracle")
    rows = [
        (f"{kind}, {name}", count(a["n"]), _flips(a), _number(a["kl"]), _number(a["next_kl"]), share(a["right"]),
         _number(a["to_oracle"]))
        for kind, found in arms.items()
        for name, a in found.items()
    ]  # fmt: skip
    note = (
        "stepwise: a re-prefill chunk by chunk, the arithmetic noise. oracle: one forward in which no chunk sees another one, "
        "at its own place. Blind reuse should equal the oracle: what differs is position."
    )
    return Section("What blind reuse changes", tables=[_table("Blind reuse", head, rows, note)])


def _shape(result: Mapping[str, Any]) -> Section:
    deficit = result["deficit"]
    names = {"relative_norm": "both", "relative_norm_rope": "rope channel (K)", "relative_norm_content": "content (V)"}
    norms = lines(
        "norm", "Size of the loss by layer, relative to the KV", "layer", "relative norm",
        {label: list(enumerate(deficit[key])) for key, label in names.items()},
    )  # fmt: skip
    ranks = lines(
        "directions", "Directions that hold 90 % of its energy, layer by layer", "layer", "directions",
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
    return Section("The shape of the loss", pictures=_drawn(norms, ranks), facts=facts)


def _compression(result: Mapping[str, Any]) -> Section:
    ways: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["curve"]:
        ways.setdefault(row["way"], []).append(row)
    figure = lines(
        "bytes", "Divergence to re-prefill over bytes", "share of the chunk's KV bytes", "KL a token (nats)",
        {way: [(r["share"], r["kl"]) for r in rows] for way, rows in ways.items()}, log=True,
    )  # fmt: skip
    rows = []
    for way, best in result["cheapest"].items():
        found = [count(best["rank"]), share(best["share"]), _number(best["eta"]), _flips(best),
                 Cell(f"{best['basis_bytes']:,}", best["basis_bytes"])] if best else [Cell(NONE)] * 5  # fmt: skip
        rows.append((way, count(ways[way][0]["n"]), *found))
    head = ("smallest that is enough", "n", "rank", "bytes", "eta", "other answers [95 %]", "bytes of the basis, once")
    note = (
        "Enough by its means on these few contexts, which only chooses what is tried below; KL under a millionth is drawn at a "
        "millionth."
    )
    return Section(
        "Bytes at equal fidelity", tables=[_table("Ways to compress", head, rows, note)], pictures=_drawn(figure)
    )


def _proving(result: Mapping[str, Any]) -> Section:
    head = ("setting", "bytes", "n", "other answers [95 %]", "eta [95 %]", "safe")
    rows = []
    for s in result["proving"]:
        f = s["figures"]
        served = " (served)" if result["served"] and s["rank"] == result["served"]["rank"] else ""
        rows.append(
            (f"rank {s['rank']}, {s['layers']}{served}", share(s["share"]), count(f["n"]), _flips(f),
             between(_number(f["eta"]), f["eta_ci95"], _number), "yes" if s["safe"] else "no")
        )  # fmt: skip
    return Section("Settings on fresh contexts", tables=[_table("Settings", head, rows)])


def _moves(result: Mapping[str, Any]) -> Section:
    survivors = result["survivors"]
    references = {"window": "to what is placed now", "stream": "to what was seen lately", "nearer": "to the nearer"}
    figure = lines(
        "survivors", "Survivors kept as they are", "slides", "KL a token (nats)",
        {label: [(s["slides"], s[f"kl_{name}"]) for s in survivors] for name, label in references.items()},
    )  # fmt: skip
    head = ("answers other than by", "n", "placed now [95 %]", "seen lately [95 %]", "both")
    lost: list[Row] = [
        (f"after {s['slides']} slide{'s' if s['slides'] > 1 else ''}", count(s["n"]),
         *(between(share(s[f"other_than_{name}"]), s[f"other_than_{name}_ci95"], share) for name in ("window", "stream")),
         share(s["other_than_both"]))
        for s in survivors
    ]  # fmt: skip
    moves = [(f"other order, {name} patch", result["reorder"][name]) for name in ("exact", "transfer", "orbit")]
    for r in result["recall"]:
        moves += [(f"recall, {r['replaced']:.0%} replaced, {name} patch", r[name]) for name in ("stale", "fresh")]
    rows: list[Row] = [
        (name, count(f["n"]), _number(f["eta"]), _number(f["kl"]), _flips(f)) if f else (name, *[Cell(NONE)] * 4)
        for name, f in moves
    ]
    note = "The stricter of both references decides whether survivors may be kept."
    tables = [
        _table("Survivors", head, lost, note),
        _table("Moves", ("move", "n", "eta", "KL a token", "other answers [95 %]"), rows),
    ]
    return Section("What windows do", tables=tables, pictures=_drawn(figure))


def _costs(rows: Sequence[Mapping[str, Any]]) -> Section:
    named = {
        "prefill": "compute", "memory": "fetch (memory)", "disk": "fetch (disk)", "relocate": "rotate",
        "apply": "rotate + patch", "compress": "compress",
    }  # fmt: skip
    cells: list[Row] = [
        (str(r["tokens"]), *(Cell(f"{r[f'{name}_ms']:.2f} ms", r[f"{name}_ms"]) for name in named),
         count(r["uses"]) if r["uses"] else Cell("never"))
        for r in rows
    ]  # fmt: skip
    table = _table("Costs", ("tokens", *named.values(), "pays from use"), cells)
    return Section("Computing against loading, on this machine", tables=[table])


def _table(title: str, head: Sequence[str], rows: Iterable[Row], note: str = "") -> Table:
    cells = tuple(tuple(Cell(cell) if isinstance(cell, str) else cell for cell in row) for row in rows)
    return Table(title, tuple(head), cells, note)


def _drawn(*pictures: Picture) -> list[tuple[str, bytes]]:
    return [(picture.caption, render(picture.figure, "svg")) for picture in pictures]


def _flips(figures: Mapping[str, Any]) -> Cell:
    return between(share(figures["flips"]), figures["flips_ci95"], share)


def _number(value: float | None) -> Cell:
    return Cell(NONE) if value is None else Cell(f"{value:.3g}", value)


def _spelled(fidelity: Mapping[str, Any]) -> str:
    rest = "".join(f", {name}={value!r}" for name, value in fidelity.items() if name != "mode")
    return f'Fidelity("{fidelity["mode"]}"{rest})'


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"

"""The result as one self-contained HTML file: the verdict first, then what it rests on, then everything measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from ctxwin_evals.items import grouped
from ctxwin_evals.probe.verdict import TRIES
from ctxwin_evals.report.figures import Picture, lines, render
from ctxwin_evals.report.page import Section, render_page
from ctxwin_evals.report.tables import Cell, Format, Row, count, share, tabulate

NOT_MEASURED = (
    "Answers longer than the questions here ask for, other kinds of questions, and windows with more chunks.",
    "Other engines and dtypes: a profile holds for the weights, the figures for what is named above.",
)
number = Format("{:.3g}".format)
_SETTING = ("rank", "layers", "layout")


def html(result: Mapping[str, Any]) -> str:
    """The report. Every number in it is one of ``result``'s."""
    verdict, source, engine = result["verdict"], result["source"], result["engine"]
    low, high = (f"{end(source['chunk_tokens']):.4g}" for end in (min, max))
    about = (
        f"{source['about']}; {source['chunks']} chunks of {low if low == high else f'{low} to {high}'} tokens; "
        f"{engine['name']}: {engine['family']}, {engine['layers']} layers, {engine['dtype']}; {result['seconds']:.0f} s; "
        f"{result['date']}"
    )
    rest = "".join(f", {name}={value!r}" for name, value in result["fidelity"].items() if name != "mode")
    safe = (
        f'Safe for it: Fidelity("{result["fidelity"]["mode"]}"{rest}), which Fidelity("auto") means where this probe\'s '
        "profile lies beside the weights or among your own."
    )
    sections = [_texts(result)] if "strategies" in result else []
    if "arms" in result:
        sections += [_reading(result["reading"]), _arms(result["arms"]), _shape(result)]
    if "curve" in result:
        sections.append(_compression(result))
    if result.get("proving"):
        sections.append(_proving(result))
    if "survivors" in result:
        sections.append(_moves(result))
    if "cost" in result:
        sections.append(_costs(result["cost"]))
    sections.append(Section("What was not measured", facts=[*source["notes"], *NOT_MEASURED]))
    title, headline = f"Can {result['model']} reuse KV out of context?", (verdict["finding"], verdict["sentence"])
    return render_page(title, about, [safe, *verdict["reasons"]], sections, verdict=headline)


def _texts(result: Mapping[str, Any]) -> Section:
    figures, rows = {"lost": "mean", "at most": "upper", "budget": "budget", "needed": "units_like"}, list[Row]()
    for r in result["strategies"]:
        numbers = {title: number(r[name]) for title, name in figures.items()}
        strategy, safe = f"{r['strategy']}, {r['kind']}", "yes" if r["safe"] else "no"
        rows.append({"strategy, answers": strategy, "passages": count(r["units"]), **numbers, "safe": safe})
    note = "Text loses nats a token beyond the floor, answers with a value lose it; 'needed' such passages show it."
    return Section("What reuse loses", result["floor"], tables=[tabulate("Strategies", rows, note=note)])


def _reading(reading: Mapping[str, Sequence[Mapping[str, Any]]]) -> Section:
    rows: list[Row] = [
        {
            "source, questions": f"{name}, {c['kind']}",
            "n": count(c["n"]),
            "right": share(c["accuracy"]),
            "needed chunk swapped": share(c["swapped"]),
            "needed moves further by": number(c["addressed"]),
            "at least": number(c["addressed_low"]),
            "reads": "yes" if c["reads"] else "no",
        }
        for name, competences in reading.items()
        for c in competences
    ]
    facts = [
        f"Your questions do not say what they need: swapping a chunk changes {c['changed']:.0%} of the answers (at least "
        f"{c['changed_low']:.0%})."
        for competences in reading.values()
        for c in competences
        if c["changed"] is not None
    ]
    return Section("Does it read its context?", tables=[tabulate("Reading", rows)], facts=facts)


def _arms(arms: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Section:
    rows: list[Row] = [
        {
            "questions, arm": f"{kind}, {name}",
            **_changed_answers(a),
            "KL a token": number(a["kl"]),
            "KL, next token": number(a["next_kl"]),
            "right": share(a["right"]),
            "KL to the oracle": number(a["to_oracle"]),
        }
        for kind, by_name in arms.items()
        for name, a in by_name.items()
    ]
    note = (
        "stepwise: a re-prefill chunk by chunk, the arithmetic noise. oracle: one forward in which no chunk sees another one, "
        "at its own place. Blind reuse should equal the oracle: what differs is position."
    )
    return Section("What blind reuse changes", tables=[tabulate("Blind reuse", rows, note=note)])


def _shape(result: Mapping[str, Any]) -> Section:
    deficit = result["deficit"]
    names = {"relative_norm": "both", "relative_norm_rope": "rope channel (K)", "relative_norm_content": "content (V)"}
    sizes = {label: list(enumerate(deficit[key])) for key, label in names.items()}
    norms = lines("norm", "Size of the loss by layer, relative to the KV", "layer", "relative norm", sizes)
    directions = {"per layer": list(enumerate(deficit["energy_rank_by_layer"]))}
    caption = "Directions that hold 90 % of its energy, layer by layer"
    ranks = lines("directions", caption, "layer", "directions", directions)
    facts = [
        f"{deficit['chunks']} chunks of {deficit['tokens']:.0f} tokens; all layers together: "
        f"{deficit['energy_rank_joint']:.1f} directions for 90 % of the energy",
        f"relocation: first-layer keys moved and computed in place differ by {deficit['relocation_error']:.1e} of the largest",
    ]
    for way, rank in result.get("functional_rank", {}).items():
        if rank is not None:
            found = f"{rank['rank']} {rank['ci95']}, where the divergence reaches its plateau"
            facts.append(f"functional rank ({way}): {found}")
    return Section("The shape of the loss", pictures=_drawn(norms, ranks), facts=facts)


def _compression(result: Mapping[str, Any]) -> Section:
    ways: dict[str, list[Mapping[str, Any]]] = grouped(result["curve"], lambda row: row["way"])
    points = {way: [(r["share"], r["kl"]) for r in rows] for way, rows in ways.items()}
    caption, x = "Divergence to re-prefill over bytes", "share of the chunk's KV bytes"
    figure = lines("bytes", caption, x, "KL a token (nats)", points, log=True)
    rows: list[Row] = []
    for way, best in result["cheapest"].items():
        cells: dict[str, Cell | str] = {"smallest that is enough": way, "n": count(ways[way][0]["n"])}
        if best:
            cells |= {"rank": count(best["rank"]), "bytes": share(best["share"]), "eta": number(best["eta"])}
            basis_bytes = best["basis_bytes"]
            cells |= _changed_answers(best) | {"bytes of the basis, once": Cell(f"{basis_bytes:,}", basis_bytes)}
        rows.append(cells)
    note = (
        "Enough by its means on these few contexts, which only chooses what is tried below; KL under a millionth is drawn at a "
        "millionth."
    )
    tables = [tabulate("Ways to compress", rows, note=note)]
    return Section("Bytes at equal fidelity", tables=tables, pictures=_drawn(figure))


def _proving(result: Mapping[str, Any]) -> Section:
    rows: list[Row] = [
        {
            "setting": f"{s['layout']}, rank {s['rank']}, {s['layers']}"
            + (" (served)" if result["served"] and all(s[k] == result["served"][k] for k in _SETTING) else ""),
            "bytes": share(s["share"]),
            **_changed_answers(s["figures"]),
            "eta [95 %]": number(s["figures"]["eta"], s["figures"]["eta_ci95"]),
            "safe": "yes" if s["safe"] else "no",
        }
        for s in result["proving"]
    ]
    ways = dict.fromkeys(f"{s['layout']}, {s['layers']}" for s in result["proving"])
    note = (
        f"Tried, each on contexts of its own, until one was safe: {'; '.join(ways)}. At most {TRIES} are, and an end of an "
        f"interval errs in 2.5 %, so a probe calls a setting safe that is not in at most {TRIES * 0.025:.0%} of cases."
    )
    return Section("Settings on fresh contexts", tables=[tabulate("Settings", rows, note=note)])


def _moves(result: Mapping[str, Any]) -> Section:
    survivors = result["survivors"]
    references = {"window": "to what is placed now", "stream": "to what was seen lately", "nearer": "to the nearer"}
    points = {label: [(s["slides"], s[f"kl_{name}"]) for s in survivors] for name, label in references.items()}
    figure = lines("survivors", "Survivors kept as they are", "slides", "KL a token (nats)", points)
    lost: list[Row] = [
        {
            "answers other than by": f"after {s['slides']} slide{'s' if s['slides'] > 1 else ''}",
            "n": count(s["n"]),
            "placed now [95 %]": share(s["other_than_window"], s["other_than_window_ci95"]),
            "seen lately [95 %]": share(s["other_than_stream"], s["other_than_stream_ci95"]),
            "both": share(s["other_than_both"]),
        }
        for s in survivors
    ]
    moves = [(f"other order, {name} patch", result["reorder"][name]) for name in ("exact", "transfer", "orbit")]
    moves += [(f"{s['slides']} slides, removal patches", s["removal"]) for s in survivors]
    for r in result["recall"]:
        moves += [(f"recall, {r['replaced']:.0%} replaced, {name} patch", r[name]) for name in ("stale", "fresh")]
    rows: list[Row] = []
    for name, f in moves:
        cells: dict[str, Cell | str] = {"move": name}
        if f:
            cells |= {"n": count(f["n"]), "eta": number(f["eta"]), "KL a token": number(f["kl"])}
            cells |= _changed_answers(f)
        rows.append(cells)
    note = "The stricter of both references decides whether survivors may be kept."
    tables = [tabulate("Survivors", lost, note=note), tabulate("Moves", rows)]
    return Section("What windows do", tables=tables, pictures=_drawn(figure))


def _costs(rows: Sequence[Mapping[str, Any]]) -> Section:
    names = {"prefill": "compute", "memory": "fetch (memory)", "disk": "fetch (disk)", "relocate": "rotate"}
    names |= {"apply": "rotate + patch", "compress": "compress"}
    milliseconds = Format("{:.2f} ms".format)
    cells: list[Row] = [
        {"tokens": str(r["tokens"])}
        | {title: milliseconds(r[f"{name}_ms"]) for name, title in names.items()}
        | {"pays from use": count(r["uses"]) if r["uses"] else "never"}
        for r in rows
    ]
    return Section("Computing against loading, on this machine", tables=[tabulate("Costs", cells)])


def _drawn(*pictures: Picture) -> list[tuple[str, bytes]]:
    return [(picture.caption, render(picture.figure, "svg")) for picture in pictures]


def _changed_answers(figures: Mapping[str, Any]) -> dict[str, Cell]:
    """How many answers there are, and how many of them are others than re-prefill's."""
    return {"n": count(figures["n"]), "other answers [95 %]": share(figures["flips"], figures["flips_ci95"])}

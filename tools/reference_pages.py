"""Writes the generated parts of docs/reference: ``python tools/reference_pages.py``; ``--check`` only compares.

A part is between ``<!-- generated: NAME -->`` and ``<!-- end -->``. The tests check that the parts match the code.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reference"
_PART = re.compile(r"(<!-- generated: ([a-z ]+) -->\n).*?(<!-- end -->)", re.S)


def command_line() -> str:
    """Return every command with its arguments and options."""
    import typer

    from ctxwin.cli.main import app
    from ctxwin_evals.cli import app as harness

    lines: list[str] = []

    def show(name: str, command: Any) -> None:
        subcommands = getattr(command, "commands", {})
        lines.extend([f"## {name}" if name.count(" ") < 2 else f"### {name}", "", _sentences(command.help), ""])
        rows = [_parameter(p) for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
        if rows:
            lines.extend(_table(("", "default", ""), rows))
        for sub, child in subcommands.items():
            show(f"{name} {sub}", typer.main.get_command(harness) if (name, sub) == ("ctxwin", "eval") else child)

    show("ctxwin", typer.main.get_command(app))
    return "\n".join(lines)


def _parameter(parameter: Any) -> tuple[str, str, str]:
    names = "/".join([*parameter.opts, *parameter.secondary_opts])
    metavar = (
        parameter.make_metavar() if hasattr(parameter, "make_metavar") and not hasattr(parameter, "is_flag") else None
    )
    if parameter.param_type_name == "argument":
        names = (metavar or parameter.name).upper().strip("[]")
    default = parameter.default
    default_text = (
        "" if default is None or callable(default) or default is False or default in ("", ()) else f"`{default}`"
    )
    return f"`{names}`", default_text, getattr(parameter, "help", None) or ""


def metrics() -> str:
    from prometheus_client import CollectorRegistry

    from ctxwin_server.process.metrics import Metrics

    registry = CollectorRegistry()
    Metrics(registry=registry)
    rows = []
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append((f"`{name}`", family.type, family.documentation))
    return "\n".join(_table(("metric", "kind", ""), rows))


def architectures_of_vllm() -> dict[str, Any]:
    """Return an `Assessment` of each generating architecture of the installed vLLM, by its name there."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto
    from vllm.model_executor.models import registry

    from ctxwin.doctor.models import Assessment, assess_config
    from ctxwin.engines.vllm_support import VLLM_ONLY, register_config

    kinds: dict[str, str] = {}
    for name in filter(lambda name: name.endswith("_MAPPING_NAMES"), dir(modeling_auto)):
        for kind, classes in getattr(modeling_auto, name).items():
            for architecture in [classes] if isinstance(classes, str) else classes:
                kinds.setdefault(architecture, kind)
    for kind in VLLM_ONLY:
        register_config(kind)
        prefix = CONFIG_MAPPING[kind].__name__.removesuffix("Config")
        kinds |= {name: kind for name in registry._MULTIMODAL_MODELS if name.startswith(prefix)}
    unknown = "transformers has no config class for it"
    assessments = {}
    for name in sorted({*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS}):
        kind = kinds.get(name)
        assessments[name] = (
            assess_config(CONFIG_MAPPING[kind](), name, False) if kind else Assessment(name, "", "unknown", unknown)
        )
    return assessments


def architectures() -> str:
    """Return a table of the support of every architecture of vLLM, by its default config."""
    rows = []
    for name, assessment in architectures_of_vllm().items():
        reason = assessment.reason.removesuffix("; cached KV cannot be moved")
        rows.append((f"`{name}`", f"`{assessment.kind}`" if assessment.kind else "", assessment.standing, reason))
    return "\n".join(_table(("vLLM's architecture", "model type", "", ""), rows))


def operations() -> str:
    from ctxwin_server.registry.operations import OPERATIONS, AuditedAsk

    rows = [("`ask`", _body(AuditedAsk), "Answers a query; see `Window.ask`.")]
    rows += [(f"`{name}`", _body(o.body), _sentences(o.text)) for name, o in OPERATIONS.items()]
    return "\n".join(_table(("operation", "body", ""), rows))


def _body(model: Any) -> str:
    """Return the fields of a body, optional ones with their defaults."""
    parts = []
    for name, field in model.model_fields.items():
        if field.is_required():
            parts.append(f"`{name}`")
        else:
            parts.append(f"`{name}` ({field.get_default(call_default_factory=True)!r})")
    return ", ".join(parts) or "-"


def errors() -> str:
    from ctxwin_client.errors import KINDS

    return "\n".join(
        _table(("status", "code", "error"), [(str(k.status), f"`{k.code}`", k.error.__name__) for k in KINDS])
    )


def fidelity() -> str:
    from ctxwin.fidelity import AdvancedFidelity, Fidelity

    texts = _attributes(Fidelity.__doc__ or "")
    rows = [(f"`{n}`", f"`{f.default!r}`", texts[n]) for n, f in Fidelity.model_fields.items() if n != "advanced"]
    texts = _attributes(AdvancedFidelity.__doc__ or "")
    rows += [(f"`advanced.{n}`", f"`{f.default!r}`", texts[n]) for n, f in AdvancedFidelity.model_fields.items()]
    return "\n".join(_table(("field", "default", ""), rows))


def limits() -> str:
    from ctxwin_server.protocol.limits import Limits

    texts = _attributes(Limits.__doc__ or "")
    rows = []
    for field in fields(Limits):
        default = field.default if field.default is not MISSING else ""
        rows.append((f"`{field.name}`", f"`{default!r}`" if default != "" else "", texts.get(field.name, "")))
    return "\n".join(_table(("limit", "default", ""), rows))


_SOURCES = "https://github.com/ctxwin/ctxwin/blob/main/"
STATUSES = {"laboratory": "laboratory only", "study": "settled study"}


def papers() -> str:
    """Return a table for each paper of ``papers.toml``, behind a count of their rows by status."""
    data = tomllib.loads((PAGES / "papers.toml").read_text(encoding="utf-8"))
    counts = [(paper["name"], Counter(row["status"] for row in paper["rows"])) for paper in data.values()]
    statuses = ("served", "harness", "laboratory", "study", "not built")
    head = ("", *(STATUSES.get(status, status) for status in statuses))
    lines = _table(head, [(name, *(str(count[status]) for status in statuses)) for name, count in counts])
    for paper in data.values():
        number = f" (arXiv {paper['arxiv']})" if paper["arxiv"] else ""
        lines += [f"## {paper['name']}", "", f"{paper['title']}{number}.", ""]
        if paper["background"]:
            lines += [f"Background, without a mechanism: {', '.join(map(_short, paper['background']))}.", ""]
        rows = [tuple(_paper_row(row)) for row in paper["rows"]]
        lines += _table(("place", "mechanism", "status", "engines", "code", "tests or figures"), rows)
    return "\n".join(lines)


def _paper_row(row: dict[str, Any]) -> Iterable[str]:
    yield "; ".join(map(_short, row["at"]))
    yield row["what"] + (f"<br>*{row['note']}*" if "note" in row else "")
    yield STATUSES.get(row["status"], row["status"])
    yield ", ".join(row.get("engines", ()))
    yield "<br>".join(f"`{name}`" for name in row.get("code", ()))
    figures = [f"[{row['result'].partition('#')[0]}]({_SOURCES}{row['result']})"] if "result" in row else []
    yield "<br>".join([*(f"`{name}`" for name in row.get("tests", ())), *figures])


def _short(place: str) -> str:
    """Return a place of a paper as its citations have it."""
    for word, short in (("section ", "§ "), ("appendix ", "app. "), ("figure ", "fig. "), ("algorithm ", "alg. ")):
        place = place.replace(word, short)
    return place


def _attributes(docstring: str) -> dict[str, str]:
    """Return the ``Attributes:`` of a Google docstring; several names may share one text."""
    texts: dict[str, str] = {}
    _, _, section = docstring.partition("Attributes:")
    for entry in re.split(r"\n        (?=\S)", section.split("\n\n")[0]):
        names, colon, text = entry.strip().partition(":")
        for name in names.split(",") if colon else ():
            texts[name.strip()] = _sentences(text).replace("``", "`")
    return texts


def _sentences(text: str | None) -> str:
    return " ".join((text or "").replace("``", "`").split())


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in cells), ""]


PARTS: dict[str, Callable[[], str]] = {
    "architectures": architectures,
    "command line": command_line,
    "errors": errors,
    "fidelity": fidelity,
    "limits": limits,
    "metrics": metrics,
    "operations": operations,
    "papers": papers,
}


def render(page: Path) -> str:
    """Return a page with its parts generated again; that of vLLM's architectures only if vLLM is installed."""

    def part(match: re.Match[str]) -> str:
        if match[2] == "architectures" and importlib.util.find_spec("vllm") is None:
            return match[0]
        return f"{match[1]}{PARTS[match[2]]().strip()}\n{match[3]}"

    return _PART.sub(part, page.read_text(encoding="utf-8"))


def main(arguments: list[str]) -> int:
    stale = [page for page in sorted(PAGES.glob("*.md")) if render(page) != page.read_text(encoding="utf-8")]
    if "--check" in arguments:
        for page in stale:
            sys.stdout.write(f"{page.relative_to(ROOT)} does not match the code; run python tools/reference_pages.py\n")
        return 1 if stale else 0
    for page in stale:
        page.write_text(render(page), encoding="utf-8")
        sys.stdout.write(f"wrote {page.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``--config FILE.yaml``: the options of a long command in a file, beside its flags.

Keys are the names of options as on the command line, with dashes or underscores; flags win over the file, and the file over
what a flag like ``--quick`` chooses.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxwin.evals.console import errors

if TYPE_CHECKING:
    from collections.abc import Mapping


def read_config(path: Path, known: Mapping[str, str]) -> dict[str, Any]:
    """The options that a YAML file sets, as parameter names and values; lists become comma-separated text.

    ``known`` holds parameter names by option name (``max-tokens``).

    Raises ValueError where the file does not hold option names and values, or an unknown option (with the nearest one), and
    OSError where it cannot be read.
    """
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be a YAML file: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold option names and values, got {type(found).__name__}")
    made: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).replace("_", "-")
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"options are {', '.join(sorted(known))}"
            raise ValueError(f"{path}: {key!r} is no option of this command; {hint}")
        if isinstance(value, dict):
            raise ValueError(f"{path}: {key} must be one value or a list, got a mapping")
        made[known[name]] = ",".join(map(str, value)) if isinstance(value, list) else value
    return made


def _apply(context: typer.Context, value: Path | None) -> Path | None:
    """Makes the file's values the command's defaults, before other options are read."""
    if value is not None and not context.resilient_parsing:
        known = {
            text.lstrip("-"): parameter.name
            for parameter in context.command.params
            if parameter.name and parameter.name != "config"
            for text in (parameter.opts if parameter.param_type_name == "option" else [parameter.name])
        }
        with errors():
            context.default_map = {**(context.default_map or {}), **read_config(value, known)}
    return value


_ABOUT = "Options of this command in a YAML file; flags win over it."
Config = Annotated[
    Path | None, typer.Option("--config", metavar="FILE.yaml", is_eager=True, callback=_apply, help=_ABOUT)
]


def preset(name: str, about: str, **chosen: Any) -> Any:
    """A flag that changes the defaults of some options; flags and a configuration file still win over it."""

    def apply(context: typer.Context, value: bool) -> bool:
        if value and not context.resilient_parsing:
            context.default_map = {**chosen, **(context.default_map or {})}
        return value

    return typer.Option(name, is_eager=True, callback=apply, help=about)

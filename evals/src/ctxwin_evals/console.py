"""Shared parts of the eval commands: opening a model, printing, options in a file.

``--config FILE.yaml`` names options as on the command line, with dashes or underscores; flags win over the file, and the file
over what a flag like ``--quick`` chooses.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from ctxwin.engines.encoding.encoder import EncodingEngine
    from ctxwin.engines.hf.engine import HFEngine

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Model = Annotated[str, typer.Option(help="'tiny' (bundled), or a local folder or Hub name.")]
ModelArgument = Annotated[str, typer.Argument(help="'tiny' (bundled), or a local folder or Hub name.")]
Dtype = Annotated[str, typer.Option(help="The model's arithmetic: float32 or bfloat16.")]
Device = Annotated[str, typer.Option(help="torch device.")]
OwnDtype = Annotated[str, typer.Option(help="The model's arithmetic; '' takes the checkpoint's own.")]
MaxPixels = Annotated[int, typer.Option(help="Larger pictures are scaled down to this; 0: as they are.", min=0)]
Engine = Annotated[str, typer.Option(help="hf (transformers, which is read inside) or vllm (the serving engine).")]
_OF_ENGINE = 'Of the vllm engine: arguments of vllm.LLM and processes, as JSON: {"tensor_parallel_size": 2}.'
EngineOptions = Annotated[str, typer.Option(help=_OF_ENGINE)]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 leaves the default.", min=0)]


def open_model(model: str, dtype: str, device: str, threads: int) -> HFEngine:
    """The transformers engine, which lets evals read inside the model; ``hf:`` in front of its name changes nothing.

    The options are those of the commands. Raises ValueError for another engine's name or a device that is not there.
    """
    prepare(threads)
    import torch

    from ctxwin.opening import open_engine

    if is_on_vllm(model):
        raise ValueError(f"this reads inside the model, which transformers allows and vLLM does not; got {model!r}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises the latter
        raise ValueError(f"device must be one that torch has here, got {device!r}: {error}") from error
    name = "tiny:hf" if model == "tiny" else model if model.startswith(("hf:", "tiny:")) else f"hf:{model}"
    return open_engine(name, dtype=dtype or None, device=device)  # type: ignore[return-value]


def is_on_vllm(model: str, engine: str = "hf") -> bool:
    """Return whether a model, or the engine option beside it, names vLLM."""
    return engine == "vllm" or model.startswith(("vllm:", "tiny:vllm"))


def open_model_on(
    engine: str, options: str, model: str, dtype: str | None, device: str, threads: int
) -> EncodingEngine:
    """Open a model on transformers, as `open_model`, or on vLLM, with ``options`` of its own; see `engine_keywords`."""
    keywords = engine_keywords(engine, options)
    if is_on_vllm(model, engine):
        from ctxwin.opening import open_engine

        prepare(threads)
        try:
            return cast("EncodingEngine", open_engine(model, engine="vllm", dtype=dtype or "auto", **keywords))
        except TypeError as error:
            raise ValueError(f"engine options must be arguments of vllm.LLM, got {options}: {error}") from error
    if keywords:
        raise ValueError(f"engine options are those of the vllm engine, got {options} for hf; add --engine vllm")
    return open_model(model, "float32" if dtype is None else dtype, device, threads)


def engine_keywords(engine: str, options: str) -> dict[str, Any]:
    """The options of an engine, from JSON. Raises ValueError for another engine, or what is no JSON object."""
    try:
        keywords = json.loads(options)
    except ValueError as error:
        raise ValueError(f"engine options must be a JSON object, got {options!r}: {error}") from None
    if engine not in ("hf", "vllm") or not isinstance(keywords, dict):
        raise ValueError(f"engine must be hf or vllm and its options a JSON object, got {engine!r} and {options!r}")
    return keywords


def prepare(threads: int) -> None:
    """Prepare the first import of transformers: repair torchvision, hide progress bars, set torch's number of threads."""
    from ctxwin.engines.torchvision_repair import repair

    repair()
    import torch
    from transformers.utils import logging as hub_logging

    hub_logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)


def names(text: str) -> tuple[str, ...]:
    """The parts of a comma-separated list, each once."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def numbers(text: str) -> list[int]:
    """The numbers of a comma-separated list, each once."""
    if not (parts := names(text)) or not all(p.isdigit() for p in parts):
        raise ValueError(f"numbers must be integers >= 0 separated by commas, like 512,2048, got {text!r}")
    return [int(p) for p in parts]


def print_json(value: Any) -> None:
    """Print one JSON value."""
    typer.echo(json.dumps(value, indent=1))


def terminal() -> Any:
    """The console that results go to, without markup, since names and paths may look like it; files get wide rows."""
    from rich.console import Console

    return Console(markup=False, width=None if sys.stdout.isatty() else 150)


def new_table(title: str, columns: str, *, left: Collection[int] = (0,)) -> Table:
    """A table without rows; ``columns`` are headings separated by ``|``, those numbered in ``left`` are aligned left."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns.split("|")):
        table.add_column(column.strip(), justify="left" if i in left else "right")
    return table


def say(text: str, *, bold: bool = False) -> None:
    """Print a line unwrapped, so that no path in it is broken in two."""
    terminal().print(text, style="bold" if bold else None, highlight=False, soft_wrap=True)


def show(result: Mapping[str, Any], as_json: bool, *tables: Any) -> None:
    """Print a result as JSON, or its tables and lines."""
    if as_json:
        print_json(result)
        return
    for one in tables:
        say(one) if isinstance(one, str) else terminal().print(one)


def read_config(path: Path, parameters: Mapping[str, str]) -> dict[str, Any]:
    """The options that a YAML file sets, as parameter names and values; lists become comma-separated text, ``~/`` the home.

    ``parameters`` holds parameter names by option name (``max-tokens``).

    Raises ValueError where the file does not hold option names and values, or an unknown option (with the nearest one), and
    OSError where it cannot be read.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be a YAML file: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold option names and values, got {type(content).__name__}")
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name not in parameters:
            near = get_close_matches(name, parameters, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"options are {', '.join(sorted(parameters))}"
            raise ValueError(f"{path}: {key!r} is no option of this command; {hint}")
        if isinstance(value, dict):
            raise ValueError(f"{path}: {key} must be one value or a list, got a mapping")
        several = isinstance(value, list)
        shown = [str(Path(v).expanduser()) if str(v).startswith("~/") else v for v in (value if several else [value])]
        values[parameters[name]] = ",".join(map(str, shown)) if several else shown[0]
    return values


def _apply(context: typer.Context, value: Path | None) -> Path | None:
    """Make the file's values the command's defaults, before other options are read."""
    if value is not None and not context.resilient_parsing:
        parameters = {
            text.lstrip("-"): parameter.name
            for parameter in context.command.params
            if parameter.name and parameter.name != "config"
            for text in (parameter.opts if parameter.param_type_name == "option" else [parameter.name])
        }
        context.default_map = {**(context.default_map or {}), **read_config(value, parameters)}
    return value


_ABOUT = "Options of this command in a YAML file; flags win over it."
Config = Annotated[
    Path | None, typer.Option("--config", metavar="FILE.yaml", is_eager=True, callback=_apply, help=_ABOUT)
]


def quick_option(about: str, **chosen: Any) -> Any:
    """Return a flag that changes the defaults of some options; flags and a configuration file still win over it."""

    def apply(context: typer.Context, value: bool) -> bool:
        if value and not context.resilient_parsing:
            context.default_map = {**chosen, **(context.default_map or {})}
        return value

    return typer.Option("--quick", is_eager=True, callback=apply, help=about)

"""``ctxwin eval basis MODEL``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ctxwin.evals.console import Json, Threads, errors, open_model, print_json, progress, say


def basis(
    model: Annotated[str, typer.Argument(help="'tiny' (bundled), or a local folder or Hub name.")] = "tiny",
    images: Annotated[Path | None, typer.Option(help="Folder of pictures and videos to fit on.")] = None,
    contexts: Annotated[int, typer.Option(help="Sequences of chunks to fit on.", min=1)] = 120,
    rank: Annotated[int, typer.Option(help="Directions to keep; patches may use fewer.", min=1)] = 64,
    layers: Annotated[str, typer.Option(help="Layers that patches cover: deep or all.")] = "deep",
    seed: Annotated[int, typer.Option(help="Seed of the contexts.", min=0)] = 0,
    max_pixels: Annotated[
        int, typer.Option(help="Larger pictures are scaled down to this; 0: as they are.", min=0)
    ] = 0,
    output: Annotated[Path | None, typer.Option(help="File to write; by default the one that windows find.")] = None,
    dtype: Annotated[str, typer.Option(help="The model's arithmetic; '' takes the checkpoint's own.")] = "float32",
    device: Annotated[str, typer.Option(help="torch device.")] = "cpu",
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Fit the directions that all patches of a model share, for Fidelity("patched", layout="shared")."""
    with errors():
        from ctxwin.evals.shared_basis import FitSettings, contexts_for, fit
        from ctxwin.profiles import find_basis, write_basis

        settings = FitSettings(contexts, rank, layers, seed)  # type: ignore[arg-type]
        with open_model(model, dtype, device, threads) as engine, progress("contexts", contexts) as advance:
            name = engine.spec.model
            sources = contexts_for(engine, settings, images, max_pixels or None)
            made = fit(engine, sources, settings, advance)
            patch = made.rank * made.basis.right.element_size() / engine.spec.kv.span_bytes(1)
        path = write_basis(made, name, output)
        found = find_basis(name)
        followed = found is not None and found.id == made.id
        if as_json:
            print_json({
                "id": made.id, "rank": made.rank, "layers": list(made.basis.layers), "bytes": made.basis.nbytes,
                "deficits": made.basis.meta["deficits"], "share": patch, "date": made.date, "file": str(path),
                "followed": followed,
            })  # fmt: skip
            return
        say(
            f"{made.rank} directions over layers {list(made.basis.layers)}, {made.basis.nbytes:,} bytes once a model",
            bold=True,
        )
        say(f"fitted on {made.basis.meta['deficits']} chunks of {contexts} contexts; a patch of all directions takes "
            f"{patch:.1%} of its chunk's KV in bf16")  # fmt: skip
        say(str(path) + ("" if followed else f": windows find it once it lies beside the weights as {_name()}"))


def _name() -> str:
    from ctxwin.profiles import BASIS_NAME

    return BASIS_NAME

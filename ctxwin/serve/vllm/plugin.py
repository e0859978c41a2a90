"""The plugin of vLLM: with ``VLLM_PLUGINS=ctxwin``, ``vllm serve`` serves what ``ctxwin serve`` does.

vLLM loads `register` in each of its processes, and `endpoints` in its API server. Without that variable both do nothing,
and import nothing that vLLM has not.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import Namespace

    from ctxwin.serve.vllm.server import Windows

_registered = False


def switched_on() -> bool:
    """Whether ``VLLM_PLUGINS`` names this plugin; vLLM by itself loads general plugins that nobody has named."""
    return "ctxwin" in os.environ.get("VLLM_PLUGINS", "").split(",")


def register() -> None:
    """``vllm.general_plugins``: gives ``vllm serve`` our arguments, and has it start its engine with our connector.

    Idempotent. Raises EngineFailed for a vLLM that was not tested.
    """
    global _registered
    if _registered or not switched_on():
        return
    _registered = True
    from ctxwin.engines.vllm.lifecycle import versions

    versions.check()
    from vllm.engine.arg_utils import EngineArgs

    from ctxwin.serve.vllm.arguments import add_settings, enlist

    add = EngineArgs.add_cli_args
    EngineArgs.add_cli_args = staticmethod(lambda parser: add_settings(add(parser)))
    enlist(_from_arguments)


def endpoints() -> Windows:
    """``vllm.endpoint_plugins``: the routes, and what stands behind them."""
    from ctxwin.serve.vllm.arguments import ENLISTED

    if not ENLISTED:
        raise RuntimeError("vLLM must have been started by `vllm serve`, or by its server's own module")
    windows: Windows = ENLISTED[0]
    return windows


def _from_arguments(args: Namespace) -> Windows:
    from ctxwin.serve.vllm.arguments import settings_of
    from ctxwin.serve.vllm.server import Windows

    return Windows(settings_of(args))

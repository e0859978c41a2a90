"""The plugin of vLLM: with ``VLLM_PLUGINS=ctxwin``, ``vllm serve`` serves what ``ctxwin serve`` does.

vLLM loads `register` in each of its processes, and `endpoints` in its API server. Without that variable both do nothing,
and import nothing beyond vLLM's own imports.

vLLM has no official way for a plugin to add arguments to its server, or to change those of its engine. So two functions of
vLLM's are replaced here: `EngineArgs.add_cli_args`, and `AsyncEngineArgs.from_cli_args` until it has made the arguments of this
process's server. No request passes through either, and ``ctxwin serve`` replaces neither.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace

    from ctxwin_server.vllm.server import Windows

_registered = False


def switched_on() -> bool:
    """Return whether ``VLLM_PLUGINS`` names this plugin; vLLM itself loads general plugins without being asked."""
    return "ctxwin" in os.environ.get("VLLM_PLUGINS", "").split(",")


def register() -> None:
    """Add our arguments to ``vllm serve``, and start its engine with our connector (``vllm.general_plugins``).

    Idempotent. Raises EngineFailed for a vLLM that was not tested.
    """
    global _registered
    if _registered or not switched_on():
        return
    _registered = True
    from ctxwin.engines import vllm_support as versions

    versions.check()
    from vllm import AsyncEngineArgs
    from vllm.engine.arg_utils import EngineArgs

    from ctxwin_server.vllm.arguments import SERVED, add_settings

    add_cli, from_cli = EngineArgs.add_cli_args, AsyncEngineArgs.from_cli_args.__func__

    def from_cli_args(cls: Any, args: Namespace) -> Any:
        # Only servers make engine arguments of a namespace that has an HTTP server's in it.
        if hasattr(args, "middleware") and not SERVED:
            _prepare(args)
            AsyncEngineArgs.from_cli_args = classmethod(from_cli)
        return from_cli(cls, args)

    EngineArgs.add_cli_args = staticmethod(lambda parser: add_settings(add_cli(parser)))
    AsyncEngineArgs.from_cli_args = classmethod(from_cli_args)


def endpoints() -> Windows:
    """Return the plugin of this process's server (``vllm.endpoint_plugins``)."""
    from ctxwin_server.vllm.arguments import SERVED

    if not SERVED:
        raise RuntimeError("vLLM must have been started by `vllm serve`, or by its server's own module")
    windows: Windows = SERVED[0]
    return windows


def _prepare(args: Namespace) -> None:
    """Prepare the server of this process by its command line. Raises as `server.run`."""
    from ctxwin_server.vllm.arguments import SERVED, settings_of
    from ctxwin_server.vllm.server import Windows

    windows = Windows(settings_of(args))
    windows.prepare(args, sys.argv[1:])
    SERVED[:] = [windows]

"""Arguments of ``vllm serve``, parsed by vLLM and completed with what ctxwin needs."""

import logging
import os
import re
from argparse import Namespace
from collections.abc import Sequence, Set
from dataclasses import fields
from typing import Any

from ctxwin.errors import UnsupportedModel
from ctxwin.tiny import checkpoint_dir
from ctxwin_server.app.settings import Settings
from ctxwin_server.vllm.launchers import command_line
from ctxwin_vllm.core import engine_arguments
from ctxwin_vllm.lifecycle import startup

_SHUTDOWN_S = 2
"""Seconds for running requests to finish at shutdown."""
_log = logging.getLogger("ctxwin.serve")
SERVED: list[Any] = []
"""The `server.Windows` of this process, at most one."""


def parse(model: str, arguments: Sequence[str]) -> Namespace:
    """Return vLLM's namespace for ``vllm serve MODEL ARGUMENTS...``; exit as a command line does for unknown arguments."""
    from vllm.logger import configure_logging_from_args

    set_environment, _, validate = command_line()
    set_environment()
    args: Namespace = _parser().parse_args([model, *arguments])
    configure_logging_from_args(args)  # vLLM has no handlers before, which `server.log_like_vllm` shares
    if args.model_tag is None and not any(word.partition("=")[0] == "--model" for word in (model, *arguments)):
        raise ValueError("serve must have a model, got none: give a folder, a name or 'tiny' as its first argument")
    args.model = args.model_tag = args.model_tag or args.model  # also named by --model, as `vllm serve` takes it
    validate(args)
    return args


def prepare(args: Namespace, arguments: Sequence[str], outputs: bool) -> None:
    """Set in vLLM's namespace what ctxwin needs, so that vLLM's server starts with the connector.

    ``tiny`` is the bundled model.

    Args:
        arguments: the command line that ``args`` was parsed from.
        outputs: whether stage outputs are kept.

    Raises:
        ValueError, UnsupportedModel: an argument that ctxwin does not support; the message has a remedy.
    """
    from vllm import AsyncEngineArgs

    words = {word.partition("=")[0].replace("_", "-") for word in arguments}
    if args.model == "tiny":
        args.model = args.model_tag = str(checkpoint_dir())
        args.served_model_name = args.served_model_name or ["tiny"]
    _check_one_process(args)
    _check_template(args)
    if "--no-enable-prompt-tokens-details" not in words:
        args.enable_prompt_tokens_details = True  # otherwise cached_tokens is null
    if "--shutdown-timeout" not in words:
        args.shutdown_timeout = args.shutdown_timeout or _SHUTDOWN_S
    args.plain_max_logprobs = args.max_logprobs  # of plain requests; windows may ask for the whole vocabulary
    names = {f.name for f in fields(AsyncEngineArgs)} - {"model", "max_logprobs"}
    for name, value in engine_arguments(args.model, {**_chosen(args, words, names), "outputs": outputs}).items():
        setattr(args, name, value)
    if startup.eager_on_cpu(vars(args)):
        # vLLM's few compiled sampling functions take 5-17 s to compile, and win nothing back here.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def add_settings(parser: Any) -> Any:
    """Add an argument for each of our settings to vLLM's parser."""
    group = parser.add_argument_group(title="ctxwin", description="Windows and chunks beside vLLM's own endpoints.")
    for name, kind, default, text, metavar in Settings.options():
        flag = f"--ctxwin-{name.replace('_', '-')}"
        if kind is bool:
            group.add_argument(flag, action="store_true", default=default, help=text)
        else:
            # vLLM logs what differs from a default, and a store's URL may hold a password.
            kind = _Unlogged if kind is str else kind
            group.add_argument(flag, type=kind, default=default, help=text, metavar=metavar)
    return parser


def settings_of(args: Namespace) -> Settings:
    """Return our settings among vLLM's arguments."""
    named: dict[str, Any] = {}
    for name, _, default, _, _ in Settings.options():
        value = getattr(args, f"ctxwin_{name}", default)
        named[name] = str(value) if isinstance(value, _Unlogged) else value
    return Settings(**named)


class _Unlogged(str):
    """Text whose ``repr`` hides the user and password of URLs."""

    def __repr__(self) -> str:
        return repr(re.sub(r"//[^/@]*@", "//***@", self))


def _parser() -> Any:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    _, add_arguments, _ = command_line()
    return add_arguments(FlexibleArgumentParser(prog="ctxwin serve"))


def _chosen(args: Namespace, words: Set[str], names: set[str]) -> dict[str, Any]:
    """Return the explicit options: those that differ from the default, and switches set to it on the command line.

    A switch cannot be turned off in a ``--config`` file: vLLM ignores false values there.
    """
    defaults = vars(_parser().parse_args([]))
    chosen = {name: value for name, value in vars(args).items() if name in names and value != defaults.get(name, value)}
    for name in names:
        flag = name.replace("_", "-")
        if isinstance(defaults.get(name), bool) and not words.isdisjoint((f"--{flag}", f"--no-{flag}")):
            chosen[name] = getattr(args, name)
    return chosen


def server_keys(args: Namespace) -> list[str]:
    """Return the server's own API keys: ``--api-key``, else ``VLLM_API_KEY``."""
    from vllm import envs

    return [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]


def print_help(section: str) -> None:
    """Print vLLM's help of ``vllm serve``: ``all``, or that of a named group or argument."""
    _parser().parse_args([f"--help={section}"])


def _check_one_process(args: Namespace) -> None:
    """Raise UnsupportedModel for more than one API server process: windows live in it."""
    from vllm import envs

    if args.headless or args.grpc:
        raise UnsupportedModel(
            "windows are served over HTTP with their engine on one machine; drop --headless and --grpc"
        )
    if getattr(envs, "VLLM_USE_RUST_FRONTEND", False):
        raise UnsupportedModel("windows live in vLLM's Python server; unset VLLM_USE_RUST_FRONTEND")
    if (args.api_server_count or 1) != 1:
        raise UnsupportedModel(
            f"--api-server-count must be 1, got {args.api_server_count}: windows live in one process; start further "
            "servers on a shared store (--store redis://...) instead"
        )


def _check_template(args: Namespace) -> None:
    """Warn of options that affect chats but not windows."""
    template = [name for name in ("chat_template", "default_chat_template_kwargs") if getattr(args, name, None)]
    if template:
        _log.warning(
            "%s: for chats only; /v1/windows read the template in the model's folder, so put it there as chat_template.jinja",
            ", ".join("--" + name.replace("_", "-") for name in template),
        )

"""``vllm serve``'s arguments, parsed by vLLM, with what ctxwin needs put in."""

from __future__ import annotations

import logging
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence, Set
from dataclasses import fields
from typing import Any

from ctxwin.engines.vllm.core import engine_arguments
from ctxwin.engines.vllm.lifecycle import startup
from ctxwin.errors import UnsupportedModel
from ctxwin.serve.settings import Settings
from ctxwin.tiny import checkpoint_dir

_SHUTDOWN_S = 5
"""What vLLM's processes get to end by themselves; killed at once, they leave shared memory behind."""
_log = logging.getLogger("ctxwin.serve")
ENLISTED: list[Any] = []
"""What was put into this process's server, once its engine has been asked for: one at most."""


def parse(model: str, given: Sequence[str]) -> Namespace:
    """vLLM's namespace for ``vllm serve MODEL GIVEN...``; exits like any command line for an argument it does not know."""
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()
    args: Namespace = _parser().parse_args([model, *given])
    args.model = args.model_tag
    validate_parsed_serve_args(args)
    return args


def prepare(args: Namespace, given: Sequence[str]) -> None:
    """Puts into vLLM's namespace what ctxwin needs, so that vLLM's server starts with the connector.

    ``tiny`` is the bundled model.

    Args:
        given: the command line that ``args`` was read from.

    Raises:
        ValueError, UnsupportedModel: an argument that ctxwin cannot work with; the message says what to do.
    """
    from vllm import AsyncEngineArgs

    words = {word.partition("=")[0].replace("_", "-") for word in given}
    if args.model == "tiny":
        args.model = args.model_tag = str(checkpoint_dir())
        args.served_model_name = args.served_model_name or ["tiny"]
    _check_one_process(args)
    _check_template(args)
    if "--shutdown-timeout" not in words:
        args.shutdown_timeout = args.shutdown_timeout or _SHUTDOWN_S
    args.plain_max_logprobs = args.max_logprobs  # of plain requests; windows may ask for the whole vocabulary
    names = {f.name for f in fields(AsyncEngineArgs)} - {"model", "max_logprobs"}
    for name, value in engine_arguments(args.model, _chosen(args, words, names)).items():
        setattr(args, name, value)
    if startup.eager_on_cpu(vars(args)):
        # vLLM's few compiled sampling functions take 5-17 s to compile, and win nothing back here.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def enlist(made: Callable[[Namespace], Any], given: Sequence[str] | None = None) -> None:
    """Has the server that this process starts next prepared, by what ``made(args)`` returns, when its engine is asked for.

    vLLM's servers, and nothing else, make engine arguments of a namespace with an HTTP server's arguments in it.

    Args:
        given: the command line, to tell switches that were set to their default from those that were not set.
    """
    from vllm import AsyncEngineArgs

    inner = AsyncEngineArgs.from_cli_args.__func__

    def from_cli_args(cls: Any, args: Namespace) -> Any:
        if hasattr(args, "middleware") and not ENLISTED:
            windows = made(args)
            windows.prepare(args, sys.argv[1:] if given is None else given)
            ENLISTED.append(windows)
        return inner(cls, args)

    AsyncEngineArgs.from_cli_args = classmethod(from_cli_args)


def add_settings(parser: Any) -> Any:
    """Gives vLLM's parser an argument for each of our settings."""
    group = parser.add_argument_group(title="ctxwin", description="Windows and chunks beside vLLM's own endpoints.")
    for name, kind, default, text, shown in Settings.described():
        flag = f"--ctxwin-{name.replace('_', '-')}"
        if kind is bool:
            group.add_argument(flag, action="store_true", default=default, help=text)
        else:
            # vLLM logs what differs from a default, and a store's URL may hold a password.
            group.add_argument(flag, type=_Unlogged if kind is str else kind, default=default, help=text, metavar=shown)
    return parser


def settings_of(args: Namespace) -> Settings:
    """Our settings among vLLM's arguments."""
    named: dict[str, Any] = {}
    for name, _, default, _, _ in Settings.described():
        value = getattr(args, f"ctxwin_{name}", default)
        named[name] = str(value) if isinstance(value, _Unlogged) else value
    return Settings(**named)


class _Unlogged(str):
    """Text that is shown without the user and the password of a URL."""

    def __repr__(self) -> str:
        return repr(re.sub(r"//[^/@]*@", "//***@", self))


def _parser() -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(prog="ctxwin serve"))


def _chosen(args: Namespace, words: Set[str], names: set[str]) -> dict[str, Any]:
    """What was asked for by name: what differs from the default, and switches that were set to it.

    A switch is off in no ``--config`` file: vLLM takes what is false there as not said.
    """
    defaults = vars(_parser().parse_args([]))
    chosen = {name: value for name, value in vars(args).items() if name in names and value != defaults.get(name, value)}
    for name in names:
        flag = name.replace("_", "-")
        if isinstance(defaults.get(name), bool) and not words.isdisjoint((f"--{flag}", f"--no-{flag}")):
            chosen[name] = getattr(args, name)
    return chosen


def own_keys(args: Namespace) -> list[str]:
    """The server's own API keys: ``--api-key``, else ``VLLM_API_KEY``."""
    from vllm import envs

    return [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]


def print_help(section: str) -> None:
    """vLLM's own help of ``vllm serve``: ``all``, the name of a group, or of an argument."""
    _parser().parse_args([f"--help={section}"])


def _check_one_process(args: Namespace) -> None:
    """Windows live in the API server's process, so there is one."""
    from vllm import envs

    if args.headless or args.grpc:
        raise UnsupportedModel(
            "windows are served over HTTP with their engine on this machine; drop --headless and --grpc"
        )
    if getattr(envs, "VLLM_USE_RUST_FRONTEND", False):
        raise UnsupportedModel("windows live in vLLM's Python server; unset VLLM_USE_RUST_FRONTEND")
    if (args.api_server_count or 1) != 1:
        raise UnsupportedModel(
            f"--api-server-count must be 1, got {args.api_server_count}: windows live in one process; start further "
            "servers on a shared store (--store redis://...) instead"
        )


def _check_template(args: Namespace) -> None:
    """Says where chats that name chunks are not the prompt or the answer that the same ones with pictures are."""
    template = [name for name in ("chat_template", "default_chat_template_kwargs") if getattr(args, name, None)]
    if template:
        _log.warning(
            "%s: for plain chats only; windows and chats that name chunks read the template in the model's folder, so "
            "put it there as chat_template.jinja",
            ", ".join("--" + name.replace("_", "-") for name in template),
        )
    if getattr(args.structured_outputs_config, "reasoning_parser", "") or getattr(args, "reasoning_parser", ""):
        _log.warning("--reasoning-parser: for plain chats only; those that name chunks show thinking in their content")


def defaults_of(config: Any) -> dict[str, float]:
    """How chats are decoded that say nothing: the model's own generation config, as for vLLM's other chats."""
    return {name: value for name, value in config.get_diff_sampling_param().items() if value is not None}

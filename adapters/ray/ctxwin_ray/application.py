"""The application: fronts, and replicas behind a router that finds the places of windows and chunks."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Any

import ray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model
from ray import serve
from ray.serve.config import RequestRouterConfig

from ctxwin.store import open_store
from ctxwin.validation import validate
from ctxwin_ray.front import Front
from ctxwin_ray.replica import Replica
from ctxwin_server.app.settings import Settings
from ctxwin_server.protocol.limits import Limits

_HEALTH_S = 5.0


def _as_written(value: Any) -> Any:
    """Return the text that YAML has read as something else: off and on as booleans, a size in bytes as a number."""
    return {"False": "off", "True": "on"}.get(str(value), str(value)) if isinstance(value, int) else value


_TEXT = Annotated[str, BeforeValidator(_as_written)]
_TYPES = {n: (_TEXT if t is str and form != "FILE" else t, given) for n, t, given, _, form in Settings.options()}
_OPTIONS: type[BaseModel] = create_model("_OPTIONS", __config__=ConfigDict(strict=True, extra="forbid"), **_TYPES)  # type: ignore[call-overload]


class FleetArguments(BaseModel):
    """Arguments of a fleet: ``args`` in a YAML for ``serve run``.

    Attributes:
        model, vllm: as ``ctxwin serve MODEL VLLM...`` takes them.
        settings: options of ``ctxwin serve``, with underscores: ``{"store": "tiered:memory:,redis://host:6379/0"}``.
        replicas: their number, or ``[least, most]`` to scale with the ongoing requests.
        name: of the fleet, unique on its registry. Default: the application and its Ray cluster.
        gpus, cpus: of each replica; several GPUs need ``--tensor-parallel-size``.
        ongoing: ongoing requests of a replica, of which it answers ``max_concurrency`` at once.
        target: ongoing requests of each replica that scaling aims at.
        router: import path of a request router.
        fronts: processes that read requests and route them; one passes on some hundreds a second.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    vllm: list[str] = []
    settings: dict[str, Any] = {}
    replicas: int | tuple[int, int] = Field(default=2)
    name: str = ""
    gpus: float = Field(default=0, ge=0)
    cpus: float = Field(default=1, ge=0)
    ongoing: int = Field(default=1024, gt=0)
    target: float = Field(default=16, gt=0)
    router: str = "ctxwin_ray.router.WindowRouter"
    fronts: int = Field(default=1, gt=0)


def validated(args: FleetArguments | dict[str, Any]) -> tuple[FleetArguments, Limits]:
    """Return the arguments of a fleet and the limits of its servers; starts nothing. Raises as `fleet`."""
    arguments: FleetArguments = validate(FleetArguments.model_validate, args)
    least, most = _range(arguments)
    if not 1 <= least <= most:
        raise ValueError(f"replicas must be a number from 1 on, or [least, most], got {arguments.replicas}")
    options = "settings must be options of ctxwin serve with underscores: "
    given = validate(_OPTIONS.model_validate, arguments.settings, options).model_dump(exclude_unset=True)
    arguments = arguments.model_copy(update={"settings": given})
    limits: Limits = (settings := Settings(**given)).service()["limits"]
    records = settings.registry or settings.store
    if most > 1 and not records.rpartition(",")[2].removeprefix("tiered:").startswith(("redis://", "rediss://")):
        raise ValueError(
            f"replicas must share the windows' versions in a Redis, got {records!r}; give --registry redis://HOST:PORT/DB (in "
            "a YAML the setting registry), a --store that ends with one, or one replica"
        )
    with closing(open_store(records)) as store:  # one clear error now instead of one from every replica
        if most > 1 and store.evicts:
            raise ValueError(
                f"the Redis of windows' versions must keep its entries, and {records!r} may evict them; set its "
                "maxmemory-policy to noeviction"
            )
    for name in ("--port", "--host", "--uds", "--restarts", "--vllm-help"):
        if any(word.partition("=")[0] == name for word in arguments.vllm):
            raise ValueError(f"replicas must be without {name}: Ray Serve listens, and starts them again")
    return arguments, limits


def _range(arguments: FleetArguments) -> tuple[int, int]:
    replicas = arguments.replicas
    return replicas if isinstance(replicas, tuple) else (replicas, replicas)


def fleet(args: FleetArguments | dict[str, Any]) -> Any:
    """Return the Ray Serve application of a fleet; from a YAML Ray passes ``args`` as a dict.

    Raises:
        ValueError: invalid arguments, with a remedy. OSError: the store cannot be reached.
    """
    arguments, limits = validated(args)
    least, most = _range(arguments)
    scaling: dict[str, Any] = {"num_replicas": least}
    if most > least:
        autoscaling = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": arguments.target}
        scaling = {"autoscaling_config": autoscaling}
    replicas = serve.deployment(Replica, name="replica").options(
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": arguments.gpus},
        max_ongoing_requests=arguments.ongoing,
        request_router_config=RequestRouterConfig(request_router_class=arguments.router),
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=60.0,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=60.0,
        **scaling,
    )
    name = arguments.name or f"ctxwin@{ray.get_runtime_context().gcs_address}"
    front = serve.deployment(serve.ingress()(Front), name="front").options(
        num_replicas=arguments.fronts, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=16 * arguments.ongoing
    )
    return front.bind(replicas.bind(arguments.model, arguments.vllm, arguments.settings, name), limits)

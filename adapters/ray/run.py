"""A fleet from a command or a program, rather than from a YAML."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from ctxwin.adapters.ray.fleet import FleetArguments, fleet

APPLICATION = "ctxwin"
_log = logging.getLogger("ctxwin.serve")


@contextmanager
def running(arguments: FleetArguments, host: str = "127.0.0.1", port: int = 8000, address: str = "") -> Iterator[str]:
    """A fleet that answers at the URL it gives, until the block ends.

    Args:
        address: of a Ray cluster; "" starts one on this machine, which ends with the block.

    Raises: as `fleet`; ValueError where this machine has not what the replicas need; RuntimeError where a replica cannot
    start, with what it said.
    """
    ray.init(address=address or "local", include_dashboard=False, log_to_driver=True, configure_logging=False)
    try:
        application = fleet(arguments)
        if not address:
            _check_resources(arguments)
        serve.start(http_options={"host": host, "port": port})
        serve.run(application, name=APPLICATION, route_prefix="/")
        yield f"http://{host}:{port}"
    finally:
        with suppress(RayServeException):  # nothing has started
            serve.delete(APPLICATION, _blocking=True)
        if not address:
            serve.shutdown()
        ray.shutdown()


def _check_resources(arguments: FleetArguments) -> None:
    """Ray would wait for ever for what no machine of the cluster has."""
    least = arguments.replicas if isinstance(arguments.replicas, int) else arguments.replicas[0]
    has = ray.cluster_resources()
    for name, each in (("GPU", arguments.gpus), ("CPU", arguments.cpus)):
        if least * each > has.get(name, 0):
            raise ValueError(
                f"{least} replicas with {each:g} {name}s each must have {least * each:g}, got a machine with "
                f"{has.get(name, 0):g}; give fewer replicas, less of each (--{name.lower()}s), or a cluster (--address)"
            )


def run(arguments: FleetArguments, host: str, port: int, address: str) -> None:
    """`running` until SIGINT or SIGTERM. Main thread only."""
    told = threading.Event()

    def stop(*_: Any) -> None:
        told.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    with running(arguments, host, port, address) as url:
        _log.info("the fleet answers at %s", url)
        told.wait()

"""A fleet started by a command or a program instead of a YAML."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from ctxwin_ray.application import FleetArguments, fleet, validated

APPLICATION = "ctxwin"
_log = logging.getLogger("ctxwin.serve")


@contextmanager
def running(arguments: FleetArguments, host: str = "127.0.0.1", port: int = 8000, address: str = "") -> Iterator[str]:
    """Run a fleet until the block ends; yields its URL.

    Args:
        address: of a Ray cluster; "" starts one on this machine, which ends with the block.

    Raises: as `fleet`; ValueError if this machine lacks the resources of the replicas; RuntimeError if a replica cannot
    start, with its error.
    """
    validated(arguments)  # a cluster takes long to start
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
    """Raise ValueError if the cluster lacks the replicas' resources, for which Ray would wait forever."""
    least = arguments.replicas if isinstance(arguments.replicas, int) else arguments.replicas[0]
    available = ray.cluster_resources()
    for name, each in (("GPU", arguments.gpus), ("CPU", arguments.cpus)):
        if least * each > available.get(name, 0):
            raise ValueError(
                f"{least} replicas with {each:g} {name}s each must have {least * each:g}, got a machine with "
                f"{available.get(name, 0):g}; give fewer replicas, less of each (--{name.lower()}s), or a cluster (--address)"
            )


def run(arguments: FleetArguments, host: str, port: int, address: str) -> None:
    """Run a fleet until SIGINT, SIGTERM or, unless it is ignored, SIGHUP. Main thread only."""
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda *_: stopping.set())
    with running(arguments, host, port, address) as url:
        _log.info("the fleet answers at %s", url)
        stopping.wait()

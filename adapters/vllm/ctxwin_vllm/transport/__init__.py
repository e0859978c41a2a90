"""How KV gets from an engine to the connector and back: within a process, or to others through shared memory."""

from ctxwin_vllm.transport.base import PARAM, Endpoint, LoadSpec, RequestMeta, SaveSpec, Transfer, Transport
from ctxwin_vllm.transport.endpoint import open_endpoint
from ctxwin_vllm.transport.local import LocalTransport, find
from ctxwin_vllm.transport.shared_memory import SharedMemoryTransport

__all__ = ["PARAM", "LoadSpec", "LocalTransport", "RequestMeta", "SaveSpec", "SharedMemoryTransport"]
__all__ += ["Transfer", "Transport"]


def connect(source: str) -> Endpoint:
    """vLLM's end of the transport whose `Transport.source` this is. Raises RuntimeError where there is none."""
    return open_endpoint(source) if source.startswith("/") else find(source)

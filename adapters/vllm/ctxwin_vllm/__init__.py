"""vLLM as an embedded engine: spans are written into its paged cache, and computed spans are read back.

Modules:
    engine: `VLLMEngine`, an engine on a running vLLM (`core`), driven from any thread (`drivers`).
    requests, inputs, cache_namespace: one request, its prompt, and which blocks of the prefix cache it may share.
    rendered: a prompt that vLLM's own server rendered, as the segments of a window.
    connector: what vLLM loads by module path, in every process that it runs: scheduler and worker halves, encoder cache.
    transport: how KV gets to the connector and back, within a process or through shared memory.
    paged, resident, ranks: the cache's packing; copies on the device; KV heads of tensor-parallel ranks.
    lifecycle, refusals: start and end of vLLM's processes; configurations that are refused.
    internals: all uses of vLLM beyond its official interfaces.
"""

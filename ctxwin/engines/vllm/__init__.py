"""The vLLM adapter: a KV connector that writes spans into vLLM's paged cache and reads computed spans back.

Modules:
    registry: what one request shall load and capture, shared between an engine and its connector in one process.
    paged: writing and reading token slots of the paged cache, whatever its packing.
    connector: the out-of-tree KV connector that vLLM loads by module path.
"""

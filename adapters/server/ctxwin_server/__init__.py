"""Windows over HTTP: chunks uploaded once, windows driven by id, chats that name chunks, tenants, metrics.

The routes are added to those of an OpenAI server (`ctxwin_server.vllm` adds them to vLLM's); outside that package nothing
imports vLLM. What both ends share lies below: the errors in `ctxwin_client.errors`, the JSON forms of answers and plans in
`ctxwin.window.serialization`.
"""

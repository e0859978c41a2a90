"""Windows over HTTP: chunks uploaded once, windows driven by id, chats that name chunks, tenants, metrics.

The routes stand beside the ones of an OpenAI server (`ctxwin.serve.vllm` puts them into vLLM's). Nothing here
knows vLLM: an engine is an engine. FastAPI is imported by `routes` and `responses` only, so that the client
(`ctxwin.adapters.openai`) can share `wire` and `errors`.
"""

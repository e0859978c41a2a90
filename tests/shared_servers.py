"""Servers with vLLM that the tests of several files share, see `serve/conftest.py`."""

SERVER_OF = {
    "serve/test_edited_chats.py": "stock",
    "serve/test_lazy_chats.py": "keys",
    "serve/test_odd_requests.py": "keys",
    "serve/test_vllm_chats.py": "stock",
    "serve/test_vllm_histories.py": "stock",
    "serve/test_vllm_server.py": "keys",
}
"""By file: ours with keys, two tenants and bounds of what is kept, or vLLM's own command with keys and our plugin."""

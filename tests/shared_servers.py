"""What the tests of several files share: servers with vLLM (`serve/conftest.py`), a vLLM engine (`adapters/vllm/conftest.py`)."""

SERVER_OF = {
    "adapters/vllm/test_vllm.py": "engine",
    "adapters/vllm/test_vllm_faults.py": "engine",
    "serve/test_edited_chats.py": "stock",
    "serve/test_lazy_chats.py": "keys",
    "serve/test_odd_requests.py": "keys",
    "serve/test_vllm_chats.py": "stock",
    "serve/test_vllm_histories.py": "stock",
    "serve/test_vllm_server.py": "keys",
}
"""By file: an engine; our server with keys, two tenants and bounds of what is kept; or vLLM's own command with our plugin."""

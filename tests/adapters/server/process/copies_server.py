"""Windows on a vLLM in processes of its own that keeps copies of spans there, as on a GPU.

``python -m adapters.server.process.copies_server FOLDER`` prints its address, then for each line that it reads how many spans
were loaded from copies. Its paged cache holds two windows or three.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from ctxwin.engines.torchvision_repair import repair

BLOCKS = 17


def main() -> None:
    from adapters.server.serving import serving
    from ctxwin.tiny import checkpoint_dir
    from ctxwin_vllm.engine import VLLMEngine
    from interpreted import resident_copies

    options: dict[str, Any] = {
        "dtype": "float32",
        "processes": "multi",
        "num_gpu_blocks_override": BLOCKS,
        "max_model_len": 512,
    }
    with (
        resident_copies(partial(VLLMEngine, checkpoint_dir(), **options), interpret=False) as engine,
        serving(store=f"disk:{sys.argv[1]}", make=lambda store: engine.view("", store)) as server,
    ):
        print(server.url, flush=True)
        for _ in sys.stdin:
            print(engine.kept_served.value, flush=True)


if __name__ == "__main__":
    repair()
    main()

"""Attacks on a running server, and a bystander who asks all the while.

Everything goes over HTTP, so that the same attacks run against any version of the server:

    PYTHONPATH=tests python -m adapters.server.attacks --tree /path/to/another/checkout [ATTACK ...]

starts ``ctxwin serve`` from that checkout and prints one line of JSON for each attack. Tests take `besieged` and `ATTACKS`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from adapters.server.attacks.bystander import Bystander, endure
from adapters.server.attacks.registry import ATTACKS, OPEN, attempt
from adapters.server.attacks.victim import besieged


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tree", default="", help="PYTHONPATH of the server; default: this process's own")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    if not given.names or "open" in given.names:
        with tempfile.TemporaryDirectory() as folder, besieged(Path(folder), tree=given.tree, tenants=False) as victim:
            for name, made in OPEN.items():
                broken = attempt(made, victim)
                print(json.dumps({"attack": f"open_{name}", "broken": broken}), flush=True)
    names = [n for n in ATTACKS if not given.names or any(n.startswith(g) for g in given.names)]
    while names:
        with tempfile.TemporaryDirectory() as folder, besieged(Path(folder), tree=given.tree) as victim:
            bystander = Bystander(victim)
            bystander.quiet(10)
            idle = victim.resident()
            print(json.dumps({"idle_mb": idle >> 20, "answers": bystander.expected}), flush=True)
            while names:
                made = endure(victim, bystander, names.pop(0), given.seconds)
                row = {**vars(made), "peak_mb": made.peak >> 20}
                print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
                if not made.alive or set(made.answers) != {"right"}:
                    print(json.dumps({"server": "started again", "exit": victim.process.poll()}), flush=True)
                    break
            bystander.close()


if __name__ == "__main__":
    main()

"""The trainer of the bundled model (`ctxwin.tiny`), run from a checkout; no part of what is installed.

python tools/train_tiny --out DIR --seed 0      train (see `train`)
python tools/train_tiny check --weights DIR     check a checkpoint on held-out contexts (see `check`)
"""

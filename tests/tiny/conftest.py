"""Settings for the tests of the bundled model."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the model is tiny; threads would only wait for each other

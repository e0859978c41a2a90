"""The demo: a windowed agent watches a video, and every step is counted against a prefix cache and a re-prefill."""

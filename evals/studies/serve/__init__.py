"""Many windows on one vLLM under load, beside three users of vLLM's own prefix cache: ``python -m evals.studies.serve``.

Modules:
    trace: the sessions' turns, drawn from a seed.
    requests: plain requests to vLLM, every token timed.
    policies: who serves: windows, and users of vLLM's prefix cache.
    load: the open loop, by wall clock or by processor time.
    sweep: all policies at rising rates; a run that was killed continues from its folder.
    plain: plain traffic with and without the connector.
    figures: the comparison and the checks.
    show: the result in a terminal and as a picture.
"""

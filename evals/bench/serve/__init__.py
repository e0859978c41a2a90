"""``ctxwin bench serve``: windows and users of a prefix cache under load.

Modules:
    trace: turns of the sessions, from a seed.
    requests: plain requests to vLLM, every token timed.
    policies: who serves: windows, and users of vLLM's prefix cache.
    load: the open loop, by the wall's clock or the processor's.
    sweep: all policies at rising rates, in a folder from which a killed run continues.
    plain: plain traffic with and without the connector.
    figures: the comparison and the checks.
    show: the result for a terminal, and as a picture.
"""

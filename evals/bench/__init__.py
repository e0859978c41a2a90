"""The benchmark of speed: what an edit of a window costs at the next ask, against a prefix cache and against the floor.

Modules:
    model: a random model of 0.5 billion parameters, generated once.
    provenance: the machine, versions and the model, recorded beside the times.
    content: chunks of an exact number of tokens.
    moves: the edits that are timed, with the windows they are made in.
    opponent: the same prompts by prefix caching, without ctxwin.
    reuse: paired runs of both, and the figures.
    show: the figures for a terminal.
"""

"""The benchmark of speed: what an edit of a window costs at the next ask, against a prefix cache and against the floor.

Modules:
    model: a random model of 0.5 billion parameters, generated once.
    provenance: the machine, versions and the model, recorded beside the times.
    moves: the edits that are timed, with the windows they are made in, over chunks of an exact number of tokens.
    peers: vLLM with other connectors, asked for the same.
    reuse: runs of a window, of users of a prefix cache without ctxwin and of the floor, and the figures.
"""

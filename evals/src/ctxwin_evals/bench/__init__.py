"""The benchmark of speed: what an edit of a window costs at the next ask, against a prefix cache and against the floor."""

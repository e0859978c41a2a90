"""``ctxwin eval probe``: does a model lose answers when KV is reused out of context, and what setting is safe?

Sources: Kamera (arXiv 2606.23581), sections 2 to 5 and appendices A to D. `contexts` says what is read, `reading` whether
the model reads it, `probe` runs the stages on the runner and the arms of all evals, `verdict` decides; `texts` is text.
"""

FOLDER = "probe-output"

"""ctxwin."""

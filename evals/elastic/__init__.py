"""Elastic Cache (Liu et al., arXiv 2407.18121): merging a prompt's KV, eviction baselines, and its own claims measured."""

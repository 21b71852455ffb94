"""Pods without GPUs: what an engine does with its KV cache and what it tells an indexer about it."""

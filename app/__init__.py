"""KV prefix-cache indexer: which pod already holds the KV cache of the longest leading part of a prompt."""

__version__ = "0.1.0"

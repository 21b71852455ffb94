"""Checks the indexer against captured engines: their event frames are replayed into it, and what they reused is the
truth that its answers are compared with.
"""

"""Checks the indexer against engines that have run: their frames go in again, their own answers are the
truth.
"""

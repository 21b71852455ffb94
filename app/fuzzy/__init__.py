"""Fuzzy match: what can be reused of a prompt whose prefix differs, and where it is held."""

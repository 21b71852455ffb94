"""API keys: as they are written, and those that hold now. What a key may do: app/api/access.py."""

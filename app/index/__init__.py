"""Two-level table, context -> prefix hash -> holders: the thin Python front of the native core."""

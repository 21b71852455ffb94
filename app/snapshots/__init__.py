"""The picture kept for a restart: checked frames in a file or in Redis, written in slices while the service goes on."""

"""The picture on disk: a file of checked frames, written in slices while the service goes on, and read at the start."""

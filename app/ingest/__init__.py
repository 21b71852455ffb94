"""Bytes to events: wire codec, sockets, sequence numbers."""

"""The native core as Python sees it (native/binding.cpp). Buffers are little-endian."""

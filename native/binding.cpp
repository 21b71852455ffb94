// The only file that knows Python: every function takes and returns buffers or numbers, never Python containers of
// single blocks.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(_native, m) { m.doc() = "Native core of the KV prefix-cache indexer; see app/_native.pyi."; }

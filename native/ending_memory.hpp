// For tests: memory that ends when it is asked for the n-th time. Only in the sanitizer build, whose linker
// leads every call for memory by which the core gets any (operator new, mmap, mremap) to here first
// (CMakeLists.txt). What Python takes for arguments and answers, before and behind the core, never ends here.
#pragma once

#include <cstdint>

namespace kvindexer {

// From now on so many calls find memory, and then so many find none. Returns how many found none since the
// last time.
uint64_t end_memory(uint64_t found, uint64_t not_found);

}  // namespace kvindexer

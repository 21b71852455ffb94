// The linker's --wrap gives a function both names: __wrap_ what is called, and __real_ what it stands before.
#include "ending_memory.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <new>
#include <utility>

namespace kvindexer {

namespace {

uint64_t left = UINT64_MAX, missing = 0, missed = 0;

bool has_ended() {
  if (left != 0) {
    --left;
    return false;
  }
  if (missing == 0) return false;
  --missing;
  ++missed;
  return true;
}

}  // namespace

uint64_t end_memory(uint64_t found, uint64_t not_found) {
  left = found;
  missing = not_found;
  return std::exchange(missed, 0);
}

}  // namespace kvindexer

using kvindexer::has_ended;

extern "C" {

void* __real__Znwm(size_t bytes);
void* __real__Znam(size_t bytes);
void* __real__ZnwmSt11align_val_t(size_t bytes, std::align_val_t alignment);
void* __real_mmap(void* at, size_t bytes, int protection, int flags, int file, off_t from);
void* __real_mremap(void* at, size_t bytes, size_t wanted, int flags, ...);

void* __wrap__Znwm(size_t bytes) {
  if (has_ended()) throw std::bad_alloc();
  return __real__Znwm(bytes);
}

void* __wrap__Znam(size_t bytes) {
  if (has_ended()) throw std::bad_alloc();
  return __real__Znam(bytes);
}

void* __wrap__ZnwmSt11align_val_t(size_t bytes, std::align_val_t alignment) {
  if (has_ended()) throw std::bad_alloc();
  return __real__ZnwmSt11align_val_t(bytes, alignment);
}

void* __wrap_mmap(void* at, size_t bytes, int protection, int flags, int file, off_t from) {
  if (!has_ended()) return __real_mmap(at, bytes, protection, flags, file, from);
  errno = ENOMEM;
  return MAP_FAILED;
}

void* __wrap_mremap(void* at, size_t bytes, size_t wanted, int flags, ...) {
  if (!has_ended()) return __real_mremap(at, bytes, wanted, flags);
  errno = ENOMEM;
  return MAP_FAILED;
}

}  // extern "C"

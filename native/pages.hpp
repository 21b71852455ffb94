// A run of zeroed memory pages that can be resized in place or moved by the kernel without a copy (mremap on
// Linux).
//
// Why not malloc: tables grow by an eighth at a time, and a heap cannot reuse the holes that leaves; a
// mapping gives every page back the moment it is not needed. Cost: one system call (about 1 us) a resize, 4
// KiB at least.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <utility>

namespace kvindexer {

class Pages {
 public:
  static constexpr size_t kPageBytes = 4096;

  Pages() = default;
  Pages(Pages&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), pages_(std::exchange(other.pages_, 0)) {}
  Pages& operator=(Pages&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(pages_, other.pages_);
    return *this;
  }
  ~Pages() { release(); }

  void* base() const { return base_; }
  size_t pages() const { return pages_; }
  size_t bytes() const { return pages_ * kPageBytes; }

  // The content of these pages is not wanted any more: they may read as zero, and take no memory until they
  // are written again.
  void discard(size_t first, size_t pages) {
    madvise(static_cast<char*>(base_) + first * kPageBytes, pages * kPageBytes, MADV_DONTNEED);
  }

  // Keeps the leading content; new pages are zero. Throws std::bad_alloc, and then nothing has changed.
  void resize(size_t pages) {
    if (pages == pages_) return;
    if (pages == 0) return release();
    void* moved;
#ifdef __linux__
    moved = base_ == nullptr ? map(pages) : mremap(base_, bytes(), pages * kPageBytes, MREMAP_MAYMOVE);
    if (moved == MAP_FAILED) throw std::bad_alloc();
#else
    moved = map(pages);
    if (moved == MAP_FAILED) throw std::bad_alloc();
    if (base_ != nullptr) {
      std::memcpy(moved, base_, (pages < pages_ ? pages : pages_) * kPageBytes);
      munmap(base_, bytes());
    }
#endif
    base_ = moved;
    pages_ = pages;
  }

  // So many zero pages, whatever was there, for content that fills them: they are all fetched at once. Throws
  // as `resize` does.
  void renew(size_t pages) {
    if (pages == pages_) {
      if (pages != 0) std::memset(base_, 0, bytes());
      return;
    }
    void* const fresh = pages == 0 ? nullptr : map(pages, kPopulate);
    if (fresh == MAP_FAILED) throw std::bad_alloc();
    release();
    base_ = fresh;
    pages_ = pages;
  }

 private:
#ifdef __linux__
  static constexpr int kPopulate = MAP_POPULATE;
#else
  static constexpr int kPopulate = 0;
#endif

  static void* map(size_t pages, int flags = 0) {
    return mmap(nullptr, pages * kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1,
                0);
  }

  void release() {
    if (base_ != nullptr) munmap(base_, bytes());
    base_ = nullptr;
    pages_ = 0;
  }

  void* base_ = nullptr;
  size_t pages_ = 0;
};

}  // namespace kvindexer

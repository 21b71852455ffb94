// Integers of a snapshot frame into bytes and back. Little-endian, columns of one width.
//
// A reader never goes past its end: what is missing reads as 0 and `is_whole` becomes false for good.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace kvindexer {

class FrameWriter {
 public:
  void u32(uint32_t value) { append(&value, sizeof(value)); }
  void u64(uint64_t value) { append(&value, sizeof(value)); }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

 private:
  void append(const void* value, size_t size) {
    const auto* first = static_cast<const uint8_t*>(value);
    bytes_.insert(bytes_.end(), first, first + size);
  }

  std::vector<uint8_t> bytes_;
};

class FrameReader {
 public:
  explicit FrameReader(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  uint32_t u32() { return number<uint32_t>(); }
  uint64_t u64() { return number<uint64_t>(); }
  // A number of things that take at least `bytes_each`; never more than can follow.
  size_t count(size_t bytes_each) {
    const uint32_t wanted = u32();
    if (wanted <= (bytes_.size() - at_) / bytes_each) return wanted;
    whole_ = false;
    return 0;
  }
  bool is_whole() const { return whole_; }
  bool is_at_end() const { return at_ == bytes_.size(); }

 private:
  template <class Number>
  Number number() {
    Number value = 0;
    if (bytes_.size() - at_ < sizeof(value)) {
      whole_ = false;
      at_ = bytes_.size();
    } else {
      std::memcpy(&value, bytes_.data() + at_, sizeof(value));
      at_ += sizeof(value);
    }
    return value;
  }

  std::span<const uint8_t> bytes_;
  size_t at_ = 0;
  bool whole_ = true;
};

}  // namespace kvindexer

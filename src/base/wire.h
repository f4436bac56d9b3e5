#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/error.h"

// Bytes that other processes read: the reader and the writer of every codec. Fields follow each
// other without gaps, fixed-width and little-endian.
namespace convoy {

static_assert(std::endian::native == std::endian::little, "the wire order is the native one");

// Numbers, enumerators, and structs of them without padding. No bool: a byte of a peer's may be
// neither.
template <class T>
concept WireField =
    std::is_trivially_copyable_v<T> && !std::is_same_v<T, bool> && !std::is_array_v<T> &&
    (std::is_arithmetic_v<T> || std::is_enum_v<T> ||
     (std::is_aggregate_v<T> && std::has_unique_object_representations_v<T>));

// How many zeros fill `length` bytes up to a multiple of 8.
constexpr std::size_t wire_padding(std::size_t length) { return (8 - length % 8) % 8; }

// Appends to a string, or fills memory from its front: more than fits there is a bug (kInternal).
class WireWriter {
 public:
  explicit WireWriter(std::string& out) : out_(&out) {}
  explicit WireWriter(std::span<std::byte> room) : room_(room) {}

  template <WireField T>
  void put(const T& value) {
    put(std::string_view(reinterpret_cast<const char*>(&value), sizeof value));
  }
  void put(std::string_view bytes) {
    if (out_) {
      out_->append(bytes);
    } else if (!bytes.empty()) {
      std::memcpy(claim(bytes.size()), bytes.data(), bytes.size());
    }
  }
  void put(std::span<const std::byte> bytes) {
    put(std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }
  // A length of type Length, then the bytes.
  template <std::unsigned_integral Length>
  void put_sized(std::string_view bytes) {
    CONVOY_CHECK(std::in_range<Length>(bytes.size()), "a field of ", bytes.size(), " bytes");
    put(static_cast<Length>(bytes.size()));
    put(bytes);
  }
  void put_padded(std::string_view bytes) {
    put(bytes);
    put_zeros(wire_padding(bytes.size()));
  }
  void put_zeros(std::size_t count) {
    if (out_) {
      out_->append(count, '\0');
    } else if (count != 0) {
      std::memset(claim(count), 0, count);
    }
  }
  // Of the memory that it fills.
  std::size_t written() const { return written_; }

 private:
  std::byte* claim(std::size_t bytes) {
    CONVOY_CHECK(bytes <= room_.size() - written_, bytes, " bytes where ", room_.size() - written_,
                 " fit");
    std::byte* const place = room_.data() + written_;
    written_ += bytes;
    return place;
  }

  std::string* out_ = nullptr;
  std::span<std::byte> room_;
  std::size_t written_ = 0;
};

// Takes fields from the front of what another process wrote, which may be anything. Neither copies
// nor allocates: views point into the bytes, which must stay and which nobody may change meanwhile.
// Errors are kInvalidArgument: "malformed <what>: it is cut off".
class WireReader {
 public:
  WireReader(std::string_view bytes, const char* what) : bytes_(bytes), what_(what) {}
  WireReader(std::span<const std::byte> bytes, const char* what)
      : WireReader({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, what) {}

  template <WireField T>
  T take() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view take(std::uint64_t length) {
    if (length > bytes_.size()) bad("it is cut off");
    const auto front = bytes_.substr(0, length);
    bytes_.remove_prefix(length);
    return front;
  }
  template <std::unsigned_integral Length>
  std::string_view take_sized() {
    return take(std::uint64_t{take<Length>()});
  }
  std::string_view take_padded(std::uint64_t length) {
    const auto front = take(length);
    take_zeros(wire_padding(front.size()));
    return front;
  }
  void take_zeros(std::size_t count) {
    if (take(count).find_first_not_of('\0') != std::string_view::npos) {
      bad("bytes that must be zero are not");
    }
  }
  void take_magic(std::string_view magic) {
    if (take(magic.size()) != magic) bad("it begins with other bytes, or is of another version");
  }
  // How many things of `bytes_each` bytes at least follow: checked before memory is taken for them.
  template <std::unsigned_integral Count>
  std::size_t take_count(std::size_t bytes_each = 1) {
    return checked_count(take<Count>(), bytes_each);
  }
  std::size_t checked_count(std::uint64_t count, std::size_t bytes_each) const {
    if (count > bytes_.size() / bytes_each) bad("it is cut off");
    return static_cast<std::size_t>(count);
  }
  // Nothing may be left.
  void end() const {
    if (!bytes_.empty()) bad("there is more behind it");
  }
  std::size_t left() const { return bytes_.size(); }

  [[noreturn]] void bad(const char* why) const {
    fail(ErrorKind::kInvalidArgument, "malformed ", what_, ": ", why);
  }

 private:
  std::string_view bytes_;
  const char* what_;
};

}  // namespace convoy

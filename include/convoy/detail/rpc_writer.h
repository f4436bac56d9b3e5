#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <variant>

#include "convoy/detail/rpc_message.h"

// The two passes over values that become a message. For convoy/detail/rpc_values.h; nothing here is
// for direct use.
namespace convoy::rpc::detail {

// The first pass: computes the size.
class ValueSizer {
 public:
  template <class T>
  static constexpr bool kHolds = kHeld<T>;

  ValueSizer(TensorsOut& tensors, ReferencesOut& references)
      : tensors_(tensors), references_(references) {}
  std::size_t bytes() const { return bytes_; }

  template <class T>
  void add(const T& value) {
    if constexpr (std::same_as<T, at::Tensor>) {
      bytes_ += tensors_.add(value);
    } else if constexpr (kIsRRef<T>) {
      bytes_ += references_.add(value.handle());
    } else if constexpr (kPlainVector<T>) {
      bytes_ += sizeof(std::uint64_t) + value.size() * sizeof(typename T::value_type);
    } else if constexpr (std::same_as<T, std::string>) {
      add_text(value);
    } else {
      bytes_ += sizeof(T);
    }
  }
  void add_text(std::string_view text) { bytes_ += sizeof(std::uint64_t) + text.size(); }
  void add_unsigned(std::uint64_t) { bytes_ += sizeof(std::uint64_t); }

 private:
  TensorsOut& tensors_;
  ReferencesOut& references_;
  std::size_t bytes_ = 0;
};

// The second pass: writes the bytes.
class ValueWriter {
 public:
  template <class T>
  static constexpr bool kHolds = kHeld<T>;

  ValueWriter(std::byte* to, std::size_t bytes, TensorsOut& tensors, ReferencesOut& references)
      : at_(to), end_(to + bytes), tensors_(tensors), references_(references) {}

  template <class T>
  void add(const T& value) {
    if constexpr (std::same_as<T, at::Tensor>) {
      at_ = tensors_.write_next(at_, end_);
    } else if constexpr (kIsRRef<T>) {
      put(references_.next().data(), ReferencesOut::kBytes);
    } else if constexpr (kPlainVector<T>) {
      add_unsigned(value.size());
      put(value.data(), value.size() * sizeof(typename T::value_type));
    } else if constexpr (std::same_as<T, std::string>) {
      add_text(value);
    } else if constexpr (std::same_as<T, std::monostate>) {
      const std::byte nothing{};
      put(&nothing, 1);
    } else {
      put(&value, sizeof value);
    }
  }
  void add_text(std::string_view text) {
    add_unsigned(text.size());
    put(text.data(), text.size());
  }
  void add_unsigned(std::uint64_t value) { put(&value, sizeof value); }
  // Throws kInvalidArgument unless exactly the computed size was written: another thread changed
  // the values in between.
  void finish() const;
  [[noreturn]] static void fail_changed();

 private:
  void put(const void* data, std::size_t bytes) {
    if (bytes > static_cast<std::size_t>(end_ - at_)) fail_changed();
    if (bytes != 0) std::memcpy(at_, data, bytes);
    at_ += bytes;
  }

  std::byte* at_;
  std::byte* const end_;
  TensorsOut& tensors_;
  ReferencesOut& references_;
};

}  // namespace convoy::rpc::detail

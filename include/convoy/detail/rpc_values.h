#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "convoy/detail/rpc_message.h"
#include "convoy/detail/rpc_writer.h"
#include "convoy/fields.h"
#include "convoy/future.h"

// How arguments and results of calls are encoded (docs/internals/wire.md has the tables): a sink
// and a source of convoy/fields.h. Encoding takes two passes: the first computes the size, the
// second writes the bytes to their destination. For convoy/rpc.h; nothing here is for direct use.
namespace convoy::rpc::detail {

// Decodes values from received bytes, which may be malformed: throws kInvalidArgument then.
class ValueSource {
 public:
  template <class T>
  static constexpr bool kHolds = kHeld<T>;

  // `parts` is a std::span<transport::Part>. Decoded tensors take ownership of their parts.
  ValueSource(const std::byte* data, std::size_t bytes, void* parts)
      : at_(data), end_(data + bytes), parts_(parts) {}

  template <class T>
  T take() {
    return convoy::detail::take_value<T>(*this);
  }
  template <class T>
  T take_held() {
    if constexpr (std::same_as<T, at::Tensor>) {
      return take_tensor();
    } else if constexpr (kIsRRef<T>) {
      return T(take_reference());
    } else if constexpr (kPlainVector<T>) {
      using Item = typename T::value_type;
      const std::size_t count = checked_count(take_unsigned(), sizeof(Item));
      T values(count);
      copy(values.data(), count * sizeof(Item));
      return values;
    } else if constexpr (std::same_as<T, std::string>) {
      const std::size_t count = checked_count(take_unsigned(), 1);
      std::string text(count, '\0');
      copy(text.data(), count);
      return text;
    } else if constexpr (std::same_as<T, bool>) {
      std::uint8_t value = 0;
      copy(&value, 1);
      if (value > 1) wrong_kind();
      return value == 1;
    } else if constexpr (std::same_as<T, std::monostate>) {
      std::uint8_t value = 0;
      copy(&value, 1);
      if (value != 0) wrong_kind();
      return {};
    } else {
      T value;
      copy(&value, sizeof value);
      return value;
    }
  }
  std::uint64_t take_unsigned() {
    std::uint64_t value = 0;
    copy(&value, sizeof value);
    return value;
  }
  std::size_t take_count() {
    return checked_count(static_cast<std::uint64_t>(take_held<std::int64_t>()), 1);
  }
  [[noreturn]] void wrong_kind() const;
  // Sets the sender. Without one, bytes with references are malformed.
  void comes_from(const MessagePeer* from) { from_ = from; }
  // The references that were decoded so far.
  const std::vector<RRefHandle>& references() const { return references_; }
  // Throws kInvalidArgument if bytes are left, unless a trailer callback was set. The callback gets
  // the tensors that require grad, in order, and the bytes after the values.
  void finish() const;
  using Trailer = void (*)(void* data, const std::vector<at::Tensor>& with_grad,
                           const std::byte* bytes, std::size_t count);
  void on_trailer(Trailer callback, void* data) {
    take_trailer_ = callback;
    trailer_data_ = data;
  }

  // Limits the depth of recursive types such as trees: the bytes decide how deep they nest.
  class Nested {
   public:
    explicit Nested(ValueSource& source) : source_(source) {
      if (++source_.depth_ > kMostDepth) source_.wrong_kind();
    }
    ~Nested() { --source_.depth_; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;

   private:
    ValueSource& source_;
  };

 private:
  static constexpr int kMostDepth = 500;

  bool take_plain_tensor(at::Tensor& tensor);
  std::size_t checked_count(std::uint64_t count, std::size_t bytes_each) const {
    if (count > static_cast<std::size_t>(end_ - at_) / bytes_each) wrong_kind();
    return static_cast<std::size_t>(count);
  }
  void copy(void* to, std::size_t bytes) {
    if (bytes > static_cast<std::size_t>(end_ - at_)) wrong_kind();
    if (bytes != 0) std::memcpy(to, at_, bytes);
    at_ += bytes;
  }
  at::Tensor take_tensor();
  RRefHandle take_reference();

  const std::byte* at_;
  const std::byte* const end_;
  void* const parts_;
  std::uint32_t next_piece_ = 1;
  int depth_ = 0;
  Trailer take_trailer_ = nullptr;
  void* trailer_data_ = nullptr;
  std::vector<at::Tensor> with_grad_;
  const MessagePeer* from_ = nullptr;
  std::vector<RRefHandle> references_;
};

template <class T>
void FutureState<T>::decode(ValueSource& source) {
  value_.emplace(source.take<Stored<T>>());
}

// Values that are to be sent. They are encoded when the call engine has room for them.
struct Body {
  std::size_t bytes = 0;
  void* values = nullptr;
  void (*write)(void* values, std::byte* to, std::size_t bytes) = nullptr;
  TensorsOut* tensors = nullptr;
  ReferencesOut* references = nullptr;
};

// Calls send(Body) with these values. With a `peer` of nullptr they must not hold references.
template <class Send, class... T>
decltype(auto) with_body(const MessagePeer* peer, TensorMode mode, bool lend, Send send,
                         const T&... values) {
  TensorsOut tensors(mode, lend);
  ReferencesOut references(peer);
  ValueSizer sizer(tensors, references);
  (convoy::detail::put_value(sizer, values), ...);
  auto write = [&](std::byte* to, std::size_t bytes) {
    tensors.rewind();  // it may be written more than once
    references.rewind();
    ValueWriter writer(to, bytes, tensors, references);
    (convoy::detail::put_value(writer, values), ...);
    writer.finish();
  };
  using Write = decltype(write);
  return send(Body{
      sizer.bytes(), &write,
      [](void* self, std::byte* to, std::size_t bytes) { (*static_cast<Write*>(self))(to, bytes); },
      &tensors, &references});
}

// For values whose bytes are all in the message.
std::string to_text(const Body& body);
template <class T>
std::string to_text(const T& value) {
  return with_body(
      nullptr, TensorMode::kInline, false, [](const Body& body) { return to_text(body); }, value);
}
template <class T>
T from_text(std::string_view text) {
  ValueSource source(reinterpret_cast<const std::byte*>(text.data()), text.size(), nullptr);
  T value = source.take<T>();
  source.finish();
  return value;
}

}  // namespace convoy::rpc::detail

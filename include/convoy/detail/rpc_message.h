#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

// The tensors and references of a call's message, as they will be written. For
// convoy/detail/rpc_values.h; nothing here is for direct use.
namespace convoy::rpc {

template <class T>
class RRef;  // convoy/rref.h

namespace detail {

class SessionImpl;
using Bytes = std::vector<std::byte>;

class RRefState;
using RRefHandle = std::shared_ptr<RRefState>;  // the state behind an RRef
template <class T>
inline constexpr bool kIsRRef = false;
template <class T>
inline constexpr bool kIsRRef<RRef<T>> = true;

// Numbers are copied as they are in memory, with their own width.
template <class T>
concept PlainNumber = (std::integral<T> && !std::same_as<T, bool>) || std::same_as<T, float> ||
                      std::same_as<T, double>;
template <class T>
inline constexpr bool kPlainVector = false;
template <class T>
inline constexpr bool kPlainVector<std::vector<T>> = PlainNumber<T> || std::same_as<T, std::byte>;

// Types that sink and source encode directly. All other types are composed of these.
template <class T>
inline constexpr bool kHeld =
    std::same_as<T, bool> || PlainNumber<T> || std::same_as<T, std::monostate> ||
    std::same_as<T, std::string> || std::same_as<T, at::Tensor> || kPlainVector<T> || kIsRRef<T>;

// How tensors travel.
enum class TensorMode : std::uint8_t {
  kStay,    // large ones are not copied: the caller keeps them unchanged until they were read
  kCopy,    // all are copied before the call returns
  kResult,  // kStay for memory that nobody else holds, otherwise kCopy
  kInline,  // all bytes are in the message itself
};

// The tensors of one message, as they will be written. Not thread-safe.
class TensorsOut {
 public:
  // Data that plain tensors do not need.
  struct Rare {
    at::Tensor shape;                           // owner of Plan::sizes, if another tensor
    std::string header;                         // encoded header of a tensor that is not plain
    c10::SmallVector<std::int64_t, 6> strides;  // empty if contiguous
    std::uint32_t parts = 0;                    // number of storages that follow
  };
  struct Plan {
    at::Tensor tensor;           // owner of the memory
    const void* data = nullptr;  // the bytes
    std::uint64_t bytes = 0;
    at::IntArrayRef sizes;
    std::uint32_t piece = 0;  // 0: in the message; n: piece n
    std::uint8_t kind = 0, type = 0, flags = 0;
    bool private_copy = false;  // nobody else holds the memory
    std::unique_ptr<Rare> rare;

    Rare& make_rare() {
      if (!rare) rare = std::make_unique<Rare>();
      return *rare;
    }
  };

  TensorsOut(TensorMode mode, bool lend) : mode_(mode), lend_(lend) {}

  // Adds a tensor, which may be undefined. Returns how many bytes it takes in the message. Throws
  // kUnsupported for a tensor that cannot be passed; for a lent one also as share::to_bytes().
  std::size_t add(const at::Tensor& tensor);
  void rewind() { next_ = 0; }
  // Writes the next tensor. Returns where it ends.
  std::byte* write_next(std::byte* to, std::byte* end);

  const c10::SmallVector<Plan, 3>& plans() const { return plans_; }
  // The tensors that require grad, in order.
  const std::vector<at::Tensor>& with_grad() const { return with_grad_; }
  TensorMode mode() const { return mode_; }
  std::uint32_t pieces() const { return pieces_; }

 private:
  bool add_plain(const at::Tensor& tensor, std::size_t& with_message);
  std::size_t add_strided(const at::Tensor& tensor, Plan plan);
  std::size_t add_other(const at::Tensor& tensor, Plan plan);
  std::size_t add_lent(const at::Tensor& tensor, Plan plan);
  std::size_t place(Plan& plan);

  const TensorMode mode_;
  const bool lend_;
  std::uint32_t pieces_ = 0;
  std::size_t next_ = 0;
  c10::SmallVector<Plan, 3> plans_;
  std::vector<at::Tensor> with_grad_;
};

// The worker that a message goes to or comes from.
struct MessagePeer {
  const SessionImpl* session = nullptr;
  std::uint32_t worker = 0;
  std::uint64_t answer_to = 0;  // number of the call that it answers; 0: it is a call
};

// The references in one message. The destructor takes them back if the message was not sent. Not
// thread-safe.
class ReferencesOut {
 public:
  static constexpr std::size_t kBytes = 48;
  using Passed = std::array<std::uint64_t, kBytes / sizeof(std::uint64_t)>;  // rref::Passed

  explicit ReferencesOut(const MessagePeer* to) : to_(to) {}
  ReferencesOut(const ReferencesOut&) = delete;
  ReferencesOut& operator=(const ReferencesOut&) = delete;
  ~ReferencesOut() {
    if (!passed_.empty() && !released_) give_back();
  }

  // Adds a reference, which is passed to the receiver. Returns how many bytes it takes. Throws if
  // it cannot be passed: kUnsupported outside calls, kInvalidArgument for one that is empty, ended
  // or of another session.
  std::size_t add(const RRefHandle& reference);
  void rewind() { next_ = 0; }
  const Passed& next() { return passed_.at(next_++); }
  bool empty() const { return passed_.empty(); }
  // Call it when the message is sent: it is known later whether the references arrived. They may
  // still have to be written.
  std::vector<Passed> release() {
    released_ = true;
    return passed_;
  }
  // Undoes release(): the message was not sent.
  void take_back() { released_ = false; }

 private:
  void give_back() noexcept;

  const MessagePeer* const to_;
  std::size_t next_ = 0;
  bool released_ = false;
  std::vector<Passed> passed_;
  std::shared_ptr<SessionImpl> session_;
};

}  // namespace detail
}  // namespace convoy::rpc

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include "convoy/fields.h"
#include "convoy/future.h"

// How arguments and results of calls become bytes (docs/wire.md has the tables): a sink and a
// source of convoy/fields.h. Two passes: the first finds out how many bytes there are, the second
// writes them to where they travel. For convoy/rpc.h; nothing here is for direct use.
namespace convoy::rpc {

template <class T>
class RRef;  // convoy/rref.h

namespace detail {

using Bytes = std::vector<std::byte>;

class RRefState;
using RRefHandle = std::shared_ptr<RRefState>;  // what an RRef is
template <class T>
inline constexpr bool kIsRRef = false;
template <class T>
inline constexpr bool kIsRRef<RRef<T>> = true;

// Numbers go as they lie in memory, with their own width.
template <class T>
concept PlainNumber = (std::integral<T> && !std::same_as<T, bool>) || std::same_as<T, float> ||
                      std::same_as<T, double>;
template <class T>
inline constexpr bool kPlainVector = false;
template <class T>
inline constexpr bool kPlainVector<std::vector<T>> = PlainNumber<T> || std::same_as<T, std::byte>;

// What sink and source hold as it is. Everything else is made of these.
template <class T>
inline constexpr bool kHeld =
    std::same_as<T, bool> || PlainNumber<T> || std::same_as<T, std::monostate> ||
    std::same_as<T, std::string> || std::same_as<T, at::Tensor> || kPlainVector<T> || kIsRRef<T>;

// How tensors travel.
enum class TensorMode : std::uint8_t {
  kStay,    // large ones stay as they are until they were read: the caller sees to that
  kCopy,    // they are copied before the call returns
  kResult,  // as kStay where nobody else has the memory, otherwise kCopy
  kInline,  // all bytes are in the message itself
};

// The tensors of one message, as they will be written.
class TensorsOut {
 public:
  // What plain tensors do not have.
  struct Rare {
    at::Tensor shape;                           // whose sizes they are, if those of another
    std::string header;                         // the bytes of those that are not plain
    c10::SmallVector<std::int64_t, 6> strides;  // if they are not those of a contiguous tensor
    std::uint32_t parts = 0;                    // so many storages follow
  };
  struct Plan {
    at::Tensor tensor;           // whose memory it is
    const void* data = nullptr;  // the bytes
    std::uint64_t bytes = 0;
    at::IntArrayRef sizes;
    std::uint32_t piece = 0;  // 0: in the message; n: piece n
    std::uint8_t kind = 0, type = 0, flags = 0;
    bool private_copy = false;  // nobody else has the memory
    std::unique_ptr<Rare> rare;

    Rare& make_rare() {
      if (!rare) rare = std::make_unique<Rare>();
      return *rare;
    }
  };

  TensorsOut(TensorMode mode, bool lend) : mode_(mode), lend_(lend) {}

  // Plans for a tensor; how many bytes it takes in the message. Throws kUnsupported,
  // kInvalidArgument.
  std::size_t add(const at::Tensor& tensor);
  void rewind() { next_ = 0; }
  // Writes the next one; where it ends.
  std::byte* write_next(std::byte* to, std::byte* end);

  const c10::SmallVector<Plan, 3>& plans() const { return plans_; }
  // Those that require grad, in order.
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
  std::size_t inline_bytes_ = 0;
  std::size_t next_ = 0;
  c10::SmallVector<Plan, 3> plans_;
  std::vector<at::Tensor> with_grad_;
};

// Whom a message goes to, or comes from.
struct MessagePeer {
  const SessionImpl* session = nullptr;
  std::uint32_t worker = 0;
  std::uint64_t answer_to = 0;  // the number of the call whose answer it is; 0: it is a call
};

// The references in one message. Those of a message that was not sent come back.
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

  // Lends it to the receiver; how many bytes it takes. Throws why it cannot be passed.
  std::size_t add(const RRefHandle& reference);
  void rewind() { next_ = 0; }
  const Passed& next() { return passed_.at(next_++); }
  bool empty() const { return passed_.empty(); }
  // The message is sent: what becomes of them is known later. They may still have to be written.
  std::vector<Passed> release() {
    released_ = true;
    return passed_;
  }
  // It was not, after all.
  void take_back() { released_ = false; }

 private:
  void give_back() noexcept;

  const MessagePeer* const to_;
  std::size_t next_ = 0;
  bool released_ = false;
  std::vector<Passed> passed_;
  std::shared_ptr<SessionImpl> session_;
};

// The first pass.
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

// The second.
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
  // kInvalidArgument unless all was written: somebody changes the values meanwhile.
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

// Takes values from what arrived, which may be anything: kInvalidArgument.
class ValueSource {
 public:
  template <class T>
  static constexpr bool kHolds = kHeld<T>;

  // `parts`: std::span<transport::Part>, which tensors take for themselves.
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
  // Without it, there can be no references.
  void comes_from(const MessagePeer* from) { from_ = from; }
  // Those that were taken.
  const std::vector<RRefHandle>& references() const { return references_; }
  // Nothing may be left but what a callback takes that was set here: it gets the tensors that
  // require grad, in order, and the bytes behind the values.
  void finish() const;
  using Trailer = void (*)(void* data, const std::vector<at::Tensor>& with_grad,
                           const std::byte* bytes, std::size_t count);
  void on_trailer(Trailer callback, void* data) {
    take_trailer_ = callback;
    trailer_data_ = data;
  }

  // Types that hold themselves (a tree, say) nest as deep as the bytes say, within limits.
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

// Values on their way: written when the engine has room for them.
struct Body {
  std::size_t bytes = 0;
  void* values = nullptr;
  void (*write)(void* values, std::byte* to, std::size_t bytes) = nullptr;
  TensorsOut* tensors = nullptr;
  ReferencesOut* references = nullptr;
};

// Calls send(Body) with these values. They have no references in them if `peer` is nullptr.
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

// Of values without pieces.
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

// --- Signatures -------------------------------------------------------------------------------

// Whether values of this type can be passed at all.
template <class T>
consteval bool is_passable() {
  using namespace convoy::detail;
  if constexpr (kHeld<T> || std::is_enum_v<T> || HasFields<T>) {
    return true;  // what fields there are is said when they are passed
  } else if constexpr (kIsVector<T> || kIsOptional<T>) {
    return is_passable<typename T::value_type>();
  } else if constexpr (kIsMap<T>) {
    return is_passable<typename T::key_type>() && is_passable<typename T::mapped_type>();
  } else if constexpr (kIsVariant<T>) {
    return []<class... Kinds>(std::variant<Kinds...>*) {
      return (is_passable<Kinds>() && ...);
    }(static_cast<T*>(nullptr));
  } else if constexpr (Parts<T>) {
    return []<std::size_t... i>(std::index_sequence<i...>) {
      return (is_passable<std::remove_const_t<std::tuple_element_t<i, T>>>() && ...);
    }(std::make_index_sequence<std::tuple_size_v<T>>());
  } else {
    return false;
  }
}

// A text of how a type travels: its name, and its fields where it has some. Processes compare its
// hash, so that a struct of which one side knows an older form is noticed.
class Describer {
 public:
  template <class T>
  void add() {
    using namespace convoy::detail;
    if constexpr (kIsRRef<T>) {
      text_ += "convoy::RRef";
      add_list<typename T::Value>('<', '>');
    } else if constexpr (kHeld<T> || std::is_void_v<T> || std::is_enum_v<T>) {
      name(typeid(T));
    } else if constexpr (HasFields<T>) {
      name(typeid(T));
      if (enter(typeid(T))) {
        add_all(static_cast<decltype(fields_of(std::declval<T&>()))*>(nullptr), '{', '}');
        leave();
      }
    } else if constexpr (kIsVector<T> || kIsOptional<T>) {
      text_ += kIsVector<T> ? "std::vector" : "std::optional";
      add_list<typename T::value_type>('<', '>');
    } else if constexpr (kIsMap<T>) {
      text_ += "std::map";
      add_list<typename T::key_type, typename T::mapped_type>('<', '>');
    } else if constexpr (kIsVariant<T>) {
      text_ += "std::variant";
      add_all(static_cast<T*>(nullptr), '<', '>');
    } else if constexpr (Parts<T>) {
      [this]<std::size_t... i>(std::index_sequence<i...>) {
        add_list<std::remove_const_t<std::tuple_element_t<i, T>>...>('(', ')');
      }(std::make_index_sequence<std::tuple_size_v<T>>());
    } else {
      text_ += "object ";
      name(typeid(T));
    }
  }
  template <class... T>
  void add_list(char open, char close) {
    text_ += open;
    [[maybe_unused]] bool first = true;
    ((text_ += first ? "" : ", ", first = false, add<std::remove_cvref_t<T>>()), ...);
    text_ += close;
  }
  std::string& text() { return text_; }
  void add_name(const std::type_info& type) { name(type); }

 private:
  template <template <class...> class List, class... T>
  void add_all(List<T...>*, char open, char close) {
    add_list<T...>(open, close);
  }
  void name(const std::type_info& type);
  bool enter(const std::type_info& type);  // false: it is in itself
  void leave() { inside_.pop_back(); }

  std::string text_;
  std::vector<const std::type_info*> inside_;
};

}  // namespace detail
}  // namespace convoy::rpc

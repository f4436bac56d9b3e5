#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "convoy/detail/rpc_signature.h"
#include "convoy/detail/rpc_values.h"

// The callee's side of a call: the call itself, and values that references refer to. For
// convoy/rpc_function.h; nothing here is for direct use.
namespace convoy::rpc::detail {

// A value that references refer to, at its owner. See convoy/rref.h.
class HeldValue {
 public:
  HeldValue() = default;
  HeldValue(const HeldValue&) = delete;
  HeldValue& operator=(const HeldValue&) = delete;
  virtual ~HeldValue();

  virtual const std::type_info& type() const noexcept = 0;
  // Calls send(data, body) with the encoded value. Throws kUnsupported if it cannot be passed.
  using Send = void (*)(void* data, const Body& body);
  virtual void pass(const MessagePeer& to, Send send, void* data) const = 0;
  // The value, or the object that it points to, if its type is `wanted`. Otherwise nullptr.
  virtual void* find(const std::type_info& wanted) noexcept = 0;
  // The object that member functions are called on, with its type: the value, or what it points to.
  // {nullptr} if that pointer is empty.
  struct Object {
    void* pointer = nullptr;
    const std::type_info* type = nullptr;
  };
  virtual Object object() noexcept = 0;
  // Throws a pointer to that object. A handler for a pointer to a base class catches it, which
  // converts the pointer.
  [[noreturn]] virtual void throw_pointer() = 0;
};

// A call as the function that serves it sees it.
class ServedCall {
 public:
  // For answers that are given later. Copies refer to the same call.
  class Later {
   public:
    Later(std::shared_ptr<void> call, const MessagePeer& peer)
        : call_(std::move(call)), peer_(peer) {}
    void reply(const Body& body) const;
    void fail(const std::exception_ptr& error) const noexcept;
    const MessagePeer& peer() const { return peer_; }

   private:
    std::shared_ptr<void> call_;
    MessagePeer peer_;
  };

  ServedCall(void* call, ValueSource& arguments, const MessagePeer& peer, std::uint32_t flags)
      : call_(call), arguments_(arguments), peer_(peer), flags_(flags) {}

  ValueSource& arguments() { return arguments_; }
  const MessagePeer& peer() const { return peer_; }
  void reply(const Body& body) const;
  void fail(const std::exception_ptr& error) const noexcept;    // the function threw
  void refuse(const std::exception_ptr& error) const noexcept;  // bad arguments
  Later later() const;

  static constexpr std::uint32_t kKeepsResult = 1, kOnReference = 2;  // agent::CallFlags
  std::uint32_t flags() const { return flags_; }
  // Take the object that the function is called on, and the reference to its result. Call them
  // before taking the arguments.
  void take_object();
  RRefHandle take_result();
  // True once the object is there and the owners of all references among the arguments know of
  // them. Throws the error if that can no longer happen.
  bool ready();
  const std::shared_ptr<HeldValue>& object() const;
  // Calls `go_on` once ready() would be true, on the session's threads. If that can no longer
  // happen, the call fails instead.
  using GoOn = std::function<void(const Later& answer, const std::shared_ptr<HeldValue>& object)>;
  void when_ready(GoOn go_on, const RRefHandle& result);

 private:
  struct Needs;

  void* call_;
  ValueSource& arguments_;
  const MessagePeer& peer_;
  const std::uint32_t flags_;
  std::shared_ptr<HeldValue> object_;  // if it was there at once
  std::shared_ptr<Needs> needs_;
};

// For a call whose result stays here.
void keep_result(const RRefHandle& result, std::shared_ptr<HeldValue> value, std::uint64_t type);
void keep_failure(const RRefHandle& result, const std::exception_ptr& error) noexcept;
[[noreturn]] void fail_object(const std::type_info* has, const std::type_info& wanted);
[[noreturn]] void fail_result(const std::type_info& type);

template <class T>
concept PointsTo = requires(T& value) {
  static_cast<bool>(value);
  *value;
  value.operator->();
};

// A hash of a type, equal in all programs that are built from the same sources.
std::uint64_t type_number(const std::string& description);
template <class T>
std::uint64_t type_number() {
  static const std::uint64_t number = [] {
    Describer text;
    text.add<T>();
    return type_number(text.text());
  }();
  return number;
}

template <class T>
class HeldValueOf final : public HeldValue {
 public:
  template <class... Arguments>
  explicit HeldValueOf(Arguments&&... arguments) : value(std::forward<Arguments>(arguments)...) {}

  const std::type_info& type() const noexcept override { return typeid(T); }
  void pass(const MessagePeer& to, Send send, void* data) const override {
    if constexpr (is_passable<T>()) {
      with_body(
          &to, TensorMode::kResult, false, [&](const Body& body) { send(data, body); }, value);
    } else {
      fail_result(typeid(T));
    }
  }
  void* find(const std::type_info& wanted) noexcept override {
    if (wanted == typeid(T)) return &value;
    if constexpr (PointsTo<T>) {
      if (value && wanted == typeid(std::remove_cvref_t<decltype(*value)>)) return pointee();
    }
    return nullptr;
  }
  Object object() noexcept override {
    if constexpr (PointsTo<T>) {
      if (!value) return {};
      using Pointee = std::remove_cvref_t<decltype(*value)>;
      if constexpr (std::is_polymorphic_v<Pointee>) {
        return {pointee(), &typeid(*static_cast<Pointee*>(pointee()))};
      } else {
        return {pointee(), &typeid(Pointee)};
      }
    } else {
      return {&value, &typeid(T)};
    }
  }
  // NOLINTBEGIN(bugprone-std-exception-baseclass): a pointer is what is wanted
  [[noreturn]] void throw_pointer() override {
    if constexpr (PointsTo<T>) {
      throw static_cast<std::remove_cvref_t<decltype(*value)>*>(pointee());
    } else {
      throw &value;
    }
  }
  // NOLINTEND(bugprone-std-exception-baseclass)

  T value;

 private:
  void* pointee() noexcept
    requires PointsTo<T>
  {
    return const_cast<void*>(static_cast<const volatile void*>(std::addressof(*value)));
  }
};

// The object of type C in a held value: the value, what it points to, or a base of that.
template <class C>
C& object_in(HeldValue& held) {
  if (void* const exact = held.find(typeid(C))) [[likely]]
    return *static_cast<C*>(exact);
  const HeldValue::Object object = held.object();
  if (!object.pointer) fail_object(nullptr, typeid(C));
  // Cache of the base's offset in an object of this type. The held type is part of the key: through
  // another base the offset differs.
  thread_local const std::type_info* last = nullptr;
  thread_local const std::type_info* last_held = nullptr;
  thread_local std::ptrdiff_t offset = 0;
  if (last != object.type || last_held != &held.type()) {
    try {
      held.throw_pointer();
    } catch (C* base) {  // NOLINT(misc-throw-by-value-catch-by-reference)
      offset = reinterpret_cast<std::byte*>(base) - static_cast<std::byte*>(object.pointer);
      last = object.type;
      last_held = &held.type();
    } catch (...) {
      fail_object(object.type, typeid(C));
    }
  }
  return *reinterpret_cast<C*>(static_cast<std::byte*>(object.pointer) + offset);
}

}  // namespace convoy::rpc::detail

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include "convoy/rpc.h"

// Calls whose types are known at run time only: for bindings of other languages. What travels is
// the same as with convoy/rpc.h: a function of C++ is called by its name and signature, and one
// that is served here can be called by C++.
//
//   auto functions = dynamic::functions_of(session, "worker1");
//   auto y = dynamic::call_sync(session, "worker1", functions.at(0), {tensor, 2.0}, {});
namespace convoy::rpc::dynamic {

// A type, as signatures have it.
struct ValueType {
  enum class Kind : std::uint8_t {
    kVoid,
    kNothing,  // std::monostate
    kBool,
    kInteger,  // `bytes`, `is_signed`
    kReal,     // `bytes`
    kText,
    kBytes,  // std::vector<std::byte>
    kTensor,
    kReference,  // parts[0]: to what
    kList,       // parts[0]
    kOptional,   // parts[0]
    kMap,        // parts[0], parts[1]
    kVariant,
    kTuple,
    kStruct,  // `name`; its fields
    kObject,  // `name`; it cannot be passed
  };

  Kind kind = Kind::kVoid;
  std::string name = {};  // also of numbers
  std::size_t bytes = 0;
  bool is_signed = false;
  std::vector<ValueType> parts = {};

  // As in a signature. kUnsupported for what this does not know.
  static ValueType parse(std::string_view text);
  std::string text() const;

  friend bool operator==(const ValueType&, const ValueType&) = default;
};

struct Signature {
  ValueType result;
  std::vector<ValueType> parameters;

  static Signature parse(std::string_view text);  // "at::Tensor (at::Tensor, double)"
  std::string text() const;
};

struct Function {
  std::string name;
  std::string signature;
};

// A value of such a type.
struct Value {
  // Lists, tuples, structs: items. Optionals: none or one. Maps: keys and values in turn. Variants:
  // the index, and the value.
  using List = std::vector<Value>;

  std::variant<std::monostate, bool, std::int64_t, std::uint64_t, double, std::string,
               detail::Bytes, at::Tensor, detail::RRefHandle, List>
      held;

  const List& list() const { return std::get<List>(held); }
};

// What a worker has to call; asks it. kTimeout, kPeerLost.
std::vector<Function> functions_of(const Session& session, const To& worker);

// A result that is not there yet.
class Result final : public detail::FutureCore {
 public:
  Result(std::shared_ptr<detail::SessionImpl> session, ValueType type)
      : FutureCore(std::move(session)), type_(std::move(type)) {}
  // On the stack, of a call that is waited for.
  explicit Result(ValueType type) : type_(std::move(type)) {}
  ~Result() override;

  const ValueType& type() const { return type_; }
  // Once it has ended well.
  Value& value() { return value_; }
  void set(Value value) { value_ = std::move(value); }

 private:
  void decode(detail::ValueSource& source) override;

  ValueType type_;
  Value value_;
};

// A function, ready to be called.
class Callee {
 public:
  explicit Callee(const Function& function);

  const Signature& signature() const { return *signature_; }
  const std::string& name() const;
  const detail::CallKey& key() const { return key_; }

 private:
  detail::CallKey key_;
  const Signature* signature_;  // lives as long as the process
};

// What a call is made on: a worker, or the value of a reference.
struct Target {
  std::uint32_t worker = 0;
  detail::RRefHandle on = nullptr;
};

// Arguments are of the callee's parameters; without the first if it is called on a reference. These
// throw as those of Session do.
Value call_sync(const Session& session, const Target& to, const Callee& callee,
                const std::vector<Value>& arguments, const CallOptions& options);
std::shared_ptr<Result> call_async(const Session& session, const Target& to, const Callee& callee,
                                   const std::vector<Value>& arguments, const CallOptions& options);
detail::RRefHandle remote(const Session& session, const Target& to, const Callee& callee,
                          const std::vector<Value>& arguments, const CallOptions& options);

// A value at its owner, that other workers refer to.
class Held : public detail::HeldValue {
 public:
  explicit Held(ValueType type) : type_(std::move(type)) {}

  // To be passed. kUnsupported for objects.
  virtual Value get() const = 0;
  const ValueType& value_type() const { return type_; }

  const std::type_info& type() const noexcept override { return typeid(*this); }
  void pass(const detail::MessagePeer& to, Send send, void* data) const override;
  void* find(const std::type_info&) noexcept override { return nullptr; }
  Object object() noexcept override { return {}; }
  [[noreturn]] void throw_pointer() override;

 private:
  const ValueType type_;
};

// A Held, or a HeldValueOf<at::Tensor>: tensors are held as C++ holds them.
detail::RRefHandle hold(const Session& session, std::shared_ptr<detail::HeldValue> value,
                        const ValueType& type);
// The value, of that type. At the owner, Held::get() or the tensor.
std::shared_ptr<Result> fetch(const detail::RRefHandle& reference, const ValueType& type,
                              const CallOptions& options);
// At the owner: what holds the value, once it is there. kInvalidArgument elsewhere.
std::shared_ptr<detail::HeldValue> local(const detail::RRefHandle& reference);

// A call of a function that is served here. Copies are the same.
class Served {
 public:
  struct State;
  explicit Served(std::shared_ptr<State> state) : state_(std::move(state)) {}

  std::vector<Value>& arguments() const;
  // What the function is called on; nullptr without.
  const std::shared_ptr<detail::HeldValue>& object() const;
  // The result stays here: keep() it instead of reply().
  bool keeps_result() const;

  void reply(const Value& value) const noexcept;
  void keep(std::shared_ptr<detail::HeldValue> value) const noexcept;
  // What the function threw.
  void fail(const std::string& type, const std::string& text) const noexcept;
  void fail(const std::exception_ptr& error) const noexcept;

 private:
  std::shared_ptr<State> state_;
};

// Lets any peer of sessions that are made from now on call it. `run` must not throw, and may answer
// later. kInvalidArgument if there is such a function.
void serve(const Function& function, std::function<void(const Served&)> run);

}  // namespace convoy::rpc::dynamic

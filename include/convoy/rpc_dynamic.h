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

// Calls whose types are known only at run time, for bindings of other languages. The wire format is
// that of convoy/rpc.h: these calls can call C++ functions by name and signature, and C++ can call
// functions that are served here.
//
//   auto functions = dynamic::functions_of(session, "worker1");
//   auto y = dynamic::call_sync(session, "worker1", functions.at(0), {tensor, 2.0}, {});
namespace convoy::rpc::dynamic {

// A type in a signature.
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
    kReference,  // parts[0]: type of the value
    kList,       // parts[0]
    kOptional,   // parts[0]
    kMap,        // parts[0], parts[1]
    kVariant,
    kTuple,
    kStruct,  // `name`; parts: its fields
    kObject,  // `name`; it cannot be passed
  };

  Kind kind = Kind::kVoid;
  std::string name = {};  // also set for numbers
  std::size_t bytes = 0;
  bool is_signed = false;
  std::vector<ValueType> parts = {};

  // Parses a type of a signature. Throws kUnsupported for a type that is unknown here.
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
  // What it holds: the items of a list, tuple or struct; no or one item of an optional; keys and
  // values of a map in turn; index and value of a variant.
  using List = std::vector<Value>;

  std::variant<std::monostate, bool, std::int64_t, std::uint64_t, double, std::string,
               detail::Bytes, at::Tensor, detail::RRefHandle, List>
      held;

  const List& list() const { return std::get<List>(held); }
};

// Asks a worker which functions it serves. Blocks. Throws as Session::rpc_sync, for example
// kTimeout or kPeerLost.
std::vector<Function> functions_of(const Session& session, const To& worker);

// A pending result. Thread-safe as FutureCore; value() only after it has ended.
class Result final : public detail::FutureCore {
 public:
  Result(std::shared_ptr<detail::SessionImpl> session, ValueType type)
      : FutureCore(std::move(session)), type_(std::move(type)) {}
  // For a blocking call, on its stack.
  explicit Result(ValueType type) : type_(std::move(type)) {}
  ~Result() override;

  const ValueType& type() const { return type_; }
  // Valid after it has ended without an error.
  Value& value() { return value_; }
  void set(Value value) { value_ = std::move(value); }

 private:
  void decode(detail::ValueSource& source) override;

  ValueType type_;
  Value value_;
};

// A parsed function, ready to be called. A value.
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

// The target of a call: a worker, or the value of a reference.
struct Target {
  std::uint32_t worker = 0;
  detail::RRefHandle on = nullptr;
};

// Arguments have the types of the callee's parameters; without the first one if the call is on a
// reference. Throws as the methods of Session; also kInvalidArgument for a wrong number of
// arguments. Only call_sync() blocks.
Value call_sync(const Session& session, const Target& to, const Callee& callee,
                const std::vector<Value>& arguments, const CallOptions& options);
std::shared_ptr<Result> call_async(const Session& session, const Target& to, const Callee& callee,
                                   const std::vector<Value>& arguments, const CallOptions& options);
detail::RRefHandle remote(const Session& session, const Target& to, const Callee& callee,
                          const std::vector<Value>& arguments, const CallOptions& options);

// A value at its owner that references of other workers refer to.
class Held : public detail::HeldValue {
 public:
  explicit Held(ValueType type) : type_(std::move(type)) {}

  // The value, to be sent. Throws kUnsupported for objects.
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

// Makes a reference to a value here: a Held, or a HeldValueOf<at::Tensor>, which is how C++ holds
// tensors.
detail::RRefHandle hold(const Session& session, std::shared_ptr<detail::HeldValue> value,
                        const ValueType& type);
// Fetches the value, which must be of that type, without blocking. At the owner it is Held::get()
// or the tensor.
std::shared_ptr<Result> fetch(const detail::RRefHandle& reference, const ValueType& type,
                              const CallOptions& options);
// At the owner: the holder of the value. Blocks until the value is there. Throws kInvalidArgument
// on other workers, kTimeout after the session's timeout.
std::shared_ptr<detail::HeldValue> local(const detail::RRefHandle& reference);

// A call that this worker serves. Copies are the same call. Answer it once: with reply(), keep() or
// fail().
class Served {
 public:
  struct State;
  explicit Served(std::shared_ptr<State> state) : state_(std::move(state)) {}

  std::vector<Value>& arguments() const;
  // The object of a call on a reference; otherwise nullptr.
  const std::shared_ptr<detail::HeldValue>& object() const;
  // True if the result stays here: answer with keep(), not with reply().
  bool keeps_result() const;

  void reply(const Value& value) const noexcept;
  void keep(std::shared_ptr<detail::HeldValue> value) const noexcept;
  // Answers with the exception that the function threw.
  void fail(const std::string& type, const std::string& text) const noexcept;
  void fail(const std::exception_ptr& error) const noexcept;

 private:
  std::shared_ptr<State> state_;
};

// Registers a function that any peer may call, in sessions that are made from now on. `run` must
// not throw, and may answer later. Throws kInvalidArgument if a function with this name and
// signature is registered already. Thread-safe.
void serve(const Function& function, std::function<void(const Served&)> run);

}  // namespace convoy::rpc::dynamic

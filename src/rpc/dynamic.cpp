// Calls whose types are known at run time only.
#include "rpc/dynamic.h"

#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <utility>

#include "agent/agent.h"
#include "base/concat.h"
#include "base/error.h"
#include "base/log.h"
#include "base/quote.h"
#include "convoy/rpc_dynamic.h"
#include "rpc/message.h"
#include "rpc/rref_state.h"
#include "rpc/serve.h"
#include "rpc/session_impl.h"

namespace convoy::rpc::dynamic {
namespace {

using detail::Body;
using detail::MessagePeer;
using detail::TensorMode;
using Kind = ValueType::Kind;

// --- Values as bytes ---------------------------------------------------------------------------

[[noreturn]] void fail_value(const ValueType& type) {
  fail(ErrorKind::kInvalidArgument, "rpc: a value is not a ", type.text());
}

template <class T>
const T& held(const ValueType& type, const Value& value) {
  const T* const found = std::get_if<T>(&value.held);
  if (!found) fail_value(type);
  return *found;
}

const Value::List& items(const ValueType& type, const Value& value, std::size_t count) {
  const auto& list = held<Value::List>(type, value);
  if (list.size() != count) fail_value(type);
  return list;
}

template <class T, class Sink>
void put_integer(Sink& to, const ValueType& type, const Value& value) {
  if (const auto* const wide = std::get_if<std::uint64_t>(&value.held)) {
    if (!std::in_range<T>(*wide)) fail_value(type);
    return to.add(static_cast<T>(*wide));
  }
  const auto number = held<std::int64_t>(type, value);
  if (!std::in_range<T>(number)) fail_value(type);
  to.add(static_cast<T>(number));
}

template <class Sink>
void put_integer(Sink& to, const ValueType& type, const Value& value) {
  switch (type.bytes) {
    case 1:
      return type.is_signed ? put_integer<signed char>(to, type, value)
                            : put_integer<unsigned char>(to, type, value);
    case 2:
      return type.is_signed ? put_integer<short>(to, type, value)
                            : put_integer<unsigned short>(to, type, value);
    case 4:
      return type.is_signed ? put_integer<int>(to, type, value)
                            : put_integer<unsigned int>(to, type, value);
    default:
      return type.is_signed ? put_integer<long>(to, type, value)
                            : put_integer<unsigned long>(to, type, value);
  }
}

// As put_value() of convoy/fields.h does it for a C++ type.
template <class Sink>
void put(Sink& to, const ValueType& type, const Value& value) {
  switch (type.kind) {
    case Kind::kVoid:
    case Kind::kNothing: return to.add(std::monostate());
    case Kind::kBool: return to.add(held<bool>(type, value));
    case Kind::kInteger: return put_integer(to, type, value);
    case Kind::kReal:
      if (type.bytes == sizeof(float)) return to.add(static_cast<float>(held<double>(type, value)));
      return to.add(held<double>(type, value));
    case Kind::kText: return to.add(held<std::string>(type, value));
    case Kind::kBytes: return to.add(held<detail::Bytes>(type, value));
    case Kind::kTensor: return to.add(held<at::Tensor>(type, value));
    case Kind::kReference:
      return to.add(RRef<std::monostate>(held<detail::RRefHandle>(type, value)));
    case Kind::kList: {
      const auto& list = held<Value::List>(type, value);
      to.add_unsigned(list.size());
      for (const Value& each : list) put(to, type.parts[0], each);
      return;
    }
    case Kind::kOptional: {
      const auto& list = held<Value::List>(type, value);
      if (list.size() > 1) fail_value(type);
      to.add(!list.empty());
      if (!list.empty()) put(to, type.parts[0], list[0]);
      return;
    }
    case Kind::kMap: {
      const auto& list = held<Value::List>(type, value);
      if (list.size() % 2 != 0) fail_value(type);
      to.add_unsigned(list.size() / 2);
      for (std::size_t i = 0; i < list.size(); ++i) put(to, type.parts[i % 2], list[i]);
      return;
    }
    case Kind::kVariant: {
      const auto& list = items(type, value, 2);
      const auto index = held<std::int64_t>(type, list[0]);
      if (index < 0 || static_cast<std::size_t>(index) >= type.parts.size()) fail_value(type);
      to.add(index);
      return put(to, type.parts[static_cast<std::size_t>(index)], list[1]);
    }
    case Kind::kTuple:
    case Kind::kStruct: {
      const auto& list = items(type, value, type.parts.size());
      for (std::size_t i = 0; i < list.size(); ++i) put(to, type.parts[i], list[i]);
      return;
    }
    case Kind::kObject: break;
  }
  fail(ErrorKind::kUnsupported, "rpc: a value of type ", type.text(),
       " cannot be passed; make it with remote(), and call functions on the reference");
}

template <class T>
Value take_integer(detail::ValueSource& from) {
  if constexpr (std::same_as<T, unsigned long>) {
    return {std::uint64_t{from.take_held<T>()}};
  } else {
    return {std::int64_t{from.take_held<T>()}};
  }
}

Value take_integer(detail::ValueSource& from, const ValueType& type) {
  switch (type.bytes) {
    case 1:
      return type.is_signed ? take_integer<signed char>(from) : take_integer<unsigned char>(from);
    case 2: return type.is_signed ? take_integer<short>(from) : take_integer<unsigned short>(from);
    case 4: return type.is_signed ? take_integer<int>(from) : take_integer<unsigned int>(from);
    default: return type.is_signed ? take_integer<long>(from) : take_integer<unsigned long>(from);
  }
}

Value take(detail::ValueSource& from, const ValueType& type) {
  Value::List list;
  switch (type.kind) {
    case Kind::kVoid:
    case Kind::kNothing: from.take_held<std::monostate>(); return {};
    case Kind::kBool: return {from.take_held<bool>()};
    case Kind::kInteger: return take_integer(from, type);
    case Kind::kReal:
      if (type.bytes == sizeof(float)) return {double{from.take_held<float>()}};
      return {from.take_held<double>()};
    case Kind::kText: return {from.take_held<std::string>()};
    case Kind::kBytes: return {from.take_held<detail::Bytes>()};
    case Kind::kTensor: return {from.take_held<at::Tensor>()};
    case Kind::kReference: return {from.take_held<RRef<std::monostate>>().handle()};
    case Kind::kList:
      for (std::size_t n = from.take_count(); n > 0; --n) list.push_back(take(from, type.parts[0]));
      return {std::move(list)};
    case Kind::kOptional:
      if (from.take_held<bool>()) list.push_back(take(from, type.parts[0]));
      return {std::move(list)};
    case Kind::kMap:
      for (std::size_t n = from.take_count(); n > 0; --n) {
        list.push_back(take(from, type.parts[0]));
        list.push_back(take(from, type.parts[1]));
      }
      return {std::move(list)};
    case Kind::kVariant: {
      const auto index = from.take_held<std::int64_t>();
      if (index < 0 || static_cast<std::size_t>(index) >= type.parts.size()) from.wrong_kind();
      list.push_back({index});
      list.push_back(take(from, type.parts[static_cast<std::size_t>(index)]));
      return {std::move(list)};
    }
    case Kind::kTuple:
    case Kind::kStruct: {
      const detail::ValueSource::Nested nested(from);
      for (const ValueType& part : type.parts) list.push_back(take(from, part));
      return {std::move(list)};
    }
    case Kind::kObject: break;
  }
  from.wrong_kind();
}

// What comes before the arguments of a call: whose function it is, and what the result is called.
struct Prefix {
  const std::array<std::uint64_t, 3>* object = nullptr;
  const std::array<std::uint64_t, 4>* result = nullptr;

  template <class Sink>
  void put_to(Sink& to) const {
    if (object) convoy::detail::put_value(to, *object);
    if (result) convoy::detail::put_value(to, *result);
  }
};

// As with_body() does it: send(body) with these values.
template <class Send>
void with_values(const MessagePeer* peer, TensorMode mode, bool lend, const Prefix& prefix,
                 std::span<const ValueType> types, std::span<const Value> values, Send send) {
  detail::TensorsOut tensors(mode, lend);
  detail::ReferencesOut references(peer);
  const auto put_all = [&](auto& to) {
    prefix.put_to(to);
    for (std::size_t i = 0; i < types.size(); ++i) put(to, types[i], values[i]);
  };
  detail::ValueSizer sizer(tensors, references);
  put_all(sizer);
  auto write = [&](std::byte* to, std::size_t bytes) {
    tensors.rewind();
    references.rewind();
    detail::ValueWriter writer(to, bytes, tensors, references);
    put_all(writer);
    writer.finish();
  };
  using Write = decltype(write);
  send(Body{
      sizer.bytes(), &write,
      [](void* self, std::byte* to, std::size_t bytes) { (*static_cast<Write*>(self))(to, bytes); },
      &tensors, &references});
}

}  // namespace

Result::~Result() = default;

void Result::decode(detail::ValueSource& source) { value_ = take(source, type_); }

Value take_value(detail::ValueSource& from, const ValueType& type) { return take(from, type); }

// --- Calls -------------------------------------------------------------------------------------

namespace {

// That of convoy/functions.h: both sides compare it.
std::uint64_t signature_hash(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

struct KnownCallee {
  convoy::detail::FunctionEntry entry;
  Signature signature;
  std::uint32_t id = 0;
};

// Entries stay: the engine refers to them.
const KnownCallee& known_callee(const Function& function) {
  static std::mutex mutex;
  static auto* const all = new std::map<std::pair<std::string, std::string>, KnownCallee>;
  const std::scoped_lock lock(mutex);
  const auto key = std::pair(function.name, function.signature);
  if (const auto found = all->find(key); found != all->end()) return found->second;
  KnownCallee made;
  made.signature = Signature::parse(function.signature);
  made.entry.call_name = function.name;
  made.entry.call_signature = function.signature;
  made.entry.call_hash = signature_hash(function.signature);
  KnownCallee& kept = all->emplace(key, std::move(made)).first->second;
  kept.id = agent::declare_function(
      {kept.entry.call_name, kept.entry.call_signature, kept.entry.call_hash});
  return kept;
}

void start(const Session& session, const Target& to, const Callee& callee,
           const std::vector<Value>& arguments, const CallOptions& options,
           detail::FutureCore& core, const std::shared_ptr<detail::FutureCore>& keep,
           const detail::Creation* creation) {
  std::span<const ValueType> types = callee.signature().parameters;
  if (to.on) {
    if (types.empty()) fail(ErrorKind::kInvalidArgument, "rpc: ", callee.name(), " has no object");
    types = types.subspan(1);
  }
  if (arguments.size() != types.size()) {
    fail(ErrorKind::kInvalidArgument, "rpc: ", callee.name(), " takes ", types.size(),
         " arguments, not ", arguments.size());
  }
  const auto mode = options.stays || !keep ? TensorMode::kStay : TensorMode::kCopy;
  Prefix prefix;
  std::optional<detail::OnReference> on;
  if (to.on) prefix.object = &on.emplace(to.on).id;
  if (creation) prefix.result = &creation->head;
  const std::uint32_t worker = on ? on->worker : to.worker;
  const MessagePeer peer{session.impl().get(), worker};
  const std::uint32_t flags = (creation ? detail::ServedCall::kKeepsResult : 0) |
                              (to.on ? detail::ServedCall::kOnReference : 0);
  const detail::CallStart begun{session.impl(), core,    keep,  worker,
                                callee.key(),   options, flags, to.on ? &to.on : nullptr};
  with_values(&peer, mode, options.lend, prefix, types, arguments,
              [&](const Body& body) { detail::start_call(begun, body); });
}

}  // namespace

Callee::Callee(const Function& function) {
  const KnownCallee& known = known_callee(function);
  key_ = {&known.entry, known.id};
  signature_ = &known.signature;
}

const std::string& Callee::name() const { return key_.entry->call_name; }

Value call_sync(const Session& session, const Target& to, const Callee& callee,
                const std::vector<Value>& arguments, const CallOptions& options) {
  Result result(callee.signature().result);
  start(session, to, callee, arguments, options, result, nullptr, nullptr);
  detail::wait_for_call(*session.impl(), result);
  return std::move(result.value());
}

std::shared_ptr<Result> call_async(const Session& session, const Target& to, const Callee& callee,
                                   const std::vector<Value>& arguments,
                                   const CallOptions& options) {
  auto result = std::make_shared<Result>(session.impl(), callee.signature().result);
  start(session, to, callee, arguments, options, *result, result, nullptr);
  return result;
}

detail::RRefHandle remote(const Session& session, const Target& to, const Callee& callee,
                          const std::vector<Value>& arguments, const CallOptions& options) {
  const std::uint32_t worker = to.on ? detail::OnReference(to.on).worker : to.worker;
  const detail::Creation creation(session.impl(), worker);
  try {
    start(session, to, callee, arguments, options, *creation.call, creation.call, &creation);
  } catch (...) {
    creation.fail(std::current_exception());
    throw;
  }
  return creation.reference;
}

// --- References --------------------------------------------------------------------------------

void Held::pass(const MessagePeer& to, Send send, void* data) const {
  const Value value = get();
  with_values(&to, TensorMode::kResult, false, {}, {&type_, 1}, {&value, 1},
              [&](const Body& body) { send(data, body); });
}

// NOLINTNEXTLINE(bugprone-std-exception-baseclass): a pointer is what is wanted
void Held::throw_pointer() { throw static_cast<Held*>(this); }

detail::RRefHandle hold(const Session& session, std::shared_ptr<detail::HeldValue> value,
                        const ValueType& type) {
  return detail::hold(session.impl(), std::move(value), detail::type_number(type.text()));
}

std::shared_ptr<detail::HeldValue> local(const detail::RRefHandle& reference) {
  if (!reference) fail(ErrorKind::kInvalidArgument, "this RRef refers to nothing");
  const auto session = detail::session_of(reference);
  if (!reference->ref.is_owner()) {
    fail(ErrorKind::kInvalidArgument, "local_value: the owner of ", detail::describe(reference),
         " is ", detail::owner_of(reference).name, ": call to_here(), or functions on it");
  }
  const auto limit = session->agent().call_timeout();
  const detail::WaitScope waits;
  const auto value = session->refs().value(
      reference->ref, limit.count() == 0 ? Deadline::never() : Deadline::after(limit));
  return std::static_pointer_cast<detail::HeldValue>(value.object);
}

namespace {

// At the owner.
Value value_in(detail::HeldValue& found, const ValueType& type) {
  if (const auto* const value = dynamic_cast<const Held*>(&found)) {
    if (value->value_type() == type) return value->get();
  } else if (type.kind == Kind::kTensor && found.type() == typeid(at::Tensor)) {
    return {static_cast<detail::HeldValueOf<at::Tensor>&>(found).value};
  }
  fail(ErrorKind::kInvalidArgument, "rpc: the value is not a ", type.text());
}

}  // namespace

std::shared_ptr<Result> fetch(const detail::RRefHandle& reference, const ValueType& type,
                              const CallOptions& options) {
  const auto session = detail::session_of(reference);
  auto result = std::make_shared<Result>(session, type);
  if (!detail::is_owner(reference)) {
    detail::fetch(session, reference, *result, result, detail::type_number(type.text()), options);
    return result;
  }
  detail::when_local(reference, result, options, [](void* future, detail::HeldValue& found) {
    auto& here = *static_cast<Result*>(future);
    try {
      here.set(value_in(found, here.type()));
    } catch (...) {
      return here.end(std::current_exception());
    }
    here.end();
  });
  return result;
}

// --- The other side ----------------------------------------------------------------------------

struct Served::State {
  detail::ServedCall::Later answer;
  const ValueType* result_type;
  std::vector<Value> arguments;
  std::shared_ptr<detail::HeldValue> object;
  detail::RRefHandle result;
};

std::vector<Value>& Served::arguments() const { return state_->arguments; }
const std::shared_ptr<detail::HeldValue>& Served::object() const { return state_->object; }
bool Served::keeps_result() const { return state_->result != nullptr; }

void Served::reply(const Value& value) const noexcept {
  try {
    const bool nothing = state_->result != nullptr;
    static const ValueType none{.kind = Kind::kNothing};
    const ValueType& type = nothing ? none : *state_->result_type;
    with_values(&state_->answer.peer(), TensorMode::kResult, false, {}, {&type, 1}, {&value, 1},
                [&](const Body& body) { state_->answer.reply(body); });
  } catch (...) {
    fail(std::current_exception());
  }
}

void Served::keep(std::shared_ptr<detail::HeldValue> value) const noexcept {
  try {
    detail::keep_result(state_->result, std::move(value),
                        detail::type_number(state_->result_type->text()));
    reply({});
  } catch (...) {
    fail(std::current_exception());
  }
}

void Served::fail(const std::string& type, const std::string& text) const noexcept {
  fail(std::make_exception_ptr(
      detail::HandlerFailure({ErrorKind::kRemote, text, /*worker=*/"", type})));
}

void Served::fail(const std::exception_ptr& error) const noexcept {
  if (state_->result) detail::keep_failure(state_->result, error);
  state_->answer.fail(error);
}

namespace {

struct ServedFunction {
  Function function;
  Signature signature;
  std::uint64_t hash = 0;
  std::function<void(const Served&)> run;
};

struct Registry {
  std::mutex mutex;
  std::map<std::pair<std::string, std::string>, ServedFunction> functions;  // entries stay
};
Registry& registry() {
  static auto* const all = new Registry;
  return *all;
}

void run_served(const ServedFunction& function, const std::shared_ptr<Served::State>& state) {
  function.run(Served(state));
}

void serve_call(const ServedFunction& function, detail::ServedCall& call) {
  detail::RRefHandle result;
  try {
    std::span<const ValueType> types = function.signature.parameters;
    if ((call.flags() & detail::ServedCall::kOnReference) != 0) {
      if (types.empty() || types[0].kind != Kind::kObject) return call.refuse(nullptr);
      call.take_object();
      types = types.subspan(1);
    }
    if ((call.flags() & detail::ServedCall::kKeepsResult) != 0) result = call.take_result();
    const auto state = std::make_shared<Served::State>(
        Served::State{call.later(), &function.signature.result, {}, nullptr, result});
    for (const ValueType& type : types) state->arguments.push_back(take(call.arguments(), type));
    call.arguments().finish();
    if (call.ready()) {
      state->object = call.object();
      return run_served(function, state);
    }
    call.when_ready(
        [&function, state](const detail::ServedCall::Later&,
                           const std::shared_ptr<detail::HeldValue>& object) {
          state->object = object;
          run_served(function, state);
        },
        result);
  } catch (...) {
    if (result) detail::keep_failure(result, std::current_exception());
    call.refuse(std::current_exception());
  }
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): as handlers are
void run_dynamic(void* data, agent::RequestRef request) noexcept {
  const auto& function = *static_cast<const ServedFunction*>(data);
  IncomingMessage message(request->body(), request->parts());
  message.source().on_trailer(&detail::take_context, request.get());
  const MessagePeer peer{static_cast<detail::SessionImpl*>(request->agent().user()),
                         request->caller().id, request->number()};
  message.source().comes_from(&peer);
  detail::ServedCall call(&request, message.source(), peer, request->flags());
  serve_call(function, call);
}

}  // namespace

void serve(const Function& function, std::function<void(const Served&)> run) {
  ServedFunction made{function, Signature::parse(function.signature),
                      signature_hash(function.signature), std::move(run)};
  const std::scoped_lock lock(registry().mutex);
  const auto key = std::pair(function.name, function.signature);
  if (!registry().functions.emplace(key, std::move(made)).second) {
    fail(ErrorKind::kInvalidArgument, "rpc: two functions are called ",
         in_quotes(function.name, 300), " and are ", in_quotes(function.signature, 300));
  }
}

std::vector<agent::Handler> served_handlers() {
  const std::scoped_lock lock(registry().mutex);
  std::vector<agent::Handler> handlers;
  for (auto& [key, served] : registry().functions) {
    handlers.push_back({.key = {served.function.name, served.function.signature, served.hash},
                        .run = &run_dynamic,
                        .data = &served});
  }
  return handlers;
}

}  // namespace convoy::rpc::dynamic

// --- What there is to call ---------------------------------------------------------------------

namespace convoy::rpc::detail {

std::vector<std::pair<std::string, std::string>> functions_here() {
  std::vector<std::pair<std::string, std::string>> found;
  for (const auto* const entry : convoy::detail::exported_functions()) {
    if (entry->run_call) found.emplace_back(entry->call_name, entry->call_signature);
  }
  const std::scoped_lock lock(dynamic::registry().mutex);
  for (const auto& [key, served] : dynamic::registry().functions) found.push_back(key);
  return found;
}
CONVOY_RPC(functions_here);

}  // namespace convoy::rpc::detail

namespace convoy::rpc::dynamic {

std::vector<Function> functions_of(const Session& session, const To& worker) {
  std::vector<Function> functions;
  for (auto& [name, signature] : session.rpc_sync<detail::functions_here>(worker)) {
    functions.push_back({name, signature});
  }
  return functions;
}

}  // namespace convoy::rpc::dynamic

// The callee's side: from bytes to a function and back.
#include "rpc/serve.h"

#include <ATen/ThreadLocalState.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <cxxabi.h>

#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "agent/agent.h"
#include "base/error.h"
#include "base/log.h"
#include "base/quote.h"
#include "base/thread.h"
#include "convoy/rpc_function.h"
#include "rpc/dynamic.h"
#include "rpc/message.h"
#include "rpc/recording.h"
#include "rpc/rref_state.h"
#include "rpc/session_impl.h"

namespace convoy::rpc::detail {
namespace {

using convoy::detail::FunctionEntry;

std::string name_of(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), std::free);
  return text ? text.get() : type.name();
}

}  // namespace

Thrown describe_thrown(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const HandlerFailure& failure) {
    return {failure.type, failure.what(), failure.kind()};
  } catch (const Refusal& refusal) {  // ours, not the function's
    return {"", refusal.what(), refusal.kind()};
  } catch (const c10::Error& thrown) {  // without its stack
    return {name_of(typeid(thrown)), thrown.what_without_backtrace()};
  } catch (const std::exception& thrown) {
    return {name_of(typeid(thrown)), thrown.what()};
  } catch (...) {
    const std::type_info* const type = abi::__cxa_current_exception_type();
    return {type ? name_of(*type) : "unknown", "an exception not derived from std::exception"};
  }
}

void fail_request(agent::Request& request, const std::exception_ptr& error) noexcept {
  try {
    const Thrown thrown = describe_thrown(error);
    log_info("rpc: a function threw ", thrown.type, ": ", thrown.text);
    request.fail(thrown.kind, thrown.type, thrown.text);
  } catch (const std::exception& failure) {
    request.fail(ErrorKind::kRemote, "", failure.what());
  }
}

void reply_to(agent::Request& request, const Body& body) {
  const Recorded recorded(request, body);
  try {
    OutgoingMessage message(body, recorded.bytes());
    const bool goes = request.reply(message.outgoing());
    if (goes) body.references->release();
    // A caller that has given up does not take it.
    if (!goes || request.cancelled()) recorded.forget();
  } catch (...) {
    recorded.forget();
    throw;
  }
}

void take_context(void* data, const std::vector<at::Tensor>& with_grad, const std::byte* bytes,
                  std::size_t count) {
  agent::Request& request = *static_cast<agent::Request*>(data);
  std::span tail(bytes, count);
  const RecordTrailer trailer = decode_trailer(tail, with_grad.size());
  Recordings* const recordings = static_cast<SessionImpl*>(request.agent().user())->recordings();
  if (!recordings) return;
  const std::uint32_t caller = request.caller().id;
  const std::string_view function = request.function_name();
  auto recorder = recordings->came(caller, trailer, tail, with_grad, function, /*reply=*/false);
  if (!recorder) return;
  request.attached() =
      std::make_shared<AttachedRecorder>(AttachedRecorder{std::move(recorder), caller, function});
}

namespace {

agent::Request& request_of(void* call) { return **static_cast<agent::RequestRef*>(call); }

void run_function(void* data, agent::RequestRef request) noexcept {
  const auto& entry = *static_cast<const FunctionEntry*>(data);
  if (!entry.run_call) {
    request->fail(ErrorKind::kInvalidArgument, "",
                  concat(entry.call_name,
                         " is a function of an object that cannot be passed by "
                         "value; it is called on a reference to one"));
    return;
  }
  IncomingMessage message(request->body(), request->parts());
  message.source().on_trailer(&take_context, request.get());
  const MessagePeer peer{static_cast<SessionImpl*>(request->agent().user()), request->caller().id,
                         request->number()};
  message.source().comes_from(&peer);
  ServedCall call(&request, message.source(), peer, request->flags());
  entry.run_call(&call);
}

}  // namespace

std::vector<agent::Handler> exported_handlers() {
  std::vector<agent::Handler> handlers;
  std::set<std::pair<std::string_view, std::uint64_t>> names;
  for (const FunctionEntry* const entry : convoy::detail::exported_functions()) {
    if (!names.emplace(entry->call_name, entry->call_hash).second) {
      convoy::fail(ErrorKind::kInvalidArgument, "rpc: two functions are called ",
                   in_quotes(entry->call_name, 300), " and are ",
                   in_quotes(entry->call_signature, 300),
                   ": they are static, or in unnamed namespaces, of two files; callers could not "
                   "tell one from the other");
    }
    handlers.push_back({.key = {entry->call_name, entry->call_signature, entry->call_hash},
                        .run = &run_function,
                        .data = const_cast<FunctionEntry*>(entry)});
  }
  for (const agent::Handler& handler : dynamic::served_handlers()) handlers.push_back(handler);
  handlers.push_back(fetch_handler());
  return handlers;
}

void ServedCall::reply(const Body& body) const { reply_to(request_of(call_), body); }

void ServedCall::fail(const std::exception_ptr& error) const noexcept {
  fail_request(request_of(call_), error);
}

void ServedCall::refuse(const std::exception_ptr& error) const noexcept {
  if (!error) {
    request_of(call_).fail(ErrorKind::kInvalidArgument, "",
                           (flags_ & kOnReference) != 0
                               ? "it is not a member function"
                               : "it is a function of an object that cannot be passed by value; it "
                                 "is called on a reference to one");
    return;
  }
  try {
    std::rethrow_exception(error);
  } catch (const HandlerFailure& failure) {  // of a reference among them
    request_of(call_).fail(failure.kind(), failure.type, failure.what());
  } catch (...) {
    request_of(call_).fail(ErrorKind::kInvalidArgument, "", describe_thrown(error).text);
  }
}

ServedCall::Later ServedCall::later() const {
  return {std::make_shared<agent::RequestRef>(*static_cast<agent::RequestRef*>(call_)), peer_};
}

void ServedCall::Later::reply(const Body& body) const { reply_to(request_of(call_.get()), body); }

void ServedCall::Later::fail(const std::exception_ptr& error) const noexcept {
  fail_request(request_of(call_.get()), error);
}

CallKey call_key(const convoy::detail::CallRegistration& registration) {
  const FunctionEntry& entry = convoy::detail::call_entry(registration);
  return {&entry,
          agent::declare_function({entry.call_name, entry.call_signature, entry.call_hash})};
}

// --- The state of a thread --------------------------------------------------------------------

namespace {

// That of a thread which has done nothing yet.
struct CleanState {
  at::ThreadLocalState all;
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
};

const CleanState& clean_state() {
  static const CleanState* const state = [] {
    const CleanState* made = nullptr;
    start_thread([&] { made = new CleanState; }).join();
    return made;
  }();
  return *state;
}

bool is_clean(const CleanState& clean) {
  const auto& autograd = c10::AutogradState::get_tls_state();
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  return autograd.get_grad_mode() && !autograd.get_inference_mode() &&
         autograd.get_fw_grad_mode() && autograd.get_multithreading_enabled() &&
         keys.included_ == clean.keys.included_ && keys.excluded_ == clean.keys.excluded_ &&
         c10::ThreadLocalDebugInfo::current() == nullptr;
}

}  // namespace

void clean_thread_state() {
  const CleanState& clean = clean_state();
  if (!is_clean(clean)) at::ThreadLocalState::setThreadLocalState(clean.all);
}

}  // namespace convoy::rpc::detail

// What a pass says of itself.
#include <c10/util/Exception.h>
#include <cxxabi.h>

#include <cstdlib>

#include "autograd/pass.h"
#include "autograd/registry.h"
#include "base/error.h"

namespace convoy::autograd::detail {
namespace {

std::string type_name(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), std::free);
  return text ? text.get() : type.name();
}

}  // namespace

std::string Pass::waits_for() const {
  const std::scoped_lock lock(mutex_);
  return waits_for_locked();
}

std::string Pass::waits_for_locked() const {
  std::string text;
  std::size_t count = 0;
  for (const auto& [message, send] : walk_.sends()) {
    if (came_.contains(message)) continue;
    if (++count > 5) continue;
    text += concat(text.empty() ? "" : ", ", "the gradient of its ",
                   send.sent->reply ? "reply of " : "call of ", send.sent->function, " to ",
                   registry_.name_of(send.sent->to), " (message ", message, ")");
  }
  if (count > 5) text += concat(" and ", count - 5, " more");
  if (told_.fast && count != 0) {
    text +=
        "; in FAST mode every tensor that was sent must be used: unused tensors never get a "
        "gradient";
  }
  return text;
}

PassReport Pass::report() const {
  PassReport report;
  report.pass = told_.pass;
  const std::scoped_lock lock(mutex_);
  report.state = state_ == State::kDiscovery ? "discovery"
                 : state_ == State::kRunning ? "running"
                                             : "done";
  for (const auto& [message, send] : walk_.sends()) {
    report.active.push_back(message);
    if (!came_.contains(message)) report.missing.push_back(message);
  }
  return report;
}

PassError Pass::describe(const std::exception_ptr& error, const std::string& where) const {
  PassError result;
  result.worker = registry_.self();
  const auto set = [&](ErrorKind kind, const std::string& type, const std::string& text) {
    result.kind = static_cast<std::int32_t>(kind);
    result.type = type;
    result.text = where.empty() ? text : concat(text, " (", where, ")");
  };
  try {
    std::rethrow_exception(error);
  } catch (const rpc::RemoteError& thrown) {
    set(where.empty() ? thrown.kind() : ErrorKind::kRemote, thrown.remote_type(), thrown.what());
  } catch (const Error& thrown) {
    const bool kept = thrown.kind() == ErrorKind::kUnsupported ||
                      (thrown.kind() == ErrorKind::kTimeout && where.empty());
    set(kept ? thrown.kind() : ErrorKind::kRemote, type_name(typeid(thrown)), thrown.what());
  } catch (const c10::Error& thrown) {
    set(ErrorKind::kRemote, type_name(typeid(thrown)), thrown.what_without_backtrace());
  } catch (const std::exception& thrown) {
    set(ErrorKind::kRemote, type_name(typeid(thrown)), thrown.what());
  } catch (...) {
    set(ErrorKind::kRemote, "", "an exception not derived from std::exception");
  }
  return result;
}

}  // namespace convoy::autograd::detail

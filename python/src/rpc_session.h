#pragma once

#include <sys/types.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "convoy/rpc_dynamic.h"

namespace pybind11 {
class module_;  // NOLINT(readability-identifier-naming): their name
}

namespace convoy::python {

// A session, and what its workers have to call. Thread-safe.
class PythonSession : public std::enable_shared_from_this<PythonSession> {
 public:
  // That of a session; the same for all its copies. kStay: names and numbers of workers are known,
  // and looked up in no time.
  enum class Workers { kStay, kComeAndGo };
  static std::shared_ptr<PythonSession> of(const rpc::Session& session,
                                           Workers workers = Workers::kComeAndGo);

  const rpc::Session& session() const { return session_; }
  Workers workers() const { return workers_; }
  // The functions of this name; none: find() must ask. Does not wait.
  std::vector<rpc::dynamic::Callee> find_known(std::uint32_t worker, const std::string& name);
  // The functions of this name; asks the worker the first time. kInvalidArgument if it has none.
  std::vector<rpc::dynamic::Callee> find(std::uint32_t worker, const std::string& name);
  std::vector<rpc::dynamic::Function> functions(std::uint32_t worker);

  PythonSession(rpc::Session session, Workers workers);
  // False in a forked child of the process that made it.
  bool is_at_home() const;

 private:
  using Table = std::multimap<std::string, rpc::dynamic::Function>;
  std::shared_ptr<const Table> ask(std::uint32_t worker);

  const pid_t home_;
  const Workers workers_;
  const rpc::Session session_;
  std::mutex mutex_;
  std::map<std::uint32_t, std::shared_ptr<const Table>> tables_;  // guarded by it
};

// Adds RpcSession, RpcFuture, RpcReference, RpcContext and what Python functions are served by.
void bind_rpc(pybind11::module_& module);

}  // namespace convoy::python

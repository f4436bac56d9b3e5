#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "convoy/deadline.h"
#include "convoy/rpc_dynamic.h"
#include "python_object.h"

// Python's values of a call, and those that travel.
namespace convoy::python {

class PythonSession;

// A reference, as Python holds it.
struct PythonReference {
  std::shared_ptr<PythonSession> session;
  rpc::detail::RRefHandle handle;
  rpc::dynamic::ValueType type;  // of the value
};

// These need the interpreter's lock. kInvalidArgument says what was wanted, and what was found.
rpc::dynamic::Value from_python(const rpc::dynamic::ValueType& type, pybind11::handle object);
pybind11::object to_python(const rpc::dynamic::ValueType& type, const rpc::dynamic::Value& value,
                           const std::shared_ptr<PythonSession>& session);
// A struct of this name is an object of this class, whose fields are as many.
void declare_struct(const std::string& name, pybind11::object type);

// Threads of sessions that run Python code. None begins when the interpreter is about to end.
class PythonRun {
 public:
  PythonRun();  // kCancelled
  PythonRun(const PythonRun&) = delete;
  PythonRun& operator=(const PythonRun&) = delete;
  ~PythonRun();

  // Waits for those that run; false: the deadline passed.
  static bool end_all(const Deadline& deadline);
};

// A Python object that references refer to.
class __attribute__((visibility("hidden"))) HeldObject final : public rpc::dynamic::Held {
 public:
  HeldObject(rpc::dynamic::ValueType type, pybind11::object object)
      : Held(std::move(type)), object_(held(std::move(object))) {}

  rpc::dynamic::Value get() const override;
  const pybind11::object& object_here() const { return *object_; }

 private:
  std::shared_ptr<pybind11::object> object_;
};

// What holds it: C++'s own for tensors, so that C++ code here can use them.
std::shared_ptr<rpc::detail::HeldValue> hold_object(const rpc::dynamic::ValueType& type,
                                                    pybind11::object object);
// The object; kInvalidArgument for values of C++ but tensors.
pybind11::object object_in(rpc::detail::HeldValue& found);

}  // namespace convoy::python

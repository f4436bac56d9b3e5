#include "rpc_values.h"

#include <torch/csrc/autograd/python_variable.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <mutex>

#include "convoy/error.h"

namespace convoy::python {
namespace {

namespace py = pybind11;
using rpc::dynamic::Value;
using rpc::dynamic::ValueType;
using Kind = ValueType::Kind;

// Name -> class. Never destroyed: it may be used until the interpreter ends.
py::dict& structs() {
  static auto* const all = new py::dict;
  return *all;
}

[[noreturn]] void refuse(const ValueType& type, py::handle object) {
  throw Error(ErrorKind::kInvalidArgument,
              "expected " + type.text() + ", got " + Py_TYPE(object.ptr())->tp_name);
}

Value integer_of(const ValueType& type, py::handle object) {
  if (PyBool_Check(object.ptr()) || PyIndex_Check(object.ptr()) == 0) refuse(type, object);
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(object.ptr()));
  if (!number) throw py::error_already_set();
  Value value;
  if (!type.is_signed && type.bytes == sizeof(std::uint64_t)) {
    value.held = static_cast<std::uint64_t>(PyLong_AsUnsignedLongLong(number.ptr()));
  } else {
    value.held = static_cast<std::int64_t>(PyLong_AsLongLong(number.ptr()));
  }
  if (PyErr_Occurred()) {
    PyErr_Clear();
    throw Error(ErrorKind::kInvalidArgument, "the number does not fit " + type.text());
  }
  return value;
}

Value::List list_of(const ValueType& item, py::handle object) {
  Value::List list;
  const auto sequence = py::reinterpret_borrow<py::sequence>(object);
  list.reserve(sequence.size());
  for (const auto& each : sequence) list.push_back(from_python(item, each));
  return list;
}

// The fields of a dataclass, or the items of a tuple or list.
py::object fields_of(const ValueType& type, py::handle object) {
  const bool sequence = PyTuple_Check(object.ptr()) || PyList_Check(object.ptr());
  if (structs().contains(type.name)) {
    const auto wanted = structs()[py::str(type.name)];
    if (!py::isinstance(object, wanted) && !sequence) refuse(type, object);
  }
  if (!py::hasattr(object, "__dataclass_fields__")) {
    if (!sequence) refuse(type, object);
    return py::tuple(py::reinterpret_borrow<py::sequence>(object));
  }
  py::list found;
  for (const auto& name : object.attr("__dataclass_fields__")) found.append(object.attr(name));
  return py::tuple(found);
}

Value items_of(const ValueType& type, py::handle object) {
  py::object all = py::reinterpret_borrow<py::object>(object);
  if (type.kind == Kind::kStruct) {
    all = fields_of(type, object);
  } else if (!PyTuple_Check(object.ptr()) && !PyList_Check(object.ptr())) {
    refuse(type, object);
  }
  const auto sequence = py::reinterpret_borrow<py::sequence>(all);
  if (sequence.size() != type.parts.size()) {
    throw Error(ErrorKind::kInvalidArgument,
                "expected " + type.text() + ", got " + std::to_string(sequence.size()) + " items");
  }
  Value::List list;
  for (std::size_t i = 0; i < type.parts.size(); ++i) {
    list.push_back(from_python(type.parts[i], py::object(sequence[i])));
  }
  return {std::move(list)};
}

// The first kind that fits.
Value variant_of(const ValueType& type, py::handle object) {
  for (std::size_t i = 0; i < type.parts.size(); ++i) {
    try {
      Value value = from_python(type.parts[i], object);
      Value::List list;
      list.push_back({static_cast<std::int64_t>(i)});
      list.push_back(std::move(value));
      return {std::move(list)};
    } catch (const Error&) {
      continue;
    }
  }
  refuse(type, object);
}

Value map_of(const ValueType& type, py::handle object) {
  if (!PyDict_Check(object.ptr())) refuse(type, object);
  Value::List list;
  for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(object)) {
    list.push_back(from_python(type.parts[0], key));
    list.push_back(from_python(type.parts[1], value));
  }
  return {std::move(list)};
}

Value bytes_of(const ValueType& type, py::handle object) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_Check(object.ptr())) {
    PyBytes_AsStringAndSize(object.ptr(), &data, &size);
  } else if (PyByteArray_Check(object.ptr())) {
    data = PyByteArray_AsString(object.ptr());
    size = PyByteArray_Size(object.ptr());
  } else {
    refuse(type, object);
  }
  rpc::detail::Bytes bytes(static_cast<std::size_t>(size));
  if (size != 0) std::memcpy(bytes.data(), data, bytes.size());
  return {std::move(bytes)};
}

}  // namespace

void declare_struct(const std::string& name, py::object type) {
  structs()[py::str(name)] = std::move(type);
}

Value from_python(const ValueType& type, py::handle object) {
  switch (type.kind) {
    case Kind::kVoid:
    case Kind::kNothing:
      if (!object.is_none()) refuse(type, object);
      return {};
    case Kind::kBool:
      if (!PyBool_Check(object.ptr())) refuse(type, object);
      return {object.ptr() == Py_True};
    case Kind::kInteger: return integer_of(type, object);
    case Kind::kReal:
      if (PyFloat_Check(object.ptr())) return {PyFloat_AS_DOUBLE(object.ptr())};
      if (PyLong_Check(object.ptr()) && !PyBool_Check(object.ptr())) {
        return {object.cast<double>()};
      }
      refuse(type, object);
    case Kind::kText:
      if (!PyUnicode_Check(object.ptr())) refuse(type, object);
      return {object.cast<std::string>()};
    case Kind::kBytes: return bytes_of(type, object);
    case Kind::kTensor:
      if (!THPVariable_Check(object.ptr())) refuse(type, object);
      return {THPVariable_Unpack(object.ptr())};
    case Kind::kReference: {
      if (!py::isinstance<PythonReference>(object)) refuse(type, object);
      const auto& reference = object.cast<const PythonReference&>();
      if (reference.type != type.parts[0]) {
        throw Error(ErrorKind::kInvalidArgument,
                    "expected " + type.text() + ", got a reference to " + reference.type.text());
      }
      return {reference.handle};
    }
    case Kind::kList:
      if (!PyList_Check(object.ptr()) && !PyTuple_Check(object.ptr())) refuse(type, object);
      return {list_of(type.parts[0], object)};
    case Kind::kOptional: {
      Value::List list;
      if (!object.is_none()) list.push_back(from_python(type.parts[0], object));
      return {std::move(list)};
    }
    case Kind::kMap: return map_of(type, object);
    case Kind::kVariant: return variant_of(type, object);
    case Kind::kTuple:
    case Kind::kStruct: return items_of(type, object);
    case Kind::kObject: break;
  }
  throw Error(ErrorKind::kUnsupported,
              type.text() +
                  " cannot be passed: make it with remote(), and call functions on the "
                  "reference");
}

py::object to_python(const ValueType& type, const Value& value,
                     const std::shared_ptr<PythonSession>& session) {
  switch (type.kind) {
    case Kind::kVoid:
    case Kind::kNothing:
    case Kind::kObject: return py::none();
    case Kind::kBool: return py::bool_(std::get<bool>(value.held));
    case Kind::kInteger:
      if (const auto* const wide = std::get_if<std::uint64_t>(&value.held)) return py::int_(*wide);
      return py::int_(std::get<std::int64_t>(value.held));
    case Kind::kReal: return py::float_(std::get<double>(value.held));
    case Kind::kText: return py::str(std::get<std::string>(value.held));
    case Kind::kBytes: {
      const auto& bytes = std::get<rpc::detail::Bytes>(value.held);
      return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    }
    case Kind::kTensor:
      return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::get<at::Tensor>(value.held)));
    case Kind::kReference:
      return py::cast(
          PythonReference{session, std::get<rpc::detail::RRefHandle>(value.held), type.parts[0]});
    case Kind::kList: {
      py::list list;
      for (const Value& each : value.list()) list.append(to_python(type.parts[0], each, session));
      return list;
    }
    case Kind::kOptional:
      if (value.list().empty()) return py::none();
      return to_python(type.parts[0], value.list()[0], session);
    case Kind::kMap: {
      py::dict dict;
      const auto& list = value.list();
      for (std::size_t i = 0; i + 1 < list.size(); i += 2) {
        dict[to_python(type.parts[0], list[i], session)] =
            to_python(type.parts[1], list[i + 1], session);
      }
      return dict;
    }
    case Kind::kVariant: {
      const auto index = static_cast<std::size_t>(std::get<std::int64_t>(value.list()[0].held));
      return to_python(type.parts[index], value.list()[1], session);
    }
    case Kind::kTuple:
    case Kind::kStruct: {
      py::tuple items(type.parts.size());
      for (std::size_t i = 0; i < type.parts.size(); ++i) {
        items[i] = to_python(type.parts[i], value.list()[i], session);
      }
      if (type.kind == Kind::kStruct && structs().contains(type.name)) {
        return py::object(structs()[py::str(type.name)])(*items);
      }
      return items;
    }
  }
  return py::none();
}

namespace {

struct Runs {
  std::mutex mutex;
  std::condition_variable ended;
  int running = 0;
  bool ending = false;
  pid_t process = ::getpid();

  // A forked child has none of those that ran.
  void come_home() {
    const pid_t here = ::getpid();
    if (process == here) return;
    process = here;
    running = 0;
    ending = false;
  }
};
// Never destroyed: threads of sessions may outlive main.
Runs& runs() {
  static auto* const all = new Runs;
  return *all;
}

}  // namespace

PythonRun::PythonRun() {
  const std::lock_guard lock(runs().mutex);
  runs().come_home();
  if (runs().ending) throw Error(ErrorKind::kCancelled, "the Python interpreter there is ending");
  ++runs().running;
}

PythonRun::~PythonRun() {
  const std::lock_guard lock(runs().mutex);
  if (--runs().running == 0) runs().ended.notify_all();
}

bool PythonRun::end_all(const Deadline& deadline) {
  std::unique_lock lock(runs().mutex);
  runs().come_home();
  runs().ending = true;
  return runs().ended.wait_until(lock, deadline.when(), [] { return runs().running == 0; });
}

Value HeldObject::get() const {
  const PythonRun run;
  const py::gil_scoped_acquire gil;
  return from_python(value_type(), *object_);
}

std::shared_ptr<rpc::detail::HeldValue> hold_object(const ValueType& type, py::object object) {
  if (type.kind != Kind::kTensor) return std::make_shared<HeldObject>(type, std::move(object));
  return std::make_shared<rpc::detail::HeldValueOf<at::Tensor>>(
      std::get<at::Tensor>(from_python(type, object).held));
}

py::object object_in(rpc::detail::HeldValue& found) {
  if (const auto* const object = dynamic_cast<const HeldObject*>(&found)) {
    return object->object_here();
  }
  if (found.type() == typeid(at::Tensor)) {
    return py::reinterpret_steal<py::object>(
        THPVariable_Wrap(static_cast<rpc::detail::HeldValueOf<at::Tensor>&>(found).value));
  }
  throw Error(ErrorKind::kInvalidArgument, "the reference is to an object of C++");
}

}  // namespace convoy::python

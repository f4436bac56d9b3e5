#include "share.h"

#include "convoy/share.h"
#include "seconds.h"

namespace py = pybind11;

namespace convoy::python {
namespace {

using share::Channel;
using share::ChannelListener;
using share::Message;
using share::PythonObject;
using share::Value;

struct ToPython {
  py::object operator()(std::monostate) const { return py::none(); }
  py::object operator()(bool value) const { return py::bool_(value); }
  py::object operator()(std::int64_t value) const { return py::int_(value); }
  py::object operator()(double value) const { return py::float_(value); }
  py::object operator()(const std::string& value) const { return py::str(value); }
  py::object operator()(const share::Bytes& value) const {
    return py::bytes(reinterpret_cast<const char*>(value.data()), value.size());
  }
  py::object operator()(const at::Tensor& value) const { return py::cast(value); }
  py::object operator()(const PythonObject& value) const { return py::cast(value); }
  py::object operator()(const share::Shared& value) const { return py::cast(value); }
};

Value to_value(py::handle object) {
  if (object.is_none()) return std::monostate{};
  if (py::isinstance<py::bool_>(object)) return object.cast<bool>();
  if (py::isinstance<py::int_>(object)) return object.cast<std::int64_t>();
  if (py::isinstance<py::float_>(object)) return object.cast<double>();
  if (py::isinstance<py::str>(object)) return object.cast<std::string>();
  if (py::isinstance<py::bytes>(object)) {
    const auto held = py::reinterpret_borrow<py::bytes>(object);
    const std::string_view bytes = held;
    const auto* const data = reinterpret_cast<const std::byte*>(bytes.data());
    return share::Bytes(data, data + bytes.size());
  }
  if (py::isinstance<PythonObject>(object)) return object.cast<PythonObject>();
  if (py::isinstance<share::Shared>(object)) return object.cast<share::Shared>();
  return object.cast<at::Tensor>();
}

}  // namespace

Message to_message(const py::list& values) {
  Message message;
  for (const py::handle value : values) message.add(to_value(value));
  return message;
}

py::list to_list(const Message& message) {
  py::list values;
  for (const Value& value : message) values.append(std::visit(ToPython{}, value));
  return values;
}

namespace {

void send(const Channel& channel, const py::list& values, double seconds) {
  const Message message = to_message(values);
  const py::gil_scoped_release release;
  channel.send(message, deadline_of(seconds));
}

py::list receive(const Channel& channel, double seconds) {
  Message message;
  {
    const py::gil_scoped_release release;
    message = channel.receive_message(deadline_of(seconds));
  }
  return to_list(message);
}

py::object try_receive(const Channel& channel) {
  std::optional<Message> message;
  {
    const py::gil_scoped_release release;
    message = channel.try_receive();
  }
  return message ? py::object(to_list(*message)) : py::none();
}

}  // namespace

void bind_share(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();

  py::class_<PythonObject>(module, "PythonObject")
      .def(py::init([](const py::bytes& pickle) { return PythonObject{pickle}; }))
      .def_property_readonly("pickle",
                             [](const PythonObject& self) { return py::bytes(self.pickle); });

  py::class_<Channel>(module, "Channel")
      .def("send", &send, py::arg("values"), py::arg("seconds"))
      .def("receive", &receive, py::arg("seconds"))
      .def("try_receive", &try_receive)
      .def("close", &Channel::close, unlocked)
      .def("release", &Channel::release)
      .def_static("adopt", [](int descriptor) { return Channel::adopt(descriptor); });
  module.def("channel", [] { return share::channel(); });
  module.def(
      "connect",
      [](const std::string& path, double seconds) {
        return share::connect(path, deadline_of(seconds));
      },
      unlocked);

  py::class_<ChannelListener>(module, "ChannelListener")
      .def_property_readonly("path", &ChannelListener::path)
      .def(
          "accept",
          [](const ChannelListener& self, double seconds) {
            return self.accept(deadline_of(seconds));
          },
          unlocked);
  module.def("listen", &share::listen);

  module.def("share_memory_", &share::share_memory_, unlocked);
  module.def("is_shared", &share::is_shared);
  module.def("empty_shared", [](std::size_t bytes) {
    return share::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
  });
  module.def("tensor_to_bytes",
             [](const at::Tensor& tensor) { return py::bytes(share::to_bytes(tensor)); });
  module.def("tensor_from_bytes",
             [](const py::bytes& bytes) { return share::from_bytes(std::string_view(bytes)); });
  module.def("get_sharing_strategy", [] {
    return share::get_sharing_strategy() == share::Strategy::kFile ? "file" : "descriptor";
  });
  module.def("set_sharing_strategy", [](const std::string& name) {
    if (name != "file" && name != "descriptor") {
      throw py::value_error("the strategies are \"descriptor\" and \"file\", not " + name);
    }
    share::set_sharing_strategy(name == "file" ? share::Strategy::kFile
                                               : share::Strategy::kDescriptor);
  });
  module.def("share_usage", [] {
    const auto usage = share::usage();
    py::dict found;
    found["pool_bytes"] = usage.pool_bytes;
    found["blocks"] = usage.blocks;
    found["elsewhere"] = usage.elsewhere;
    found["foreign"] = usage.foreign;
    return found;
  });
  module.def("trim", &share::trim, unlocked);
}

}  // namespace convoy::python

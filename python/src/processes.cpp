#include "processes.h"

#include <pybind11/stl.h>

#include "convoy/published.h"
#include "convoy/slots.h"
#include "convoy/spawn.h"
#include "seconds.h"
#include "share.h"

namespace py = pybind11;

namespace convoy::python {
namespace {

using Pairs = std::vector<std::pair<std::string, at::Tensor>>;
using Specs = std::vector<std::tuple<std::string, std::vector<std::int64_t>, at::ScalarType>>;

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
}

std::vector<share::NamedTensor> named(const Pairs& pairs) {
  std::vector<share::NamedTensor> found;
  for (const auto& [name, tensor] : pairs) found.push_back({name, tensor});
  return found;
}

// None if all have ended well, else (index, pid, exit code, signal, exception).
py::object first_failure(Processes& self) {
  const auto failures = self.failures();
  if (failures.empty()) return py::none();
  const auto& f = failures[0];
  return py::make_tuple(f.index, f.pid, f.exit_code, f.signal, f.exception);
}

// True: all have ended. Failures are left to first_failure().
bool join(Processes& self, double seconds) {
  const py::gil_scoped_release release;
  try {
    return self.join(deadline_of(seconds));
  } catch (const Error&) {
    if (self.failures().empty()) throw;
    return true;
  }
}

py::tuple spawned_tuple(const Spawned& self) {
  return py::make_tuple(self.index, self.count, to_list(self.arguments), self.parent);
}

void bind_spawn(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<Processes>(module, "Processes")
      .def("pids", &Processes::pids)
      .def("join", &join)
      .def("first_failure", &first_failure)
      .def(
          "terminate",
          [](Processes& self, double grace) { self.terminate(milliseconds_of(grace)); }, unlocked)
      .def("restart", &Processes::restart, unlocked)
      .def("restart_failed",
           [](Processes& self) {
             std::vector<ProcessFailure> failed;
             {
               const py::gil_scoped_release release;
               failed = self.restart_failed();
             }
             std::vector<std::string> texts;
             for (const auto& failure : failed) texts.push_back(failure.to_string());
             return texts;
           })
      .def("channel", &Processes::channel);
  module.def(
      "start_processes", [](const std::vector<std::string>& program, int count, double grace,
                            const std::vector<std::string>& environment, const py::list& values) {
        const auto message = to_message(values);
        const py::gil_scoped_release release;
        return start_processes(
            program, {.count = count, .grace = milliseconds_of(grace), .environment = environment},
            message);
      });
  module.def("adopt_ticket", [](const std::string& ticket) {
    const Spawned* self = nullptr;
    {
      const py::gil_scoped_release release;
      self = &adopt_ticket(ticket);
    }
    return spawned_tuple(*self);
  });
  module.def("report_exception", &report_exception, unlocked);
}

void bind_published(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<share::Snapshot>(module, "Snapshot")
      .def_property_readonly("version", &share::Snapshot::version)
      .def_property_readonly("age",
                             [](const share::Snapshot& self) {
                               return std::chrono::duration<double>(self.age()).count();
                             })
      .def("names",
           [](const share::Snapshot& self) {
             std::vector<std::string> names;
             for (std::size_t i = 0; i < self.size(); ++i) names.push_back(self.name(i));
             return names;
           })
      .def("tensor",
           [](const share::Snapshot& self, const std::string& name) { return self[name]; })
      .def("tensors", &share::Snapshot::tensors);
  py::class_<share::PublishedTensors>(module, "PublishedTensors")
      .def(py::init([](const Pairs& pairs, std::size_t buffers, double patience) {
        const py::gil_scoped_release release;
        return share::PublishedTensors(named(pairs),
                                       {.buffers = buffers, .patience = milliseconds_of(patience)});
      }))
      .def(
          "publish",
          [](const share::PublishedTensors& self, const Pairs& pairs) {
            return self.publish(named(pairs));
          },
          unlocked)
      .def("read", &share::PublishedTensors::read)
      .def(
          "read_newer",
          [](const share::PublishedTensors& self, std::uint64_t version, double seconds) {
            return self.read_newer(version, deadline_of(seconds));
          },
          unlocked)
      .def(
          "load_into",
          [](const share::PublishedTensors& self, const Pairs& pairs) {
            return self.load_into(named(pairs));
          },
          unlocked)
      .def("version", &share::PublishedTensors::version)
      .def("handle", &share::PublishedTensors::handle)
      .def_static("open", &share::PublishedTensors::open);
}

void bind_slots(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<share::Slot>(module, "Slot")
      .def("__bool__", [](const share::Slot& self) { return static_cast<bool>(self); })
      .def("tensor", [](const share::Slot& self, const std::string& name) { return self[name]; })
      .def_property_readonly("number", &share::Slot::number)
      .def("commit", &share::Slot::commit)
      .def("release", &share::Slot::release);
  py::class_<share::Slots>(module, "Slots")
      .def(py::init([](std::size_t count, const Specs& specs) {
        std::vector<share::TensorSpec> tensors;
        for (const auto& [name, sizes, type] : specs) tensors.push_back({name, sizes, type});
        const py::gil_scoped_release release;
        return share::Slots(count, tensors);
      }))
      .def(
          "fill",
          [](const share::Slots& self, double seconds) { return self.fill(deadline_of(seconds)); },
          unlocked)
      .def(
          "next",
          [](const share::Slots& self, double seconds) { return self.next(deadline_of(seconds)); },
          unlocked)
      .def("try_fill", &share::Slots::try_fill)
      .def("try_next", &share::Slots::try_next)
      .def("close", &share::Slots::close)
      .def("closed", &share::Slots::closed)
      .def("reclaim", &share::Slots::reclaim)
      .def("counts",
           [](const share::Slots& self) {
             const auto c = self.counts();
             using namespace pybind11::literals;
             return py::dict("free"_a = c.free, "filling"_a = c.filling, "ready"_a = c.ready,
                             "reading"_a = c.reading, "committed"_a = c.committed,
                             "abandoned"_a = c.abandoned, "returned"_a = c.returned);
           })
      .def("names",
           [](const share::Slots& self) {
             std::vector<std::string> names;
             for (const auto& spec : self.tensors()) names.push_back(spec.name);
             return names;
           })
      .def("__len__", &share::Slots::size)
      .def("handle", &share::Slots::handle)
      .def_static("open", &share::Slots::open);
}

}  // namespace

void bind_processes(py::module_& module) {
  bind_spawn(module);
  bind_published(module);
  bind_slots(module);
}

}  // namespace convoy::python

#include "queue.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <optional>

#include "convoy/error.h"
#include "convoy/queue.h"
#include "seconds.h"
#include "share.h"

namespace py = pybind11;

namespace convoy::python {
namespace {

using share::Barrier;
using share::Event;
using share::Lock;
using share::Message;
using share::Queue;
using share::QueueOptions;
using share::Shared;

// No end for None. In pieces, so that signals of Python's are handled: attempt(deadline) until it
// is true.
template <class Attempt>
bool wait_in_pieces(std::optional<double> seconds, Attempt attempt) {
  constexpr auto kPiece = std::chrono::milliseconds(200);
  const auto end =
      seconds ? Deadline::after(std::chrono::duration<double>(*seconds)) : Deadline::never();
  for (;;) {
    {
      const py::gil_scoped_release release;
      if (attempt(std::min(end, Deadline::after(kPiece)))) return true;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (end.expired()) return false;
  }
}

bool put(const Queue& queue, const py::list& values, std::optional<double> seconds) {
  const std::vector<Message> messages{to_message(values)};
  return wait_in_pieces(
      seconds, [&](const Deadline& deadline) { return queue.put_many(messages, deadline) == 1; });
}

std::size_t put_many(const Queue& queue, const py::list& items, std::optional<double> seconds) {
  std::vector<Message> left;
  for (const py::handle item : items) left.push_back(to_message(item.cast<py::list>()));
  const std::size_t all = left.size();
  wait_in_pieces(seconds, [&](const Deadline& deadline) {
    try {
      const std::size_t done = queue.put_many(left, deadline);
      left.erase(left.begin(), left.begin() + static_cast<std::ptrdiff_t>(done));
    } catch (const std::exception&) {
      if (left.size() == all) throw;
      return true;  // as the C++ function: the next call throws it
    }
    return left.empty();
  });
  return all - left.size();
}

py::list get_many(const Queue& queue, std::size_t most, std::optional<double> seconds) {
  std::vector<Message> messages;
  wait_in_pieces(seconds, [&](const Deadline& deadline) {
    messages = queue.get_many(most, deadline);
    return !messages.empty();
  });
  py::list found;
  for (const Message& message : messages) found.append(to_list(message));
  return found;
}

}  // namespace

void bind_queue(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();

  py::class_<Shared>(module, "Shared")
      .def_static("adopt", &Shared::adopt)
      .def("descriptors", &Shared::descriptors)
      .def("__eq__", [](const Shared& a, const Shared& b) { return a == b; })
      .def_property_readonly("kind", [](const Shared& self) {
        switch (self.kind()) {
          case Shared::Kind::kQueue: return "queue";
          case Shared::Kind::kEvent: return "event";
          case Shared::Kind::kBarrier: return "barrier";
          case Shared::Kind::kLock: return "lock";
        }
        return "unknown";
      });

  py::class_<Queue, Shared>(module, "Queue")
      .def(py::init([](std::size_t capacity, std::size_t item_bytes, std::size_t copy_below) {
        return Queue(
            QueueOptions{.capacity = capacity, .item_bytes = item_bytes, .copy_below = copy_below});
      }))
      .def(py::init<const Shared&>())
      .def("put", &put, py::arg("values"), py::arg("seconds"))
      .def("put_many", &put_many, py::arg("items"), py::arg("seconds"))
      .def("get_many", &get_many, py::arg("most"), py::arg("seconds"))
      .def("size", &Queue::size)
      .def("capacity", &Queue::capacity)
      .def("close", &Queue::close, unlocked)
      .def("closed", &Queue::closed)
      .def("lost", [](const Queue& self) {
        const auto losses = self.lost();
        return py::make_tuple(losses.items, losses.latest);
      });

  py::class_<Event, Shared>(module, "Event")
      .def(py::init([] { return Event::create(); }))
      .def(py::init<const Shared&>())
      .def("is_set", &Event::is_set)
      .def("set", &Event::set)
      .def("clear", &Event::clear)
      .def("wait", [](const Event& self, std::optional<double> seconds) {
        return wait_in_pieces(seconds,
                              [&](const Deadline& deadline) { return self.wait(deadline); });
      });

  py::class_<Barrier, Shared>(module, "Barrier")
      .def(py::init<std::size_t>())
      .def(py::init<const Shared&>())
      .def("parties", &Barrier::parties)
      .def("waiting", &Barrier::waiting)
      .def("reset", &Barrier::reset, unlocked)
      // Not in pieces: who gives up is not counted, and others would see that.
      .def("wait", [](const Barrier& self, double seconds) {
        const py::gil_scoped_release release;
        return self.wait(deadline_of(seconds));
      });

  py::class_<Lock, Shared>(module, "Lock")
      .def(py::init([] { return Lock::create(); }))
      .def(py::init<const Shared&>())
      .def("unlock", &Lock::unlock)
      // 0: not in time; 1: taken; 2: taken from a process that has died with it.
      .def("lock", [](const Lock& self, std::optional<double> seconds) {
        Lock::Taken taken{};
        const bool got = wait_in_pieces(seconds, [&](const Deadline& deadline) {
          try {
            taken = self.lock(deadline);
            return true;
          } catch (const Error& error) {
            if (error.kind() != ErrorKind::kTimeout) throw;
            return false;
          }
        });
        return !got ? 0 : taken == Lock::Taken::kFromDead ? 2 : 1;
      });

  module.def("offer", &share::offer, unlocked);
  module.def(
      "open_shared",
      [](const std::string& name, double seconds) {
        return share::open(name, Deadline::after(std::chrono::duration<double>(seconds)));
      },
      unlocked);
}

}  // namespace convoy::python

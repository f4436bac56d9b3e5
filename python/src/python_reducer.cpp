// The gradient reducer for Python.
#include "python_reducer.h"

#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "convoy/hooks.h"
#include "convoy/reducer.h"
#include "python_object.h"

namespace py = pybind11;

namespace convoy::python {
namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// Futures made in Python hold Python objects.
at::Tensor tensor_of(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor();
  if (value.isTensorList() && value.toTensorList().size() == 1) return value.toTensorList().get(0);
  if (value.isPyObject()) {
    const py::gil_scoped_acquire gil;
    const py::object object = py::reinterpret_borrow<py::object>(value.toPyObject());
    if (py::isinstance<py::list>(object) && py::len(object) == 1) {
      return object[py::int_(0)].cast<at::Tensor>();
    }
    if (THPVariable_Check(object.ptr())) return object.cast<at::Tensor>();
  }
  throw std::invalid_argument("the hook's future must hold a tensor, or a list of one");
}

FuturePtr as_tensor(const FuturePtr& future) {
  auto typed = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  future->addCallback([typed](c10::ivalue::Future& done) {
    try {
      if (done.hasError()) std::rethrow_exception(done.exception_ptr());
      typed->markCompleted(tensor_of(done.constValue()));
    } catch (...) {
      typed->setErrorIfNeeded(std::current_exception());
    }
  });
  return typed;
}

// Whether the next bucket's hook may start before this one's result is there.
enum class HookOrder { kOverlaps, kOneAtATime };

// hook(state, bucket): a torch.futures.Future of a tensor, or a tensor. Where a callback of the
// future issues operations, as torch's powerSGD_hook does, these run on the group's thread: beside
// the next hook in backward's thread, ranks would not issue in the same order.
CommHook comm_hook(py::object state, py::object function, HookOrder order) {
  const auto call = [state = held(std::move(state)),
                     function = held(std::move(function))](const GradBucket& bucket) -> HookResult {
    const py::gil_scoped_acquire gil;
    try {
      const py::object result = (*function)(*state, std::make_shared<GradBucket>(bucket));
      if (THPVariable_Check(result.ptr())) return {result.cast<at::Tensor>()};
      return {as_tensor(result.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>()->fut)};
    } catch (const py::error_already_set& error) {
      throw std::runtime_error(error.what());  // the error itself must not leave the lock
    } catch (const py::cast_error&) {
      throw std::invalid_argument("a comm hook returns a torch.futures.Future, or a tensor");
    }
  };
  // torch's own hooks may return another floating-point type: fp16_compress_wrapper does.
  auto typed = [call](const GradBucket& bucket) -> HookResult {
    return call(bucket).then([type = bucket.buffer().scalar_type()](const at::Tensor& result) {
      const bool casts = result.defined() && result.is_floating_point() && at::isFloatingType(type);
      return casts ? result.to(type) : result;
    });
  };
  if (order == HookOrder::kOverlaps) return typed;
  return [typed](const GradBucket& bucket) -> HookResult { return {typed(bucket).wait()}; };
}

// What torch.distributed.BuiltinCommHookType names, and its twin.
CommHook builtin_hook(const std::string& name) {
  if (name == "ALLREDUCE") return hooks::all_reduce;
  if (name == "FP16_COMPRESS") return hooks::fp16_compress;
  if (name == "BF16_COMPRESS") return hooks::bf16_compress;
  throw std::invalid_argument("no comm hook is called " + name);
}

// function(buckets, used)
GradConsumer consumer(std::vector<bool> takes, py::object function) {
  return {.takes = std::move(takes),
          .function = [function = held(std::move(function))](const std::vector<GradBucket>& buckets,
                                                             const std::vector<bool>& used) {
            call_python([&] {
              py::list list;
              for (const GradBucket& bucket : buckets) {
                list.append(std::make_shared<GradBucket>(bucket));
              }
              (*function)(list, used);
            });
          }};
}

py::dict stats_of(const Reducer& reducer) {
  using namespace pybind11::literals;
  const auto seconds = [](std::chrono::nanoseconds time) {
    return std::chrono::duration<double>(time).count();
  };
  const auto& stats = reducer.stats();
  return py::dict(
      "backwards"_a = stats.backwards, "bytes"_a = stats.bytes,
      "backward_time"_a = seconds(stats.backward_time),
      "exposed_time"_a = seconds(stats.exposed_time), "copy_time"_a = seconds(stats.copy_time),
      "search_time"_a = seconds(stats.search_time), "report"_a = reducer.timeline().report());
}

// A scope that Python enters and leaves.
class Pause {
 public:
  explicit Pause(Reducer& reducer) : reducer_(reducer) {}
  void enter() { scopes_.push_back(std::make_unique<Reducer::NoSync>(reducer_)); }
  void leave() { scopes_.pop_back(); }

 private:
  Reducer& reducer_;
  std::vector<std::unique_ptr<Reducer::NoSync>> scopes_;
};

}  // namespace

void add_reducer(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> no_gil;

  py::class_<GradBucket, std::shared_ptr<GradBucket>>(module, "GradBucket")
      .def("index", &GradBucket::index)
      .def("is_last", &GradBucket::is_last)
      .def("buffer", &GradBucket::buffer)
      .def("gradients", &GradBucket::gradients)
      .def("parameters", &GradBucket::parameters)
      .def("indices", &GradBucket::indices)
      .def("set_buffer",
           [](GradBucket& self, const at::Tensor& buffer) { self = self.with(buffer); });

  py::class_<Pause>(module, "_NoSync")
      .def("__enter__", &Pause::enter)
      .def("__exit__", [](Pause& self, const py::args&) { self.leave(); });

  const py::class_<Joinable> joinable(module, "Joinable");
  py::class_<Reducer, Joinable>(module, "Reducer")
      .def("before_forward", &Reducer::before_forward, no_gil)
      .def(
          "no_sync", [](Reducer& self) { return std::make_unique<Pause>(self); },
          py::keep_alive<0, 1>())
      .def_property_readonly("is_paused", &Reducer::is_paused)
      .def("sync_gradients", &Reducer::sync_gradients, no_gil)
      .def(
          "register_comm_hook",
          [](Reducer& self, py::object state, py::object hook, bool overlaps) {
            auto made = comm_hook(std::move(state), std::move(hook),
                                  overlaps ? HookOrder::kOverlaps : HookOrder::kOneAtATime);
            const py::gil_scoped_release released;
            self.register_comm_hook(std::move(made));
          },
          py::arg("state"), py::arg("hook"), py::arg("overlaps") = false)
      .def("register_builtin_comm_hook",
           [](Reducer& self, const std::string& name) {
             auto made = builtin_hook(name);
             const py::gil_scoped_release released;
             self.register_comm_hook(std::move(made));
           })
      .def(
          "register_power_sgd",
          [](Reducer& self, int matrix_approximation_rank, std::uint64_t start_iter,
             double min_compression_rate, bool use_error_feedback, bool warm_start, double epsilon,
             std::uint64_t random_seed) {
            self.register_comm_hook(
                hooks::PowerSgd({.matrix_approximation_rank = matrix_approximation_rank,
                                 .start_power_sgd_iter = start_iter,
                                 .min_compression_rate = min_compression_rate,
                                 .use_error_feedback = use_error_feedback,
                                 .warm_start = warm_start,
                                 .orthogonalization_epsilon = epsilon,
                                 .random_seed = random_seed}));
          },
          py::kw_only(), py::arg("matrix_approximation_rank"), py::arg("start_iter"),
          py::arg("min_compression_rate"), py::arg("use_error_feedback"), py::arg("warm_start"),
          py::arg("epsilon"), py::arg("random_seed"), no_gil)
      .def("register_consumer",
           [](Reducer& self, std::vector<bool> takes, py::object function) {
             self.register_consumer(consumer(std::move(takes), std::move(function)));
           })
      .def("set_sparse_metadata", &Reducer::set_sparse_metadata, no_gil)
      .def("write_trace", &Reducer::write_trace, no_gil)
      .def(
          "broadcast",
          [](const Reducer& self, const std::vector<at::Tensor>& tensors, int root) {
            broadcast_coalesced(self.group(), tensors, {.root = root});
          },
          py::arg("tensors"), py::arg("root") = 0, no_gil)
      .def("parameters", &Reducer::parameters)
      .def("buckets", &Reducer::buckets)
      .def("used", &Reducer::used)
      .def("stats", &stats_of);
}

}  // namespace convoy::python

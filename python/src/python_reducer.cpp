// The gradient reducer for Python.
#include "python_reducer.h"

#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "convoy/c10d_store.h"
#include "convoy/reducer.h"

namespace py = pybind11;

namespace convoy::python {
namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// A Python object that threads without the interpreter's lock may copy and drop.
std::shared_ptr<py::object> shared(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

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

// hook(state, bucket): a torch.futures.Future of a tensor, or a tensor.
CommHook comm_hook(py::object state, py::object function) {
  return [state = shared(std::move(state)),
          function = shared(std::move(function))](const GradBucket& bucket) -> HookResult {
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
}

ProcessGroup adopt(const c10::intrusive_ptr<c10d::Backend>& backend,
                   const c10::intrusive_ptr<c10d::Store>& store) {
  return ProcessGroup::from(backend, {.store = store ? from_c10d(store) : nullptr});
}

std::unique_ptr<Reducer> make_reducer(std::vector<at::Tensor> parameters,
                                      const c10::intrusive_ptr<c10d::Backend>& backend,
                                      const c10::intrusive_ptr<c10d::Store>& store,
                                      ReducerOptions options) {
  const py::gil_scoped_release no_gil;
  return std::make_unique<Reducer>(std::move(parameters), adopt(backend, store),
                                   std::move(options));
}

py::dict stats_of(const Reducer& reducer) {
  using namespace pybind11::literals;
  const auto seconds = [](std::chrono::nanoseconds time) {
    return std::chrono::duration<double>(time).count();
  };
  const auto& stats = reducer.stats();
  return py::dict("backwards"_a = stats.backwards, "bytes"_a = stats.bytes,
                  "backward_time"_a = seconds(stats.backward_time),
                  "exposed_time"_a = seconds(stats.exposed_time),
                  "copy_time"_a = seconds(stats.copy_time),
                  "search_time"_a = seconds(stats.search_time));
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
           [](GradBucket& self, at::Tensor buffer) { self = self.with(std::move(buffer)); });

  py::class_<Pause>(module, "_NoSync")
      .def("__enter__", &Pause::enter)
      .def("__exit__", [](Pause& self, const py::args&) { self.leave(); });

  py::class_<Reducer>(module, "Reducer")
      .def(py::init([](std::vector<at::Tensor> parameters,
                       const c10::intrusive_ptr<c10d::Backend>& backend,
                       const c10::intrusive_ptr<c10d::Store>& store,
                       std::vector<double> bucket_cap_mb_list, bool find_unused_parameters,
                       bool static_graph, bool gradient_as_bucket_view,
                       bool skip_all_reduce_unused_params, std::vector<std::string> names,
                       std::vector<std::size_t> sparse, std::vector<std::size_t> delayed,
                       std::vector<std::string> must_agree, std::string error) {
             return make_reducer(std::move(parameters), backend, store,
                                 {.bucket_cap_mb_list = std::move(bucket_cap_mb_list),
                                  .find_unused_parameters = find_unused_parameters,
                                  .static_graph = static_graph,
                                  .gradient_as_bucket_view = gradient_as_bucket_view,
                                  .skip_all_reduce_unused_params = skip_all_reduce_unused_params,
                                  .names = std::move(names),
                                  .sparse = std::move(sparse),
                                  .delayed = std::move(delayed),
                                  .must_agree = std::move(must_agree),
                                  .error = std::move(error)});
           }),
           py::arg("parameters"), py::arg("backend"), py::arg("store") = py::none(), py::kw_only(),
           py::arg("bucket_cap_mb_list") = std::vector<double>(),
           py::arg("find_unused_parameters") = false, py::arg("static_graph") = false,
           py::arg("gradient_as_bucket_view") = true,
           py::arg("skip_all_reduce_unused_params") = false,
           py::arg("names") = std::vector<std::string>(),
           py::arg("sparse") = std::vector<std::size_t>(),
           py::arg("delayed") = std::vector<std::size_t>(),
           py::arg("must_agree") = std::vector<std::string>(), py::arg("error") = std::string())
      .def("before_forward", &Reducer::before_forward, no_gil)
      .def(
          "prepare_for_backward",
          [](Reducer& self, const std::vector<at::Tensor>& outputs, bool in_step) {
            return self.prepare_for_backward(
                outputs, in_step ? Reducer::Forward::kInStep : Reducer::Forward::kAside);
          },
          py::arg("outputs"), py::arg("in_step") = true, no_gil)
      .def(
          "no_sync", [](Reducer& self) { return std::make_unique<Pause>(self); },
          py::keep_alive<0, 1>())
      .def_property_readonly("is_paused", &Reducer::is_paused)
      .def("sync_gradients", &Reducer::sync_gradients, no_gil)
      .def("register_comm_hook",
           [](Reducer& self, py::object state, py::object hook) {
             auto made = comm_hook(std::move(state), std::move(hook));
             const py::gil_scoped_release released;
             self.register_comm_hook(std::move(made));
           })
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

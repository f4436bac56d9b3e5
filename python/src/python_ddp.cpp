// DistributedDataParallel and Join for Python. A Python module is seen through an object that tells
// of its tensors: `_Module` in _ddp.py.
#include "python_ddp.h"

#include <pybind11/stl.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "convoy/c10d_store.h"
#include "convoy/ddp.h"
#include "python_object.h"

namespace py = pybind11;

namespace convoy::python {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Dtype = std::optional<at::ScalarType>;

ProcessGroup adopt(const BackendPtr& backend, const StorePtr& store) {
  return ProcessGroup::from(backend, {.store = store ? from_c10d(store) : nullptr});
}

class PythonModule final : public DdpModule {
 public:
  explicit PythonModule(py::object view)
      : name_(view.attr("name").cast<std::string>()), view_(held(std::move(view))) {}

  // Told before each forward, so that nobody has to ask.
  void set_training(bool training) { training_ = training; }

  std::string name() const override { return name_; }
  bool is_training() const override { return training_; }
  NamedTensors parameters() const override { return ask<NamedTensors>("parameters"); }
  // As long as the dictionaries of the modules hold the same objects, nothing can have changed: to
  // look there is much faster than to make the list again.
  bool holds(const NamedTensors& known) const override {
    if (places_ && call_python([&] { return hold_the_same(*places_); })) return true;
    places_.reset();
    auto places = call_python([&] { return held(view_->attr("places")()); });
    if (!DdpModule::holds(known)) return false;
    places_ = std::move(places);
    return true;
  }
  NamedTensors buffers() const override { return ask<NamedTensors>("buffers"); }
  std::vector<at::Tensor> sparse() const override { return ask<std::vector<at::Tensor>>("sparse"); }
  std::vector<at::Tensor> statistics() const override {
    return ask<std::vector<at::Tensor>>("statistics");
  }
  bool has_sync_batch_norm() const override { return false; }
  std::string error() const override { return ask<std::string>("error"); }

 private:
  template <class Answer>
  Answer ask(const char* method) const {
    return call_python([&] { return view_->attr(method)().template cast<Answer>(); });
  }

  // True if each of these dictionaries has the values that are listed beside it.
  static bool hold_the_same(const py::object& places) {
    for (const py::handle place : py::reinterpret_borrow<py::list>(places)) {
      PyObject* const holder = PyTuple_GET_ITEM(place.ptr(), 0);
      PyObject* const values = PyTuple_GET_ITEM(place.ptr(), 1);
      if (!PyDict_Check(holder) || PyDict_Size(holder) != PyTuple_GET_SIZE(values)) return false;
      Py_ssize_t next = 0, i = 0;
      PyObject* value = nullptr;
      while (PyDict_Next(holder, &next, nullptr, &value) != 0) {
        if (value != PyTuple_GET_ITEM(values, i++)) return false;
      }
    }
    return true;
  }

  const std::string name_;
  const std::shared_ptr<py::object> view_;
  mutable std::shared_ptr<py::object> places_;  // when they were last compared
  bool training_ = true;
};

class PythonDdp final : public Joinable {
 public:
  PythonDdp(std::shared_ptr<PythonModule> module, const BackendPtr& backend, const StorePtr& store,
            const DdpOptions& options)
      : module_(std::move(module)), core_(module_, adopt(backend, store), options) {}

  DdpCore& core() { return core_; }
  PythonModule& module() { return *module_; }

  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override {
    return core_.join_hook(*this, options);
  }
  const ProcessGroup& join_process_group() const override { return core_.reducer().group(); }

 private:
  const std::shared_ptr<PythonModule> module_;
  DdpCore core_;
};

std::unique_ptr<PythonDdp> make_ddp(py::object view, const BackendPtr& backend,
                                    const StorePtr& store, const DdpOptions& options) {
  auto module = std::make_shared<PythonModule>(std::move(view));
  const py::gil_scoped_release no_gil;
  return std::make_unique<PythonDdp>(std::move(module), backend, store, options);
}

std::optional<MixedPrecision> mixed_precision(
    const std::optional<std::tuple<Dtype, Dtype, Dtype, bool>>& given) {
  if (!given) return std::nullopt;
  const auto& [param, reduce, buffer, cast_inputs] = *given;
  return MixedPrecision{.param_dtype = param,
                        .reduce_dtype = reduce,
                        .buffer_dtype = buffer,
                        .cast_forward_inputs = cast_inputs};
}

std::vector<at::Tensor> after_forward(PythonDdp& self, std::vector<at::Tensor> outputs) {
  std::vector<at::Tensor*> places;
  places.reserve(outputs.size());
  for (at::Tensor& output : outputs) places.push_back(&output);
  self.core().after_forward(places);
  return outputs;
}

void set_buffer_hook(PythonDdp& self, py::object function, bool after_forward) {
  self.core().set_buffer_hook(
      [function = held(std::move(function))](const ProcessGroup&, const NamedTensors& buffers) {
        call_python([&] {
          py::dict by_name;
          for (const auto& [name, buffer] : buffers) by_name[py::str(name)] = buffer;
          (*function)(by_name);
        });
      },
      after_forward ? BufferSync::kAfterForward : BufferSync::kBeforeForward);
}

void add_join(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::class_<Join>(module, "Join")
      .def(py::init([](std::vector<Joinable*> joinables, bool divide_by_initial_world_size,
                       bool throw_on_early_termination) {
             const py::gil_scoped_release released;
             return std::make_unique<Join>(
                 std::move(joinables),
                 JoinOptions{.divide_by_initial_world_size = divide_by_initial_world_size,
                             .throw_on_early_termination = throw_on_early_termination});
           }),
           py::arg("joinables"), py::kw_only(), py::arg("divide_by_initial_world_size") = true,
           py::arg("throw_on_early_termination") = false, py::keep_alive<1, 2>())
      .def("finish", &Join::finish, no_gil)
      .def("abandon", &Join::abandon, no_gil);
  py::class_<JoinPart>(module, "JoinPart")
      .def(py::init([](PythonDdp& ddp, bool divide_by_initial_world_size) {
             return std::make_unique<JoinPart>(
                 ddp.core(),
                 JoinOptions{.divide_by_initial_world_size = divide_by_initial_world_size});
           }),
           py::arg("ddp"), py::kw_only(), py::arg("divide_by_initial_world_size") = true,
           py::keep_alive<1, 2>())
      .def("step", &JoinPart::step, no_gil)
      .def("shadow", &JoinPart::shadow, no_gil)
      .def("finish", &JoinPart::finish, no_gil);
}

}  // namespace

void add_ddp(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::class_<PythonDdp, Joinable>(module, "DdpCore")
      .def(
          py::init([](py::object view, const BackendPtr& backend, const StorePtr& store,
                      std::vector<double> bucket_cap_mb_list, bool find_unused_parameters,
                      bool static_graph, bool gradient_as_bucket_view,
                      bool skip_all_reduce_unused_params, bool init_sync, bool forward_sync_buffers,
                      std::vector<std::string> ignore, std::vector<std::string> delayed,
                      const std::optional<std::tuple<Dtype, Dtype, Dtype, bool>>& mixed) {
            return make_ddp(std::move(view), backend, store,
                            {.bucket_cap_mb_list = std::move(bucket_cap_mb_list),
                             .find_unused_parameters = find_unused_parameters,
                             .static_graph = static_graph,
                             .gradient_as_bucket_view = gradient_as_bucket_view,
                             .skip_all_reduce_unused_params = skip_all_reduce_unused_params,
                             .init_sync = init_sync,
                             .forward_sync_buffers = forward_sync_buffers,
                             .ignore = std::move(ignore),
                             .delay_all_reduce_named_params = std::move(delayed),
                             .mixed_precision = mixed_precision(mixed)});
          }),
          py::arg("module"), py::arg("backend"), py::arg("store") = py::none(), py::kw_only(),
          py::arg("bucket_cap_mb_list") = std::vector<double>(),
          py::arg("find_unused_parameters") = false, py::arg("static_graph") = false,
          py::arg("gradient_as_bucket_view") = true,
          py::arg("skip_all_reduce_unused_params") = false, py::arg("init_sync") = true,
          py::arg("forward_sync_buffers") = true, py::arg("ignore") = std::vector<std::string>(),
          py::arg("delayed") = std::vector<std::string>(), py::arg("mixed_precision") = py::none())
      .def_property_readonly(
          "reducer", [](PythonDdp& self) -> Reducer& { return self.core().reducer(); },
          py::return_value_policy::reference_internal)
      .def(
          "before_forward",
          [](PythonDdp& self, bool training) {
            self.module().set_training(training);
            self.core().before_forward();
          },
          no_gil)
      .def("after_forward", &after_forward, no_gil)
      .def(
          "forward_failed",
          [](PythonDdp& self, const std::string& why) { self.core().forward_failed(why); },
          py::arg("why"), no_gil)
      .def(
          "restore_parameters", [](PythonDdp& self) { self.core().restore_parameters(); }, no_gil)
      .def(
          "sync_buffers", [](PythonDdp& self) { self.core().sync_buffers(); }, no_gil)
      .def("set_buffer_hook", &set_buffer_hook)
      .def(
          "update_process_group",
          [](PythonDdp& self, const BackendPtr& backend, const StorePtr& store) {
            self.core().update_process_group(adopt(backend, store));
          },
          py::arg("backend"), py::arg("store") = py::none(), no_gil)
      .def(
          "set_static_graph", [](PythonDdp& self) { self.core().set_static_graph(); }, no_gil)
      .def("set_sample_rate",
           [](PythonDdp& self, std::uint64_t rate) { self.core().set_sample_rate(rate); })
      .def("stats", [](PythonDdp& self) { return self.core().stats().to_map(); }, no_gil);
  add_join(module);
}

}  // namespace convoy::python

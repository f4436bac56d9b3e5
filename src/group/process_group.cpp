#include "convoy/group.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "base/error.h"
#include "convoy/backend.h"
#include "group/process_group_impl.h"
#include "group/rounding.h"
#include "os/file.h"

namespace convoy {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using std::chrono::milliseconds;

enum class Mode { kSync, kAsync };

bool rounds_in_registers(const c10d::Backend& backend) {
  const auto* const ours = dynamic_cast<const ConvoyBackend*>(&backend);
  return ours != nullptr && ours->shares_memory();
}

bool is_async(Mode mode) { return mode == Mode::kAsync; }

void finish(const WorkPtr& work) {
  if (work) work->wait();  // a backend that has none is done
}

milliseconds limit(const Timeout& timeout) {
  const auto given = in_milliseconds(timeout);
  return given == milliseconds::zero() ? c10d::kUnsetTimeout : given;
}

// What no backend can do anything with. `which` is the argument.
void check(const at::Tensor& tensor, const char* which) {
  if (!tensor.defined()) [[unlikely]] {
    fail(ErrorKind::kInvalidArgument, which,
         " is undefined; pass a tensor with memory, of zero elements if there is nothing to send");
  }
  if (tensor.is_meta()) [[unlikely]] {
    fail(ErrorKind::kInvalidArgument, which,
         " is on device meta and has no values; pass one in the memory of the CPU");
  }
}
void check(at::TensorList tensors, const char* which) {
  for (const at::Tensor& tensor : tensors) check(tensor, which);
}

void check_root(const c10d::Backend& backend, int root) {
  if (root >= 0 && root < backend.getSize()) return;
  fail(ErrorKind::kInvalidArgument, "the root is ", root, "; it must be a rank of the group, 0 to ",
       backend.getSize() - 1);
}

// The numbers are c10d's own: nothing is translated, on the way down or in our backend.
c10d::ReduceOp to_c10d(ReduceOp op, double factor) {
  static_assert(static_cast<int>(ReduceOp::kSum) == c10d::ReduceOp::SUM &&
                static_cast<int>(ReduceOp::kPremulSum) == c10d::ReduceOp::PREMUL_SUM);
  if (op < ReduceOp::kPremulSum) return static_cast<c10d::ReduceOp::RedOpType>(op);
  if (op == ReduceOp::kPremulSum) return c10d::makePreMulSum(factor);
  fail(ErrorKind::kInvalidArgument, "unknown reduce operation ", static_cast<int>(op));
}

c10d::ReduceOp to_c10d(const c10d::Backend& backend, const ReduceOptions& options) {
  c10d::ReduceOp op = to_c10d(options.op, options.factor);
  if (options.rounding == Rounding::kNone) return op;
  if (!rounds_in_registers(backend)) {
    fail(ErrorKind::kUnsupported, "backend ", backend.getBackendName(),
         " cannot round inside of a sum: reduce tensors of that type instead");
  }
  op.supplement_ = c10::make_intrusive<RoundingSupplement>(options.rounding);
  return op;
}

// --- each operation, in both modes ---

WorkPtr all_reduce(c10d::Backend& backend, const at::Tensor& tensor, const ReduceOptions& options,
                   Mode mode) {
  check(tensor, "the tensor");
  changes(tensor);
  Tensors tensors = {tensor};
  return backend.allreduce(tensors, {.reduceOp = to_c10d(backend, options),
                                     .timeout = limit(options.timeout),
                                     .asyncOp = is_async(mode)});
}

WorkPtr all_reduce_coalesced(c10d::Backend& backend, at::TensorList list,
                             const ReduceOptions& options, Mode mode) {
  check(list, "a tensor of the list");
  changes(list);
  Tensors tensors = list.vec();
  c10d::AllreduceCoalescedOptions more;
  more.reduceOp = to_c10d(backend, options);
  more.timeout = limit(options.timeout);
  more.asyncOp = is_async(mode);
  return backend.allreduce_coalesced(tensors, more);
}

WorkPtr reduce(c10d::Backend& backend, const at::Tensor& tensor, const RootReduceOptions& options,
               Mode mode) {
  check(tensor, "the tensor");
  check_root(backend, options.root);
  if (backend.getRank() == options.root) changes(tensor);
  Tensors tensors = {tensor};
  return backend.reduce(tensors, {.reduceOp = to_c10d(options.op, options.factor),
                                  .rootRank = options.root,
                                  .timeout = limit(options.timeout),
                                  .asyncOp = is_async(mode)});
}

WorkPtr broadcast(c10d::Backend& backend, const at::Tensor& tensor, const RootOptions& options,
                  Mode mode) {
  check(tensor, "the tensor");
  check_root(backend, options.root);
  if (backend.getRank() != options.root) changes(tensor);
  Tensors tensors = {tensor};
  return backend.broadcast(
      tensors,
      {.rootRank = options.root, .timeout = limit(options.timeout), .asyncOp = is_async(mode)});
}

WorkPtr all_gather(c10d::Backend& backend, at::TensorList outputs, const at::Tensor& input,
                   const CallOptions& options, Mode mode) {
  check(outputs, "an output");
  check(input, "the input");
  changes(outputs);
  std::vector<Tensors> lists = {outputs.vec()};
  Tensors inputs = {input};
  return backend.allgather(lists, inputs,
                           {.timeout = limit(options.timeout), .asyncOp = is_async(mode)});
}

// Ours compare lengths. Gloo compares shapes, and reads the first size even of a tensor that has
// none: as tensors of one dimension they please everybody.
void flatten_for(const c10d::Backend& backend, at::Tensor& one, at::Tensor& other) {
  if (!one.defined() || !other.defined() || (one.dim() == 1 && other.dim() == 1)) return;
  if (dynamic_cast<const ConvoyBackend*>(&backend) != nullptr) return;
  const auto is_flat = [](const at::Tensor& tensor) {
    return tensor.layout() == c10::kStrided && tensor.is_contiguous();
  };
  if (!is_flat(one) || !is_flat(other)) return;  // what that means is the backend's affair
  const at::NoGradGuard no_grad;
  one = one.view({-1});
  other = other.view({-1});
}

WorkPtr all_gather_single(c10d::Backend& backend, at::Tensor output, at::Tensor input,
                          const CallOptions& options, Mode mode) {
  check(output, "the output");
  check(input, "the input");
  changes(output);
  flatten_for(backend, output, input);
  return backend._allgather_base(output, input,
                                 {.timeout = limit(options.timeout), .asyncOp = is_async(mode)});
}

WorkPtr gather(c10d::Backend& backend, at::TensorList outputs, const at::Tensor& input,
               const RootOptions& options, Mode mode) {
  check(outputs, "an output");
  check(input, "the input");
  check_root(backend, options.root);
  changes(outputs);
  std::vector<Tensors> lists;
  if (!outputs.empty()) lists.push_back(outputs.vec());
  Tensors inputs = {input};
  return backend.gather(
      lists, inputs,
      {.rootRank = options.root, .timeout = limit(options.timeout), .asyncOp = is_async(mode)});
}

WorkPtr scatter(c10d::Backend& backend, const at::Tensor& output, at::TensorList inputs,
                const RootOptions& options, Mode mode) {
  check(output, "the output");
  check(inputs, "an input");
  check_root(backend, options.root);
  changes(output);
  std::vector<Tensors> lists;
  if (!inputs.empty()) lists.push_back(inputs.vec());
  Tensors outputs = {output};
  return backend.scatter(
      outputs, lists,
      {.rootRank = options.root, .timeout = limit(options.timeout), .asyncOp = is_async(mode)});
}

WorkPtr reduce_scatter(c10d::Backend& backend, const at::Tensor& output, at::TensorList inputs,
                       const ReduceOptions& options, Mode mode) {
  check(output, "the output");
  check(inputs, "an input");
  changes(output);
  std::vector<Tensors> lists = {inputs.vec()};
  Tensors outputs = {output};
  return backend.reduce_scatter(outputs, lists,
                                {.reduceOp = to_c10d(backend, options),
                                 .timeout = limit(options.timeout),
                                 .asyncOp = is_async(mode)});
}

WorkPtr reduce_scatter_single(c10d::Backend& backend, at::Tensor output, at::Tensor input,
                              const ReduceOptions& options, Mode mode) {
  check(output, "the output");
  check(input, "the input");
  changes(output);
  flatten_for(backend, output, input);
  return backend._reduce_scatter_base(output, input,
                                      {.reduceOp = to_c10d(backend, options),
                                       .timeout = limit(options.timeout),
                                       .asyncOp = is_async(mode)});
}

WorkPtr all_to_all(c10d::Backend& backend, at::TensorList to, at::TensorList from,
                   const CallOptions& options, Mode mode) {
  check(to, "an output");
  check(from, "an input");
  changes(to);
  Tensors outputs = to.vec(), inputs = from.vec();
  return backend.alltoall(outputs, inputs,
                          {.timeout = limit(options.timeout), .asyncOp = is_async(mode)});
}

WorkPtr all_to_all_single(c10d::Backend& backend, at::Tensor output, at::Tensor input,
                          const SplitsOptions& options, Mode mode) {
  check(output, "the output");
  check(input, "the input");
  changes(output);
  auto output_splits = options.output_splits, input_splits = options.input_splits;
  return backend.alltoall_base(output, input, output_splits, input_splits,
                               {.timeout = limit(options.timeout), .asyncOp = is_async(mode)});
}

c10d::BarrierOptions barrier_options(const CallOptions& options, Mode mode) {
  c10d::BarrierOptions result;
  result.timeout = limit(options.timeout);
  result.asyncOp = is_async(mode);
  return result;
}

WorkPtr barrier(c10d::Backend& backend, const CallOptions& options, Mode mode) {
  return backend.barrier(barrier_options(options, mode));
}

template <class Group, class Operation, class... Arguments>
void run(const Group& group, const char* name, const CallSite& where, const Operation& operation,
         const Arguments&... arguments) {
  const CallScope scope(where);
  finish(group.call(
      name, [&](c10d::Backend& backend) { return operation(backend, arguments..., Mode::kSync); }));
}
template <class Group, class Operation, class... Arguments>
WorkPtr start(const Group& group, const char* name, const CallSite& where,
              const Operation& operation, const Arguments&... arguments) {
  const CallScope scope(where);
  return group.call(
      name, [&](c10d::Backend& backend) { return operation(backend, arguments..., Mode::kAsync); });
}

// --- the group ---

milliseconds timeout_of(c10d::Backend& backend) {
  try {
    return backend.getBackendOptions()->timeout;
  } catch (const std::exception&) {  // a backend need not have options
    return kBackendDefaultTimeout;
  }
}

std::string name_of(c10d::Backend& backend) {
  try {
    auto name = backend.getBackendOptions()->group_name;
    if (!name.empty()) return name;
  } catch (const std::exception&) {
  }
  return backend.getBackendName();
}

std::string host_name() {
  std::string name(256, '\0');
  if (::gethostname(name.data(), name.size() - 1) != 0) return "localhost";
  return name.c_str();
}

}  // namespace

ProcessGroup::Impl::Impl(c10::intrusive_ptr<c10d::Backend> made, std::string title,
                         std::shared_ptr<Store> keys, milliseconds limit)
    : backend(std::move(made)),
      own(dynamic_cast<ConvoyBackend*>(backend.get())),
      name(std::move(title)),
      store(std::move(keys)),
      timeout(limit) {}

std::string ProcessGroup::Impl::head(std::string_view operation) const {
  return concat(operation, ", group \"", name, "\", rank ", backend->getRank(), " of ",
                backend->getSize(), ": ");
}

// In a handler.
void ProcessGroup::Impl::rethrow_complete(std::string_view operation) const {
  try {
    throw;
  } catch (const Error& error) {
    const std::string text = error.what();
    if (text.find("group \"") != std::string::npos) throw;
    throw Error(error.kind(), head(operation) + text);
  } catch (const c10::DistError&) {
    throw;
  } catch (const c10::Error& error) {
    // Of our own backend: a bad argument, with torch's text.
    if (!own) throw;
    std::string text = error.what_without_backtrace();
    text = text.substr(0, text.find('\n'));
    if (text.starts_with("ConvoyBackend::")) text = text.substr(text.find(": ") + 2);
    throw Error(ErrorKind::kInvalidArgument, head(operation) + text);
  }
}

milliseconds in_milliseconds(const Timeout& timeout) {
  const auto left = timeout.left();
  if (!left) return milliseconds::zero();
  if (!timeout.is_deadline() && *left <= std::chrono::nanoseconds::zero()) {
    fail(ErrorKind::kInvalidArgument, "timeout must be > 0 ms, got ",
         std::chrono::duration_cast<milliseconds>(*left).count(),
         "; leave it out for the group's own");
  }
  // c10d has no deadlines: what is over fails as soon as something has to be waited for. Whatever
  // adds a time to the clock must not overflow.
  constexpr std::chrono::nanoseconds kCentury = std::chrono::hours(24 * 36525);
  return std::max(milliseconds(1), std::chrono::ceil<milliseconds>(std::min(*left, kCentury)));
}

void ProcessGroup::Impl::fail_in_child(std::string_view operation) const {
  fail(ErrorKind::kUnsupported, operation, ", group \"", name, "\", rank ", backend->getRank(),
       " of ", backend->getSize(), ": this process (pid ", ::getpid(),
       ") is a forked child of the rank, perhaps a worker of a DataLoader; only the process that "
       "made a group can use it: call it in the rank itself, or start the worker by exec "
       "(convoy::spawn, multiprocessing's \"spawn\") and make a group there");
}

ProcessGroup ProcessGroup::from(c10::intrusive_ptr<c10d::Backend> backend, const Adopted& more) {
  if (!backend) fail(ErrorKind::kInvalidArgument, "ProcessGroup::from: the backend is nullptr");
  const auto name = more.name.empty() ? name_of(*backend) : more.name;
  const auto timeout = more.timeout == milliseconds::zero() ? timeout_of(*backend) : more.timeout;
  return ProcessGroup(std::make_shared<Impl>(std::move(backend), name, more.store, timeout));
}

ProcessGroup::Impl& ProcessGroup::impl() const {
  if (!impl_)
    fail(ErrorKind::kInvalidArgument,
         "this ProcessGroup is empty; init(), new_group() or split() give one");
  return *impl_;
}

bool ProcessGroup::can_round() const { return rounds_in_registers(*impl().backend); }
int ProcessGroup::rank() const { return impl().backend->getRank(); }
int ProcessGroup::size() const { return impl().backend->getSize(); }
const std::string& ProcessGroup::name() const { return impl().name; }
std::string ProcessGroup::backend_name() const { return impl().backend->getBackendName(); }
const c10::intrusive_ptr<c10d::Backend>& ProcessGroup::backend() const { return impl().backend; }
const std::shared_ptr<Store>& ProcessGroup::store() const { return impl().store; }
milliseconds ProcessGroup::timeout() const { return impl().timeout; }

void ProcessGroup::set_timeout(milliseconds timeout) const {
  if (timeout <= milliseconds::zero()) {
    fail(ErrorKind::kInvalidArgument, impl().head("set_timeout"), "timeout must be > 0 ms, got ",
         timeout.count());
  }
  impl().backend->setTimeout(timeout);
  impl().timeout = timeout;
}

const std::vector<std::string>& ProcessGroup::hosts() const {
  impl().check_process("hosts");
  auto places = impl().places.lock();
  if (!*places) {
    Impl::Places found;
    if (impl().shares_memory()) {  // whose ranks have shown each other that they share memory
      found = {std::vector<std::string>(static_cast<std::size_t>(size()), host_name()), rank(),
               size()};
    } else {
      // Two hosts may have one name, but have not been started as one.
      const auto boot = read_file("/proc/sys/kernel/random/boot_id").value_or("");
      const auto all = all_gather_object(host_name() + "\n" + boot);
      for (std::size_t r = 0; r < all.size(); ++r) {
        found.hosts.push_back(all[r].substr(0, all[r].find('\n')));
        if (all[r] != all[static_cast<std::size_t>(rank())]) continue;
        ++found.local_size;
        if (static_cast<int>(r) < rank()) ++found.local_rank;
      }
    }
    places->emplace(std::move(found));
  }
  return (*places)->hosts;  // never changed again
}

int ProcessGroup::local_rank() const {
  hosts();
  return (*impl().places.lock())->local_rank;
}

int ProcessGroup::local_size() const {
  hosts();
  return (*impl().places.lock())->local_size;
}

// --- collectives ---

void ProcessGroup::all_reduce(const at::Tensor& tensor, const ReduceOptions& options,
                              const CallSite& where) const {
  run(impl(), "all_reduce", where, convoy::all_reduce, tensor, options);
}
Work ProcessGroup::all_reduce_async(const at::Tensor& tensor, const ReduceOptions& options,
                                    const CallSite& where) const {
  return Work(start(impl(), "all_reduce", where, convoy::all_reduce, tensor, options));
}

void ProcessGroup::all_reduce_coalesced(at::TensorList tensors, const ReduceOptions& options,
                                        const CallSite& where) const {
  run(impl(), "all_reduce_coalesced", where, convoy::all_reduce_coalesced, tensors, options);
}
Work ProcessGroup::all_reduce_coalesced_async(at::TensorList tensors, const ReduceOptions& options,
                                              const CallSite& where) const {
  return Work(
      start(impl(), "all_reduce_coalesced", where, convoy::all_reduce_coalesced, tensors, options));
}

void ProcessGroup::reduce(const at::Tensor& tensor, const RootReduceOptions& options,
                          const CallSite& where) const {
  run(impl(), "reduce", where, convoy::reduce, tensor, options);
}
Work ProcessGroup::reduce_async(const at::Tensor& tensor, const RootReduceOptions& options,
                                const CallSite& where) const {
  return Work(start(impl(), "reduce", where, convoy::reduce, tensor, options));
}

void ProcessGroup::broadcast(const at::Tensor& tensor, const RootOptions& options,
                             const CallSite& where) const {
  run(impl(), "broadcast", where, convoy::broadcast, tensor, options);
}
Work ProcessGroup::broadcast_async(const at::Tensor& tensor, const RootOptions& options,
                                   const CallSite& where) const {
  return Work(start(impl(), "broadcast", where, convoy::broadcast, tensor, options));
}

void ProcessGroup::all_gather(at::TensorList outputs, const at::Tensor& input,
                              const CallOptions& options, const CallSite& where) const {
  run(impl(), "all_gather", where, convoy::all_gather, outputs, input, options);
}
Work ProcessGroup::all_gather_async(at::TensorList outputs, const at::Tensor& input,
                                    const CallOptions& options, const CallSite& where) const {
  return Work(start(impl(), "all_gather", where, convoy::all_gather, outputs, input, options));
}

void ProcessGroup::all_gather_single(const at::Tensor& output, const at::Tensor& input,
                                     const CallOptions& options, const CallSite& where) const {
  run(impl(), "all_gather_single", where, convoy::all_gather_single, output, input, options);
}
Work ProcessGroup::all_gather_single_async(const at::Tensor& output, const at::Tensor& input,
                                           const CallOptions& options,
                                           const CallSite& where) const {
  return Work(
      start(impl(), "all_gather_single", where, convoy::all_gather_single, output, input, options));
}

at::Tensor ProcessGroup::all_gather(const at::Tensor& input, const CallOptions& options,
                                    const CallSite& where) const {
  const CallScope scope(where);
  impl().call("all_gather", [&](const c10d::Backend&) { check(input, "the input"); });
  auto sizes = input.sizes().vec();
  sizes.insert(sizes.begin(), size());
  auto output = at::empty(sizes, input.options().requires_grad(false));
  all_gather_single(output, input, options);
  return output;
}

void ProcessGroup::gather(at::TensorList outputs, const at::Tensor& input,
                          const RootOptions& options, const CallSite& where) const {
  run(impl(), "gather", where, convoy::gather, outputs, input, options);
}
Work ProcessGroup::gather_async(at::TensorList outputs, const at::Tensor& input,
                                const RootOptions& options, const CallSite& where) const {
  return Work(start(impl(), "gather", where, convoy::gather, outputs, input, options));
}

void ProcessGroup::scatter(const at::Tensor& output, at::TensorList inputs,
                           const RootOptions& options, const CallSite& where) const {
  run(impl(), "scatter", where, convoy::scatter, output, inputs, options);
}
Work ProcessGroup::scatter_async(const at::Tensor& output, at::TensorList inputs,
                                 const RootOptions& options, const CallSite& where) const {
  return Work(start(impl(), "scatter", where, convoy::scatter, output, inputs, options));
}

void ProcessGroup::reduce_scatter(const at::Tensor& output, at::TensorList inputs,
                                  const ReduceOptions& options, const CallSite& where) const {
  run(impl(), "reduce_scatter", where, convoy::reduce_scatter, output, inputs, options);
}
Work ProcessGroup::reduce_scatter_async(const at::Tensor& output, at::TensorList inputs,
                                        const ReduceOptions& options, const CallSite& where) const {
  return Work(
      start(impl(), "reduce_scatter", where, convoy::reduce_scatter, output, inputs, options));
}

void ProcessGroup::reduce_scatter_single(const at::Tensor& output, const at::Tensor& input,
                                         const ReduceOptions& options,
                                         const CallSite& where) const {
  run(impl(), "reduce_scatter_single", where, convoy::reduce_scatter_single, output, input,
      options);
}
Work ProcessGroup::reduce_scatter_single_async(const at::Tensor& output, const at::Tensor& input,
                                               const ReduceOptions& options,
                                               const CallSite& where) const {
  return Work(start(impl(), "reduce_scatter_single", where, convoy::reduce_scatter_single, output,
                    input, options));
}

void ProcessGroup::all_to_all(at::TensorList outputs, at::TensorList inputs,
                              const CallOptions& options, const CallSite& where) const {
  run(impl(), "all_to_all", where, convoy::all_to_all, outputs, inputs, options);
}
Work ProcessGroup::all_to_all_async(at::TensorList outputs, at::TensorList inputs,
                                    const CallOptions& options, const CallSite& where) const {
  return Work(start(impl(), "all_to_all", where, convoy::all_to_all, outputs, inputs, options));
}

void ProcessGroup::all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                                     const SplitsOptions& options, const CallSite& where) const {
  run(impl(), "all_to_all_single", where, convoy::all_to_all_single, output, input, options);
}
Work ProcessGroup::all_to_all_single_async(const at::Tensor& output, const at::Tensor& input,
                                           const SplitsOptions& options,
                                           const CallSite& where) const {
  return Work(
      start(impl(), "all_to_all_single", where, convoy::all_to_all_single, output, input, options));
}

void ProcessGroup::barrier(const CallOptions& options, const CallSite& where) const {
  run(impl(), "barrier", where, convoy::barrier, options);
}
Work ProcessGroup::barrier_async(const CallOptions& options, const CallSite& where) const {
  return Work(start(impl(), "barrier", where, convoy::barrier, options));
}

void ProcessGroup::monitored_barrier(const CallOptions& options, const CallSite& where) const {
  const CallScope scope(where);
  impl().call("monitored_barrier", [&](c10d::Backend& backend) {
    backend.monitoredBarrier(barrier_options(options, Mode::kSync), true);
  });
}

at::Tensor ProcessGroup::allocate(at::IntArrayRef sizes, const at::TensorOptions& options) const {
  return impl().call("allocate", [&](c10d::Backend& backend) {
    if (std::any_of(sizes.begin(), sizes.end(), [](std::int64_t size) { return size < 0; })) {
      fail(ErrorKind::kInvalidArgument, "the sizes are ", sizes, "; none can be negative");
    }
    if (!backend.supportsTensorAlloc(options.device().index())) return at::empty(sizes, options);
    return backend.allocateTensor(c10::multiply_integers(sizes), options).view(sizes);
  });
}

EventHandle ProcessGroup::on_event(EventCallback callback) const {
  if (!impl().own) {
    fail(ErrorKind::kUnsupported, impl().head("on_event"), "backend \"", backend_name(),
         "\" does not report its operations; \"convoy\" does");
  }
  return impl().own->on_event(std::move(callback));
}

void ProcessGroup::abort() const { impl().here("abort").abort(); }
void ProcessGroup::shutdown() const {
  if (impl().home.is_here()) impl().backend->shutdown();
}

}  // namespace convoy

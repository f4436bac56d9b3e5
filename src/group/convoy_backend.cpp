#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <atomic>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "base/concat.h"
#include "base/error.h"
#include "coll/group.h"
#include "convoy/backend.h"
#include "convoy/c10d_store.h"
#include "group/convoy_work.h"
#include "tensor/elements.h"
#include "tensor/memory.h"
#include "tensor/packing.h"

namespace convoy {
namespace {

using c10d::OpType;
using coll::Piece;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Refuses with torch's own texts, which programs and tests know.
auto refuse_as(const char* operation) {
  return [operation](const std::string& text) {
    TORCH_CHECK_VALUE(false, "ConvoyBackend::", operation, ": ", text);
  };
}

coll::ReduceOptions reduce_options(const c10d::ReduceOp& op) {
  using coll::ReduceOp;
  coll::ReduceOptions options;
  switch (op) {
    case c10d::ReduceOp::SUM: options.op = ReduceOp::kSum; break;
    case c10d::ReduceOp::AVG: options.op = ReduceOp::kAvg; break;
    case c10d::ReduceOp::PRODUCT: options.op = ReduceOp::kProduct; break;
    case c10d::ReduceOp::MIN: options.op = ReduceOp::kMin; break;
    case c10d::ReduceOp::MAX: options.op = ReduceOp::kMax; break;
    case c10d::ReduceOp::BAND: options.op = ReduceOp::kBand; break;
    case c10d::ReduceOp::BOR: options.op = ReduceOp::kBor; break;
    case c10d::ReduceOp::BXOR: options.op = ReduceOp::kBxor; break;
    case c10d::ReduceOp::PREMUL_SUM: {
      options.op = ReduceOp::kPremulSum;
      const auto* factor = dynamic_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
      TORCH_CHECK_VALUE(factor, "PREMUL_SUM needs a factor: make it with makePreMulSum");
      options.factor = factor->tensor_factor.defined() ? factor->tensor_factor.item<double>()
                                                       : factor->double_factor;
      break;
    }
    default: TORCH_CHECK_VALUE(false, "unknown reduce operation");
  }
  return options;
}

// What a rank's several tensors of one call are together before they meet those of the others.
void combine_into(at::Tensor& total, const at::Tensor& next, coll::ReduceOp op) {
  switch (op) {
    case coll::ReduceOp::kSum:
    case coll::ReduceOp::kAvg:
    case coll::ReduceOp::kPremulSum:
      if (total.scalar_type() == at::kBool) {
        total.logical_or_(next);
      } else {
        total.add_(next);
      }
      break;
    case coll::ReduceOp::kProduct: total.mul_(next); break;
    case coll::ReduceOp::kMin: at::minimum_out(total, total, next); break;
    case coll::ReduceOp::kMax: at::maximum_out(total, total, next); break;
    case coll::ReduceOp::kBand: total.bitwise_and_(next); break;
    case coll::ReduceOp::kBor: total.bitwise_or_(next); break;
    case coll::ReduceOp::kBxor: total.bitwise_xor_(next); break;
  }
}

// Contiguous, on the CPU, strided: worked on where it is.
bool is_simple(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == c10::kStrided && tensor.device().is_cpu() &&
         tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

std::size_t count_of(const at::Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()); }

// Pieces of a buffer that is cut along its first dimension; `splits` empty: evenly.
std::vector<Piece> cut(const Piece& whole, const at::Tensor& tensor,
                       const std::vector<int64_t>& splits, int ranks) {
  const auto n = static_cast<std::size_t>(ranks);
  const std::size_t row = tensor.dim() == 0 || tensor.size(0) == 0
                              ? 0
                              : whole.count / static_cast<std::size_t>(tensor.size(0));
  std::vector<Piece> pieces;
  auto* data = static_cast<std::byte*>(whole.data);
  for (std::size_t r = 0; r < n; ++r) {
    const std::size_t count =
        splits.empty() ? whole.count / n : static_cast<std::size_t>(splits[r]) * row;
    pieces.push_back({data, count});
    data += count * tensor.element_size();
  }
  return pieces;
}

}  // namespace

// --- one operation ---

class ConvoyBackend::Impl {
 public:
  Impl(const std::shared_ptr<Store>& store, int rank, int size, c10::intrusive_ptr<Options> options)
      : options_(std::move(options)),
        timeout_(options_->timeout),
        group_(coll::Group::create(
            store, rank, size,
            {.name = options_->group_name.empty() ? "convoy" : options_->group_name,
             .timeout = options_->timeout,
             .threads = options_->threads,
             .read_private = options_->read_private})) {}

  coll::Group& group() { return *group_; }
  const Options& options() const { return *options_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  std::uint64_t number() const { return number_; }
  void count() { ++number_; }

  std::chrono::nanoseconds timeout(std::chrono::milliseconds asked) const {
    return asked == c10d::kUnsetTimeout ? timeout_.load() : asked;
  }
  coll::CallOptions call(std::chrono::milliseconds asked) const {
    return {.timeout = timeout(asked)};
  }
  coll::ReduceOptions call(const c10d::ReduceOp& op, std::chrono::milliseconds asked) const {
    coll::ReduceOptions options = reduce_options(op);
    options.timeout = timeout(asked);
    return options;
  }

  // An operation on tensors: start(group, callback) issues it on packed memory; at its end results
  // are unpacked and `after` runs.
  struct Job {
    OpType op;
    const char* title;
    bool asynchronous;
    Tensors inputs;   // for profilers
    Tensors outputs;  // of the future
    std::shared_ptr<Packing> packing = std::make_shared<Packing>();
    std::function<void()> after = nullptr;
  };
  template <class Start>
  WorkPtr submit(Job job, const Start& start) {
    count();
    const auto end = [packing = job.packing, after = job.after] {
      packing->unpack();
      if (!after) return;
      const at::AutoDispatchBelowAutograd guard;
      after();
    };
    if (!job.asynchronous) {
      start(*group_, nullptr).wait();
      end();
      return nullptr;
    }
    auto work = c10::make_intrusive<ConvoyWork>(group_->rank(), job.op, job.title, job.inputs,
                                                std::move(job.outputs));
    work->attach(start(*group_,
                       [work, end](std::exception_ptr error) {
                         if (!error) {
                           try {
                             end();
                           } catch (...) {
                             error = std::current_exception();
                           }
                         }
                         work->complete(error);
                       }),
                 number_);
    return work;
  }

 private:
  const c10::intrusive_ptr<Options> options_;
  std::atomic<std::chrono::nanoseconds> timeout_;
  const std::shared_ptr<coll::Group> group_;
  std::atomic<std::uint64_t> number_{0};  // of operations asked for
};

ConvoyBackend::ConvoyBackend(const std::shared_ptr<Store>& store, int rank, int size,
                             const c10::intrusive_ptr<Options>& options)
    : Backend(rank, size),
      impl_(std::make_unique<Impl>(store, rank, size,
                                   options ? options : c10::make_intrusive<Options>())) {
  init();
}

ConvoyBackend::ConvoyBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                             const c10::intrusive_ptr<Options>& options)
    : ConvoyBackend(from_c10d(store), rank, size, options) {}

ConvoyBackend::~ConvoyBackend() = default;

c10::intrusive_ptr<c10d::Backend::Options> ConvoyBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(impl_->options());
}

void ConvoyBackend::setTimeout(std::chrono::milliseconds timeout) { impl_->set_timeout(timeout); }

// --- combining ---

WorkPtr ConvoyBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const auto refuse = refuse_as("allreduce");
  c10d::assertNonEmpty(refuse, tensors);
  if (tensors[0].layout() == c10::kSparse) return allreduce_sparse(tensors, opts);
  const auto options = impl_->call(opts.reduceOp, opts.timeout);
  const at::Tensor& first = tensors[0];
  if (!opts.asyncOp && tensors.size() == 1 && is_simple(first)) {
    impl_->count();
    impl_->group().all_reduce(first.data_ptr(), first.data_ptr(), count_of(first),
                              element_type(first.scalar_type()), options);
    return nullptr;
  }
  c10d::assertLayoutMatch(refuse, tensors);
  c10d::assertTypeAndSizesMatch(refuse, tensors);
  Impl::Job job{OpType::ALLREDUCE, "convoy:all_reduce", opts.asyncOp, tensors, tensors};
  at::Tensor all = first;
  if (tensors.size() > 1) {
    const at::AutoDispatchBelowAutograd guard;
    all = first.clone(at::MemoryFormat::Contiguous);
    for (std::size_t i = 1; i < tensors.size(); ++i) combine_into(all, tensors[i], options.op);
    job.after = [tensors, all] {
      for (const auto& tensor : tensors) tensor.copy_(all);
    };
  }
  const Piece piece = job.packing->in_out(all);
  const auto type = element_type(all.scalar_type());
  return impl_->submit(std::move(job), [&](coll::Group& group, auto&& done) {
    return group.all_reduce_async(piece.data, piece.data, piece.count, type, options, done);
  });
}

WorkPtr ConvoyBackend::allreduce_coalesced(Tensors& tensors,
                                           const c10d::AllreduceCoalescedOptions& opts) {
  const auto refuse = refuse_as("allreduce_coalesced");
  c10d::assertNonEmpty(refuse, tensors);
  c10d::assertLayoutMatch(refuse, tensors);
  for (std::size_t i = 1; i < tensors.size(); ++i) {
    if (tensors[i].scalar_type() != tensors[0].scalar_type()) {
      refuse("tensors must all have the same type");
    }
  }
  const auto options = impl_->call(opts.reduceOp, opts.timeout);
  Impl::Job job{OpType::ALLREDUCE_COALESCED, "convoy:all_reduce", opts.asyncOp, tensors, tensors};
  std::vector<Piece> pieces;
  for (const auto& tensor : tensors) pieces.push_back(job.packing->in_out(tensor));
  const auto type = element_type(tensors[0].scalar_type());
  return impl_->submit(std::move(job), [&](coll::Group& group, auto&& done) {
    return group.all_reduce_coalesced_async(pieces, pieces, type, options, done);
  });
}

// Sums of sparse tensors: everyone gathers everyone's entries, of which each may have another
// number.
WorkPtr ConvoyBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const auto refuse = refuse_as("allreduce");
  c10d::assertSingleElement(refuse, tensors);
  const at::Tensor& tensor = tensors[0];
  if (tensor.layout() != c10::kSparse) refuse("requires a sparse tensor");
  const auto options = impl_->call(opts.reduceOp, opts.timeout);
  if (options.op != coll::ReduceOp::kSum)
    refuse("unsupported reduction operation for sparse tensors");

  const at::AutoDispatchBelowAutograd guard;
  const auto mine = tensor.is_coalesced() ? tensor : tensor.coalesce();
  const auto indices = mine._indices().contiguous();
  const auto values = mine._values().contiguous();
  const auto n = static_cast<std::size_t>(getSize());
  // How many entries each has is needed before their memory can be made.
  std::vector<std::int64_t> entries(n);
  const std::int64_t own = values.size(0);
  impl_->group().all_gather(&own, entries.data(), 1, coll::DataType::kI64,
                            impl_->call(opts.timeout));
  Tensors all_indices, all_values;
  std::vector<Piece> index_pieces, value_pieces;
  for (std::size_t r = 0; r < n; ++r) {
    all_indices.push_back(at::empty({indices.size(0), entries[r]}, indices.options()));
    auto shape = values.sizes().vec();
    shape[0] = entries[r];
    all_values.push_back(at::empty(shape, values.options()));
    index_pieces.push_back({all_indices[r].data_ptr(), count_of(all_indices[r])});
    value_pieces.push_back({all_values[r].data_ptr(), count_of(all_values[r])});
  }
  impl_->group().all_gather_v({indices.data_ptr(), count_of(indices)}, index_pieces,
                              coll::DataType::kI64, impl_->call(opts.timeout));
  Impl::Job job{OpType::ALLREDUCE, "convoy:sparse_all_reduce", opts.asyncOp, tensors, tensors};
  job.packing->input(values);
  job.after = [tensor, all_indices, all_values] {
    auto sum = at::sparse_coo_tensor(at::cat(all_indices, 1), at::cat(all_values, 0),
                                     tensor.sizes(), tensor.options())
                   .coalesce();
    at::Tensor(tensor).copy_(sum);
  };
  const auto type = element_type(values.scalar_type());
  return impl_->submit(std::move(job), [&](coll::Group& group, auto&& done) {
    return group.all_gather_v_async({values.data_ptr(), count_of(values)}, value_pieces, type,
                                    impl_->call(opts.timeout), done);
  });
}

WorkPtr ConvoyBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const auto refuse = refuse_as("reduce");
  c10d::assertRootRank(refuse, opts.rootRank, getSize());
  c10d::assertRootTensor(refuse, opts.rootTensor, static_cast<int64_t>(tensors.size()));
  c10d::assertSingleElement(refuse, tensors);
  const auto options = impl_->call(opts.reduceOp, opts.timeout);
  const int root = static_cast<int>(opts.rootRank);
  Impl::Job job{OpType::REDUCE, "convoy:reduce", opts.asyncOp, tensors, tensors};
  const bool is_root = getRank() == root;
  const Piece piece = is_root ? job.packing->in_out(tensors[0]) : job.packing->input(tensors[0]);
  const auto type = element_type(tensors[0].scalar_type());
  return impl_->submit(std::move(job), [&](coll::Group& group, auto&& done) {
    return group.reduce_async(piece.data, piece.data, piece.count, type, root, options, done);
  });
}

WorkPtr ConvoyBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                      const c10d::ReduceScatterOptions& opts) {
  const auto refuse = refuse_as("reduce_scatter");
  c10d::assertSingleElementOutput(refuse, outputs);
  c10d::assertScatterInputTensorList(refuse, inputs, getSize());
  const auto options = impl_->call(opts.reduceOp, opts.timeout);
  Impl::Job job{OpType::REDUCE_SCATTER, "convoy:reduce_scatter", opts.asyncOp, inputs[0], outputs};
  std::vector<Piece> pieces;
  for (const auto& tensor : inputs[0]) {
    c10d::assertTypeMatch(refuse, outputs[0].options(), inputs[0], pieces.size());
    pieces.push_back(job.packing->input(tensor));
  }
  const Piece output = job.packing->output(outputs[0]);
  const auto type = element_type(outputs[0].scalar_type());
  return impl_->submit(std::move(job), [&](coll::Group& group, auto&& done) {
    return group.reduce_scatter_v_async(pieces, output, type, options, done);
  });
}

WorkPtr ConvoyBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                            const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(input.numel() == output.numel() * getSize(),
                    "input tensor must be the same size as output size times world size");
  TORCH_CHECK_TYPE(input.scalar_type() == output.scalar_type(),
                   "input tensor must be the same type as the output tensor.");
  const auto options = impl_->call(opts.reduceOp, opts.timeout);
  const auto type = element_type(output.scalar_type());
  if (!opts.asyncOp && is_simple(input) && is_simple(output)) {
    impl_->count();
    impl_->group().reduce_scatter(input.data_ptr(), output.data_ptr(), count_of(output), type,
                                  options);
    return nullptr;
  }
  Impl::Job job{
      OpType::_REDUCE_SCATTER_BASE, "convoy:_reduce_scatter_base", opts.asyncOp, {input}, {output}};
  const Piece from = job.packing->input(input);
  const Piece to = job.packing->output(output);
  return impl_->submit(std::move(job), [&](coll::Group& group, auto&& done) {
    return group.reduce_scatter_async(from.data, to.data, to.count, type, options, done);
  });
}

WorkPtr ConvoyBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::ReduceScatterOptions& opts) {
  const auto refuse = refuse_as("reduce_scatter_tensor_coalesced");
  c10d::assertNonEmpty(refuse, inputs);
  if (inputs.size() != outputs.size())
    refuse("requires input/output tensor lists to have the same length");
  const auto options = impl_->call(opts.reduceOp, opts.timeout);
  Impl::Job job{OpType::COALESCED, "convoy:reduce_scatter", opts.asyncOp, inputs, outputs};
  std::vector<Piece> from, to;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].scalar_type() != outputs[0].scalar_type() ||
        outputs[i].scalar_type() != outputs[0].scalar_type()) {
      refuse("tensors must all have the same type");
    }
    if (inputs[i].numel() != outputs[i].numel() * getSize()) {
      refuse("input tensor must be the same size as output size times world size");
    }
    from.push_back(job.packing->input(inputs[i]));
    to.push_back(job.packing->output(outputs[i]));
  }
  const auto type = element_type(outputs[0].scalar_type());
  return impl_->submit(std::move(job), [&](coll::Group& group, auto&& done) {
    return group.reduce_scatter_coalesced_async(from, to, type, options, done);
  });
}

// --- moving ---

WorkPtr ConvoyBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const auto refuse = refuse_as("broadcast");
  c10d::assertRootRank(refuse, opts.rootRank, getSize());
  c10d::assertRootTensor(refuse, opts.rootTensor, static_cast<int64_t>(tensors.size()));
  c10d::assertDense(refuse, tensors);
  c10d::assertTypeAndSizesMatch(refuse, tensors);
  const int root = static_cast<int>(opts.rootRank);
  const at::Tensor chosen = tensors[static_cast<std::size_t>(opts.rootTensor)];
  const auto type = element_type(chosen.scalar_type());
  const auto options = impl_->call(opts.timeout);
  if (!opts.asyncOp && tensors.size() == 1 && is_simple(chosen)) {
    impl_->count();
    impl_->group().broadcast(chosen.data_ptr(), chosen.data_ptr(), count_of(chosen), type, root,
                             options);
    return nullptr;
  }
  Impl::Job job{OpType::BROADCAST, "convoy:broadcast", opts.asyncOp, tensors, tensors};
  const Piece piece = job.packing->in_out(chosen);
  if (tensors.size() > 1) {
    job.after = [tensors, chosen] {
      for (const auto& tensor : tensors) {
        if (!tensor.is_same(chosen)) tensor.copy_(chosen);
      }
    };
  }
  return impl_->submit(std::move(job), [&](coll::Group& group, auto&& done) {
    return group.broadcast_async(piece.data, piece.data, piece.count, type, root, options, done);
  });
}

WorkPtr ConvoyBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::AllgatherOptions& opts) {
  const auto refuse = refuse_as("allgather");
  if (inputs.empty()) refuse("requires non-empty input tensor list");
  if (inputs.size() != outputs.size()) {
    refuse("requires input/output tensor lists to have the same length");
  }
  const std::size_t each = inputs.size();
  for (std::size_t i = 0; i < each; ++i) {
    const std::size_t expected = each * static_cast<std::size_t>(getSize());
    if (outputs[i].size() != expected) {
      refuse("invalid output tensor list at index " + std::to_string(i) + " (expected length " +
             std::to_string(expected) + ", got " + std::to_string(outputs[i].size()) + ")");
    }
    for (std::size_t k = 0; k < expected; ++k) {
      c10d::assertTypeMatch(refuse, inputs[0].options(), outputs[i], k);
    }
  }
  const auto options = impl_->call(opts.timeout);
  const auto type = element_type(inputs[0].scalar_type());
  if (each == 1) {
    Impl::Job job{OpType::ALLGATHER, "convoy:all_gather", opts.asyncOp, inputs, outputs[0]};
    const Piece from = job.packing->input(inputs[0]);
    std::vector<Piece> to;
    for (const auto& tensor : outputs[0]) to.push_back(job.packing->output(tensor));
    return impl_->submit(std::move(job), [&](coll::Group& group, auto&& done) {
      return group.all_gather_v_async(from, to, type, options, done);
    });
  }
  // Several inputs: rank r's input j is at r * each + j of every output list.
  c10d::assertTypeAndSizesMatch(refuse, inputs);
  const at::AutoDispatchBelowAutograd guard;
  const at::Tensor mine = at::stack(inputs);
  auto shape = mine.sizes().vec();
  shape[0] *= getSize();
  const at::Tensor all = at::empty(shape, mine.options());
  Tensors flat;
  for (const auto& list : outputs) flat.insert(flat.end(), list.begin(), list.end());
  Impl::Job job{OpType::ALLGATHER, "convoy:all_gather", opts.asyncOp, inputs, flat};
  job.after = [outputs, all] {
    for (const auto& list : outputs) {
      for (std::size_t k = 0; k < list.size(); ++k) {
        list[k].copy_(all[static_cast<int64_t>(k)]);
      }
    }
  };
  const Piece from = job.packing->input(mine);
  const Piece to = job.packing->output(all);
  return impl_->submit(std::move(job), [&](coll::Group& group, auto&& done) {
    return group.all_gather_async(from.data, to.data, from.count, type, options, done);
  });
}

WorkPtr ConvoyBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                       const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(input.numel() * getSize() == output.numel(),
                    "output tensor size must be equal to world_size times input tensor size");
  TORCH_CHECK_TYPE(input.scalar_type() == output.scalar_type(),
                   "output tensor must have the same type as input tensor");
  const auto options = impl_->call(opts.timeout);
  const auto type = element_type(input.scalar_type());
  if (!opts.asyncOp && is_simple(input) && is_simple(output)) {
    impl_->count();
    impl_->group().all_gather(input.data_ptr(), output.data_ptr(), count_of(input), type, options);
    return nullptr;
  }
  Impl::Job job{
      OpType::_ALLGATHER_BASE, "convoy:_all_gather_base", opts.asyncOp, {input}, {output}};
  const Piece from = job.packing->input(input);
  const Piece to = job.packing->output(output);
  return impl_->submit(std::move(job), [&](coll::Group& group, auto&& done) {
    return group.all_gather_async(from.data, to.data, from.count, type, options, done);
  });
}

WorkPtr ConvoyBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& opts) {
  const auto refuse = refuse_as("allgather_coalesced");
  if (inputs.empty()) refuse("requires non-empty input tensor list");
  if (outputs.size() != static_cast<std::size_t>(getSize())) {
    refuse("output lists should be equal to world size");
  }
  for (const auto& list : outputs) {
    if (list.size() != inputs.size()) {
      refuse("invalid output size: (expected length " + std::to_string(inputs.size()) + ", got " +
             std::to_string(list.size()) + ")");
    }
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (!list[i].sizes().equals(inputs[i].sizes())) {
        refuse("invalid size of output tensor at index " + std::to_string(i));
      }
      if (list[i].scalar_type() != inputs[i].scalar_type()) {
        refuse("invalid tensor type at index " + std::to_string(i));
      }
    }
  }
  // As bytes, whatever their types; each input's outputs side by side.
  Tensors flat, together;
  for (const auto& list : outputs) flat.insert(flat.end(), list.begin(), list.end());
  Impl::Job job{OpType::ALLGATHER_COALESCED, "convoy:all_gather", opts.asyncOp, inputs, flat};
  std::vector<Piece> from, to;
  for (const auto& input : inputs) {
    together.push_back(at::empty({getSize(), input.numel()}, input.options()));
    from.push_back(Packing::bytes(job.packing->input(input), input));
    to.push_back(Packing::bytes(job.packing->output(together.back()), input));
  }
  job.after = [outputs, together] {
    for (std::size_t r = 0; r < outputs.size(); ++r) {
      for (std::size_t i = 0; i < together.size(); ++i) {
        outputs[r][i].copy_(together[i][static_cast<int64_t>(r)].view(outputs[r][i].sizes()));
      }
    }
  };
  return impl_->submit(std::move(job), [&](coll::Group& group, auto&& done) {
    return group.all_gather_coalesced_async(from, to, coll::DataType::kU8,
                                            impl_->call(opts.timeout), done);
  });
}

WorkPtr ConvoyBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::AllgatherOptions& opts) {
  const auto refuse = refuse_as("allgather_into_tensor_coalesced");
  c10d::assertNonEmpty(refuse, inputs);
  if (inputs.size() != outputs.size()) {
    refuse("requires input/output tensor lists to have the same length");
  }
  Impl::Job job{OpType::COALESCED, "convoy:all_gather", opts.asyncOp, inputs, outputs};
  std::vector<Piece> from, to;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].scalar_type() != outputs[i].scalar_type()) {
      refuse("output tensor must have the same type as input tensor");
    }
    if (inputs[i].numel() * getSize() != outputs[i].numel()) {
      refuse("output tensor size must be equal to world_size times input tensor size");
    }
    from.push_back(Packing::bytes(job.packing->input(inputs[i]), inputs[i]));
    to.push_back(Packing::bytes(job.packing->output(outputs[i]), outputs[i]));
  }
  return impl_->submit(std::move(job), [&](coll::Group& group, auto&& done) {
    return group.all_gather_coalesced_async(from, to, coll::DataType::kU8,
                                            impl_->call(opts.timeout), done);
  });
}

WorkPtr ConvoyBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::GatherOptions& opts) {
  const auto refuse = refuse_as("gather");
  c10d::assertRootRank(refuse, opts.rootRank, getSize());
  c10d::assertSingleElementInput(refuse, inputs);
  const int root = static_cast<int>(opts.rootRank);
  Impl::Job job{OpType::GATHER, "convoy:gather", opts.asyncOp, inputs, {}};
  const Piece from = job.packing->input(inputs[0]);
  std::vector<Piece> to;
  if (getRank() == root) {
    c10d::assertGatherOutputTensorList(refuse, outputs, getSize());
    for (std::size_t i = 0; i < outputs[0].size(); ++i) {
      c10d::assertTypeMatch(refuse, inputs[0].options(), outputs[0], i);
      to.push_back(job.packing->output(outputs[0][i]));
    }
    job.outputs = outputs[0];
  } else {
    c10d::assertEmptyOutputTensorList(refuse, outputs);
  }
  const auto type = element_type(inputs[0].scalar_type());
  return impl_->submit(std::move(job), [&](coll::Group& group, auto&& done) {
    return group.gather_v_async(from, to, type, root, impl_->call(opts.timeout), done);
  });
}

WorkPtr ConvoyBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                               const c10d::ScatterOptions& opts) {
  const auto refuse = refuse_as("scatter");
  c10d::assertRootRank(refuse, opts.rootRank, getSize());
  c10d::assertSingleElementOutput(refuse, outputs);
  const int root = static_cast<int>(opts.rootRank);
  Impl::Job job{OpType::SCATTER, "convoy:scatter", opts.asyncOp, {}, outputs};
  const Piece to = job.packing->output(outputs[0]);
  std::vector<Piece> from;
  if (getRank() == root) {
    c10d::assertScatterInputTensorList(refuse, inputs, getSize());
    for (std::size_t i = 0; i < inputs[0].size(); ++i) {
      c10d::assertTypeMatch(refuse, outputs[0].options(), inputs[0], i);
      from.push_back(job.packing->input(inputs[0][i]));
    }
    job.inputs = inputs[0];
  } else {
    c10d::assertEmptyInputTensorList(refuse, inputs);
  }
  const auto type = element_type(outputs[0].scalar_type());
  return impl_->submit(std::move(job), [&](coll::Group& group, auto&& done) {
    return group.scatter_v_async(from, to, type, root, impl_->call(opts.timeout), done);
  });
}

WorkPtr ConvoyBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                     std::vector<int64_t>& output_splits,
                                     std::vector<int64_t>& input_splits,
                                     const c10d::AllToAllOptions& opts) {
  c10d::checkSplitSizes(input_splits, input, getSize());
  c10d::checkSplitSizes(output_splits, output, getSize());
  TORCH_CHECK_TYPE(input.scalar_type() == output.scalar_type(),
                   "output tensor must have the same type as input tensor");
  Impl::Job job{OpType::ALLTOALL_BASE, "convoy:all_to_all", opts.asyncOp, {input}, {output}};
  const auto from = cut(job.packing->input(input), input, input_splits, getSize());
  const auto to = cut(job.packing->output(output), output, output_splits, getSize());
  const auto type = element_type(input.scalar_type());
  return impl_->submit(std::move(job), [&](coll::Group& group, auto&& done) {
    return group.all_to_all_v_async(from, to, type, impl_->call(opts.timeout), done);
  });
}

WorkPtr ConvoyBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                const c10d::AllToAllOptions& opts) {
  const auto refuse = refuse_as("alltoall");
  const auto n = static_cast<std::size_t>(getSize());
  if (inputs.size() != n || outputs.size() != n) {
    refuse("requires input and output lists of " + std::to_string(n) + " tensors");
  }
  Impl::Job job{OpType::ALLTOALL, "convoy:all_to_all", opts.asyncOp, inputs, outputs};
  std::vector<Piece> from, to;
  for (std::size_t r = 0; r < n; ++r) {
    c10d::assertTypeMatch(refuse, inputs[0].options(), inputs, r);
    c10d::assertTypeMatch(refuse, inputs[0].options(), outputs, r);
    from.push_back(job.packing->input(inputs[r]));
    to.push_back(job.packing->output(outputs[r]));
  }
  const auto type = element_type(inputs[0].scalar_type());
  return impl_->submit(std::move(job), [&](coll::Group& group, auto&& done) {
    return group.all_to_all_v_async(from, to, type, impl_->call(opts.timeout), done);
  });
}

// --- messages ---

WorkPtr ConvoyBackend::send(Tensors& tensors, int target, int tag) {
  c10d::assertSingleElement(refuse_as("send"), tensors);
  Impl::Job job{OpType::SEND, "convoy:send", true, tensors, tensors};
  const Piece piece = job.packing->input(tensors[0]);
  const auto type = element_type(tensors[0].scalar_type());
  const coll::MessageOptions options{.tag = static_cast<std::uint32_t>(tag),
                                     .timeout = impl_->timeout(c10d::kUnsetTimeout)};
  return impl_->submit(std::move(job), [&](coll::Group& group, auto&& done) {
    return group.send_async(piece.data, piece.count, type, target, options, done);
  });
}

WorkPtr ConvoyBackend::recv(Tensors& tensors, int source, int tag) {
  c10d::assertSingleElement(refuse_as("recv"), tensors);
  Impl::Job job{source == coll::kAnyRank ? OpType::RECVANYSOURCE : OpType::RECV, "convoy:recv",
                true, tensors, tensors};
  const Piece piece = job.packing->output(tensors[0]);
  const auto type = element_type(tensors[0].scalar_type());
  const coll::MessageOptions options{.tag = static_cast<std::uint32_t>(tag),
                                     .timeout = impl_->timeout(c10d::kUnsetTimeout)};
  return impl_->submit(std::move(job), [&](coll::Group& group, auto&& done) {
    return group.recv_async(piece.data, piece.count, type, source, options, done);
  });
}

WorkPtr ConvoyBackend::recvAnysource(Tensors& tensors, int tag) {
  return recv(tensors, coll::kAnyRank, tag);
}

WorkPtr ConvoyBackend::barrier(const c10d::BarrierOptions& opts) {
  if (!opts.asyncOp) {
    impl_->count();
    impl_->group().barrier(impl_->call(opts.timeout));
    return nullptr;
  }
  return impl_->submit({OpType::BARRIER, "convoy:barrier", true, {}, {}},
                       [&](coll::Group& group, auto&& done) {
                         return group.barrier_async(impl_->call(opts.timeout), done);
                       });
}

void ConvoyBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool) {
  impl_->count();
  impl_->group().monitored_barrier(impl_->call(opts.timeout));
}

// --- the group ---

uint64_t ConvoyBackend::getSequenceNumberForGroup() { return impl_->number(); }

c10::intrusive_ptr<c10d::Backend> ConvoyBackend::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  if (mine == ranks.end()) return nullptr;
  // Subsets of the same name are apart.
  std::string members = "members";
  for (const int rank : ranks) members = concat(members, "-", rank);
  const auto own = c10::make_intrusive<c10d::PrefixStore>(members, store);
  return merge(own, opts, static_cast<int>(mine - ranks.begin()), static_cast<int>(ranks.size()));
}

c10::intrusive_ptr<c10d::Backend> ConvoyBackend::merge(
    const c10::intrusive_ptr<c10d::Store>& store,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts, const int& rank, const int& size) {
  auto options = c10::make_intrusive<Options>(impl_->options());
  if (opts) {
    options->timeout = opts->timeout;
    options->group_name = opts->group_name;
    options->group_desc = opts->group_desc;
    options->global_ranks_in_group = opts->global_ranks_in_group;
  }
  const auto prefixed =
      c10::make_intrusive<c10d::PrefixStore>("convoy/" + options->group_name, store);
  return c10::make_intrusive<ConvoyBackend>(c10::intrusive_ptr<c10d::Store>(prefixed), rank, size,
                                            options);
}

at::Tensor ConvoyBackend::allocateTensor(long numel, at::TensorOptions options) {
  return empty_shared({numel}, options);
}

std::shared_ptr<c10::Allocator> ConvoyBackend::getMemAllocator() {
  return {shared_allocator(), [](c10::Allocator*) {}};  // it lives forever
}

void ConvoyBackend::abort() { impl_->group().abort("abort() was called"); }
void ConvoyBackend::shutdown() { impl_->group().close(); }

c10d::ErrorType ConvoyBackend::getError() {
  return impl_->group().broken() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

}  // namespace convoy

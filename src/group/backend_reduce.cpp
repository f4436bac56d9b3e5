// ConvoyBackend: operations that combine.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "base/concat.h"
#include "base/error.h"
#include "base/id.h"
#include "group/backend_impl.h"

namespace convoy {
namespace {

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

}  // namespace

WorkPtr ConvoyBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const auto refuse = refuse_as("allreduce");
  c10d::assertNonEmpty(refuse, tensors);
  if (tensors[0].layout() == c10::kSparse) return allreduce_sparse(tensors, opts);
  const at::Tensor& first = tensors[0];
  const auto options = impl_->on(impl_->call(opts.reduceOp, opts.timeout), first);
  if (impl_->alone(opts.asyncOp) && tensors.size() == 1 && is_simple(first)) {
    return impl_->at_once(
        OpType::ALLREDUCE, "convoy:all_reduce", first,
        impl_->calls().all_reduce(first.data_ptr(), first.data_ptr(), count_of(first),
                                  element_type(first.scalar_type()), options));
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
  return impl_->submit(std::move(job), impl_->calls().all_reduce(piece.data, piece.data,
                                                                 piece.count, type, options));
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
  for (const auto& tensor : tensors) {
    pieces.push_back(impl_->with_shape(job.packing->in_out(tensor), tensor));
  }
  const auto type = element_type(tensors[0].scalar_type());
  return impl_->submit(std::move(job),
                       impl_->calls().all_reduce_coalesced(pieces, pieces, type, options));
}

// Sums of sparse tensors: everyone gathers everyone's entries, of which each may have another
// number.
WorkPtr ConvoyBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const auto refuse = refuse_as("allreduce");
  c10d::assertNonEmpty(refuse, tensors);
  const at::Tensor& tensor = tensors[0];
  for (const auto& one : tensors) {
    if (one.layout() != c10::kSparse) refuse("requires sparse tensors");
    if (one.scalar_type() != tensor.scalar_type()) refuse("invalid tensor type");
    if (!one.sizes().equals(tensor.sizes()) || one.sparse_dim() != tensor.sparse_dim()) {
      refuse("invalid tensor size");
    }
  }
  const auto options = impl_->call(opts.reduceOp, opts.timeout);
  if (options.op != coll::ReduceOp::kSum) {
    refuse("unsupported reduction operation for sparse tensors");
  }
  const auto type = element_type(tensor.scalar_type());

  const at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor mine = tensor;
  for (std::size_t i = 1; i < tensors.size(); ++i) mine = mine + tensors[i];
  if (!mine.is_coalesced()) mine = mine.coalesce();
  const auto indices = mine._indices().contiguous();
  const auto values = mine._values().contiguous();
  const auto n = static_cast<std::size_t>(getSize());
  // How many entries each has is needed before their memory can be made; with it goes what must be
  // equal.
  const std::string shape = concat(c10::str(tensor.sizes()), ", ", tensor.sparse_dim(),
                                   " of them sparse, ", c10::toString(tensor.scalar_type()));
  const std::int64_t own[] = {values.size(0), static_cast<std::int64_t>(hash_text(shape))};
  std::vector<std::int64_t> all(2 * n);
  impl_->group().all_gather(own, all.data(), 2, coll::DataType::kI64, impl_->call(opts.timeout));
  for (std::size_t r = 0; r < n; ++r) {
    if (all[2 * r + 1] == own[1]) continue;
    fail(ErrorKind::kInvalidArgument, "all_reduce of sparse tensors, rank ", getRank(), " of ", n,
         ": ranks disagree: Sparse dimensions do not match: rank ", r,
         " has another shape or type than this one's ", shape);
  }
  Tensors all_indices, all_values;
  std::vector<Piece> index_pieces, value_pieces;
  for (std::size_t r = 0; r < n; ++r) {
    all_indices.push_back(at::empty({indices.size(0), all[2 * r]}, indices.options()));
    auto sizes = values.sizes().vec();
    sizes[0] = all[2 * r];
    all_values.push_back(at::empty(sizes, values.options()));
    index_pieces.push_back({all_indices[r].data_ptr(), count_of(all_indices[r])});
    value_pieces.push_back({all_values[r].data_ptr(), count_of(all_values[r])});
  }
  impl_->group().run(impl_->calls().all_gather_v({indices.data_ptr(), count_of(indices)},
                                                 index_pieces, coll::DataType::kI64,
                                                 impl_->call(opts.timeout)));
  Impl::Job job{OpType::ALLREDUCE, "convoy:sparse_all_reduce", opts.asyncOp, tensors, tensors};
  const Piece from = job.packing->input(values);
  job.after = [tensors, all_indices, all_values] {
    const auto sum = at::sparse_coo_tensor(at::cat(all_indices, 1), at::cat(all_values, 0),
                                           tensors[0].sizes(), tensors[0].options())
                         .coalesce();
    for (const auto& one : tensors) at::Tensor(one).copy_(sum);
  };
  return impl_->submit(std::move(job), impl_->calls().all_gather_v(from, value_pieces, type,
                                                                   impl_->call(opts.timeout)));
}

WorkPtr ConvoyBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const auto refuse = refuse_as("reduce");
  c10d::assertRootRank(refuse, opts.rootRank, getSize());
  c10d::assertRootTensor(refuse, opts.rootTensor, static_cast<int64_t>(tensors.size()));
  c10d::assertSingleElement(refuse, tensors);
  const auto options = impl_->on(impl_->call(opts.reduceOp, opts.timeout), tensors[0]);
  const int root = static_cast<int>(opts.rootRank);
  Impl::Job job{OpType::REDUCE, "convoy:reduce", opts.asyncOp, tensors, tensors};
  const bool is_root = getRank() == root;
  const Piece piece = is_root ? job.packing->in_out(tensors[0]) : job.packing->input(tensors[0]);
  const auto type = element_type(tensors[0].scalar_type());
  return impl_->submit(std::move(job), impl_->calls().reduce(piece.data, piece.data, piece.count,
                                                             type, root, options));
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
    pieces.push_back(impl_->with_shape(job.packing->input(tensor), tensor));
  }
  const Piece output = impl_->with_shape(job.packing->output(outputs[0]), outputs[0]);
  const auto type = element_type(outputs[0].scalar_type());
  return impl_->submit(std::move(job),
                       impl_->calls().reduce_scatter_v(pieces, output, type, options));
}

WorkPtr ConvoyBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                            const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(input.numel() == output.numel() * getSize(),
                    "input tensor must be the same size as output size times world size");
  TORCH_CHECK_TYPE(input.scalar_type() == output.scalar_type(),
                   "input tensor must be the same type as the output tensor.");
  // What is combined are the inputs; the output is this rank's own affair.
  const auto options = impl_->on(impl_->call(opts.reduceOp, opts.timeout), input);
  const auto type = element_type(output.scalar_type());
  if (impl_->alone(opts.asyncOp) && is_simple(input) && is_simple(output)) {
    return impl_->at_once(OpType::_REDUCE_SCATTER_BASE, "convoy:_reduce_scatter_base", input,
                          impl_->calls().reduce_scatter(input.data_ptr(), output.data_ptr(),
                                                        count_of(output), type, options),
                          output);
  }
  Impl::Job job{
      OpType::_REDUCE_SCATTER_BASE, "convoy:_reduce_scatter_base", opts.asyncOp, {input}, {output}};
  const Piece from = job.packing->input(input);
  const Piece to = job.packing->output(output);
  return impl_->submit(std::move(job),
                       impl_->calls().reduce_scatter(from.data, to.data, to.count, type, options));
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
    from.push_back(impl_->with_shape(job.packing->input(inputs[i]), inputs[i]));
    to.push_back(job.packing->output(outputs[i]));
  }
  const auto type = element_type(outputs[0].scalar_type());
  return impl_->submit(std::move(job),
                       impl_->calls().reduce_scatter_coalesced(from, to, type, options));
}

}  // namespace convoy

// ConvoyBackend: operations that move.
#include <ATen/Functions.h>

#include "group/backend_impl.h"

namespace convoy {
namespace {

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

// Of tensors that travel as bytes: ranks compare their types by it.
std::uint64_t types_tag(const Tensors& tensors) {
  std::uint64_t tag = 0;
  for (const auto& tensor : tensors) {
    tag = tag * 64 + static_cast<std::uint64_t>(tensor.scalar_type()) + 1;
    tag ^= tag >> 48;
  }
  return tag & ~coll::Signature::kHashed;
}

}  // namespace

WorkPtr ConvoyBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const auto refuse = refuse_as("broadcast");
  c10d::assertRootRank(refuse, opts.rootRank, getSize());
  c10d::assertRootTensor(refuse, opts.rootTensor, static_cast<int64_t>(tensors.size()));
  c10d::assertDense(refuse, tensors);
  c10d::assertTypeAndSizesMatch(refuse, tensors);
  const int root = static_cast<int>(opts.rootRank);
  const at::Tensor chosen = tensors[static_cast<std::size_t>(opts.rootTensor)];
  const auto type = element_type(chosen.scalar_type());
  const auto options = impl_->on(impl_->call(opts.timeout), chosen);
  if (impl_->alone(opts.asyncOp) && tensors.size() == 1 && is_simple(chosen)) {
    return impl_->at_once(OpType::BROADCAST, "convoy:broadcast", chosen,
                          impl_->calls().broadcast(chosen.data_ptr(), chosen.data_ptr(),
                                                   count_of(chosen), type, root, options));
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
  return impl_->submit(std::move(job), impl_->calls().broadcast(piece.data, piece.data, piece.count,
                                                                type, root, options));
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
    const Piece from = impl_->with_shape(job.packing->input(inputs[0]), inputs[0]);
    std::vector<Piece> to;
    for (const auto& tensor : outputs[0]) {
      to.push_back(impl_->with_shape(job.packing->output(tensor), tensor));
    }
    return impl_->submit(std::move(job), impl_->calls().all_gather_v(from, to, type, options));
  }
  // Several inputs: rank r's input j is at r * each + j of every output list.
  c10d::assertTypeAndSizesMatch(refuse, inputs);
  for (const auto& list : outputs) {
    c10d::assertTypeAndSizesMatch(refuse, list, inputs[0].options(), inputs[0].sizes());
  }
  const at::AutoDispatchBelowAutograd guard;
  const at::Tensor mine = at::stack(inputs);
  auto shape = mine.sizes().vec();
  shape[0] *= getSize();
  const at::Tensor all = at::empty(shape, mine.options());
  Tensors flat;
  for (const auto& list : outputs) flat.insert(flat.end(), list.begin(), list.end());
  Impl::Job job{OpType::ALLGATHER, "convoy:all_gather", opts.asyncOp, inputs, flat};
  job.row = outputs[0].size();
  job.after = [outputs, all] {
    for (const auto& list : outputs) {
      for (std::size_t k = 0; k < list.size(); ++k) {
        list[k].copy_(all[static_cast<int64_t>(k)]);
      }
    }
  };
  const Piece from = job.packing->input(mine);
  const Piece to = job.packing->output(all);
  const auto stacked = impl_->on(options, mine);
  return impl_->submit(std::move(job),
                       impl_->calls().all_gather(from.data, to.data, from.count, type, stacked));
}

WorkPtr ConvoyBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                       const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(input.numel() * getSize() == output.numel(),
                    "output tensor size must be equal to world_size times input tensor size");
  TORCH_CHECK_TYPE(input.scalar_type() == output.scalar_type(),
                   "output tensor must have the same type as input tensor");
  // The output is this rank's own affair: [2n] and [2, n] are both in use.
  const auto options = impl_->on(impl_->call(opts.timeout), input);
  const auto type = element_type(input.scalar_type());
  if (impl_->alone(opts.asyncOp) && is_simple(input) && is_simple(output)) {
    return impl_->at_once(OpType::_ALLGATHER_BASE, "convoy:_all_gather_base", input,
                          impl_->calls().all_gather(input.data_ptr(), output.data_ptr(),
                                                    count_of(input), type, options),
                          output);
  }
  Impl::Job job{
      OpType::_ALLGATHER_BASE, "convoy:_all_gather_base", opts.asyncOp, {input}, {output}};
  const Piece from = job.packing->input(input);
  const Piece to = job.packing->output(output);
  return impl_->submit(std::move(job),
                       impl_->calls().all_gather(from.data, to.data, from.count, type, options));
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
  auto options = impl_->call(opts.timeout);
  options.tag = types_tag(inputs);
  // As bytes, whatever their types; each input's outputs side by side.
  Tensors flat, together;
  for (const auto& list : outputs) flat.insert(flat.end(), list.begin(), list.end());
  Impl::Job job{OpType::ALLGATHER_COALESCED, "convoy:all_gather", opts.asyncOp, inputs, flat};
  if (outputs.size() > 1) job.row = inputs.size();
  std::vector<Piece> from, to;
  for (const auto& input : inputs) {
    together.push_back(at::empty({getSize(), input.numel()}, input.options()));
    from.push_back(impl_->with_shape(Packing::bytes(job.packing->input(input), input), input));
    to.push_back(Packing::bytes(job.packing->output(together.back()), input));
  }
  job.after = [outputs, together] {
    for (std::size_t r = 0; r < outputs.size(); ++r) {
      for (std::size_t i = 0; i < together.size(); ++i) {
        outputs[r][i].copy_(together[i][static_cast<int64_t>(r)].view(outputs[r][i].sizes()));
      }
    }
  };
  return impl_->submit(std::move(job),
                       impl_->calls().all_gather_coalesced(from, to, coll::DataType::kU8, options));
}

WorkPtr ConvoyBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::AllgatherOptions& opts) {
  const auto refuse = refuse_as("allgather_into_tensor_coalesced");
  c10d::assertNonEmpty(refuse, inputs);
  if (inputs.size() != outputs.size()) {
    refuse("requires input/output tensor lists to have the same length");
  }
  auto options = impl_->call(opts.timeout);
  options.tag = types_tag(inputs);
  Impl::Job job{OpType::COALESCED, "convoy:all_gather", opts.asyncOp, inputs, outputs};
  std::vector<Piece> from, to;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].scalar_type() != outputs[i].scalar_type()) {
      refuse("output tensor must have the same type as input tensor");
    }
    if (inputs[i].numel() * getSize() != outputs[i].numel()) {
      refuse("output tensor size must be equal to world_size times input tensor size");
    }
    from.push_back(
        impl_->with_shape(Packing::bytes(job.packing->input(inputs[i]), inputs[i]), inputs[i]));
    to.push_back(Packing::bytes(job.packing->output(outputs[i]), outputs[i]));
  }
  return impl_->submit(std::move(job),
                       impl_->calls().all_gather_coalesced(from, to, coll::DataType::kU8, options));
}

WorkPtr ConvoyBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::GatherOptions& opts) {
  const auto refuse = refuse_as("gather");
  c10d::assertRootRank(refuse, opts.rootRank, getSize());
  c10d::assertSingleElementInput(refuse, inputs);
  const int root = static_cast<int>(opts.rootRank);
  Impl::Job job{OpType::GATHER, "convoy:gather", opts.asyncOp, inputs, {}};
  const Piece from = impl_->with_shape(job.packing->input(inputs[0]), inputs[0]);
  std::vector<Piece> to;
  if (getRank() == root) {
    c10d::assertGatherOutputTensorList(refuse, outputs, getSize());
    for (std::size_t i = 0; i < outputs[0].size(); ++i) {
      c10d::assertTypeMatch(refuse, inputs[0].options(), outputs[0], i);
      to.push_back(impl_->with_shape(job.packing->output(outputs[0][i]), outputs[0][i]));
    }
    job.outputs = outputs[0];
  } else {
    c10d::assertEmptyOutputTensorList(refuse, outputs);
  }
  const auto type = element_type(inputs[0].scalar_type());
  return impl_->submit(std::move(job),
                       impl_->calls().gather_v(from, to, type, root, impl_->call(opts.timeout)));
}

WorkPtr ConvoyBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                               const c10d::ScatterOptions& opts) {
  const auto refuse = refuse_as("scatter");
  c10d::assertRootRank(refuse, opts.rootRank, getSize());
  c10d::assertSingleElementOutput(refuse, outputs);
  const int root = static_cast<int>(opts.rootRank);
  Impl::Job job{OpType::SCATTER, "convoy:scatter", opts.asyncOp, {}, outputs};
  const Piece to = impl_->with_shape(job.packing->output(outputs[0]), outputs[0]);
  std::vector<Piece> from;
  if (getRank() == root) {
    c10d::assertScatterInputTensorList(refuse, inputs, getSize());
    for (std::size_t i = 0; i < inputs[0].size(); ++i) {
      c10d::assertTypeMatch(refuse, outputs[0].options(), inputs[0], i);
      from.push_back(impl_->with_shape(job.packing->input(inputs[0][i]), inputs[0][i]));
    }
    job.inputs = inputs[0];
  } else {
    c10d::assertEmptyInputTensorList(refuse, inputs);
  }
  const auto type = element_type(outputs[0].scalar_type());
  return impl_->submit(std::move(job),
                       impl_->calls().scatter_v(from, to, type, root, impl_->call(opts.timeout)));
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
  return impl_->submit(std::move(job),
                       impl_->calls().all_to_all_v(from, to, type, impl_->call(opts.timeout)));
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
    from.push_back(impl_->with_shape(job.packing->input(inputs[r]), inputs[r]));
    to.push_back(impl_->with_shape(job.packing->output(outputs[r]), outputs[r]));
  }
  const auto type = element_type(inputs[0].scalar_type());
  return impl_->submit(std::move(job),
                       impl_->calls().all_to_all_v(from, to, type, impl_->call(opts.timeout)));
}

}  // namespace convoy

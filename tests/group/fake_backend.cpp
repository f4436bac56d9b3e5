#include "group/fake_backend.h"

namespace convoy::test {
namespace {

using Tensors = std::vector<at::Tensor>;

void check_equal_sizes(const Tensors& tensors, const at::Tensor& like) {
  for (const auto& tensor : tensors) {
    TORCH_CHECK(tensor.sizes().equals(like.sizes()), "fake: tensors of a list differ in size");
  }
}

template <class Options>
Options at_once(Options options) {
  options.asyncOp = false;
  return options;
}

}  // namespace

FakeBackend::FakeBackend(c10::intrusive_ptr<ConvoyBackend> inner)
    : Backend(inner->getRank(), inner->getSize()),
      inner_(std::move(inner)),
      thread_([this] { serve(); }) {
  init();
}

FakeBackend::~FakeBackend() {
  queue_.lock()->closed = true;
  queue_.notify();
}

void FakeBackend::release() {
  queue_.lock()->held = false;
  queue_.notify();
}

void FakeBackend::serve() {
  for (;;) {
    auto queue = queue_.lock();
    queue.wait(Deadline::never(),
               [&] { return queue->closed || (!queue->held && !queue->jobs.empty()); });
    if (queue->jobs.empty()) return;
    const auto job = std::move(queue->jobs.front());
    queue->jobs.pop_front();
    queue.unlock();
    job();
  }
}

void FakeBackend::FakeWork::run(const std::function<int()>& operation) {
  try {
    source_ = operation();
    finish();
  } catch (...) {
    finish(std::current_exception());
  }
}

FakeBackend::WorkPtr FakeBackend::enqueue(std::function<int()> operation) {
  auto work = c10::make_intrusive<FakeWork>(getRank());
  queue_.lock()->jobs.push_back([work, operation = std::move(operation)] { work->run(operation); });
  queue_.notify();
  return work;
}

// Messages must not block each other: they begin at once and end apart.
FakeBackend::WorkPtr FakeBackend::message(const std::function<WorkPtr()>& operation) {
  const auto inner = operation();
  return enqueue([inner] {
    inner->wait();
    return inner->sourceRank();
  });
}

FakeBackend::WorkPtr FakeBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return enqueue([this, tensors, opts = at_once(opts)]() mutable {
    inner_->allreduce(tensors, opts);
    return -1;
  });
}

FakeBackend::WorkPtr FakeBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  return enqueue([this, tensors, opts = at_once(opts)]() mutable {
    inner_->broadcast(tensors, opts);
    return -1;
  });
}

FakeBackend::WorkPtr FakeBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& opts) {
  check_equal_sizes(outputs[0], inputs[0]);
  return enqueue([this, outputs, inputs, opts = at_once(opts)]() mutable {
    inner_->allgather(outputs, inputs, opts);
    return -1;
  });
}

FakeBackend::WorkPtr FakeBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::AllgatherOptions& opts) {
  check_equal_sizes(at::chunk(output, getSize()), input);
  return enqueue([this, output, input, opts = at_once(opts)]() mutable {
    inner_->_allgather_base(output, input, opts);
    return -1;
  });
}

// Gloo reads the first size of both, also where there is none.
FakeBackend::WorkPtr FakeBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                       const c10d::ReduceScatterOptions& opts) {
  check_equal_sizes(at::chunk(input, getSize()), output);
  return enqueue([this, output, input, opts = at_once(opts)]() mutable {
    inner_->_reduce_scatter_base(output, input, opts);
    return -1;
  });
}

FakeBackend::WorkPtr FakeBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                         const c10d::GatherOptions& opts) {
  if (!outputs.empty()) check_equal_sizes(outputs[0], inputs[0]);
  return enqueue([this, outputs, inputs, opts = at_once(opts)]() mutable {
    inner_->gather(outputs, inputs, opts);
    return -1;
  });
}

FakeBackend::WorkPtr FakeBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                          const c10d::ScatterOptions& opts) {
  if (!inputs.empty()) check_equal_sizes(inputs[0], outputs[0]);
  return enqueue([this, outputs, inputs, opts = at_once(opts)]() mutable {
    inner_->scatter(outputs, inputs, opts);
    return -1;
  });
}

FakeBackend::WorkPtr FakeBackend::send(Tensors& tensors, int target, int tag) {
  return message([&] { return inner_->send(tensors, target, tag); });
}

FakeBackend::WorkPtr FakeBackend::recv(Tensors& tensors, int source, int tag) {
  return message([&] { return inner_->recv(tensors, source, tag); });
}

FakeBackend::WorkPtr FakeBackend::recvAnysource(Tensors& tensors, int tag) {
  return message([&] { return inner_->recvAnysource(tensors, tag); });
}

FakeBackend::WorkPtr FakeBackend::barrier(const c10d::BarrierOptions& opts) {
  return enqueue([this, opts = at_once(opts)]() mutable {
    inner_->barrier(opts);
    return -1;
  });
}

}  // namespace convoy::test

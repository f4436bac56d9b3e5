// ProcessGroup: messages and batches of them.
#include "base/error.h"
#include "base/log.h"
#include "group/convoy_work.h"
#include "group/process_group_impl.h"

namespace convoy {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using std::chrono::milliseconds;

void check_message(const ProcessGroup::Impl& impl, const at::Tensor& tensor, int peer) {
  if (!tensor.defined() || tensor.is_meta()) {
    fail(ErrorKind::kInvalidArgument, "the tensor is ",
         tensor.defined() ? "on device meta and has no values" : "undefined",
         "; pass one in the memory of the CPU");
  }
  const int size = impl.backend->getSize();
  if (peer != kAnySource && (peer < 0 || peer >= size)) {
    fail(ErrorKind::kInvalidArgument, "there is no rank ", peer,
         " in this group; it has ranks 0 to ", size - 1);
  }
}

WorkPtr send(const ProcessGroup::Impl& impl, const at::Tensor& tensor, int target,
             const MessageOptions& options) {
  check_message(impl, tensor, target);
  if (target == kAnySource) {
    fail(ErrorKind::kInvalidArgument, "the target is ", target, "; it must be a rank");
  }
  Tensors tensors = {tensor};
  const auto limit = in_milliseconds(options.timeout);
  if (impl.own && limit != milliseconds::zero()) {
    return impl.own->send(tensors, target, options.tag, limit);
  }
  return impl.backend->send(tensors, target, options.tag);
}

WorkPtr recv(const ProcessGroup::Impl& impl, const at::Tensor& tensor, int source,
             const MessageOptions& options) {
  check_message(impl, tensor, source);
  const auto limit = in_milliseconds(options.timeout);
  changes(tensor);
  Tensors tensors = {tensor};
  if (impl.own && limit != milliseconds::zero()) {
    return impl.own->recv(tensors, source, options.tag, limit);
  }
  return source == kAnySource ? impl.backend->recvAnysource(tensors, options.tag)
                              : impl.backend->recv(tensors, source, options.tag);
}

// c10d's messages have no time-out of their own: a foreign one gets it at the wait.
void finish(const WorkPtr& work, const Timeout& asked) {
  if (!work) return;
  const auto timeout = in_milliseconds(asked);
  if (timeout == milliseconds::zero()) {
    work->wait();
  } else {
    work->wait(timeout);
  }
}

// c10d has no other way to leave a block.
void end_quietly(c10d::Backend& backend) noexcept {
  try {
    backend.endCoalescing();
  } catch (const std::exception& error) {
    log_warn("leaving a batch that failed: ", error.what());
  }
}

}  // namespace

void ProcessGroup::send(const at::Tensor& tensor, int target, const MessageOptions& options,
                        const CallSite& where) const {
  const CallScope scope(where);
  impl().call("send", [&](const c10d::Backend&) {
    if (!impl().own) {
      return finish(convoy::send(impl(), tensor, target, options), options.timeout);
    }
    check_message(impl(), tensor, target);
    impl().own->send_now(tensor, target, options.tag, in_milliseconds(options.timeout));
  });
}

Work ProcessGroup::send_async(const at::Tensor& tensor, int target, const MessageOptions& options,
                              const CallSite& where) const {
  const CallScope scope(where);
  return impl().call("send", [&](const c10d::Backend&) {
    return Work(convoy::send(impl(), tensor, target, options));
  });
}

int ProcessGroup::recv(const at::Tensor& tensor, int source, const MessageOptions& options,
                       const CallSite& where) const {
  const CallScope scope(where);
  return impl().call("recv", [&](const c10d::Backend&) {
    if (impl().own) {
      check_message(impl(), tensor, source);
      changes(tensor);
      return impl().own->recv_now(tensor, source, options.tag, in_milliseconds(options.timeout));
    }
    const auto work = convoy::recv(impl(), tensor, source, options);
    finish(work, options.timeout);
    return source == kAnySource && work ? work->sourceRank() : source;
  });
}

Work ProcessGroup::recv_async(const at::Tensor& tensor, int source, const MessageOptions& options,
                              const CallSite& where) const {
  const CallScope scope(where);
  return impl().call("recv", [&](const c10d::Backend&) {
    return Work(convoy::recv(impl(), tensor, source, options));
  });
}

// --- batches ---

ProcessGroup::Batch ProcessGroup::batch() const {
  impl();
  return Batch(impl_);
}

ProcessGroup::Batch& ProcessGroup::Batch::send(const at::Tensor& tensor, int target, int tag) {
  items_.push_back({true, tensor, target, tag});
  return *this;
}

ProcessGroup::Batch& ProcessGroup::Batch::recv(const at::Tensor& tensor, int source, int tag) {
  items_.push_back({false, tensor, source, tag});
  return *this;
}

void ProcessGroup::Batch::run(const CallSite& where) { start(where).wait(); }

Work ProcessGroup::Batch::start(const CallSite& where) {
  const CallScope scope(where);
  const auto items = std::exchange(items_, {});
  impl_->call("batch", [&](const c10d::Backend& backend) {
    for (const auto& item : items) {
      check_message(*impl_, item.tensor, item.peer);
      if (item.sends && item.peer == kAnySource) {
        fail(ErrorKind::kInvalidArgument, "there is no rank ", item.peer, " in a group of ",
             backend.getSize());
      }
    }
  });
  if (items.empty()) return {};
  const bool together = impl_->backend->supportsCoalescing();
  if (together) impl_->backend->startCoalescing();
  std::vector<WorkPtr> works;
  try {
    for (const auto& item : items) {
      const MessageOptions options{.tag = item.tag};
      works.push_back(item.sends ? convoy::send(*impl_, item.tensor, item.peer, options)
                                 : convoy::recv(*impl_, item.tensor, item.peer, options));
    }
  } catch (...) {
    if (impl_->own) {
      impl_->own->cancel_coalescing();
    } else if (together) {
      end_quietly(*impl_->backend);
    }
    throw;
  }
  if (together) return Work(impl_->backend->endCoalescing());
  return Work(c10::make_intrusive<CoalescedWork>(impl_->backend->getRank(), std::move(works)));
}

}  // namespace convoy

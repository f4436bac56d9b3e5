// Group: messages between two ranks.
#include "base/error.h"
#include "coll/group_impl.h"

namespace convoy::coll {

Transfer Group::Impl::transfer(const Message& message) const {
  const bool sends = message.kind == Message::Kind::kSend;
  check_process(sends ? "send" : "recv");
  const auto refuse = [&](const auto&... why) {
    fail(ErrorKind::kInvalidArgument, sends ? "send, " : "recv, ", describe(), ": ", why...);
  };
  if (static_cast<int>(message.type) >= kDataTypes) refuse("unknown element type");
  if (message.count > SIZE_MAX / 2 / size_of(message.type)) refuse("the count is too large");
  if (message.count != 0 && !message.data) refuse("the buffer is null");
  const bool any = !sends && message.peer == kAnyRank;
  if (!any && (message.peer < 0 || message.peer >= medium_->size())) {
    refuse("there is no rank ", message.peer);
  }
  Transfer transfer;
  transfer.sends = sends;
  transfer.data = static_cast<std::byte*>(message.data);
  transfer.bytes = message.count * size_of(message.type);
  transfer.type = message.type;
  transfer.peer = message.peer;
  transfer.tag = message.tag;
  return transfer;
}

namespace {

Message send_of(const void* data, std::size_t count, DataType type, int target,
                const MessageOptions& options) {
  return {Message::Kind::kSend, const_cast<void*>(data), count, type, target, options.tag};
}

Message receive_of(void* data, std::size_t count, DataType type, int source,
                   const MessageOptions& options) {
  return {Message::Kind::kReceive, data, count, type, source, options.tag};
}

// Called back once, when the last of several transfers is done, with the first error.
Group::Callback last_of(std::size_t count, Group::Callback done) {
  struct State {
    std::mutex mutex;
    std::size_t left;
    std::exception_ptr error;
    Group::Callback done;
  };
  auto state = std::make_shared<State>();
  state->left = count;
  state->done = std::move(done);
  return [state](const std::exception_ptr& error) {
    {
      const std::lock_guard lock(state->mutex);
      if (error && !state->error) state->error = error;
      if (--state->left != 0) return;
    }
    state->done(state->error);
  };
}

}  // namespace

void Group::send(const void* data, std::size_t count, DataType type, int target,
                 const MessageOptions& options) {
  Transfer transfer = impl_->transfer(send_of(data, count, type, target, options));
  if (impl_->messages().try_send(transfer)) return impl_->observer().note(transfer);
  impl_->run(transfer, impl_->observer().begin(transfer), options.timeout);
}

int Group::recv(void* data, std::size_t count, DataType type, int source,
                const MessageOptions& options) {
  Transfer transfer = impl_->transfer(receive_of(data, count, type, source, options));
  const auto seen = impl_->observer().begin(transfer);
  if (impl_->messages().try_receive(transfer)) {
    impl_->observer().end(seen);
  } else {
    impl_->run(transfer, seen, options.timeout);
  }
  return transfer.source;
}

void Group::batch(std::span<const Message> messages, std::chrono::nanoseconds timeout) {
  impl_->check_process("batch");
  std::vector<Transfer> transfers;
  transfers.reserve(messages.size());
  const Deadline deadline = impl_->deadline(timeout);
  for (const Message& message : messages) {
    transfers.push_back(impl_->transfer(message));
    transfers.back().deadline = deadline;
  }
  std::vector<Observer::Seen> seen;
  for (const Transfer& transfer : transfers) seen.push_back(impl_->observer().begin(transfer));
  const auto tell = [&](const std::exception_ptr& error) {
    for (std::size_t i = 0; i < seen.size(); ++i) {
      impl_->observer().end(seen[i], transfers[i].done ? transfers[i].error : error);
    }
  };
  try {
    impl_->messages().run(transfers);
  } catch (...) {
    tell(std::current_exception());
    throw;
  }
  tell(nullptr);
}

Work Group::send_async(const void* data, std::size_t count, DataType type, int target,
                       const MessageOptions& options, Callback done) {
  const Message message = send_of(data, count, type, target, options);
  return batch_async({&message, 1}, options.timeout, std::move(done));
}

Work Group::recv_async(void* data, std::size_t count, DataType type, int source,
                       const MessageOptions& options, Callback done) {
  const Message message = receive_of(data, count, type, source, options);
  return batch_async({&message, 1}, options.timeout, std::move(done));
}

Work Group::batch_async(std::span<const Message> messages, std::chrono::nanoseconds timeout,
                        Callback done) {
  impl_->check_process("batch");
  auto operation = std::make_shared<Work::Messages>(impl_);
  const Deadline deadline = impl_->deadline(timeout);
  for (const Message& message : messages) {
    operation->transfers.push_back(std::make_shared<Transfer>(impl_->transfer(message)));
    operation->transfers.back()->deadline = deadline;
  }
  if (done && messages.empty()) done(nullptr);
  const Callback each =
      done && !messages.empty() ? last_of(messages.size(), std::move(done)) : nullptr;
  Observer& observer = impl_->observer();  // outlives the messages, which closing the group ends
  for (const auto& transfer : operation->transfers) {
    transfer->callback = [&observer, seen = observer.begin(*transfer),
                          each](const std::exception_ptr& error) {
      observer.end(seen, error);
      if (each) each(error);
    };
  }
  impl_->messages().start(operation->transfers);
  return Work(operation);
}

bool Work::Messages::is_done() {
  group->check_process("done");
  for (const auto& transfer : transfers) {
    if (!group->messages().is_done(*transfer)) return false;
  }
  return true;
}

bool Work::Messages::wait_until(const Deadline& deadline) {
  group->check_process("wait");
  // All of them, also after an error: their buffers are in use until they are done.
  std::exception_ptr first;
  for (const auto& transfer : transfers) {
    try {
      if (!group->messages().wait(*transfer, deadline)) return false;
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
  return true;
}

int Work::Messages::sender() {
  group->check_process("source");
  if (transfers.size() != 1 || !is_done()) return -1;
  return transfers.front()->source;
}

}  // namespace convoy::coll

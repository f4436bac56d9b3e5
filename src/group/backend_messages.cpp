// ConvoyBackend: messages, barriers, and blocks of operations that count as one.
#include "base/concat.h"
#include "base/error.h"
#include "base/log.h"
#include "group/backend_impl.h"

namespace convoy {
namespace {

// The words of Gloo's monitored barrier, which programs and tests look for.
std::string monitored_barrier_text(int rank, const std::vector<int>& late, bool wait_all,
                                   std::chrono::milliseconds limit) {
  if (rank == 0 && limit.count() == 0) {
    return "[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms";
  }
  if (rank != 0) {
    return concat("Rank ", rank,
                  " successfully reached monitoredBarrier, but received errors while waiting for "
                  "send/recv from rank 0. Please check rank 0 logs for faulty rank.");
  }
  std::string ranks = concat("Rank ", late.front());
  if (wait_all) {
    ranks = concat("Ranks ", late.front());
    for (std::size_t i = 1; i < late.size(); ++i) ranks += concat(", ", late[i]);
  }
  return concat("[Rank 0]: ", ranks, " failed to pass monitoredBarrier in ", limit.count(), " ms");
}

}  // namespace

// --- messages ---

WorkPtr ConvoyBackend::send(Tensors& tensors, int target, int tag) {
  return send(tensors, target, tag, c10d::kUnsetTimeout);
}

WorkPtr ConvoyBackend::recv(Tensors& tensors, int source, int tag) {
  return recv(tensors, source, tag, c10d::kUnsetTimeout);
}

WorkPtr ConvoyBackend::recvAnysource(Tensors& tensors, int tag) {
  return recv(tensors, coll::kAnyRank, tag);
}

WorkPtr ConvoyBackend::send(Tensors& tensors, int target, int tag,
                            std::chrono::milliseconds timeout) {
  c10d::assertSingleElement(refuse_as("send"), tensors);
  Impl::Job job{OpType::SEND, "convoy:send", true, tensors, tensors};
  const Piece piece = job.packing->input(tensors[0]);
  return impl_->submit(std::move(job),
                       {.kind = coll::Message::Kind::kSend,
                        .data = piece.data,
                        .count = piece.count,
                        .type = element_type(tensors[0].scalar_type()),
                        .peer = target,
                        .tag = static_cast<std::uint32_t>(tag)},
                       impl_->timeout(timeout));
}

WorkPtr ConvoyBackend::recv(Tensors& tensors, int source, int tag,
                            std::chrono::milliseconds timeout) {
  c10d::assertSingleElement(refuse_as("recv"), tensors);
  Impl::Job job{source == coll::kAnyRank ? OpType::RECVANYSOURCE : OpType::RECV, "convoy:recv",
                true, tensors, tensors};
  const Piece piece = job.packing->output(tensors[0]);
  return impl_->submit(std::move(job),
                       {.kind = coll::Message::Kind::kReceive,
                        .data = piece.data,
                        .count = piece.count,
                        .type = element_type(tensors[0].scalar_type()),
                        .peer = source,
                        .tag = static_cast<std::uint32_t>(tag)},
                       impl_->timeout(timeout));
}

WorkPtr ConvoyBackend::Impl::submit(Job job, const coll::Message& message,
                                    std::chrono::nanoseconds timeout) {
  group_->check_process(name_of(job.title));
  const std::uint64_t number = ++messages_;
  WorkPtr letter;
  in_block([&](Block& block) {
    const auto work = make_work(job, number);
    block.letters.push_back({message, job, work});
    letter = work;
  });
  if (letter) return letter;
  const coll::MessageOptions options{.tag = message.tag, .timeout = timeout};
  return begin(std::move(job), number, [&](coll::Group& group, const auto& done) {
    return message.kind == coll::Message::Kind::kSend
               ? group.send_async(message.data, message.count, message.type, message.peer, options,
                                  done)
               : group.recv_async(message.data, message.count, message.type, message.peer, options,
                                  done);
  });
}

// A message on this thread, of a packed tensor.
template <class Now>
void ConvoyBackend::Impl::message_now(OpType op, const char* title, const at::Tensor& tensor,
                                      Packing& packing, const Now& now) {
  try {
    at_once(op, title, tensor, now);
  } catch (...) {
    keep_if_held(*group_->medium(), std::make_shared<Packing>(std::move(packing)));
    throw;
  }
}

void ConvoyBackend::send_now(const at::Tensor& tensor, int target, int tag,
                             std::chrono::milliseconds timeout) {
  const coll::MessageOptions options{.tag = static_cast<std::uint32_t>(tag),
                                     .timeout = impl_->timeout(timeout)};
  Packing packing;
  const Piece piece = packing.input(tensor);
  impl_->message_now(OpType::SEND, "convoy:send", tensor, packing, [&](coll::Group& group) {
    group.send(piece.data, piece.count, element_type(tensor.scalar_type()), target, options);
  });
}

int ConvoyBackend::recv_now(const at::Tensor& tensor, int source, int tag,
                            std::chrono::milliseconds timeout) {
  const coll::MessageOptions options{.tag = static_cast<std::uint32_t>(tag),
                                     .timeout = impl_->timeout(timeout)};
  Packing packing;
  const Piece piece = packing.output(tensor);
  int sender = source;
  const auto op = source == coll::kAnyRank ? OpType::RECVANYSOURCE : OpType::RECV;
  impl_->message_now(op, "convoy:recv", tensor, packing, [&](coll::Group& group) {
    sender =
        group.recv(piece.data, piece.count, element_type(tensor.scalar_type()), source, options);
  });
  packing.unpack();
  return sender;
}

// --- blocks ---

void ConvoyBackend::Impl::start_coalescing() {
  group_->check_process("startCoalescing");
  if (coalescing()) {
    // Somebody left it by an exception; c10d has no way to say so.
    log_warn("startCoalescing: the block that this thread had begun is given up");
    cancel_coalescing();
  }
  auto blocks = blocks_.lock();
  blocks->try_emplace(std::this_thread::get_id());
  open_blocks_.store(blocks->size(), std::memory_order_relaxed);
}

ConvoyBackend::Impl::Block ConvoyBackend::Impl::take_block(const char* caller) {
  group_->check_process(caller);
  auto blocks = blocks_.lock();
  auto found = blocks->extract(std::this_thread::get_id());
  if (!found)
    fail(ErrorKind::kInvalidArgument, caller, ": this thread has not begun a coalescing block");
  open_blocks_.store(blocks->size(), std::memory_order_relaxed);
  return std::move(found.mapped());
}

void ConvoyBackend::Impl::give_up(const Block& block, const std::string& why) {
  const auto error = std::make_exception_ptr(Error(ErrorKind::kInvalidArgument, why));
  for (const auto& letter : block.letters) letter.work->complete_after([] {}, error);
}

void ConvoyBackend::Impl::cancel_coalescing() {
  give_up(take_block("cancel_coalescing"), "the block of which the message was part was given up");
}

void ConvoyBackend::Impl::cancel_all(const std::string& why) {
  Blocks blocks;
  {
    auto all = blocks_.lock();
    blocks.swap(*all);
    open_blocks_.store(0, std::memory_order_relaxed);
  }
  for (const auto& [thread, block] : blocks) give_up(block, why);
}

WorkPtr ConvoyBackend::Impl::end_coalescing() {
  Block block = take_block("endCoalescing");
  if (!block.letters.empty()) block.works.push_back(send_batch(block.letters));
  if (block.works.size() == 1) return block.works.front();
  return c10::make_intrusive<CoalescedWork>(group_->rank(), std::move(block.works));
}

WorkPtr ConvoyBackend::Impl::send_batch(const std::vector<Letter>& letters) {
  Job whole{OpType::COALESCED, "convoy:batch", true, {}, {}};
  std::vector<coll::Message> messages;
  for (const auto& letter : letters) {
    messages.push_back(letter.message);
    whole.outputs.insert(whole.outputs.end(), letter.job.outputs.begin(), letter.job.outputs.end());
  }
  const auto work = make_work(whole, messages_);
  const auto done = [work, letters, medium = group_->medium()](const std::exception_ptr& error) {
    for (const auto& letter : letters) {
      if (error) keep_if_held(*medium, letter.job.packing);
      letter.work->complete_after([&] { letter.job.end(); }, error);
    }
    work->complete_after([] {}, error);
  };
  try {
    const coll::Work batch = group_->batch_async(messages, timeout_.load(), done);
    work->attach(batch);
    for (const auto& letter : letters) letter.work->attach(batch);
  } catch (...) {  // nothing was issued
    done(std::current_exception());
    throw;
  }
  return work;
}

void ConvoyBackend::startCoalescing() { impl_->start_coalescing(); }
WorkPtr ConvoyBackend::endCoalescing() { return impl_->end_coalescing(); }
void ConvoyBackend::cancel_coalescing() { impl_->cancel_coalescing(); }

// --- barriers ---

WorkPtr ConvoyBackend::barrier(const c10d::BarrierOptions& opts) {
  const auto options = impl_->call(opts.timeout);
  if (impl_->alone(opts.asyncOp)) {
    return impl_->at_once(OpType::BARRIER, "convoy:barrier", {}, impl_->calls().barrier(options));
  }
  return impl_->submit({OpType::BARRIER, "convoy:barrier", true, {}, {}},
                       impl_->calls().barrier(options));
}

void ConvoyBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all) {
  using std::chrono::milliseconds;
  using std::chrono::nanoseconds;
  // Rank 0 knows first, so that it is the one that names the missing; the others know a little
  // later by themselves, should rank 0 be missing.
  constexpr milliseconds kBehind(100);
  auto options = impl_->call(opts.timeout);
  // Here, and only here, nothing is a limit too: Gloo's tests ask for it.
  const bool nothing = opts.timeout == milliseconds::zero();
  const auto limit =
      nothing ? milliseconds::zero() : std::chrono::ceil<milliseconds>(options.timeout);
  if (nothing) options.timeout = nanoseconds(1);
  if (getRank() != 0) options.timeout += std::max<nanoseconds>(kBehind, limit / 10);
  const bool worked = !impl_->group().broken();
  try {
    impl_->at_once(OpType::BARRIER, "convoy:monitored_barrier", {},
                   impl_->calls().monitored_barrier(options));
  } catch (const Error& error) {
    // A limit of nothing has passed, also where a rank that has left was noticed first. Another
    // operation's time-out, or on rank 0 another rank's, has words of its own.
    const auto late = impl_->group().late_ranks();
    const bool passed = getRank() == 0 && nothing;
    const bool ours = error.kind() == ErrorKind::kTimeout && (getRank() != 0 || !late.empty());
    if (!worked || (!passed && !ours)) throw;
    fail(ErrorKind::kTimeout, monitored_barrier_text(getRank(), late, wait_all, limit), "\n",
         error.what());
  }
}

}  // namespace convoy

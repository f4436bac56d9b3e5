// ConvoyBackend: messages, barriers, and blocks of operations that count as one.
#include "base/concat.h"
#include "base/error.h"
#include "group/backend_impl.h"

namespace convoy {
namespace {

// The words of Gloo's monitored barrier, which programs and tests look for.
std::string monitored_barrier_text(int rank, const std::vector<int>& late, bool wait_all,
                                   std::chrono::milliseconds limit) {
  if (rank == 0 && limit.count() == 0) {
    return "[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms";
  }
  if (rank != 0 || late.empty()) {
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
  if (coalescing()) {
    auto work = make_work(job);
    block_.lock()->letters.push_back({message, std::move(job), work});
    return work;
  }
  const coll::MessageOptions options{.tag = message.tag, .timeout = timeout};
  return submit(std::move(job), [&](coll::Group& group, auto&& done) {
    return message.kind == coll::Message::Kind::kSend
               ? group.send_async(message.data, message.count, message.type, message.peer, options,
                                  done)
               : group.recv_async(message.data, message.count, message.type, message.peer, options,
                                  done);
  });
}

// --- blocks ---

void ConvoyBackend::Impl::start_coalescing() {
  std::thread::id nobody;
  if (!coalescing_thread_.compare_exchange_strong(nobody, std::this_thread::get_id())) {
    fail(ErrorKind::kInvalidArgument, "startCoalescing: ",
         coalescing() ? "the block before has not ended" : "another thread has begun a block");
  }
}

ConvoyBackend::Impl::Block ConvoyBackend::Impl::take_block(const char* caller) {
  if (!coalescing()) {
    fail(ErrorKind::kInvalidArgument, caller, ": this thread has not begun a block");
  }
  Block block = std::exchange(*block_.lock(), {});
  coalescing_thread_.store({});
  return block;
}

void ConvoyBackend::Impl::cancel_coalescing() {
  const Block block = take_block("cancel_coalescing");
  for (const auto& letter : block.letters) letter.work->give_up();
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
  const auto work = make_work(whole);
  const auto done = [work, letters](const std::exception_ptr& error) {
    for (const auto& letter : letters) {
      letter.work->complete_after([&] { letter.job.end(); }, error);
    }
    work->complete_after([] {}, error);
  };
  try {
    const coll::Work batch = group_->batch_async(messages, timeout_.load(), done);
    work->attach(batch);
    for (const auto& letter : letters) letter.work->attach(batch);
  } catch (...) {  // nothing was issued
    work->give_up();
    for (const auto& letter : letters) letter.work->give_up();
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
    return impl_->at_once(OpType::BARRIER, "convoy:barrier", {},
                          [&](coll::Group& group) { group.barrier(options); });
  }
  return impl_->submit(
      {OpType::BARRIER, "convoy:barrier", true, {}, {}},
      [&](coll::Group& group, auto&& done) { return group.barrier_async(options, done); });
}

void ConvoyBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all) {
  // Rank 0 knows first, so that it is the one that names the missing; the others know a little
  // later by themselves, should rank 0 be missing.
  constexpr std::chrono::milliseconds kBehind(100);
  auto options = impl_->call(opts.timeout);
  const auto limit = std::chrono::ceil<std::chrono::milliseconds>(options.timeout);
  if (getRank() != 0) options.timeout += std::max<std::chrono::nanoseconds>(kBehind, limit / 10);
  try {
    impl_->at_once(OpType::BARRIER, "convoy:monitored_barrier", {},
                   [&](coll::Group& group) { group.monitored_barrier(options); });
  } catch (const Error& error) {
    // A limit of nothing has passed, also where a rank that has left was noticed first.
    const bool passed = getRank() == 0 && limit.count() == 0;
    if (error.kind() != ErrorKind::kTimeout && !passed) throw;
    fail(ErrorKind::kTimeout,
         monitored_barrier_text(getRank(), impl_->group().late_ranks(), wait_all, limit), "\n",
         error.what());
  }
}

}  // namespace convoy

#include "convoy/queue.h"

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "convoy/values.h"
#include "os/fork_guard.h"
#include "share/pack.h"
#include "share/queue_core.h"
#include "share/shared.h"

namespace convoy::share {
namespace {

constexpr std::size_t kMostCapacity = std::size_t{1} << 24;
constexpr std::size_t kMostItemBytes = std::size_t{1} << 20;
constexpr std::size_t kPackAtOnce = 32;

Deadline now() { return Deadline::after(std::chrono::seconds(0)); }

// Queues that this process has let go of, in which its items wait for others. A forked child has
// none: those of its parent are its parent's.
Guarded<std::vector<std::shared_ptr<QueueCore>>>& orphans() {
  static PerProcess<Guarded<std::vector<std::shared_ptr<QueueCore>>>> cores;
  return cores.get();
}

void look_at_orphans() {
  std::vector<std::shared_ptr<QueueCore>> done;  // destroyed after the lock
  auto cores = orphans().lock();
  for (auto& core : *cores) {
    try {
      if (core->leave()) done.push_back(std::move(core));
    } catch (const Error& error) {
      log_info("queue: ", error.what());
    }
  }
  std::erase(*cores, nullptr);
  cores.unlock();
}

void watch_orphans() {
  static auto* const reaper = new std::shared_ptr<Depot::Reaper>(
      std::make_shared<Depot::Reaper>([] { look_at_orphans(); }));
  Depot::instance().on_shortage(*reaper);
}

struct QueueImpl : Shared::Impl {
  explicit QueueImpl(std::shared_ptr<QueueCore> made)
      : Impl(Shared::Kind::kQueue), core(std::move(made)), memory(core->memory()) {
    // Blocks that the dead have taken come back when memory is short.
    reaper = std::make_shared<Depot::Reaper>([weak = std::weak_ptr(core)] {
      const auto there = weak.lock();
      if (!there) return;
      there->memory().look_for_dead();
      there->drop_taken();
    });
    Depot::instance().on_shortage(reaper);
  }
  QueueImpl(const QueueImpl&) = delete;
  QueueImpl& operator=(const QueueImpl&) = delete;
  ~QueueImpl() override {
    end_offers();
    try {
      SharedObjects::end(memory.segment().key(), [this] {
        try {
          if (core->leave()) return;
        } catch (const Error& error) {  // its lock is not to be had: later, perhaps
          log_warn("queue: ", error.what());
        }
        watch_orphans();
        orphans().lock()->push_back(core);
      });
    } catch (const Error& error) {
      log_warn("queue: ", error.what());
    }
  }
  std::vector<int> descriptors() const override { return core->descriptors(); }

  Deadline deadline() const {
    return Deadline::after(std::chrono::milliseconds(memory.shape().timeout_ms));
  }

  // How many went in by the deadline, or before something went wrong. Throws if none did.
  std::size_t put(const Message* messages, std::size_t count, const Deadline& until) {
    QueueMemory::Hands hands(memory, count);
    std::size_t done = 0;
    try {
      while (done < count) {
        const std::size_t before = done;
        put_chunk(messages, std::min(count, done + kPackAtOnce), hands, until, done);
        if (done < std::min(count, before + kPackAtOnce)) break;
      }
    } catch (const std::exception& error) {
      if (done == 0) throw;
      log_info("queue: put ", done, " of ", count, " messages: ", error.what());
    }
    return done;
  }

  // Puts messages up to number `end`, from number `done` on, which it counts up.
  void put_chunk(const Message* messages, std::size_t end, QueueMemory::Hands& hands,
                 const Deadline& until, std::size_t& done) {
    while (done < end) {
      const std::uint32_t epoch = memory.epoch();
      const QueuePacking packing{
          .most_bytes = memory.shape().item_bytes,
          .copy_below = memory.shape().copy_below,
          .strategy = get_sharing_strategy(),
          .deposit = [&](const std::shared_ptr<Region>& region) { core->deposit(region, epoch); }};
      std::vector<Packed> packed;
      packed.reserve(end - done);
      std::exception_ptr refused;  // of the message after these
      try {
        for (std::size_t i = done; i < end; ++i) {
          packed.push_back(pack_for_queue(messages[i], packing));
        }
      } catch (const std::exception&) {
        if (packed.empty()) throw;
        refused = std::current_exception();
      }
      std::vector<std::string_view> items;
      for (const Packed& one : packed) items.emplace_back(one.bytes);
      std::size_t went = 0;
      while (went < items.size()) {
        const auto entering = [&packed, went](std::size_t i) {
          for (const BlockRef& ref : packed[went + i].blocks) {
            ref.book->book().enter_transit(ref.entry);
          }
        };
        const auto result =
            memory.put(std::span(items).subspan(went), epoch, hands, entering, until);
        keep_files(std::span(packed).subspan(went, result.items));
        went += result.items;
        done += result.items;
        if (result.stale) break;
        if (result.items == 0) return;
      }
      if (refused && went == items.size()) std::rethrow_exception(refused);
    }
  }

  void keep_files(std::span<const Packed> put) const {
    core->drop_taken();
    for (const Packed& one : put) {
      for (const Parcel& parcel : one.parcels) {
        const BlockRef& ref = *SharedCache::place_of(parcel).block;
        if (ref.book->kind() == Region::Kind::kNamed) core->keep(SharedCache::lease_of(parcel));
      }
    }
  }

  // Empty: the item is lost. Whatever comes, it is settled and its slot is free.
  std::optional<Message> open(const QueueMemory::Item& item, bool alone) {
    struct Finish {
      QueueImpl& queue;
      const QueueMemory::Item& item;
      ~Finish() { queue.memory.finish(item); }
    } const finish{*this, item};
    try {
      return unpack_from_queue(
          item.bytes, [this](const WireRegion& region) { return core->find(region); },
          *item.progress);
    } catch (const std::exception& error) {  // of libtorch's allocator, too
      core->settle(item.bytes, *item.progress);
      memory.count_lost(item, error.what());
      const auto* const known = dynamic_cast<const Error*>(&error);
      if (alone && !(known && known->kind() == ErrorKind::kPeerLost)) throw;
    }
    return std::nullopt;
  }

  // Items that were taken. Those that nobody opens are let go of.
  struct Batch {
    QueueImpl& queue;
    std::vector<QueueMemory::Item> items;
    std::size_t next = 0;

    Batch(QueueImpl& of, std::vector<QueueMemory::Item> taken)
        : queue(of), items(std::move(taken)) {}
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;
    ~Batch() {
      for (; next < items.size(); ++next) {
        queue.core->settle(items[next].bytes, *items[next].progress);
        queue.memory.finish(items[next]);
      }
    }
  };

  std::vector<Message> get(std::size_t most, const Deadline& until) {
    std::vector<Message> messages;
    while (messages.size() < most && (messages.empty() || memory.size() > 0)) {
      Batch batch(*this,
                  take(most - messages.size(), messages.empty() ? until : now(), messages.empty()));
      if (batch.items.empty()) break;
      messages.reserve(messages.size() + batch.items.size());
      while (batch.next < batch.items.size()) {
        auto message = open(batch.items[batch.next++], most == 1);
        if (message) messages.push_back(std::move(*message));
      }
    }
    return messages;
  }

  // What a later call throws costs nothing of what the first one brought: another process may have
  // emptied a queue that is closed in between.
  std::vector<QueueMemory::Item> take(std::size_t most, const Deadline& until, bool first) {
    try {
      return memory.take(most, until);
    } catch (const std::exception&) {
      if (first) throw;
      return {};
    }
  }

  const std::shared_ptr<QueueCore> core;  // shared with who frees memory, and with the orphans
  QueueMemory& memory;
  std::shared_ptr<Depot::Reaper> reaper;
};

QueueImpl& queue_of(const Queue& queue) { return static_cast<QueueImpl&>(queue.impl()); }

std::shared_ptr<Shared::Impl> make_queue(const QueueOptions& options) {
  if (options.capacity == 0 || options.capacity > kMostCapacity) {
    fail(ErrorKind::kInvalidArgument, "the capacity of a queue must be from 1 to ", kMostCapacity,
         ", got ", options.capacity);
  }
  if (options.item_bytes < 256 || options.item_bytes > kMostItemBytes) {
    fail(ErrorKind::kInvalidArgument, "a queue with items of ", options.item_bytes,
         " bytes: it must be 256 to ", kMostItemBytes);
  }
  if (options.copy_below + 512 > options.item_bytes && options.copy_below != 0) {
    fail(ErrorKind::kInvalidArgument,
         "item_bytes of a queue must be at least copy_below + 512 = ", options.copy_below + 512,
         ", got ", options.item_bytes);
  }
  if (options.timeout < std::chrono::milliseconds(0)) {
    fail(ErrorKind::kInvalidArgument, "the timeout of a queue must be >= 0 ms, got ",
         options.timeout.count());
  }
  look_at_orphans();  // each has descriptors
  const auto timeout = std::min<std::int64_t>(options.timeout.count(), UINT32_MAX);
  auto core = std::make_shared<QueueCore>(
      QueueMemory::Shape{.capacity = static_cast<std::uint32_t>(options.capacity),
                         .item_bytes = static_cast<std::uint32_t>(options.item_bytes),
                         .copy_below = static_cast<std::uint32_t>(options.copy_below),
                         .timeout_ms = static_cast<std::uint32_t>(timeout)});
  const auto key = core->memory().segment().key();
  return SharedObjects::find_or(key, [&] { return std::make_shared<QueueImpl>(std::move(core)); });
}

const Shared& as_queue(const Shared& object) {
  require(object, Shared::Kind::kQueue);
  return object;
}

}  // namespace

std::shared_ptr<Shared::Impl> adopt_queue(std::vector<UniqueFd> descriptors) {
  look_at_orphans();
  const auto key = Segment::key_of(descriptors[0].get());
  return SharedObjects::find_or(key, [&]() -> std::shared_ptr<Shared::Impl> {
    auto left = orphans().lock();
    const auto found = std::find_if(left->begin(), left->end(), [&](const auto& core) {
      return core->memory().segment().key() == key;
    });
    std::shared_ptr<QueueCore> core;
    if (found != left->end()) {
      (*found)->come_back(std::move(descriptors[1]));  // or it stays an orphan
      core = std::move(*found);
      left->erase(found);
    } else {
      core = std::make_shared<QueueCore>(adopt_segment(std::move(descriptors[0])),
                                         std::move(descriptors[1]), std::move(descriptors[2]));
    }
    left.unlock();
    return std::make_shared<QueueImpl>(std::move(core));
  });
}

Queue::Queue(const QueueOptions& options) : Shared(make_queue(options)) {}
Queue::Queue(const Shared& object) : Shared(as_queue(object)) {}
Queue Queue::take_values(ValueReader& from) { return Queue(from.take<Shared>()); }

std::size_t Queue::size() const { return queue_of(*this).memory.size(); }
std::size_t Queue::capacity() const { return queue_of(*this).memory.shape().capacity; }

void Queue::put(const at::Tensor& tensor) const { put(Message{tensor}); }
void Queue::put(const Message& message) const { put(message, queue_of(*this).deadline()); }
void Queue::put(const Message& message, const Deadline& deadline) const {
  if (queue_of(*this).put(&message, 1, deadline) == 0) {
    fail(ErrorKind::kTimeout, "put: the queue was full until the deadline, with ", size(),
         " messages");
  }
}
bool Queue::try_put(const Message& message) const {
  return queue_of(*this).put(&message, 1, now()) == 1;
}
std::size_t Queue::put_many(const std::vector<Message>& messages, const Deadline& deadline) const {
  return queue_of(*this).put(messages.data(), messages.size(), deadline);
}

Message Queue::get() const { return get(queue_of(*this).deadline()); }
Message Queue::get(const Deadline& deadline) const {
  auto messages = queue_of(*this).get(1, deadline);
  if (messages.empty()) {
    fail(ErrorKind::kTimeout, "get: the queue was empty until the deadline");
  }
  return std::move(messages[0]);
}
std::optional<Message> Queue::try_get() const {
  auto messages = queue_of(*this).get(1, now());
  if (messages.empty()) return std::nullopt;
  return std::move(messages[0]);
}
std::vector<Message> Queue::get_many(std::size_t most, const Deadline& deadline) const {
  return queue_of(*this).get(most, deadline);
}
at::Tensor Queue::get_tensor() const { return get_tensor(queue_of(*this).deadline()); }
at::Tensor Queue::get_tensor(const Deadline& deadline) const {
  const Message message = get(deadline);
  if (message.size() != 1) {
    fail(ErrorKind::kInvalidArgument, "get_tensor: the message has ", message.size(),
         " values, and is not one tensor");
  }
  return message.tensor(0);
}

void Queue::close() const { queue_of(*this).memory.close(); }
bool Queue::closed() const { return queue_of(*this).memory.closed(); }

Queue::Losses Queue::lost() const {
  QueueMemory& memory = queue_of(*this).memory;
  memory.look_for_dead();
  auto losses = memory.lost();
  return {losses.items, std::move(losses.latest)};
}

}  // namespace convoy::share

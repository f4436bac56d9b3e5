#include "share/queue_core.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "base/error.h"
#include "base/log.h"

namespace convoy::share {
namespace {

ProcessWord owner_of(const Region& region) {
  return region.book() ? region.book().head().owner : own_process_word();
}

}  // namespace

QueueCore::QueueCore(const QueueMemory::Shape& shape)
    : memory_(shape, [this](std::string_view item, auto& progress) { settle(item, progress); }) {}

QueueCore::QueueCore(Segment memory, UniqueFd writer, UniqueFd reader)
    : memory_(std::move(memory),
              [this](std::string_view item, auto& progress) { settle(item, progress); }),
      store_(std::move(writer), std::move(reader)) {}

std::vector<int> QueueCore::descriptors() const {
  return {memory_.segment().fd(), store_.writer(), store_.reader()};
}

void QueueCore::keep(Lease lease) { kept_.lock()->push_back(std::move(lease)); }

void QueueCore::drop_taken() {
  std::vector<Lease> taken;  // let go of after the lock
  auto kept = kept_.lock();
  const auto waits = [](const Lease& lease) {
    return lease.ref().book->book().entry(lease.ref().entry).transit.load() != 0;
  };
  const auto rest = std::partition(kept->begin(), kept->end(), waits);
  std::move(rest, kept->end(), std::back_inserter(taken));
  kept->erase(rest, kept->end());
  kept.unlock();
}

bool QueueCore::leave() {
  drop_taken();
  // Before the question: of several that leave at once, the last one finds nobody.
  store_.close_writer();
  const auto concerns = [](std::string_view item) {
    try {
      for (const WireRegion& wire : parse_message(item).regions) {
        const auto region = Depot::instance().find({wire.device, wire.inode});
        if (region && (region->own() || region->kind() == Region::Kind::kNamed)) return true;
      }
    } catch (const Error&) {
      // It will be counted as lost.
    }
    return false;
  };
  return memory_.leave(concerns, [this] { return store_.has_writers(); });
}

void QueueCore::come_back(UniqueFd writer) {
  store_.reopen_writer(std::move(writer));
  memory_.come_back();
}

// Under the lock of the memory. What no item needs, and whose owner has ended or given it back, is
// dropped: it would keep that memory as long as the queue lives.
void QueueCore::prune(bool departed) {
  std::set<std::pair<std::uint64_t, std::uint64_t>> needed;
  memory_.for_each_item([&](std::string_view item) {
    try {
      for (const WireRegion& region : parse_message(item).regions) {
        needed.emplace(region.device, region.inode);
      }
    } catch (const Error&) {
      // It will be counted as lost.
    }
  });
  const auto keep = [&](const DescriptorStore::Entry& entry) {
    if (needed.contains({entry.device, entry.inode})) return true;
    if (entry.owner == own_process_word()) {
      return Depot::instance().uses({entry.device, entry.inode});
    }
    // All users are of one domain, and so are the owners of their memory.
    return !departed || !is_dead(entry.owner, own_domain());
  };
  if (store_.prune(keep) > 0) memory_.next_epoch();
}

void QueueCore::deposit(const std::shared_ptr<Region>& region, std::uint32_t epoch) {
  auto deposited = deposited_.lock();
  if (deposited->epoch != epoch) {
    deposited->epoch = epoch;
    deposited->regions.clear();
  }
  if (deposited->regions.contains(region->serial())) return;
  memory_.exclusively([&] {
    const std::uint32_t departures = memory_.departures();
    prune(departures != deposited->departures);
    deposited->departures = departures;
    if (store_.find(region->key())) return;
    store_.add({.device = region->key().device,
                .inode = region->key().inode,
                .bytes = region->bytes(),
                .owner = owner_of(*region),
                .kind = static_cast<std::uint32_t>(region->kind())},
               region->fd());
  });
  deposited->regions.insert(region->serial());
}

std::shared_ptr<Region> QueueCore::find(const WireRegion& wire) {
  const Segment::Key key{wire.device, wire.inode};
  Depot& depot = Depot::instance();
  if (!wire.path.empty()) return depot.open_named(wire.path);
  if (auto known = depot.find(key)) return known;
  const auto kind = static_cast<Region::Kind>(wire.kind);
  if (kind != Region::Kind::kPool && kind != Region::Kind::kPlain &&
      kind != Region::Kind::kOutside) {
    fail(ErrorKind::kInvalidArgument, "an item names memory of unknown kind");
  }
  std::optional<std::pair<DescriptorStore::Entry, UniqueFd>> found;
  memory_.exclusively([&] { found = store_.find(key); });
  if (!found) {
    fail(ErrorKind::kPeerLost, "an item's memory of ", wire.bytes, " bytes is not in the queue");
  }
  auto region = depot.adopt(std::move(found->second), wire.bytes, kind);
  // One tensor: it goes when nobody here uses it.
  if (kind == Region::Kind::kOutside) return region;
  std::vector<std::shared_ptr<Region>> gone;  // unmapped after the lock
  auto used = used_.lock();
  for (auto i = used->begin(); i != used->end();) {
    const Region& other = *i->second;
    const bool over =
        other.book() && (other.book().head().retired.load() != 0 ||
                         is_dead(other.book().head().owner, other.book().head().domain));
    if (over) gone.push_back(std::move(i->second));
    i = over ? used->erase(i) : std::next(i);
  }
  (*used)[wire.inode] = region;
  used.unlock();
  return region;
}

void QueueCore::leave_blocks(const WireMessage& message, std::uint32_t& number,
                             std::atomic<std::uint32_t>& progress) {
  for (const WireBlock& block : message.blocks) {
    if (number++ < progress.load()) continue;  // the taker has done so
    try {
      const auto region = find(message.regions.at(block.book & ~WireBlock::kLocal));
      const Book& book = region->book();
      progress.fetch_add(1);
      // While it is under way a block cannot end: of another generation it is another's.
      if (book && book.is_block(block.entry, 1) && book.generation(block.entry) == block.generation)
        book.leave_transit(block.entry);
    } catch (const std::exception& error) {
      progress.store(number);
      log_info("queue: memory of a lost item: ", error.what());
    }
  }
}

void QueueCore::settle(std::string_view item, std::atomic<std::uint32_t>& progress) noexcept {
  try {
    const WireMessage outer = parse_message(item);
    std::uint32_t number = 0;
    if (is_in_block(outer)) {
      const WireBlock& block = outer.blocks[0];
      const auto region = find(outer.regions.at(block.book & ~WireBlock::kLocal));
      const Book& book = region->book();
      if (!book || !book.is_block(block.entry, block.bytes) ||
          book.generation(block.entry) != block.generation) {
        return;
      }
      const std::string inside(reinterpret_cast<const char*>(region->data() + block.entry),
                               block.bytes);
      leave_blocks(parse_message(inside), number, progress);
    }
    leave_blocks(outer, number, progress);
  } catch (const std::exception& error) {
    log_info("queue: a lost item: ", error.what());
  }
}

}  // namespace convoy::share

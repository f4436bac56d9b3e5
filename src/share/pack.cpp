#include "share/pack.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <optional>

#include "base/error.h"
#include "base/wire.h"
#include "share/device.h"

namespace convoy::share {
namespace {

// From here on a handle's number is that of a storage that came as bytes.
constexpr std::uint64_t kCopied = std::uint64_t{1} << 32;

// Collects the distinct storages of a message.
class Packer {
 public:
  Packer(Strategy strategy, const NameRegion& name, std::size_t copy_below = 0)
      : strategy_(strategy), name_(name), copy_below_(copy_below) {}

  std::string tensor(const at::Tensor& tensor) {
    return convoy::encode(
        handle_of(tensor, [this](const c10::Storage& storage) { return place(storage); }));
  }
  WireMessage message;
  std::vector<Parcel> parcels;
  std::vector<BlockRef> blocks;      // of the message
  std::vector<c10::Storage> copied;  // small ones, which go as bytes

  // The blocks are kept by the bytes from now on, once each. Who turns the bytes needs the tickets:
  // without them, bytes that are turned twice would take the hold of other bytes.
  std::string enter_transit() const {
    std::string tickets;
    WireWriter out(tickets);
    for (const BlockRef& ref : blocks) out.put(ref.book->book().issue_ticket());
    for (const BlockRef& ref : blocks) ref.book->book().enter_transit(ref.entry);
    return tickets;
  }

  std::uint32_t add_region(WireRegion region) {
    message.regions.push_back(std::move(region));
    return static_cast<std::uint32_t>(message.regions.size() - 1) | WireBlock::kLocal;
  }

 private:
  // Handles say "so many bytes into block n of this message" where others say a segment.
  shm::Location place(const c10::Storage& storage) {
    if (storage.nbytes() <= copy_below_ && !SharedCache::stays(storage)) return copy(storage);
    if (parcels.empty() ||
        parcels.back().storage.unsafeGetStorageImpl() != storage.unsafeGetStorageImpl()) {
      parcels.push_back(SharedCache::instance().share(storage, strategy_));
    }
    const StoragePlace place = SharedCache::place_of(parcels.back());
    const BlockRef& ref = *place.block;
    const void* const key = &ref.book->book().entry(ref.entry);
    // Neighbours are often in one block.
    if (key != last_block_) {
      const auto [found, fresh] = blocks_.try_emplace(key, message.blocks.size() + 1);
      if (fresh) {
        message.blocks.push_back(
            to_wire(ref, [this](const auto& region) { return number(region); }));
        blocks.push_back(ref);
      }
      last_block_ = key;
      last_number_ = found->second;
    }
    return {last_number_, place.offset};
  }
  shm::Location copy(const c10::Storage& storage) {
    std::size_t i = 0;
    while (i < copied.size() &&
           copied[i].unsafeGetStorageImpl() != storage.unsafeGetStorageImpl()) {
      ++i;
    }
    if (i == copied.size()) copied.push_back(storage);
    return {kCopied + i, 0};
  }
  std::uint32_t number(const std::shared_ptr<Region>& region) {
    if (region->kind() != Region::Kind::kNamed) return name_(region);
    return add_region({.kind = static_cast<std::uint32_t>(region->kind()),
                       .bytes = region->bytes(),
                       .device = region->key().device,
                       .inode = region->key().inode,
                       .path = region->path()});
  }

  const Strategy strategy_;
  const NameRegion& name_;
  const std::size_t copy_below_;
  std::unordered_map<const void*, std::uint64_t> blocks_;  // by entry in its book: number
  const void* last_block_ = nullptr;
  std::uint64_t last_number_ = 0;
};

std::string_view as_text(const void* data, std::size_t bytes) {
  return {static_cast<const char*>(data), bytes};
}

template <class... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <class... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

template <class T>
T number_of(std::string_view bytes) {
  return WireReader(bytes, "value of a message").take<T>();
}

// A tensor of another device: what only that device understands, then the device.
std::string reduce_elsewhere(const at::Tensor& tensor) {
  const auto device = tensor.device().type();
  std::string bytes = device_sharing(device).reduce(tensor);
  bytes.push_back(static_cast<char>(device));
  return bytes;
}

at::Tensor rebuild_elsewhere(std::string_view bytes) {
  const auto device = static_cast<c10::DeviceType>(bytes.back());
  if (device < c10::DeviceType::CPU || device >= c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES) {
    fail(ErrorKind::kInvalidArgument, "a tensor is on an unknown device");
  }
  return device_sharing(device).rebuild(bytes.substr(0, bytes.size() - 1));
}

// A region that a message names by path.
std::shared_ptr<Region> find_by_path(const WireRegion& wire) {
  Depot& depot = Depot::instance();
  const Segment::Key key{wire.device, wire.inode};
  if (auto known = depot.find(key)) return known;
  const auto kind = static_cast<Region::Kind>(wire.kind);
  if (kind == Region::Kind::kNamed) return depot.open_named(wire.path);
  if ((kind != Region::Kind::kPool && kind != Region::Kind::kPlain &&
       kind != Region::Kind::kOutside) ||
      !is_descriptor_path(wire.path)) {
    fail(ErrorKind::kInvalidArgument, "a handle names memory of unknown kind");
  }
  UniqueFd fd(::open(wire.path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd || Segment::key_of(fd.get()) != key) {
    fail(ErrorKind::kPeerLost, "the process that shared a tensor as ", wire.path,
         " has ended, or this process cannot see it (another container?): send it over a channel, "
         "or share it with strategy kFile");
  }
  return depot.adopt(std::move(fd), wire.bytes, kind);
}

// The values of a message, with blocks opened once each.
class Unpacker {
 public:
  Unpacker(const WireMessage& message, const FindRegion& find,
           const FindNamed& find_named = find_by_path)
      : find_(find) {
    for (const WireRegion& region : message.regions) regions_.push_back(find_named(region));
    for (const WireValue& value : message.values) {
      if (value.kind == WireValue::kStorage) copied_.push_back({value.bytes, {}});
    }
    // All at once: a message is received as a whole or not at all.
    leases_.reserve(message.blocks.size());
    for (const WireBlock& block : message.blocks) {
      leases_.push_back(Depot::instance().open(
          from_wire(block, [this](std::uint32_t number) { return region(number); })));
    }
  }

  // This process holds the blocks: the bytes need not any more.
  void leave_transit(std::atomic<std::uint32_t>* progress = nullptr) const {
    for (const Lease& lease : leases_) {
      if (progress) progress->fetch_add(1);
      if (lease) lease.ref().book->book().leave_transit(lease.ref().entry);
    }
  }

  // Of bytes that can be read more than once: whoever is the first has the blocks.
  void redeem(std::string_view tickets) const {
    WireReader in(tickets, "tensor as bytes");
    for (const Lease& lease : leases_) {
      if (lease.ref().book->book().redeem_ticket(in.take<std::uint64_t>())) continue;
      fail(ErrorKind::kPeerLost,
           "from_bytes: these bytes were turned into a tensor before; to_bytes makes bytes for one "
           "receiver, once");
    }
  }

  // Of the one block.
  std::string body() const {
    return {reinterpret_cast<const char*>(leases_[0].data()), leases_[0].bytes()};
  }

  at::Tensor tensor(std::string_view bytes) {
    return tensor_of(decode_handle(bytes), [this](const shm::Location& place, std::uint64_t size) {
      if (place.segment >= kCopied) return copied(place.segment - kCopied, size);
      const std::uint64_t index = place.segment - 1;
      if (place.segment == 0 || index >= leases_.size() || !leases_[index] ||
          place.offset > leases_[index].bytes() || size > leases_[index].bytes() - place.offset) {
        fail(ErrorKind::kInvalidArgument, "a tensor is in memory that its message does not hold");
      }
      return SharedCache::instance().storage_of(leases_[index], place.offset, size);
    });
  }

 private:
  std::shared_ptr<Region> region(std::uint32_t number) {
    if ((number & WireBlock::kLocal) != 0) return regions_.at(number & ~WireBlock::kLocal);
    return find_(number);
  }
  // Private memory of this process, once for all tensors of it.
  c10::Storage copied(std::uint64_t index, std::uint64_t size) {
    if (index >= copied_.size() || copied_[index].bytes.size() != size) {
      fail(ErrorKind::kInvalidArgument, "a tensor is in memory that its message does not hold");
    }
    Copied& found = copied_[index];
    if (!found.storage) {
      c10::Allocator* const allocator = c10::GetAllocator(c10::DeviceType::CPU);
      found.storage = c10::Storage(c10::Storage::use_byte_size_t(), size, allocator, true);
      std::memcpy(found.storage.mutable_data(), found.bytes.data(), size);
    }
    return found.storage;
  }

  struct Copied {
    std::string_view bytes;
    c10::Storage storage;
  };

  const FindRegion& find_;
  std::vector<std::shared_ptr<Region>> regions_;
  std::vector<Lease> leases_;
  std::vector<Copied> copied_;
};

// Bytes with numbers in them, in the order of message.cpp.
std::string shared_value(const Shared& object, std::uint32_t first) {
  std::string bytes;
  for (const std::uint32_t number :
       {static_cast<std::uint32_t>(object.kind()),
        static_cast<std::uint32_t>(object.descriptors().size()), first, std::uint32_t{0}}) {
    bytes += as_text(&number, sizeof number);
  }
  return bytes;
}

Shared take_shared(std::string_view bytes, const TakeShared& take) {
  const auto kind = number_of<std::uint32_t>(bytes);
  const auto count = number_of<std::uint32_t>(bytes.substr(4));
  if (!take || count == 0 || count > 8) {
    fail(ErrorKind::kInvalidArgument, "a message refers to descriptors where it cannot");
  }
  Shared object = take(number_of<std::uint32_t>(bytes.substr(8)), count);
  if (static_cast<std::uint32_t>(object.kind()) != kind) {
    fail(ErrorKind::kInvalidArgument, "a message has descriptors of another kind than it says");
  }
  return object;
}

}  // namespace

WireBlock to_wire(const BlockRef& ref, const NameRegion& name) {
  WireBlock block;
  block.book = name(ref.book);
  block.memory = ref.memory == ref.book ? block.book : name(ref.memory);
  block.generation = ref.generation;
  block.entry = ref.entry;
  block.offset = ref.offset;
  block.bytes = ref.bytes;
  return block;
}

BlockRef from_wire(const WireBlock& block, const FindRegion& find) {
  BlockRef ref;
  ref.book = find(block.book);
  ref.memory = block.memory == block.book ? ref.book : find(block.memory);
  ref.generation = block.generation;
  ref.entry = block.entry;
  ref.offset = block.offset;
  ref.bytes = block.bytes;
  return ref;
}

namespace {

// Many small tensors that are not shared yet go side by side: a block each would cost more than
// they are.
void share_small(const Message& message) {
  constexpr std::size_t kSmall = std::size_t{16} << 10;
  constexpr std::size_t kMany = 4;
  std::vector<c10::Storage> found;
  for (const Value& value : message) {
    const auto* const tensor = std::get_if<at::Tensor>(&value);
    if (!tensor || !tensor->defined() || !tensor->is_cpu() || tensor->layout() != c10::kStrided ||
        tensor->is_nested() || !tensor->has_storage()) {
      continue;
    }
    require_memory(*tensor);
    const c10::Storage& storage = tensor->storage();
    if (storage.nbytes() == 0 || storage.nbytes() > kSmall || SharedCache::stays(storage)) continue;
    found.push_back(storage);
  }
  if (found.size() >= kMany) SharedCache::instance().share_together(found);
}

}  // namespace

namespace {

// The wire form of all values.
std::string encode_values(const Message& message, Packer& packer, const PassShared& pass) {
  std::vector<std::string> made;  // what values refer to; does not move
  made.reserve(message.size());
  auto& values = packer.message.values;
  values.reserve(message.size());
  const auto number = [&](WireValue::Kind kind, const auto& value) {
    values.push_back({kind, as_text(&value, sizeof value)});
  };
  for (const Value& value : message) {
    std::visit(
        Overloaded{[&](std::monostate) { values.push_back({WireValue::kNone, {}}); },
                   [&](const bool& v) { number(WireValue::kBool, v); },
                   [&](const std::int64_t& v) { number(WireValue::kInteger, v); },
                   [&](const double& v) { number(WireValue::kReal, v); },
                   [&](const std::string& v) { values.push_back({WireValue::kText, v}); },
                   [&](const Bytes& v) {
                     values.push_back({WireValue::kBytes, as_text(v.data(), v.size())});
                   },
                   [&](const PythonObject& v) { values.push_back({WireValue::kPython, v.pickle}); },
                   [&](const Shared& v) {
                     if (!pass) {
                       fail(ErrorKind::kUnsupported,
                            "queues, events, barriers and locks go over channels and to processes "
                            "that are started, not through a queue");
                     }
                     made.push_back(shared_value(v, pass(v)));
                     values.push_back({WireValue::kShared, made.back()});
                   },
                   [&](const at::Tensor& v) {
                     const bool elsewhere = v.defined() && !v.is_cpu() && !v.is_meta();
                     made.push_back(elsewhere ? reduce_elsewhere(v) : packer.tensor(v));
                     values.push_back(
                         {elsewhere ? WireValue::kDevice : WireValue::kTensor, made.back()});
                   }},
        value);
  }
  for (const c10::Storage& storage : packer.copied) {
    values.push_back({WireValue::kStorage, as_text(storage.data(), storage.nbytes())});
  }
  return encode(packer.message);
}

WireRegion to_wire(const Region& region, std::string path) {
  return {.kind = static_cast<std::uint32_t>(region.kind()),
          .bytes = region.bytes(),
          .device = region.key().device,
          .inode = region.key().inode,
          .path = std::move(path)};
}

}  // namespace

Packed pack(const Message& message, Strategy strategy, const NameRegion& name,
            const PassShared& pass) {
  if (strategy == Strategy::kDescriptor) share_small(message);
  Packer packer(strategy, name);
  std::string bytes = encode_values(message, packer, pass);
  return {std::move(bytes), std::move(packer.parcels), {}, {}};
}

Packed pack_for_queue(const Message& message, const QueuePacking& packing) {
  std::unordered_map<const Region*, std::uint32_t> known;
  Packer* self = nullptr;
  const NameRegion name = [&](const std::shared_ptr<Region>& region) {
    const auto [found, fresh] = known.try_emplace(region.get(), 0);
    if (fresh) {
      packing.deposit(region);
      found->second = self->add_region(to_wire(*region, ""));
    }
    return found->second;
  };
  if (packing.copy_below == 0 && packing.strategy == Strategy::kDescriptor) share_small(message);
  Packer packer(packing.strategy, name, packing.copy_below);
  self = &packer;
  Packed packed;
  packed.bytes = encode_values(message, packer, {});
  packed.parcels = std::move(packer.parcels);
  packed.blocks = std::move(packer.blocks);
  if (packed.bytes.size() <= packing.most_bytes) return packed;
  packed.body = Depot::instance().allocate(packed.bytes.size());
  std::memcpy(packed.body.data(), packed.bytes.data(), packed.bytes.size());
  // A message of one block and no value. It names all regions, so that the outer one tells which
  // are needed.
  packer.message.values.clear();
  packer.message.blocks = {to_wire(packed.body.ref(), name)};
  packed.bytes = encode(packer.message);
  packed.blocks.push_back(packed.body.ref());
  if (packed.bytes.size() > packing.most_bytes) {
    fail(ErrorKind::kResource, "put: the message is in ", packer.message.regions.size(),
         " pieces of memory, more than an item of this queue can name; make the queue with larger "
         "item_bytes");
  }
  return packed;
}

Packed pack_self_contained(const at::Tensor& tensor, Strategy strategy) {
  // By descriptors of this process, which others of this user may open.
  std::unordered_map<const Region*, std::uint32_t> known;
  Packer* self = nullptr;
  const NameRegion name = [&](const std::shared_ptr<Region>& region) {
    const auto [found, fresh] = known.try_emplace(region.get(), 0);
    if (fresh) {
      found->second =
          self->add_region(to_wire(*region, concat("/proc/", ::getpid(), "/fd/", region->fd())));
    }
    return found->second;
  };
  Packer packer(strategy, name);
  self = &packer;
  const std::string handle = packer.tensor(tensor);
  const std::string tickets = packer.enter_transit();
  packer.message.values.push_back({WireValue::kTensor, handle});
  packer.message.values.push_back({WireValue::kBytes, tickets});
  return {encode(packer.message), std::move(packer.parcels), {}, {}};
}

namespace {

Message values_of(const WireMessage& wire, Unpacker& unpacker, const TakeShared& take) {
  std::vector<Value> values;
  values.reserve(wire.values.size());
  for (const WireValue& value : wire.values) {
    switch (value.kind) {
      case WireValue::kNone: values.emplace_back(std::monostate{}); break;
      case WireValue::kBool: values.emplace_back(value.bytes[0] != 0); break;
      case WireValue::kInteger: values.emplace_back(number_of<std::int64_t>(value.bytes)); break;
      case WireValue::kReal: values.emplace_back(number_of<double>(value.bytes)); break;
      case WireValue::kText: values.emplace_back(std::string(value.bytes)); break;
      case WireValue::kBytes: {
        const auto* const data = reinterpret_cast<const std::byte*>(value.bytes.data());
        values.emplace_back(Bytes(data, data + value.bytes.size()));
        break;
      }
      case WireValue::kTensor: values.emplace_back(unpacker.tensor(value.bytes)); break;
      case WireValue::kDevice: values.emplace_back(rebuild_elsewhere(value.bytes)); break;
      case WireValue::kPython: values.emplace_back(PythonObject{std::string(value.bytes)}); break;
      case WireValue::kStorage: break;
      case WireValue::kShared: values.emplace_back(take_shared(value.bytes, take)); break;
    }
  }
  return Message(std::move(values));
}

std::shared_ptr<Region> no_channel(std::uint32_t /*number*/) {
  fail(ErrorKind::kInvalidArgument, "these bytes are a part of a channel's message");
}

}  // namespace

Message unpack(std::string_view bytes, const FindRegion& find, const TakeShared& take) {
  const WireMessage wire = parse_message(bytes);
  Unpacker unpacker(wire, find);
  return values_of(wire, unpacker, take);
}

Message unpack_from_queue(std::string_view bytes, const FindNamed& find,
                          std::atomic<std::uint32_t>& progress) {
  const FindRegion none = no_channel;
  WireMessage wire = parse_message(bytes);
  std::optional<Unpacker> outer;
  std::string inside;
  if (is_in_block(wire)) {
    outer.emplace(wire, none, find);
    inside = outer->body();  // a copy: others can still write to the memory
    wire = parse_message(inside);
  }
  Unpacker unpacker(wire, none, find);
  Message message = values_of(wire, unpacker, {});
  unpacker.leave_transit(&progress);
  if (outer) outer->leave_transit(&progress);
  return message;
}

at::Tensor unpack_self_contained(std::string_view bytes) {
  const WireMessage wire = parse_message(bytes);
  if (wire.values.size() != 2 || wire.values[0].kind != WireValue::kTensor ||
      wire.values[1].kind != WireValue::kBytes ||
      wire.values[1].bytes.size() != wire.blocks.size() * sizeof(std::uint64_t)) {
    fail(ErrorKind::kInvalidArgument, "these bytes are not a tensor of this version");
  }
  const FindRegion none = no_channel;
  Unpacker unpacker(wire, none);
  unpacker.redeem(wire.values[1].bytes);
  unpacker.leave_transit();
  return unpacker.tensor(wire.values[0].bytes);
}

}  // namespace convoy::share

#include "share/pack.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <unordered_set>

#include "base/error.h"
#include "share/device.h"

namespace convoy::share {
namespace {

// Collects the distinct storages of a message.
class Packer {
 public:
  Packer(Strategy strategy, const NameRegion& name) : strategy_(strategy), name_(name) {}

  std::string tensor(const at::Tensor& tensor) {
    return convoy::encode(
        handle_of(tensor, [this](const c10::Storage& storage) { return place(storage); }));
  }
  WireMessage message;
  std::vector<Parcel> parcels;

  // The blocks are kept by the bytes from now on, once each.
  void enter_transit() const {
    std::unordered_set<const void*> done;
    for (const Parcel& parcel : parcels) {
      const BlockRef& ref = *SharedCache::place_of(parcel).block;
      if (done.insert(&ref.book->book().entry(ref.entry)).second) {
        ref.book->book().enter_transit(ref.entry);
      }
    }
  }

  std::uint32_t add_region(WireRegion region) {
    message.regions.push_back(std::move(region));
    return static_cast<std::uint32_t>(message.regions.size() - 1) | WireBlock::kLocal;
  }

 private:
  // Handles say "so many bytes into block n of this message" where others say a segment.
  shm::Location place(const c10::Storage& storage) {
    if (parcels.empty() ||
        parcels.back().storage.unsafeGetStorageImpl() != storage.unsafeGetStorageImpl()) {
      parcels.push_back(SharedCache::instance().share(storage, strategy_));
    }
    const Place place = SharedCache::place_of(parcels.back());
    const BlockRef& ref = *place.block;
    const void* const key = &ref.book->book().entry(ref.entry);
    // Neighbours are often in one block.
    if (key != last_block_) {
      const auto [found, fresh] = blocks_.try_emplace(key, message.blocks.size() + 1);
      if (fresh) {
        message.blocks.push_back(
            to_wire(ref, [this](const auto& region) { return number(region); }));
      }
      last_block_ = key;
      last_number_ = found->second;
    }
    return {last_number_, place.offset};
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
  T value;
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
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
  if ((kind != Region::Kind::kPool && kind != Region::Kind::kPlain) ||
      !wire.path.starts_with("/proc/")) {
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
  Unpacker(const WireMessage& message, const FindRegion& find) : find_(find) {
    for (const WireRegion& region : message.regions) regions_.push_back(find_by_path(region));
    // All at once: a message is received as a whole or not at all.
    leases_.reserve(message.blocks.size());
    for (const WireBlock& block : message.blocks) {
      leases_.push_back(Depot::instance().open(
          from_wire(block, [this](std::uint32_t number) { return region(number); })));
    }
  }

  // This process holds the blocks: the bytes need not any more.
  void leave_transit() const {
    for (const Lease& lease : leases_) {
      if (lease) lease.ref().book->book().leave_transit(lease.ref().entry);
    }
  }

  at::Tensor tensor(std::string_view bytes) {
    return tensor_of(decode_handle(bytes), [this](const shm::Location& place, std::uint64_t size) {
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

  const FindRegion& find_;
  std::vector<std::shared_ptr<Region>> regions_;
  std::vector<Lease> leases_;
};

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
    const c10::Storage& storage = tensor->storage();
    if (storage.nbytes() == 0 || storage.nbytes() > kSmall || SharedCache::is_shared(storage))
      continue;
    found.push_back(storage);
  }
  if (found.size() >= kMany) SharedCache::instance().share_together(found);
}

}  // namespace

Packed pack(const Message& message, Strategy strategy, const NameRegion& name) {
  if (strategy == Strategy::kDescriptor) share_small(message);
  Packer packer(strategy, name);
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
                   [&](const at::Tensor& v) {
                     const bool elsewhere = v.defined() && !v.is_cpu() && !v.is_meta();
                     made.push_back(elsewhere ? reduce_elsewhere(v) : packer.tensor(v));
                     values.push_back(
                         {elsewhere ? WireValue::kDevice : WireValue::kTensor, made.back()});
                   }},
        value);
  }
  return {encode(packer.message), std::move(packer.parcels)};
}

Packed pack_self_contained(const at::Tensor& tensor, Strategy strategy) {
  // By descriptors of this process, which others of this user may open.
  std::unordered_map<const Region*, std::uint32_t> known;
  Packer* self = nullptr;
  const NameRegion name = [&](const std::shared_ptr<Region>& region) {
    const auto [found, fresh] = known.try_emplace(region.get(), 0);
    if (fresh) {
      found->second =
          self->add_region({.kind = static_cast<std::uint32_t>(region->kind()),
                            .bytes = region->bytes(),
                            .device = region->key().device,
                            .inode = region->key().inode,
                            .path = concat("/proc/", ::getpid(), "/fd/", region->fd())});
    }
    return found->second;
  };
  Packer packer(strategy, name);
  self = &packer;
  const std::string handle = packer.tensor(tensor);
  packer.message.values.push_back({WireValue::kTensor, handle});
  packer.enter_transit();
  return {encode(packer.message), std::move(packer.parcels)};
}

Message unpack(std::string_view bytes, const FindRegion& find) {
  const WireMessage wire = parse_message(bytes);
  Unpacker unpacker(wire, find);
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
    }
  }
  return Message(std::move(values));
}

at::Tensor unpack_self_contained(std::string_view bytes) {
  const WireMessage wire = parse_message(bytes);
  if (wire.values.size() != 1 || wire.values[0].kind != WireValue::kTensor) {
    fail(ErrorKind::kInvalidArgument, "these bytes are no tensor");
  }
  const FindRegion none = [](std::uint32_t) -> std::shared_ptr<Region> {
    fail(ErrorKind::kInvalidArgument, "these bytes are a part of a channel's message");
  };
  Unpacker unpacker(wire, none);
  unpacker.leave_transit();
  return unpacker.tensor(wire.values[0].bytes);
}

}  // namespace convoy::share

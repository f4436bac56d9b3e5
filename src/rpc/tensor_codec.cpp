#include "rpc/tensor_codec.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>

#include <array>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "convoy/share.h"
#include "os/memory_pool.h"
#include "rpc/tensor_head.h"
#include "tensor/handle.h"

namespace convoy::rpc {
namespace {

using detail::TensorMode;
using detail::TensorsOut;

constexpr const char* kWhat = "value of a call";

// Types whose elements are plain bytes of a known number.
std::size_t item_bytes(std::uint8_t type) {
  if (type >= static_cast<std::uint8_t>(c10::ScalarType::Undefined)) return 0;
  const auto known = static_cast<c10::ScalarType>(type);
  return c10::isQIntType(known) ? 0 : c10::elementSize(known);
}

bool can_require_grad(c10::ScalarType type) {
  return c10::isFloatingType(type) || c10::isComplexType(type);
}

// The same memory without what only says how it is to be read.
at::Tensor plain_alias(const at::Tensor& tensor) {
  at::Tensor plain = tensor.detach();
  plain._set_conj(false);
  plain._set_neg(false);
  return plain;
}

// The elements without gaps, in the order of their addresses.
at::Tensor packed(const at::Tensor& tensor, const StrideOrder& order) {
  const at::AutoDispatchBelowADInplaceOrView no_gradients;
  c10::DimVector sizes;
  c10::DimVector strides;
  for (std::size_t i = 0; i < order.count; ++i) {
    sizes.push_back(tensor.size(order.order[i]));
    strides.push_back(tensor.stride(order.order[i]));
  }
  return plain_alias(tensor).as_strided(sizes, strides).contiguous();
}

// Gaps that are larger than the elements do not come to be on the other side.
void close_gaps(const at::Tensor& tensor, const StrideOrder& order, std::int64_t* strides) {
  std::int64_t next = 1;
  for (std::size_t at = order.count; at-- > 0;) {
    strides[order.order[at]] = next;
    next *= tensor.size(order.order[at]);
  }
}

// To the letter: is_contiguous() does not look at strides that do not matter.
bool has_contiguous_strides(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::int64_t next = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    if (strides[i] != next) return false;
    next *= std::max<std::int64_t>(sizes[i], 1);
  }
  return true;
}

// Of a tensor of this process's memory and nothing else to it: what at::empty() gives.
c10::DispatchKeySet plain_keys() {
  static const c10::DispatchKeySet keys = [] {
    const c10::InferenceMode as_always(false);
    const auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::DispatchKeySet(c10::DispatchKey::CPU),
        c10::scalarTypeToTypeMeta(c10::ScalarType::Float), c10::Device(c10::DeviceType::CPU));
    return tensor.key_set();
  }();
  return keys;
}

void check_kind(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu() && !tensor.is_meta()) {
    fail(ErrorKind::kUnsupported, "rpc: a tensor on ", tensor.device().str(),
         " cannot be passed to another process: move it to the CPU first");
  }
  if (item_bytes(static_cast<std::uint8_t>(tensor.scalar_type())) == 0) {
    fail(ErrorKind::kUnsupported, "rpc: a tensor of type ", c10::toString(tensor.scalar_type()),
         " cannot be passed to another process");
  }
  if (static_cast<std::size_t>(tensor.dim()) > TensorHead::kMostDimensions) {
    fail(ErrorKind::kUnsupported, "rpc: a tensor of ", tensor.dim(),
         " dimensions cannot be passed to another process: at most ", TensorHead::kMostDimensions,
         " can");
  }
}

struct HeldPart {
  std::shared_ptr<const void> hold;
};
void drop_held_part(void* part) { delete static_cast<HeldPart*>(part); }

// The memory goes with the tensor: not what is somebody's (from_blob without a deleter).
bool keeps_memory(const c10::Storage& storage) {
  return storage.data_ptr().get_context() != nullptr;
}
// And nobody else knows it: it was allocated for a tensor, or came with a message.
bool owns_memory(const c10::Storage& storage) {
  return keeps_memory(storage) &&
         (storage.allocator() != nullptr || storage.data_ptr().get_deleter() == &drop_held_part);
}

std::uint8_t flags_of(const at::Tensor& tensor) {
  std::uint8_t flags = 0;
  if (tensor.requires_grad()) flags |= TensorHead::kRequiresGrad;
  if (tensor.is_conj()) flags |= TensorHead::kConjugate;
  if (tensor.is_neg()) flags |= TensorHead::kNegative;
  return flags;
}

}  // namespace

std::vector<transport::Piece> pieces_of(const TensorsOut& tensors, std::vector<at::Tensor>& kept) {
  std::vector<transport::Piece> pieces;
  if (tensors.pieces() == 0) return pieces;
  for (const TensorsOut::Plan& plan : tensors.plans()) {
    if (plan.piece == 0) continue;
    // A result that others can reach may be written by them while it is under way.
    // (The plan itself refers to it, too.)
    const c10::Storage& storage = plan.tensor.storage();
    const bool own =
        plan.tensor.use_count() == 2 && storage.use_count() == 1 && owns_memory(storage);
    // It may be read after the call was given up.
    const bool stays = plan.private_copy ||
                       (tensors.mode() == TensorMode::kStay && keeps_memory(storage)) ||
                       (tensors.mode() == TensorMode::kResult && own);
    if (stays) kept.push_back(plan.tensor);
    pieces.push_back({{static_cast<const std::byte*>(plan.data), plan.bytes}, stays});
  }
  return pieces;
}

TensorMemory allocate_for_tensor(std::size_t bytes) {
  void* const data = MemoryPool::instance().allocate(bytes);
  std::shared_ptr<void> hold(data, [](void* memory) { MemoryPool::instance().free(memory); });
  return {{static_cast<std::byte*>(data), bytes}, std::move(hold)};
}

namespace {

// Memory of a tensor's own. The pool's is warm, and costs less than aligned memory of malloc's.
c10::DataPtr copy_of(std::span<const std::byte> bytes) {
  void* const data = MemoryPool::instance().allocate(bytes.size());
  if (data) std::memcpy(data, bytes.data(), bytes.size());
  return {data, data, [](void* memory) { MemoryPool::instance().free(memory); },
          c10::Device(c10::DeviceType::CPU)};
}

// As ordinary tensors have it: it may be resized, to memory of torch's own.
c10::Storage make_storage(c10::DataPtr data, std::size_t bytes) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, std::move(data), c10::GetCPUAllocator(), true));
}

}  // namespace

namespace detail {

// Where the bytes go: with the message, or as a piece. How many they are in the message.
std::size_t TensorsOut::place(Plan& plan) {
  if (plan.bytes > kMostInline && mode_ != TensorMode::kInline && pieces_ < kMostTensorPieces) {
    plan.piece = ++pieces_;
    return 0;
  }
  return plan.bytes;
}

std::size_t TensorsOut::add(const at::Tensor& tensor) {
  std::size_t plain_bytes = 0;
  if (add_plain(tensor, plain_bytes)) [[likely]]
    return plain_bytes;
  Plan plan;
  if (!tensor.defined()) {
    plans_.push_back(std::move(plan));
    return TensorHead::kFixedBytes;
  }
  check_kind(tensor);
  plan.type = static_cast<std::uint8_t>(tensor.scalar_type());
  plan.flags = flags_of(tensor);
  if ((plan.flags & TensorHead::kRequiresGrad) != 0) with_grad_.push_back(tensor);
  if (lend_ && share::is_shared(tensor)) return add_lent(tensor, std::move(plan));
  if (tensor.layout() == c10::kStrided && tensor.is_cpu() && !tensor.is_nested()) {
    return add_strided(tensor, std::move(plan));
  }
  return add_other(tensor, std::move(plan));
}

// Most tensors are plain and contiguous. False: this one is not, or something is wrong with it.
bool TensorsOut::add_plain(const at::Tensor& tensor, std::size_t& with_message) {
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (impl->key_set() != plain_keys() || lend_ || !impl->has_storage()) return false;
  const auto type = static_cast<std::uint8_t>(c10::typeMetaToScalarType(impl->dtype()));
  const std::size_t item = item_bytes(type);
  const at::IntArrayRef sizes = impl->sizes();
  if (item == 0 || sizes.size() > TensorHead::kMostDimensions ||
      !has_contiguous_strides(sizes, impl->strides())) {
    return false;
  }
  const c10::Storage& storage = impl->unsafe_storage();
  const auto* const data = static_cast<const std::byte*>(storage.data());
  const std::size_t bytes = static_cast<std::size_t>(impl->numel()) * item;
  const std::size_t offset = static_cast<std::size_t>(impl->storage_offset()) * item;
  const std::size_t there = storage.nbytes();
  if (bytes != 0 && (!data || offset > there || bytes > there - offset)) return false;
  Plan& plan = plans_.emplace_back();
  plan.kind = static_cast<std::uint8_t>(TensorKind::kExtent);
  plan.type = type;
  plan.tensor = tensor;
  plan.sizes = sizes;
  plan.bytes = bytes;
  if (bytes != 0) plan.data = data + offset;
  if (impl->requires_grad()) {
    plan.flags = TensorHead::kRequiresGrad;
    with_grad_.push_back(tensor);
  }
  with_message = TensorHead::wire_bytes(sizes.size(), false) + place(plan);
  return true;
}

std::size_t TensorsOut::add_strided(const at::Tensor& tensor, Plan plan) {
  require_memory(tensor);
  const auto dimensions = static_cast<std::size_t>(tensor.dim());
  plan.kind = static_cast<std::uint8_t>(TensorKind::kExtent);
  plan.tensor = tensor;
  plan.sizes = tensor.sizes();
  if (has_contiguous_strides(tensor.sizes(), tensor.strides())) {
    plan.bytes = tensor.nbytes();
  } else {
    const StrideOrder order = stride_order(tensor.sizes(), tensor.strides());
    const std::size_t item = tensor.itemsize();
    plan.flags |= TensorHead::kStrides;
    Rare& rare = plan.make_rare();
    rare.strides.assign(tensor.strides().begin(), tensor.strides().end());
    if (order.dense() || order.overlaps) {
      plan.bytes = order.extent * item;
    } else {
      plan.bytes = order.elements * item;
      plan.kind = static_cast<std::uint8_t>(TensorKind::kPacked);
      if (order.extent * item > std::max(2 * plan.bytes, TensorHead::kSmallExtent)) {
        close_gaps(tensor, order, rare.strides.data());
        plan.kind = static_cast<std::uint8_t>(TensorKind::kExtent);
      }
      plan.tensor = packed(tensor, order);
      plan.private_copy = true;
      rare.shape = tensor;  // whose sizes are referred to
    }
  }
  plan.data = plan.bytes == 0 ? nullptr : plan.tensor.storage().data();
  if (plan.bytes != 0) {
    plan.data = static_cast<const std::byte*>(plan.data) +
                static_cast<std::size_t>(plan.tensor.storage_offset()) * plan.tensor.itemsize();
  }
  const std::size_t with_message = place(plan);
  const bool strides = (plan.flags & TensorHead::kStrides) != 0;
  plans_.push_back(std::move(plan));
  return TensorHead::wire_bytes(dimensions, strides) + with_message;
}

// Sparse, nested and meta tensors: their handle, and the storages that it names by number.
std::size_t TensorsOut::add_other(const at::Tensor& tensor, Plan plan) {
  const at::AutoDispatchBelowADInplaceOrView no_gradients;
  // Only the elements that are in use, side by side.
  const at::Tensor compact = tensor.is_meta() ? tensor.detach() : tensor.detach().clone();
  std::vector<c10::Storage> storages;
  TensorHandle handle = handle_of(compact, [&](const c10::Storage& storage) -> shm::Location {
    for (std::size_t i = 0; i < storages.size(); ++i) {
      if (storages[i].unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return {i + 1, 0};
    }
    storages.push_back(storage);
    return {storages.size(), 0};
  });
  plan.kind = static_cast<std::uint8_t>(TensorKind::kHandle);
  plan.flags &= TensorHead::kRequiresGrad;
  plan.tensor = compact;
  Rare& rare = plan.make_rare();
  rare.header = encode(handle);
  rare.parts = static_cast<std::uint32_t>(storages.size());
  plan.data = rare.header.data();
  plan.bytes = rare.header.size();
  std::size_t bytes = TensorHead::kFixedBytes + rare.header.size() + sizeof(std::uint32_t);
  plans_.push_back(std::move(plan));
  for (const c10::Storage& storage : storages) {
    Plan part;
    part.kind = static_cast<std::uint8_t>(TensorKind::kExtent);
    part.type = static_cast<std::uint8_t>(c10::ScalarType::Byte);
    part.tensor = at::Tensor(c10::make_intrusive<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
        c10::scalarTypeToTypeMeta(c10::ScalarType::Byte)));
    part.tensor.unsafeGetTensorImpl()->set_sizes_contiguous(
        {static_cast<std::int64_t>(storage.nbytes())});
    part.sizes = part.tensor.sizes();
    part.private_copy = true;
    part.data = storage.data();
    part.bytes = storage.nbytes();
    bytes += TensorHead::wire_bytes(1, false) + place(part);
    plans_.push_back(std::move(part));
  }
  return bytes;
}

std::size_t TensorsOut::add_lent(const at::Tensor& tensor, Plan plan) {
  plan.kind = static_cast<std::uint8_t>(TensorKind::kLent);
  plan.flags &= TensorHead::kRequiresGrad;
  plan.tensor = tensor;
  Rare& rare = plan.make_rare();
  rare.header = share::to_bytes(tensor.detach());
  plan.data = rare.header.data();
  plan.bytes = rare.header.size();
  const std::size_t bytes = TensorHead::kFixedBytes + plan.bytes;
  plans_.push_back(std::move(plan));
  return bytes;
}

std::byte* TensorsOut::write_next(std::byte* to, std::byte* end) {
  WireWriter out(std::span<std::byte>(to, end));
  for (std::uint32_t parts = 0;;) {
    if (next_ >= plans_.size()) ValueWriter::fail_changed();
    const Plan& plan = plans_[next_++];
    out.put(TensorHead::Fixed{.kind = static_cast<TensorKind>(plan.kind),
                              .type = plan.type,
                              .flags = plan.flags,
                              .dimensions = static_cast<std::uint8_t>(plan.sizes.size()),
                              .piece = plan.piece,
                              .bytes = plan.bytes});
    out.put(std::as_bytes(std::span(plan.sizes.data(), plan.sizes.size())));
    if ((plan.flags & TensorHead::kStrides) != 0) {
      out.put(std::as_bytes(std::span(plan.rare->strides.data(), plan.rare->strides.size())));
    }
    if (plan.piece == 0) {
      out.put(std::string_view(static_cast<const char*>(plan.data), plan.bytes));
    }
    if (static_cast<TensorKind>(plan.kind) == TensorKind::kHandle) {
      out.put(plan.rare->parts);
      parts = plan.rare->parts + 1;
    }
    if (parts <= 1) break;
    --parts;
  }
  return to + out.written();
}

// --- What arrives ------------------------------------------------------------------------------

namespace {

// So many bytes of a message as memory that a tensor owns.
class TensorBytes {
 public:
  TensorBytes(std::span<const std::byte> bytes, transport::Part* part)
      : bytes_(bytes), part_(part) {}

  std::span<const std::byte> bytes() const { return bytes_; }

  c10::Storage storage() {
    c10::DataPtr data = adopt();
    if (!data) data = copy_of(bytes_);
    return make_storage(std::move(data), bytes_.size());
  }

 private:
  // Memory that is nobody else's is the tensor's.
  c10::DataPtr adopt() {
    constexpr std::uintptr_t kAlignment = 64;
    if (!part_ || !part_->hold || part_->where == transport::Part::Where::kLent ||
        reinterpret_cast<std::uintptr_t>(bytes_.data()) % kAlignment != 0) {
      return {};
    }
    auto* const data = const_cast<std::byte*>(bytes_.data());
    auto* const held = new HeldPart{std::move(part_->hold)};
    return {data, held, &drop_held_part, c10::Device(c10::DeviceType::CPU)};
  }

  std::span<const std::byte> bytes_;
  transport::Part* part_;
};

at::Tensor make_tensor(c10::Storage storage, std::uint8_t type) {
  return at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(type)));
}

at::Tensor strided_tensor(c10::Storage storage, const TensorHead& head) {
  auto tensor = make_tensor(std::move(storage), head.type);
  auto* const impl = tensor.unsafeGetTensorImpl();
  if ((head.flags & TensorHead::kStrides) != 0) {
    impl->set_sizes_and_strides(head.size_span(), head.stride_span());
  } else {
    impl->set_sizes_contiguous(head.size_span());
  }
  return tensor;
}

// Puts the elements where they were, with gaps between them.
at::Tensor with_gaps(const at::Tensor& elements, const TensorHead& head) {
  const at::AutoDispatchBelowADInplaceOrView no_gradients;
  const StrideOrder order = stride_order(head.size_span(), head.stride_span());
  c10::DimVector sizes;
  c10::DimVector strides;
  for (std::size_t i = 0; i < order.count; ++i) {
    sizes.push_back(head.sizes[order.order[i]]);
    strides.push_back(head.strides[order.order[i]]);
  }
  const at::Tensor memory =
      at::zeros({static_cast<std::int64_t>(order.extent)}, elements.options());
  memory.as_strided(sizes, strides).copy_(elements.view(sizes));
  return strided_tensor(memory.storage(), head);
}

}  // namespace

void ValueWriter::fail_changed() {
  fail(ErrorKind::kInvalidArgument,
       "rpc: the arguments were changed by another thread while they were sent");
}

void ValueWriter::finish() const {
  if (at_ != end_) fail_changed();
}

void ValueSource::wrong_kind() const {
  fail(ErrorKind::kInvalidArgument, "malformed ", kWhat, ": it does not fit its type");
}

void ValueSource::finish() const {
  if (at_ == end_) return;
  if (!take_trailer_) {
    fail(ErrorKind::kInvalidArgument, "malformed ", kWhat, ": there is more behind it");
  }
  take_trailer_(trailer_data_, with_grad_, at_, static_cast<std::size_t>(end_ - at_));
}

// A contiguous tensor whose bytes are in the message, of few dimensions. False: it is another one,
// or something is wrong with it; nothing was taken.
bool ValueSource::take_plain_tensor(at::Tensor& tensor) {
  constexpr std::size_t kMostPlain = 5;
  TensorHead::Fixed head;
  if (static_cast<std::size_t>(end_ - at_) < sizeof head) return false;
  std::memcpy(&head, at_, sizeof head);
  if (head.kind != TensorKind::kExtent || head.flags != 0 || head.piece != 0 ||
      head.dimensions > kMostPlain) {
    return false;
  }
  const std::size_t size_bytes = head.dimensions * sizeof(std::int64_t);
  const std::size_t left = static_cast<std::size_t>(end_ - at_) - sizeof head;
  if (left < size_bytes || left - size_bytes < head.bytes) return false;
  std::array<std::int64_t, kMostPlain> sizes;
  std::memcpy(sizes.data(), at_ + sizeof head, size_bytes);
  std::uint64_t bytes = item_bytes(head.type);
  if (bytes == 0) return false;
  for (std::size_t i = 0; i < head.dimensions; ++i) {
    // All bytes are there: with sizes of up to 2^31 nothing overflows that matches them.
    if (sizes[i] < 1 || sizes[i] > INT32_MAX || bytes > INT32_MAX) return false;
    bytes *= static_cast<std::uint64_t>(sizes[i]);
  }
  if (bytes != head.bytes) return false;
  const std::span data(at_ + sizeof head + size_bytes, bytes);
  tensor = make_tensor(make_storage(copy_of(data), bytes), head.type);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({sizes.data(), head.dimensions});
  at_ += sizeof head + size_bytes + bytes;
  return true;
}

at::Tensor ValueSource::take_tensor() {
  if (at::Tensor plain; take_plain_tensor(plain)) [[likely]]
    return plain;
  WireReader in(std::span<const std::byte>(at_, end_), kWhat);
  const auto parts =
      parts_ ? *static_cast<std::span<transport::Part>*>(parts_) : std::span<transport::Part>();
  const auto bytes_of = [&](const TensorHead& head) -> TensorBytes {
    if (head.piece == 0) {
      const std::string_view bytes = in.take(head.bytes);
      return {std::as_bytes(std::span(bytes.data(), bytes.size())), nullptr};
    }
    if (head.piece != next_piece_ || head.piece > parts.size()) {
      in.bad("a tensor names a piece that is not there");
    }
    transport::Part& part = parts[next_piece_++ - 1];
    if (part.bytes.size() != head.bytes) in.bad("a piece is not as long as its tensor");
    return {part.bytes, &part};
  };

  const TensorHead head = take_tensor_head(in, item_bytes);
  at::Tensor tensor;
  switch (head.kind) {
    case TensorKind::kUndefined: break;
    case TensorKind::kExtent: tensor = strided_tensor(bytes_of(head).storage(), head); break;
    case TensorKind::kPacked: {
      TensorHead elements = head;
      elements.flags = 0;
      elements.dimensions = 1;
      elements.sizes[0] = static_cast<std::int64_t>(head.bytes / item_bytes(head.type));
      tensor = with_gaps(strided_tensor(bytes_of(head).storage(), elements), head);
      break;
    }
    case TensorKind::kHandle: {
      const TensorHandle handle = decode_handle(in.take(head.piece == 0 ? head.bytes : 0));
      const std::size_t count = in.take_count<std::uint32_t>(TensorHead::wire_bytes(1, false));
      std::vector<c10::Storage> storages;
      for (std::size_t i = 0; i < count; ++i) {
        const TensorHead part = take_tensor_head(in, item_bytes);
        if (part.kind != TensorKind::kExtent) in.bad("a storage of a tensor is none");
        storages.push_back(bytes_of(part).storage());
      }
      tensor = tensor_of(handle, [&](const shm::Location& location, std::uint64_t bytes) {
        const auto number = static_cast<std::uint64_t>(location.segment);
        if (number == 0 || number > storages.size() || location.offset != 0 ||
            storages[number - 1].nbytes() != bytes) {
          in.bad("a tensor names a storage that is not there");
        }
        return storages[number - 1];
      });
      break;
    }
    case TensorKind::kLent:
      if (head.piece != 0) in.bad("a tensor names a piece that is not there");
      tensor = share::from_bytes(in.take(head.bytes));
      break;
  }
  if (head.kind == TensorKind::kExtent || head.kind == TensorKind::kPacked) {
    if ((head.flags & TensorHead::kConjugate) != 0) {
      if (!tensor.is_complex()) in.bad("it conjugates numbers that are not complex");
      tensor._set_conj(true);
    }
    if ((head.flags & TensorHead::kNegative) != 0) tensor._set_neg(true);
  }
  if ((head.flags & TensorHead::kRequiresGrad) != 0) {
    if (!tensor.defined() || !can_require_grad(tensor.scalar_type())) {
      in.bad("a tensor's type can have no gradient");
    }
    tensor.set_requires_grad(true);
    if (take_trailer_) with_grad_.push_back(tensor);
  }
  at_ = end_ - in.left();
  return tensor;
}

}  // namespace detail
}  // namespace convoy::rpc

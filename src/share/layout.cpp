#include "share/layout.h"

#include <ATen/ops/from_blob.h>

#include "base/error.h"
#include "base/wire.h"
#include "convoy/share.h"

namespace convoy::share {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr const char* kLayoutName = "list of tensors in shared memory";

std::size_t bytes_of(const TensorSpec& spec) {
  std::size_t bytes = c10::elementSize(spec.type);
  for (const std::int64_t size : spec.sizes) {
    if (size < 0) {
      fail(ErrorKind::kInvalidArgument, "tensor ", in_quotes(spec.name),
           ": sizes must be >= 0, got ", size);
    }
    if (__builtin_mul_overflow(bytes, static_cast<std::size_t>(size), &bytes) ||
        bytes > SIZE_MAX / 4) {
      fail(ErrorKind::kResource, "tensor ", in_quotes(spec.name), " is too large for any memory");
    }
  }
  return bytes;
}

}  // namespace

TensorLayout::TensorLayout(std::vector<TensorSpec> tensors) : tensors_(std::move(tensors)) {
  for (const TensorSpec& spec : tensors_) {
    offsets_.push_back(bytes_);
    const std::size_t bytes = bytes_of(spec);
    if (__builtin_add_overflow(bytes_, (bytes + kAlignment - 1) / kAlignment * kAlignment,
                               &bytes_)) {
      fail(ErrorKind::kResource, "tensor ", in_quotes(spec.name), " is too large for any memory");
    }
  }
}

std::string TensorLayout::encode() const {
  std::string bytes;
  WireWriter out(bytes);
  out.put(std::uint64_t{tensors_.size()});
  for (const TensorSpec& spec : tensors_) {
    out.put(static_cast<std::int64_t>(spec.type));
    out.put_sized<std::uint64_t>(spec.name);
    out.put(std::uint64_t{spec.sizes.size()});
    for (const std::int64_t size : spec.sizes) out.put(size);
  }
  return bytes;
}

TensorLayout TensorLayout::parse(std::string_view bytes) {
  WireReader in(bytes, kLayoutName);
  std::vector<TensorSpec> tensors;
  for (std::size_t n = in.take_count<std::uint64_t>(); n > 0; --n) {
    TensorSpec spec;
    const auto type = in.take<std::int64_t>();
    if (type < 0 || type >= static_cast<std::int64_t>(at::ScalarType::NumOptions) ||
        type == static_cast<std::int64_t>(at::ScalarType::Undefined)) {
      in.bad("a type is unknown");
    }
    spec.type = static_cast<at::ScalarType>(type);
    spec.name = in.take_sized<std::uint64_t>();
    for (std::size_t sizes = in.take_count<std::uint64_t>(8); sizes > 0; --sizes) {
      spec.sizes.push_back(in.take<std::int64_t>());
    }
    tensors.push_back(std::move(spec));
  }
  return TensorLayout(std::move(tensors));
}

std::size_t TensorLayout::index_of(std::string_view name) const {
  std::string known;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].name == name) return i;
    if (i < 8) known += concat(i == 0 ? "" : ", ", in_quotes(tensors_[i].name));
  }
  fail(ErrorKind::kInvalidArgument, "there is no tensor ", in_quotes(name), " here; there are ",
       known, tensors_.size() > 8 ? ", ..." : "");
}

at::Tensor TensorLayout::view(std::size_t i, std::byte* base, std::shared_ptr<void> keep) const {
  const TensorSpec& spec = tensors_.at(i);
  return at::from_blob(
      base + offsets_[i], spec.sizes, [held = std::move(keep)](void*) {},
      at::TensorOptions().dtype(spec.type));
}

at::Tensor shared_bytes(std::size_t bytes) {
  return empty({static_cast<std::int64_t>(bytes)}, at::kByte);
}

std::span<std::byte> bytes_of(const at::Tensor& handle) {
  if (!handle.defined() || !handle.device().is_cpu() || handle.layout() != c10::kStrided ||
      handle.scalar_type() != at::kByte || handle.dim() != 1 || !handle.is_contiguous() ||
      !is_shared(handle)) {
    fail(ErrorKind::kInvalidArgument,
         "this tensor is not a handle of something in shared memory: pass on what handle() gave");
  }
  return {static_cast<std::byte*>(handle.data_ptr()), handle.nbytes()};
}

}  // namespace convoy::share

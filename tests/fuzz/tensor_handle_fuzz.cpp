// Handles of tensors from any bytes: they are refused with kInvalidArgument, or are valid (all
// elements inside of the storage) and encode to the bytes that were read.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "convoy/error.h"
#include "tensor/handle_codec.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

// TensorHandle without torch's types.
struct PlainHandle {
  struct Place {
    std::uint64_t segment = 0;
    std::uint64_t offset = 0;
    explicit operator bool() const { return segment != 0; }
  };

  convoy::HandleKind kind = convoy::HandleKind::kStrided;
  std::int8_t type = 0;
  std::int8_t layout = 0;
  bool requires_grad = false;
  bool conjugate = false;
  bool negative = false;
  bool coalesced = false;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  std::int64_t offset = 0;
  Place storage;
  std::uint64_t storage_bytes = 0;
  std::vector<PlainHandle> parts;
};

// The first of torch's: uint8, int8, int16, int32, int64, half, float, double, complex of those.
struct Types {
  static std::size_t bytes(std::int8_t type) {
    constexpr std::size_t kBytes[] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16};
    return type < 0 || type > 10 ? 0 : kBytes[type];
  }
  static bool is_complex(std::int8_t type) { return type >= 8; }
  static bool is_floating(std::int8_t type) { return type >= 5 && type <= 7; }
  static bool is_long(std::int8_t type) { return type == 4; }
};

// With numbers that cannot overflow.
void require_inside(const PlainHandle& handle) {
  if (handle.kind != convoy::HandleKind::kStrided) return;
  __int128 last = handle.offset;
  bool empty = false;
  for (std::size_t i = 0; i < handle.sizes.size(); ++i) {
    require(handle.sizes[i] >= 0 && handle.strides[i] >= 0);
    empty = empty || handle.sizes[i] == 0;
    last += static_cast<__int128>(handle.sizes[i] - 1) * handle.strides[i];
  }
  const auto item = static_cast<__int128>(Types::bytes(handle.type));
  require(item > 0);
  if (!empty) require((last + 1) * item <= static_cast<__int128>(handle.storage_bytes));
  require(static_cast<bool>(handle.storage) == (handle.storage_bytes > 0));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using Codec = convoy::HandleCodec<PlainHandle, Types>;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    const PlainHandle handle = Codec::decode(bytes);
    require_inside(handle);
    for (const PlainHandle& part : handle.parts) require_inside(part);
    require(Codec::encode(handle) == bytes);
  } catch (const convoy::Error& error) {
    require(error.kind() == convoy::ErrorKind::kInvalidArgument);
  }
  return 0;
}

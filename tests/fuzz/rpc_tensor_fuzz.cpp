// Heads of tensors in calls from any bytes: they are refused with kInvalidArgument, or are valid
// (every element lies within the memory that will be taken, which is not much more than came) and
// encode to the bytes that were read.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "convoy/error.h"
#include "rpc/tensor_head.h"

namespace {

using namespace convoy::rpc;

void require(bool condition) {
  if (!condition) std::abort();
}

// The first of torch's: uint8, int8, int16, int32, int64, half, float, double, complex of those.
std::size_t item_bytes(std::uint8_t type) {
  constexpr std::size_t kBytes[] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16};
  return type > 10 ? 0 : kBytes[type];
}

// With numbers that cannot overflow.
void require_inside(const TensorHead& head) {
  const auto item = static_cast<__int128>(item_bytes(head.type));
  require(item > 0);
  __int128 extent = 1, elements = 1;
  for (std::size_t i = 0; i < head.dimensions; ++i) {
    require(head.sizes[i] >= 0 && head.strides[i] >= 0);
    elements *= head.sizes[i];
    require(elements <= INT64_MAX);
    extent += static_cast<__int128>(head.sizes[i] - 1) * head.strides[i];
  }
  if (elements == 0) return require(head.bytes == 0);
  const auto bytes = static_cast<__int128>(head.bytes);
  if (head.kind == TensorKind::kExtent) return require(extent * item == bytes);
  require(extent * item <= 2 * bytes || extent * item <= TensorHead::kSmallExtent);
  require(elements * item >= bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    convoy::WireReader in(bytes, "tensor");
    const TensorHead head = take_tensor_head(in, item_bytes);
    require(head.piece != 0 || head.bytes <= in.left());
    if (head.kind == TensorKind::kExtent || head.kind == TensorKind::kPacked) require_inside(head);
    std::string again;
    convoy::WireWriter out(again);
    head.write(out);
    require(again == bytes.substr(0, bytes.size() - in.left()));
  } catch (const convoy::Error& error) {
    require(error.kind() == convoy::ErrorKind::kInvalidArgument);
  }
  return 0;
}

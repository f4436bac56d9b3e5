// Messages of channels and their envelopes from any bytes: they are refused with kInvalidArgument,
// or are whole and encode to the bytes that were read.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "convoy/error.h"
#include "share/message.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

template <class Function>
void refused_or_whole(Function function) {
  try {
    function();
  } catch (const convoy::Error& error) {
    require(error.kind() == convoy::ErrorKind::kInvalidArgument);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace convoy::share;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  refused_or_whole([&] {
    const WireMessage message = parse_message(bytes);
    for (const WireBlock& block : message.blocks) {
      for (const std::uint32_t region : {block.book, block.memory}) {
        require((region & WireBlock::kLocal) == 0 ||
                (region & ~WireBlock::kLocal) < message.regions.size());
      }
    }
    for (const WireValue& value : message.values) {
      require(value.bytes.data() >= bytes.data() &&
              value.bytes.data() + value.bytes.size() <= bytes.data() + bytes.size());
    }
    require(encode(message) == bytes);
  });
  refused_or_whole([&] { require(encode(parse_envelope(bytes)) == bytes); });
  return 0;
}

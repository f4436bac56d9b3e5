// Letters of agents from any bytes: they are refused with kInvalidArgument, or are whole and encode
// to the bytes that were read.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>

#include "agent/letters.h"
#include "convoy/error.h"

namespace {

using namespace convoy::agent;
using Bytes = std::span<const std::byte>;

void require(bool condition) {
  if (!condition) std::abort();
}

bool equal(const std::string& text, Bytes bytes) {
  return text.size() == bytes.size() &&
         (bytes.empty() || std::memcmp(text.data(), bytes.data(), bytes.size()) == 0);
}

template <class Function>
void refused_or_whole(Function function) {
  try {
    function();
  } catch (const convoy::Error& error) {
    require(error.kind() == convoy::ErrorKind::kInvalidArgument);
  }
}

template <class Head>
void try_head(Bytes bytes) {
  refused_or_whole([&] {
    const Head head = decode_head<Head>(bytes, "head");
    require(std::memcmp(&head, bytes.data(), sizeof head) == 0);
  });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const Bytes bytes = std::as_bytes(std::span(data, size));
  try_head<CallHead>(bytes);
  try_head<ReplyHead>(bytes);
  try_head<CancelHead>(bytes);
  try_head<GatherHead>(bytes);
  refused_or_whole([&] { require(equal(encode_error(decode_error(bytes)), bytes)); });
  // The first byte says where the head of a hello ends and its table begins.
  if (bytes.empty()) return 0;
  const Bytes rest = bytes.subspan(1);
  const Bytes head = rest.first(std::min<std::size_t>(data[0], rest.size()));
  const Bytes table = rest.subspan(head.size());
  refused_or_whole([&] {
    const Hello hello = decode_hello(head, table);
    require(hello.name.size() <= kMostName && hello.table.size() <= kMostFunctions);
    require(equal(encode_hello(hello), head) && equal(encode_table(hello.table), table));
  });
  return 0;
}

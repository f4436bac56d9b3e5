#include "agent/letters.h"

#include "base/error.h"
#include "base/wire.h"

namespace convoy::agent {
namespace {

constexpr std::uint8_t kAsks = 1;
constexpr std::uint8_t kKnows = 2;
constexpr std::uint32_t kLastKind = static_cast<std::uint32_t>(ErrorKind::kCancelled);

}  // namespace

std::string encode_hello(const Hello& hello) {
  std::string bytes;
  WireWriter writer(bytes);
  writer.put(kHelloMagic);
  writer.put(static_cast<std::uint8_t>((hello.asks ? kAsks : 0) | (hello.knows ? kKnows : 0)));
  writer.put_zeros(3);
  writer.put(hello.session.bytes);
  writer.put(hello.worker);
  writer.put_sized<std::uint16_t>(hello.name);
  return bytes;
}

std::string encode_table(std::span<const TableEntry> table) {
  std::string bytes;
  WireWriter writer(bytes);
  writer.put(static_cast<std::uint32_t>(table.size()));
  for (const TableEntry& entry : table) {
    writer.put(entry.hash);
    writer.put_sized<std::uint16_t>(entry.name);
    writer.put_sized<std::uint32_t>(entry.signature);
  }
  return bytes;
}

Hello decode_hello(std::span<const std::byte> head, std::span<const std::byte> table) {
  Hello hello;
  WireReader reader(head, "hello of a worker");
  reader.take_magic(kHelloMagic);
  const auto flags = reader.take<std::uint8_t>();
  if (flags > (kAsks | kKnows)) reader.bad("it has unknown flags");
  hello.asks = (flags & kAsks) != 0;
  hello.knows = (flags & kKnows) != 0;
  reader.take_zeros(3);
  hello.session.bytes = reader.take<decltype(hello.session.bytes)>();
  hello.worker = reader.take<std::uint32_t>();
  hello.name = reader.take_sized<std::uint16_t>();
  if (hello.name.size() > kMostName) reader.bad("its name is too long");
  reader.end();
  WireReader rest(table, "table of functions");
  constexpr std::size_t kLeastEntry = 14;
  const std::size_t count = rest.take_count<std::uint32_t>(kLeastEntry);
  if (count > kMostFunctions) rest.bad("it is too long");
  hello.table.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    TableEntry& entry = hello.table.emplace_back();
    entry.hash = rest.take<std::uint64_t>();
    entry.name = rest.take_sized<std::uint16_t>();
    entry.signature = rest.take_sized<std::uint32_t>();
  }
  rest.end();
  return hello;
}

std::string encode_error(const ErrorFields& error) {
  std::string bytes;
  WireWriter writer(bytes);
  writer.put(error.kind);
  writer.put_sized<std::uint32_t>(error.type);
  writer.put_sized<std::uint32_t>(error.text);
  return bytes;
}

ErrorFields decode_error(std::span<const std::byte> bytes) {
  ErrorFields error;
  WireReader reader(bytes, "error of a call");
  error.kind = reader.take<std::uint32_t>();
  if (error.kind > kLastKind) reader.bad("it is of an unknown kind");
  error.type = reader.take_sized<std::uint32_t>();
  error.text = reader.take_sized<std::uint32_t>();
  reader.end();
  return error;
}

template <class T>
T decode_head(std::span<const std::byte> head, const char* what) {
  WireReader reader(head, what);
  return reader.take<T>();
}
template CallHead decode_head<CallHead>(std::span<const std::byte>, const char*);
template ReplyHead decode_head<ReplyHead>(std::span<const std::byte>, const char*);
template CancelHead decode_head<CancelHead>(std::span<const std::byte>, const char*);
template GatherHead decode_head<GatherHead>(std::span<const std::byte>, const char*);

}  // namespace convoy::agent

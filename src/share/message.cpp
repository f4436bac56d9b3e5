// Bytes of a message, little-endian:
//    0  4  magic "CVM1"      4  4  regions r     8  4  blocks b      12  4  values v
//   16     r regions: kind (4), length of the path (4), bytes (8), device (8), inode (8),
//                     the path, zeros up to a multiple of 8
//          b blocks:  book (4), memory (4), generation (4), zero (4), entry (8), offset (8),
//                     bytes (8)
//          v values:  kind (4), zero (4), length (8), the bytes, zeros up to a multiple of 8
// Bytes of an envelope: magic "CVE1", zero (4), a block.
#include "share/message.h"

#include <algorithm>

#include "base/wire.h"

namespace convoy::share {
namespace {

constexpr std::string_view kMessageMagic = "CVM1";
constexpr std::string_view kEnvelopeMagic = "CVE1";
constexpr std::size_t kRegionBytes = 32;
constexpr std::size_t kBlockBytes = 40;
constexpr std::size_t kValueBytes = 16;
constexpr std::size_t kMostPath = 4096;

constexpr const char* kMessageName = "message of a channel";

[[noreturn]] void bad(const char* why) { WireReader(std::string_view(), kMessageName).bad(why); }

void put_block(WireWriter& out, const WireBlock& block) {
  out.put(block.book);
  out.put(block.memory);
  out.put(block.generation);
  out.put_zeros(4);
  out.put(block.entry);
  out.put(block.offset);
  out.put(block.bytes);
}

WireBlock take_block(WireReader& in) {
  WireBlock block;
  block.book = in.take<std::uint32_t>();
  block.memory = in.take<std::uint32_t>();
  block.generation = in.take<std::uint32_t>();
  in.take_zeros(4);
  block.entry = in.take<std::uint64_t>();
  block.offset = in.take<std::uint64_t>();
  block.bytes = in.take<std::uint64_t>();
  return block;
}

void check_region(std::uint32_t number, std::size_t local) {
  if ((number & WireBlock::kLocal) != 0 && (number & ~WireBlock::kLocal) >= local) {
    bad("a block is in memory that it does not name");
  }
}

void check(const WireValue& value) {
  std::size_t length = value.bytes.size();
  switch (value.kind) {
    case WireValue::kNone: length = 0; break;
    case WireValue::kBool:
      length = 1;
      if (value.bytes.size() == 1 && static_cast<unsigned char>(value.bytes[0]) > 1) {
        bad("a bool must be 0 or 1");
      }
      break;
    case WireValue::kInteger:
    case WireValue::kReal: length = 8; break;
    case WireValue::kText:
    case WireValue::kBytes:
    case WireValue::kTensor:
    case WireValue::kStorage:
    case WireValue::kPython: break;
    case WireValue::kShared: length = 16; break;
    case WireValue::kDevice:  // what a DeviceSharing made, then its device's number
      if (length == 0) bad("a tensor has no device");
      break;
    default: bad("a value has an unknown kind");
  }
  if (value.bytes.size() != length) bad("a value has the wrong length for its kind");
}

}  // namespace

bool is_descriptor_path(std::string_view path) {
  const auto take = [&](std::string_view text) {
    if (!path.starts_with(text)) return false;
    path.remove_prefix(text.size());
    return true;
  };
  const auto take_number = [&] {
    const auto end = std::min(path.find_first_not_of("0123456789"), path.size());
    path.remove_prefix(end);
    return end > 0;
  };
  return take("/proc/") && take_number() && take("/fd/") && take_number() && path.empty();
}

std::string encode(const WireMessage& message) {
  std::size_t size = 16 + message.blocks.size() * kBlockBytes;
  for (const auto& value : message.values) size += kValueBytes + value.bytes.size() + 8;
  std::string bytes;
  bytes.reserve(size);
  WireWriter out(bytes);
  out.put(kMessageMagic);
  out.put(static_cast<std::uint32_t>(message.regions.size()));
  out.put(static_cast<std::uint32_t>(message.blocks.size()));
  out.put(static_cast<std::uint32_t>(message.values.size()));
  for (const auto& region : message.regions) {
    out.put(region.kind);
    out.put(static_cast<std::uint32_t>(region.path.size()));
    out.put(region.bytes);
    out.put(region.device);
    out.put(region.inode);
    out.put_padded(region.path);
  }
  for (const auto& block : message.blocks) put_block(out, block);
  for (const auto& value : message.values) {
    out.put(static_cast<std::uint32_t>(value.kind));
    out.put_zeros(4);
    out.put(std::uint64_t{value.bytes.size()});
    out.put_padded(value.bytes);
  }
  return bytes;
}

std::string encode(const WireEnvelope& envelope) {
  std::string bytes;
  WireWriter out(bytes);
  out.put(kEnvelopeMagic);
  out.put_zeros(4);
  put_block(out, envelope.block);
  return bytes;
}

bool is_envelope(std::string_view bytes) { return bytes.starts_with(kEnvelopeMagic); }

WireMessage parse_message(std::string_view bytes) {
  WireReader in(bytes, kMessageName);
  in.take_magic(kMessageMagic);
  const auto regions = in.take<std::uint32_t>();
  const auto blocks = in.take<std::uint32_t>();
  const auto values = in.take<std::uint32_t>();
  WireMessage message;
  message.regions.reserve(in.checked_count(regions, kRegionBytes));
  for (std::uint32_t i = 0; i < regions; ++i) {
    WireRegion& region = message.regions.emplace_back();
    region.kind = in.take<std::uint32_t>();
    const auto length = in.take<std::uint32_t>();
    if (length > kMostPath) bad("a path is too long");
    region.bytes = in.take<std::uint64_t>();
    region.device = in.take<std::uint64_t>();
    region.inode = in.take<std::uint64_t>();
    region.path = in.take_padded(length);
    if (region.path.find('\0') != std::string::npos) bad("a path contains a NUL byte");
  }
  message.blocks.reserve(in.checked_count(blocks, kBlockBytes));
  for (std::uint32_t i = 0; i < blocks; ++i) {
    message.blocks.push_back(take_block(in));
    check_region(message.blocks.back().book, regions);
    check_region(message.blocks.back().memory, regions);
  }
  message.values.reserve(in.checked_count(values, kValueBytes));
  for (std::uint32_t i = 0; i < values; ++i) {
    WireValue& value = message.values.emplace_back();
    value.kind = static_cast<WireValue::Kind>(in.take<std::uint32_t>());
    in.take_zeros(4);
    value.bytes = in.take_padded(in.take<std::uint64_t>());
    check(value);
  }
  in.end();
  return message;
}

WireEnvelope parse_envelope(std::string_view bytes) {
  WireReader in(bytes, kMessageName);
  in.take_magic(kEnvelopeMagic);
  in.take_zeros(4);
  WireEnvelope envelope{take_block(in)};
  check_region(envelope.block.book, 0);
  check_region(envelope.block.memory, 0);
  in.end();
  return envelope;
}

}  // namespace convoy::share

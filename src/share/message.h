#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace convoy::share {

// The bytes of a message: pieces of memory, blocks in them, and values, of which tensors refer to
// the blocks. message.cpp has the table. Nothing here knows what lies in the memory.

// A piece of memory that the receiver finds by itself.
struct WireRegion {
  std::uint32_t kind = 0;  // Region::Kind
  std::uint64_t bytes = 0;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::string path;

  friend bool operator==(const WireRegion&, const WireRegion&) = default;
};

struct WireBlock {
  // A region of the message itself, or one that the channel has introduced before.
  static constexpr std::uint32_t kLocal = 0x80000000;

  std::uint32_t book = 0;
  std::uint32_t memory = 0;
  std::uint32_t generation = 0;
  std::uint64_t entry = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;

  friend bool operator==(const WireBlock&, const WireBlock&) = default;
};

struct WireValue {
  // Wire values: only append.
  enum Kind : std::uint32_t {
    kNone,
    kBool,
    kInteger,
    kReal,
    kText,
    kBytes,
    kTensor,
    kPython,
    kDevice,
    kStorage,  // bytes of a storage that is copied: tensors refer to it, it is no value
    kShared,   // descriptors that went before: kind, how many, the first one's number, zero
  };

  Kind kind = kNone;
  std::string_view bytes;

  friend bool operator==(const WireValue&, const WireValue&) = default;
};

struct WireMessage {
  std::vector<WireRegion> regions;
  std::vector<WireBlock> blocks;
  std::vector<WireValue> values;  // their bytes are those that were parsed

  friend bool operator==(const WireMessage&, const WireMessage&) = default;
};

// A message too large for a ring goes in a block of its own, which this one names.
struct WireEnvelope {
  WireBlock block;

  friend bool operator==(const WireEnvelope&, const WireEnvelope&) = default;
};

// "/proc/<pid>/fd/<number>" and nothing else: a path from somebody else is opened, and must not
// lead anywhere ("/proc/../dev/...").
bool is_descriptor_path(std::string_view path);

std::string encode(const WireMessage& message);
std::string encode(const WireEnvelope& envelope);
bool is_envelope(std::string_view bytes);
// A message of a queue that is in a block, which this one names.
inline bool is_in_block(const WireMessage& message) {
  return message.values.empty() && message.blocks.size() == 1;
}

// kInvalidArgument for bytes that are none. What they return is whole: counts and lengths fit the
// bytes, numbers of local regions exist, values have the lengths of their kinds.
WireMessage parse_message(std::string_view bytes);
WireEnvelope parse_envelope(std::string_view bytes);

}  // namespace convoy::share

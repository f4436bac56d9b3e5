#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "rref/ids.h"

// What workers write to each other about references. docs/internals/wire.md has the bytes.
namespace convoy::rref {

// The letters of this layer, among those of agents.
inline constexpr std::uint16_t kReferenceLetter = 64;

enum class RecordType : std::uint8_t {
  kRequest = 1,  // user to owner: I refer to `id`, as `number`
  kConfirm = 2,  // owner to user: I know of `number`
  kDead = 3,     // owner to user: `number` refers to nothing, because of `failure`
  kDelete = 4,   // user to owner: `number` does not refer to `id` any more
  kAbandon = 5,  // creator to owner: do not begin `id` any more, if you have not, because of
                 // `failure`
  kAccept = 6,   // receiver to sender: passage `number` was taken, and its owner knows of it
  kRefuse = 7,   // receiver to sender: passage `number` was not taken, and will not be
  kClose = 8,    // sender to receiver: which of the two holds for passage `number`? If it went with
                 // an answer, `call` says to which call
};

struct Record {
  RecordType type = RecordType::kRequest;
  RRefId id = {};
  std::uint64_t number = 0;
  std::uint64_t call = 0;
  Failure failure = {};
};

// Before the records of a letter.
struct LetterHead {
  Incarnation from = 0;
  Incarnation to = 0;
  std::uint64_t taken = 0;  // all records up to this one of the receiver were taken
  std::uint64_t first = 0;  // the number of the first record here; they count from 1
  std::uint32_t count = 0;
  std::uint32_t zero = 0;
};
static_assert(sizeof(LetterHead) == 40);

std::string encode_record(const Record& record);

struct ReferenceLetter {
  LetterHead head;
  std::vector<Record> records;
};
// Throws kInvalidArgument.
ReferenceLetter decode_letter(std::span<const std::byte> bytes);

}  // namespace convoy::rref

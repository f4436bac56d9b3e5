#include "rref/records.h"

#include "base/concat.h"
#include "base/error.h"
#include "base/wire.h"

namespace convoy::rref {
namespace {

// So that a record fits into a letter's head.
constexpr std::size_t kMostText = 3072;
constexpr std::size_t kMostName = 512;
constexpr std::uint32_t kLastKind = static_cast<std::uint32_t>(ErrorKind::kCancelled);
constexpr std::size_t kLeastRecord = 9;

struct Shape {
  bool id = false;
  bool call = false;
  bool failure = false;
};

Shape shape_of(RecordType type) {
  switch (type) {
    case RecordType::kRequest:
    case RecordType::kDelete: return {.id = true};
    case RecordType::kAbandon: return {.id = true, .failure = true};
    case RecordType::kDead: return {.failure = true};
    case RecordType::kClose: return {.call = true};
    case RecordType::kConfirm:
    case RecordType::kAccept:
    case RecordType::kRefuse: break;
  }
  return {};
}

Record take_record(WireReader& reader) {
  Record record;
  const auto type = reader.take<std::uint8_t>();
  if (type < static_cast<std::uint8_t>(RecordType::kRequest) ||
      type > static_cast<std::uint8_t>(RecordType::kClose)) {
    reader.bad("a record of unknown type");
  }
  record.type = static_cast<RecordType>(type);
  const Shape shape = shape_of(record.type);
  record.number = reader.take<std::uint64_t>();
  if (shape.id) record.id = reader.take<RRefId>();
  if (shape.call) record.call = reader.take<std::uint64_t>();
  if (shape.failure) {
    const auto kind = reader.take<std::uint32_t>();
    if (kind > kLastKind) reader.bad("an error of unknown kind");
    record.failure.kind = static_cast<ErrorKind>(kind);
    record.failure.worker = reader.take_sized<std::uint16_t>();
    record.failure.remote_type = reader.take_sized<std::uint16_t>();
    record.failure.text = reader.take_sized<std::uint16_t>();
  }
  return record;
}

}  // namespace

std::string to_string(const RRefId& id) {
  return concat("(worker ", id.owner, ", #", id.number, " of worker ", id.creator, ")");
}

std::string encode_record(const Record& record) {
  std::string bytes;
  WireWriter writer(bytes);
  const Shape shape = shape_of(record.type);
  writer.put(static_cast<std::uint8_t>(record.type));
  writer.put(record.number);
  if (shape.id) writer.put(record.id);
  if (shape.call) writer.put(record.call);
  if (shape.failure) {
    writer.put(static_cast<std::uint32_t>(record.failure.kind));
    writer.put_sized<std::uint16_t>(record.failure.worker.substr(0, kMostName));
    writer.put_sized<std::uint16_t>(record.failure.remote_type.substr(0, kMostName));
    writer.put_sized<std::uint16_t>(record.failure.text.substr(0, kMostText));
  }
  return bytes;
}

ReferenceLetter decode_letter(std::span<const std::byte> bytes) {
  ReferenceLetter letter;
  WireReader reader(bytes, "message about references");
  letter.head = reader.take<LetterHead>();
  if (letter.head.zero != 0) reader.bad("bytes are not zero");
  if (letter.head.count != 0 && letter.head.first == 0) reader.bad("records count from 1");
  if (letter.head.first > UINT64_MAX / 2 || letter.head.taken > UINT64_MAX / 2) {
    reader.bad("its numbers are out of range");
  }
  if (letter.head.count > bytes.size() / kLeastRecord) reader.bad("it is too short");
  letter.records.reserve(letter.head.count);
  for (std::uint32_t i = 0; i < letter.head.count; ++i) {
    letter.records.push_back(take_record(reader));
  }
  reader.end();
  return letter;
}

}  // namespace convoy::rref

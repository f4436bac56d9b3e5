#include "transport/endpoint.h"

#include "base/error.h"
#include "os/memory_pool.h"

namespace convoy::transport {

std::string Address::encode() const { return concat(id.to_string(), " ", where); }

Address Address::decode(const std::string& text) {
  constexpr std::size_t kIdDigits = 32;
  if (text.size() <= kIdDigits || text[kIdDigits] != ' ') {
    fail(ErrorKind::kInvalidArgument, "malformed endpoint address: '", text, "'");
  }
  return {Id::parse(std::string_view(text).substr(0, kIdDigits)), text.substr(kIdDigits + 1)};
}

std::size_t piece_bytes(const Letter& letter) {
  std::size_t bytes = 0;
  for (const Piece& piece : letter.pieces) bytes += piece.bytes.size();
  return bytes;
}

void check_letter(const Letter& letter, std::size_t most_bytes) {
  if (letter.head.size() > Letter::kMostHead) {
    fail(ErrorKind::kInvalidArgument, "a message's head of ", letter.head.size(),
         " bytes; at most ", Letter::kMostHead, ": send more as a piece");
  }
  if (letter.pieces.size() > Letter::kMostPieces) {
    fail(ErrorKind::kInvalidArgument, "a message of ", letter.pieces.size(), " pieces; at most ",
         Letter::kMostPieces);
  }
  if (const std::size_t bytes = piece_bytes(letter); bytes > most_bytes) {
    fail(ErrorKind::kInvalidArgument, "a message of ", bytes, " bytes; at most ", most_bytes,
         " may be on their way to one remote (the endpoint's quota)");
  }
}

KeptLetter::KeptLetter(const Letter& letter)
    : kind_(letter.kind), reply_(letter.reply), head_(letter.head.size()) {
  letter.head.write(head_);
  for (const Piece& piece : letter.pieces) {
    data_.emplace_back(piece.bytes.begin(), piece.bytes.end());
  }
  for (const auto& bytes : data_) pieces_.push_back({bytes});
}

Part owned_part(std::span<const std::byte> bytes) {
  if (bytes.empty()) return {.where = Part::Where::kOwned};
  auto& pool = MemoryPool::instance();
  std::shared_ptr<void> memory(pool.allocate(bytes.size()),
                               [&pool](void* data) { pool.free(data); });
  std::memcpy(memory.get(), bytes.data(), bytes.size());
  const std::span view(static_cast<const std::byte*>(memory.get()), bytes.size());
  return {view, Part::Where::kOwned, std::move(memory)};
}

}  // namespace convoy::transport

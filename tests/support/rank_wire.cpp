#include "support/rank_wire.h"

#include <sstream>

#include "base/concat.h"

namespace convoy::test {

std::string encode(const Frame& frame) {
  const auto length = static_cast<std::uint32_t>(frame.text.size());
  std::string bytes(1, static_cast<char>(frame.type));
  bytes.append(reinterpret_cast<const char*>(&length), sizeof length);
  return bytes + frame.text;
}

std::string encode(const RankFailure& failure) {
  return concat(static_cast<int>(failure.kind), " ", failure.line, " ", failure.file, "\n",
                failure.text);
}

RankFailure decode_failure(const std::string& text) {
  std::istringstream in(text);
  int kind = 0;
  RankFailure failure;
  in >> kind >> failure.line;
  in.get();
  failure.kind = static_cast<RankFailure::Kind>(kind);
  std::getline(in, failure.file);
  failure.text.assign(std::istreambuf_iterator<char>(in), {});
  return failure;
}

std::optional<Frame> FrameDecoder::next() {
  std::uint32_t length = 0;
  constexpr std::size_t kHead = 1 + sizeof length;
  if (buffer_.size() < kHead) return std::nullopt;
  std::memcpy(&length, buffer_.data() + 1, sizeof length);
  if (buffer_.size() < kHead + length) return std::nullopt;
  Frame frame{static_cast<FrameType>(buffer_[0]), buffer_.substr(kHead, length)};
  buffer_.erase(0, kHead + length);
  return frame;
}

}  // namespace convoy::test

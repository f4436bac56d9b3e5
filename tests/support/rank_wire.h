#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>

#include "support/rank_group.h"

namespace convoy::test {

// What a rank's process and its group tell each other over a socket pair. A frame: one byte of
// type, four bytes of length, that many bytes of text. Both sides are one program, so the layout is
// the machine's own.
enum class FrameType : char {
  kMark = 'm',      // rank to group: the mark
  kFailure = 'f',   // rank to group: an encoded RankFailure
  kReturned = 'r',  // rank to group: the function came to an end
  kPost = 'p',      // group to rank: the posted text
};

struct Frame {
  FrameType type;
  std::string text;
};

std::string encode(const Frame& frame);
std::string encode(const RankFailure& failure);
RankFailure decode_failure(const std::string& text);

class FrameDecoder {
 public:
  void feed(std::span<const std::byte> bytes) {
    buffer_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  std::optional<Frame> next();

 private:
  std::string buffer_;
};

}  // namespace convoy::test

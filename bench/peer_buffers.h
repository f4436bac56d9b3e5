#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>

#include "side.h"

namespace bench {

// A case's buffers, for libraries that know private memory only.
class PeerBuffers {
 public:
  // False: there is no such operation.
  bool prepare(const Case& next) {
    const bool two =
        next.op == "all_to_all" || next.op == "reduce_scatter" || next.op == "all_gather";
    in_ = allocate(next.bytes);
    out_ = two ? allocate(next.bytes) : nullptr;
    return two || next.op == "all_reduce" || next.op == "broadcast" || next.op == "barrier" ||
           next.op == "ping_pong";
  }

  std::byte* in() const { return in_.get(); }
  std::byte* out() const { return out_.get(); }  // nullptr: in place
  // What a call reads.
  std::span<std::byte> input(const Case& next, std::size_t ranks) const {
    return {in(), next.op == "all_gather" ? next.bytes / ranks : next.bytes};
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  using Memory = std::unique_ptr<std::byte, Free>;

  static Memory allocate(std::size_t bytes) {
    const std::size_t size = (bytes / 64 + 1) * 64;
    Memory memory(static_cast<std::byte*>(std::aligned_alloc(64, size)));
    std::memset(memory.get(), 0, size);
    return memory;
  }

  Memory in_, out_;
};

}  // namespace bench

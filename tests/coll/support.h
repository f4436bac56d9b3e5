#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "coll/group.h"
#include "convoy/error.h"
#include "reference.h"
#include "support/rank_group.h"

namespace convoy::coll::test {

using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using reference::Buffer;

// The operations' own deadline is far away: what fails sooner failed on the event.
inline constexpr auto kFar = std::chrono::seconds(50);
inline constexpr auto kEventLimit = std::chrono::seconds(2);

// The group of all ranks of the test; `name` must be new for every group of a test.
inline std::shared_ptr<Group> make_group(const Rank& rank, const std::string& name = "world",
                                         GroupOptions options = {}) {
  options.name = name;
  if (options.timeout == GroupOptions{}.timeout) options.timeout = rank.deadline().remaining();
  return Group::create(with_prefix(rank.store(), name), rank.id(), rank.size(), options);
}

// Where a loop over bytes takes minutes: fewer sizes must do.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// At once: a sanitizer looks at every single access of a loop over bytes.
inline bool same(const Buffer& a, const Buffer& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

enum class Place { kShared, kPrivate };

// Memory with a guard on both sides, in group memory or not, at any offset.
class Region {
 public:
  Region(Group& group, Place place, std::size_t bytes, std::size_t offset = 0) : bytes_(bytes) {
    const std::size_t total = bytes + offset + 2 * kGuard;
    if (place == Place::kShared) {
      block_ = group.allocate(total);
      base_ = block_.data();
    } else {
      memory_.resize(total);
      base_ = memory_.data();
    }
    std::memset(base_, kMark, total);
    data_ = base_ + kGuard + offset;
  }
  ~Region() { EXPECT_TRUE(intact()) << "memory beside the buffer was written"; }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::byte* data() { return data_; }
  std::size_t size() const { return bytes_; }
  void fill(const Buffer& content) {
    if (!content.empty()) std::memcpy(data_, content.data(), content.size());
  }
  Buffer content() const { return {data_, data_ + bytes_}; }

 private:
  static constexpr std::size_t kGuard = 128;
  static constexpr int kMark = 0x5a;

  bool intact() const {
    std::array<std::byte, kGuard> marks;
    marks.fill(std::byte{kMark});
    return std::memcmp(data_ - kGuard, marks.data(), kGuard) == 0 &&
           std::memcmp(data_ + bytes_, marks.data(), kGuard) == 0;
  }

  shm::Block block_;
  Buffer memory_;
  std::byte* base_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

// What every rank has, known to every rank.
inline Buffer input_of(int rank, std::uint64_t salt, DataType type, std::size_t count) {
  std::mt19937_64 random(salt * 1000003 + static_cast<std::uint64_t>(rank));
  return reference::random_elements(type, count, random);
}

inline Buffer expected_reduction(int size, std::uint64_t salt, const Reduction& reduction,
                                 std::size_t count) {
  std::vector<Buffer> inputs;
  for (int r = 0; r < size; ++r) inputs.push_back(input_of(r, salt, reduction.type, count));
  Reduction complete = reduction;
  complete.ranks = size;
  return reference::reduce(complete, inputs);
}

// Runs `function`, which must throw; the error's text, with its kind in front ("timeout: ...").
template <class Function>
std::string error_of(Function function) {
  try {
    function();
  } catch (const Error& error) {
    return std::string(to_string(error.kind())) + ": " + error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

}  // namespace convoy::coll::test

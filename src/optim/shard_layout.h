#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "optim/commit_word.h"
#include "optim/optimizer_rule.h"

namespace convoy {

// Blocks of different ranks' threads share no cache line.
inline constexpr std::size_t kShardAlignment = 64;

// Which rank keeps and updates what: the numbers of all parameters, cut into blocks, and each block
// given to the rank that has the fewest numbers so far. It depends on the parameters and on the
// number of ranks alone, so that every rank knows it of all, the dead ones too, and it stays when
// buckets are laid out anew.
//
// A rank's memory for states:
//   0            commit words, one for each chunk of its blocks: see CommitWord
//   ...          journals: what the parts of chunks that are being changed were before
//   ...          states, block by block
class ShardLayout {
 public:
  static constexpr std::int64_t kBlock = kNormBlock;
  // What one thread changes at a time, so that all of it stays in its cache.
  static constexpr std::int64_t kChunk = 1 << 13;
  // Threads that may update at once.
  static constexpr std::size_t kJournals = 32;
  static_assert(kJournals < 1U << CommitWord::kJournalBits);
  static_assert(kMostStates <= CommitWord::kStateBits);
  static constexpr std::size_t kNoState = ~std::size_t{0};

  struct Item {
    std::int64_t numbers = 0;      // real ones
    std::size_t number_bytes = 4;  // 4 or 8
    unsigned states = 0;           // as of states_of()

    friend bool operator==(const Item&, const Item&) = default;
  };
  struct Block {
    std::size_t item = 0;
    std::int64_t begin = 0, end = 0;  // numbers of the item
    int owner = 0;
    // Offsets in the owner's memory.
    std::array<std::size_t, kMostStates> states = {kNoState, kNoState, kNoState};
    std::size_t word = 0;  // of its first chunk
  };

  ShardLayout() = default;
  ShardLayout(std::vector<Item> items, int ranks);

  const std::vector<Item>& items() const { return items_; }
  // In the order of items and of numbers.
  const std::vector<Block>& blocks() const { return blocks_; }
  // Numbers of its blocks in blocks(): [first, second).
  std::pair<std::size_t, std::size_t> blocks_of(std::size_t item) const {
    return {first_block_[item], first_block_[item + 1]};
  }
  int ranks() const { return static_cast<int>(bytes_.size()); }
  std::int64_t numbers_of(int rank) const { return numbers_[static_cast<std::size_t>(rank)]; }
  std::size_t bytes_of(int rank) const { return bytes_[static_cast<std::size_t>(rank)]; }
  std::size_t words_of(int rank) const { return words_[static_cast<std::size_t>(rank)]; }
  std::size_t state_bytes_of(int rank) const { return states_[static_cast<std::size_t>(rank)]; }
  // Where state `state` of a journal begins in a rank's memory.
  std::size_t journal(int rank, std::size_t index, std::size_t state) const;

 private:
  std::vector<Item> items_;
  std::vector<Block> blocks_;
  std::vector<std::size_t> first_block_;
  std::vector<std::int64_t> numbers_;                // by rank
  std::vector<std::size_t> words_, bytes_, states_;  // by rank
  std::size_t journal_state_bytes_ = 0;              // of one state of one chunk
};

}  // namespace convoy

#include "optim/shard_layout.h"

#include <algorithm>

namespace convoy {
namespace {

std::size_t to_lines(std::size_t bytes) {
  return (bytes + kShardAlignment - 1) / kShardAlignment * kShardAlignment;
}

}  // namespace

ShardLayout::ShardLayout(std::vector<Item> items, int ranks)
    : items_(std::move(items)),
      numbers_(static_cast<std::size_t>(ranks)),
      words_(numbers_.size()),
      bytes_(numbers_.size()),
      states_(numbers_.size()) {
  for (std::size_t i = 0; i < items_.size(); ++i) {
    first_block_.push_back(blocks_.size());
    for (std::int64_t begin = 0; begin < items_[i].numbers; begin += kBlock) {
      const auto least = std::min_element(numbers_.begin(), numbers_.end());
      const auto rank = static_cast<std::size_t>(least - numbers_.begin());
      Block block{.item = i,
                  .begin = begin,
                  .end = std::min(begin + kBlock, items_[i].numbers),
                  .owner = static_cast<int>(rank),
                  .word = words_[rank]};
      *least += block.end - block.begin;
      words_[rank] += static_cast<std::size_t>((block.end - block.begin + kChunk - 1) / kChunk);
      blocks_.push_back(block);
    }
    if (items_[i].states != 0) {
      journal_state_bytes_ =
          std::max(journal_state_bytes_, static_cast<std::size_t>(kChunk) * items_[i].number_bytes);
    }
  }
  first_block_.push_back(blocks_.size());
  for (std::size_t r = 0; r < bytes_.size(); ++r) {
    bytes_[r] = to_lines(words_[r] * sizeof(std::uint64_t)) +
                kJournals * kMostStates * journal_state_bytes_;
  }
  for (Block& block : blocks_) {
    const Item& item = items_[block.item];
    const auto r = static_cast<std::size_t>(block.owner);
    for (std::size_t k = 0; k < kMostStates; ++k) {
      if ((item.states >> k & 1) == 0) continue;
      const std::size_t bytes =
          to_lines(static_cast<std::size_t>(block.end - block.begin) * item.number_bytes);
      block.states[k] = bytes_[r];
      bytes_[r] += bytes;
      states_[r] += bytes;
    }
  }
}

std::size_t ShardLayout::journal(int rank, std::size_t index, std::size_t state) const {
  return to_lines(words_[static_cast<std::size_t>(rank)] * sizeof(std::uint64_t)) +
         (index * kMostStates + state) * journal_state_bytes_;
}

}  // namespace convoy

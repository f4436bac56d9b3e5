#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace convoy {

// Of a chunk: whether its state is whole. Written by the owner alone, release; read by others when
// the owner is dead. A process stops between two instructions, so that the order in which it wrote
// is all that counts.
struct CommitWord {
  // Nothing is under way: state, and the parameter's numbers in the owner's memory, are those of
  // the last step that changed them.
  static constexpr std::uint64_t kWhole = 0;
  // State is being changed. Of the first `numbers` of the chunk, what it was is in this journal;
  // the others are as they were. What the parameter's numbers were is in the other ranks' memory,
  // to which the owner copies afterwards.
  static constexpr std::uint64_t changing(std::size_t journal, std::size_t numbers) {
    return static_cast<std::uint64_t>(numbers) << kJournalBits | (journal + 1);
  }
  static constexpr std::size_t journal_of(std::uint64_t word) {
    return static_cast<std::size_t>(word & ((1U << kJournalBits) - 1)) - 1;
  }
  static constexpr std::size_t numbers_of(std::uint64_t word) {
    return static_cast<std::size_t>(word >> kJournalBits);
  }

  static constexpr int kJournalBits = 8;
};

// A chunk's state with one change less where that is under way: never a mixture.
inline void copy_whole_state(std::uint64_t word, const std::byte* state, const std::byte* journal,
                             std::size_t numbers, std::size_t number_bytes, std::byte* to) {
  std::memcpy(to, state, numbers * number_bytes);
  if (word == CommitWord::kWhole) return;
  std::memcpy(to, journal, CommitWord::numbers_of(word) * number_bytes);
}

}  // namespace convoy

#pragma once

#include <algorithm>
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
  // These states (bit k: state k) are being changed. Of the first `numbers` of the chunk, what they
  // were is in this journal; the others are as they were. What the parameter's numbers were is in
  // the other ranks' memory, to which the owner copies afterwards.
  static constexpr std::uint64_t changing(std::size_t journal, unsigned states,
                                          std::size_t numbers) {
    return static_cast<std::uint64_t>(numbers) << (kJournalBits + kStateBits) |
           static_cast<std::uint64_t>(states) << kJournalBits | (journal + 1);
  }
  static constexpr std::size_t journal_of(std::uint64_t word) {
    return static_cast<std::size_t>(word & ((1U << kJournalBits) - 1)) - 1;
  }
  static constexpr bool is_changing(std::uint64_t word, std::size_t state) {
    return (word >> kJournalBits >> state & 1) != 0;
  }
  static constexpr std::size_t numbers_of(std::uint64_t word) {
    return static_cast<std::size_t>(word >> (kJournalBits + kStateBits));
  }

  static constexpr int kJournalBits = 8, kStateBits = 3;
};

// One state of a chunk, with one change less where that is under way: never a mixture. `journal`:
// of that state; nullptr where it is not changing.
inline void copy_whole_state(std::uint64_t word, const std::byte* state, const std::byte* journal,
                             std::size_t numbers, std::size_t number_bytes, std::byte* to) {
  std::memcpy(to, state, numbers * number_bytes);
  if (journal == nullptr) return;
  std::memcpy(to, journal, std::min(CommitWord::numbers_of(word), numbers) * number_bytes);
}

}  // namespace convoy

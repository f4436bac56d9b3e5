#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <iterator>
#include <memory>

namespace convoy::agent {

struct Peer;

// The workers of a session, by number. It grows and never shrinks, so that a number means one
// worker for ever: one that comes back gets another number. Reading takes no lock.
class PeerTable {
 public:
  static constexpr std::size_t kMost = std::size_t{1} << 18;

  PeerTable();
  PeerTable(const PeerTable&) = delete;
  PeerTable& operator=(const PeerTable&) = delete;
  ~PeerTable();

  std::size_t size() const noexcept { return size_.load(std::memory_order_acquire); }
  const std::unique_ptr<Peer>& operator[](std::size_t i) const noexcept {
    return (*chunks_[i / kChunk].load(std::memory_order_acquire))[i % kChunk];
  }
  // One thread at a time. kResource if there are too many.
  void push_back(std::unique_ptr<Peer> peer);

  class Iterator {
   public:
    // NOLINTBEGIN(readability-identifier-naming): the library's names
    using iterator_category = std::input_iterator_tag;
    using value_type = std::unique_ptr<Peer>;
    using difference_type = std::ptrdiff_t;
    using pointer = const value_type*;
    using reference = const value_type&;
    // NOLINTEND(readability-identifier-naming)

    Iterator(const PeerTable& table, std::size_t at) : table_(&table), at_(at) {}
    const std::unique_ptr<Peer>& operator*() const { return (*table_)[at_]; }
    Iterator& operator++() {
      ++at_;
      return *this;
    }
    bool operator==(const Iterator& other) const { return at_ == other.at_; }

   private:
    const PeerTable* table_;
    std::size_t at_;
  };
  // Over those who are known now.
  Iterator begin() const { return {*this, 0}; }
  Iterator end() const { return {*this, size()}; }

 private:
  static constexpr std::size_t kChunk = 1024;
  using Chunk = std::array<std::unique_ptr<Peer>, kChunk>;

  std::atomic<std::size_t> size_{0};
  std::array<std::atomic<Chunk*>, kMost / kChunk> chunks_{};
};

}  // namespace convoy::agent

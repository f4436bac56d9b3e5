#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "os/segment.h"
#include "share/book.h"

namespace convoy::share {

// A piece of shared memory as this process has it mapped, once, whoever told of it. Immutable but
// for what lies in the memory.
class Region {
 public:
  enum class Kind : std::uint32_t {
    kPool = 1,   // a process's memory for shared tensors: a book, then blocks
    kPlain = 2,  // memory without a book: of a group; the book is in a region of the same owner
    kNamed = 3,  // a file with a book and one block
    // Memory that somebody else shares, such as torch, and that stays where it is: any file that is
    // mapped from its beginning, not sealed. The book is in a region of who passed it on.
    kOutside = 4,
  };

  // Memory of this process's own pool, cleared. Throws kResource.
  static std::shared_ptr<Region> create_pool(std::size_t bytes);
  // The same with a copy of `content` where its first block begins.
  static std::shared_ptr<Region> create_pool_with(std::size_t bytes,
                                                  std::span<const std::byte> content);
  // Maps what another process passed. Throws kInvalidArgument.
  static std::shared_ptr<Region> adopt(UniqueFd fd, std::size_t bytes, Kind kind);
  // Memory (kPlain, kOutside) that somebody else of this process keeps mapped for as long as there
  // is a block in it.
  static std::shared_ptr<Region> borrow(UniqueFd fd, std::byte* data, std::size_t bytes,
                                        Kind kind = Kind::kPlain);
  // A file that this process has made or opened; it is mapped already.
  static std::shared_ptr<Region> named(Segment::Key key, std::byte* data, std::size_t bytes,
                                       std::string path);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  Kind kind() const { return kind_; }
  bool own() const { return own_; }  // this process hands out its blocks
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  const Book& book() const { return book_; }                       // empty for kPlain and kOutside
  int fd() const { return segment_ ? segment_.fd() : fd_.get(); }  // -1 for kNamed
  const Segment::Key& key() const { return key_; }
  const std::string& path() const { return path_; }  // of kNamed
  // Never that of another region of this process, not even of one that is gone.
  std::uint64_t serial() const { return serial_; }

 private:
  Region(Kind kind, Segment::Key key);
  static std::shared_ptr<Region> make_pool(Segment segment);
  static std::shared_ptr<Region> adopt_outside(UniqueFd fd, std::size_t bytes);

  const Kind kind_;
  const Segment::Key key_;
  const std::uint64_t serial_;
  bool own_ = false;
  Segment segment_;  // the mapping, unless it is another's or that of a file
  UniqueFd fd_;      // of memory that is mapped by another
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  bool unmap_ = false;  // kNamed, kOutside of others
  std::string path_;
  Book book_;
};

}  // namespace convoy::share

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "share/region.h"

namespace convoy::share {

// Blocks with names: files in a folder of this user, one for each block, for processes that have no
// socket in common. All users of a file own it together; whoever is the last unlinks it.
//
//   <folder>/p-<number>            of a process: locked as long as it lives and uses any file
//   <folder>/t-<number>-<count>    a block; its book says which processes hold it, by number
//
// A lock goes with its process, in whatever pid namespace it is. Files that no living process holds
// are what crashes have left: who enters the folder removes them. Not thread-safe; nothing is made
// before the first block.
class NamedFolder {
 public:
  // $CONVOY_SHARE_FOLDER, /dev/shm by default, and in it convoy-<uid>.
  NamedFolder();
  NamedFolder(const NamedFolder&) = delete;
  NamedFolder& operator=(const NamedFolder&) = delete;

  int fd() const { return lock_.get(); }  // -1 while no file is in use

  // A new file with a book and one block. Throws kResource.
  std::shared_ptr<Region> create(std::size_t bytes);

  using Find = std::function<std::shared_ptr<Region>(const Segment::Key&)>;
  using Found = std::function<void(const std::shared_ptr<Region>&)>;
  // The file at a path that another process named: the region that `known` knows by its key, or a
  // new one, which `made` is told. Throws kInvalidArgument for a path outside of the folder or what
  // is not a block, kPeerLost if it is not there.
  std::shared_ptr<Region> open(const std::string& path, const Find& known, const Found& made);

  // This process holds a block of another file; it holds the region's no more (`ended`: nobody
  // does).
  void join() { ++in_use_; }
  void leave(const Region& region, bool ended) noexcept;
  // Gives the lock back if no file is in use.
  void rest() noexcept;
  // This process's bit in the book of a file, from now until leave().
  int claim_slot(const Book& book);
  // Clears the bits of processes that are gone.
  void drop_dead(const Book& book) noexcept;

 private:
  void enter();  // the folder, the lock, what others left
  void make_folder();
  void lock_number();
  void sweep();
  bool is_stale(const std::string& path);
  bool is_alive(std::uint64_t number);  // or it cannot be told
  std::string lock_path(std::uint64_t number) const;

  std::string folder_;
  // Of this process, another one each time that it begins to use files: one that was seen to be
  // unlocked never comes again. Unless a file outlived our use of it: then it stays, since a file
  // that nobody has open yet (bytes that are not turned into a tensor) is kept by its maker's name.
  std::uint64_t number_ = 0;
  bool left_files_ = false;
  std::uint64_t next_ = 1;
  std::size_t in_use_ = 0;
  UniqueFd lock_;
};

}  // namespace convoy::share

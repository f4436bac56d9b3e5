#pragma once

#include <sys/types.h>

#include <map>
#include <memory>
#include <string>

#include "base/loop.h"
#include "base/unique_fd.h"

namespace convoy::launch {

// Hands one stream of input to several ranks, each at its own pace.
//
// What the fastest rank has read and others have not is kept in a file without a name: a slow rank
// neither blocks the others nor loses anything, and memory stays bounded. The source is not read
// faster than the fastest rank reads. A rank that ends or closes its input drops out. All methods
// on the loop's thread, or before it runs.
class StdinFeed {
 public:
  // `source` becomes non-blocking; `folder` is where the file is made.
  StdinFeed(Loop& loop, UniqueFd source, const std::string& folder);
  StdinFeed(const StdinFeed&) = delete;
  StdinFeed& operator=(const StdinFeed&) = delete;
  ~StdinFeed();

  // The end for the child.
  UniqueFd add(int rank);
  void drop(int rank);

  // Set if the input had to be cut short because the file could not be written.
  const std::string& error() const { return error_; }

 private:
  struct Reader {
    UniqueFd fd;
    Loop::WatchId watch = 0;  // 0: has all there is
    off_t taken = 0;
  };

  void read_on_loop();
  void write_on_loop(int rank);
  void update();  // which descriptors to watch now
  void end_source();
  void free_taken();
  off_t fastest() const;

  Loop& loop_;
  UniqueFd source_;  // closed at its end
  Loop::WatchId source_watch_ = 0;
  UniqueFd spool_;
  off_t end_ = 0;    // bytes in the spool
  off_t freed_ = 0;  // of which these were given back
  std::map<int, std::unique_ptr<Reader>> readers_;
  std::string error_;
};

}  // namespace convoy::launch

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/loop.h"
#include "base/unique_fd.h"
#include "launch/lines.h"
#include "launch/writer.h"

namespace convoy::launch {

enum class Channel { kOut, kErr };

struct OutputSettings {
  int ranks = 1;
  bool prefix = true;
  std::optional<std::set<int>> shown;  // nullopt: all ranks
  std::string log_folder;              // empty: no files
  int out = 1;
  int err = 2;
};

// Takes what ranks write, line by line, to our own standard output and error and to log files.
//
// Lines of different ranks never mix. Memory is bounded: ranks whose output is not taken up wait in
// their own write(2). A reader who goes away (EPIPE) is told to `on_closed`; after any other error
// (a full disk) the rest of that output is dropped, with a note. All methods on the loop's thread,
// or before it runs.
class Output {
 public:
  Output(Loop& loop, const OutputSettings& settings, std::function<void(Channel)> on_closed);
  ~Output();

  // The end for the child.
  UniqueFd open(int rank, Channel channel);
  // Takes all that the rank wrote before it ended, even where its children keep the pipe open and
  // whether or not there is room; shows an unfinished last line.
  void drain(int rank);
  // Lines of our own, to standard error.
  void note(std::string_view lines);
  // Into the log folder, if there is one.
  void save(const std::string& name, std::string_view text);

  std::vector<std::string> last_lines(int rank) const;
  // Calls back once nothing waits to be written (at once if so). One caller at a time.
  void when_idle(std::function<void()> callback);
  // Gives up what is still unwritten.
  void abandon();

 private:
  struct Stream {
    int rank;
    Channel channel;
    UniqueFd fd;
    Loop::WatchId watch = 0;  // 0: paused
    LineSplitter lines;
    int log_fd = -1;
  };
  struct Screen {
    std::shared_ptr<Writer> writer;
    int fd = -1;
    bool colour = false;
    bool broken = false;
  };

  Writer::Events writer_events();
  void failed_on_loop(int fd, int error);
  void progress_on_loop();

  void read_on_loop(Stream& stream);
  bool take(Stream& stream, std::size_t limit);  // false: end of the stream
  void show(Stream& stream, std::string_view bytes);
  void flush_line(Stream& stream);
  void close(Stream& stream);
  void append_line(std::string& out, const Stream& stream, std::string_view text, bool continues);

  Screen& screen(Channel channel) { return screens_[channel == Channel::kOut ? 0 : 1]; }
  bool is_shown(int rank) const;
  bool has_room(const Stream& stream);
  void watch(Stream& stream);
  void pause(Stream& stream);
  bool idle() const;

  Loop& loop_;
  const OutputSettings settings_;
  const bool raw_;  // one rank without prefix: nothing to keep apart
  std::function<void(Channel)> on_closed_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::map<int, Tail> tails_;  // by rank
  Screen screens_[2];
  std::map<int, std::string> log_files_;
  std::vector<UniqueFd> log_fds_;       // open until the writer below is through with them
  std::shared_ptr<Writer> log_writer_;  // one for all files
  std::function<void()> on_idle_;
};

// "[3] ", "[3+] " before a continued line; in colour for terminals.
std::string line_prefix(int rank, bool continues, bool colour);

}  // namespace convoy::launch

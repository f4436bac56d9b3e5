#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

namespace convoy::launch {

// Cuts a stream of bytes into lines, in bounded memory: a longer line comes in pieces.
class LineSplitter {
 public:
  static constexpr std::size_t kLongest = 64 * 1024;

  // Calls emit(text, continues) for each line without its newline; `continues`: the text carries on
  // a line whose first piece came before.
  template <class Emit>
  void feed(std::string_view bytes, Emit emit) {
    while (!bytes.empty()) {
      const std::size_t room = kLongest - partial_.size();
      const auto newline = bytes.substr(0, room + 1).find('\n');
      if (newline != std::string_view::npos) {
        end_line(bytes.substr(0, newline), emit);
        bytes.remove_prefix(newline + 1);
      } else if (bytes.size() > room) {
        piece(bytes.substr(0, room), emit);
        continues_ = true;
        bytes.remove_prefix(room);
      } else {
        partial_ += bytes;
        return;
      }
    }
  }
  // The last line may have no newline.
  template <class Emit>
  void flush(Emit emit) {
    if (!partial_.empty()) end_line({}, emit);
    continues_ = false;
  }

 private:
  template <class Emit>
  void piece(std::string_view rest, Emit& emit) {
    if (partial_.empty()) {
      emit(rest, continues_);
    } else {
      partial_ += rest;
      emit(std::string_view(partial_), continues_);
      partial_.clear();
    }
  }
  template <class Emit>
  void end_line(std::string_view rest, Emit& emit) {
    piece(rest, emit);
    continues_ = false;
  }

  std::string partial_;
  bool continues_ = false;
};

// The last lines somebody wrote, for the report; without the stack frames of libtorch's exceptions.
class Tail {
 public:
  static constexpr std::size_t kLines = 20;
  static constexpr std::size_t kLineBytes = 400;

  // Of a progress bar ("\r10%\r20%") what a terminal would still show.
  void add(std::string_view line);
  std::vector<std::string> lines() const { return {lines_.begin(), lines_.end()}; }

 private:
  std::deque<std::string> lines_;
};

}  // namespace convoy::launch

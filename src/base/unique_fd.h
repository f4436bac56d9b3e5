#pragma once

#include <utility>

namespace convoy {

// Owns a file descriptor. Movable; not thread-safe.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  // Keeps errno.
  void reset(int fd = -1) noexcept;

 private:
  int fd_ = -1;
};

// A second descriptor of the same file, close-on-exec.
UniqueFd duplicate(int fd);

}  // namespace convoy

#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace convoy {

// The whole of a (small) file, also of /proc and /sys; nullopt if it cannot be read.
std::optional<std::string> read_file(const std::string& path);
// Creates a file or replaces its contents; it has exactly the given mode before the first byte is
// written. Throws.
void write_file(const std::string& path, std::string_view text, unsigned mode = 0600);

// A fresh folder (mode 0700) under $TMPDIR or /tmp, removed with all it holds by the destructor
// (not by that of a copy in a forked child).
class TempFolder {
 public:
  enum class Killed {
    kLeaves,  // a process that is killed leaves its folder behind
    kSwept,   // a later one with the same prefix removes it; the name is longer for that
  };

  explicit TempFolder(const std::string& prefix, Killed killed = Killed::kLeaves);
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder();

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::string base_, prefix_;  // of folders to sweep; empty: none
  unsigned generation_;        // fork_generation() of the process that made it
};

}  // namespace convoy

#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace convoy {

// The whole of a (small) file, also of /proc and /sys; nullopt if it cannot be read.
std::optional<std::string> read_file(const std::string& path);
// Creates or replaces a file with the given mode. Throws.
void write_file(const std::string& path, std::string_view text, unsigned mode = 0600);

// A fresh folder (mode 0700) under $TMPDIR or /tmp, removed with all it holds by the destructor.
class TempFolder {
 public:
  explicit TempFolder(const std::string& prefix);
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder();

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace convoy

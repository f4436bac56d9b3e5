#pragma once

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "convoy/deadline.h"
#include "os/process.h"

namespace bench {

// A folder of its own for one run, removed with everything in it.
class RunFolder {
 public:
  explicit RunFolder(std::string_view name) {
    const char* const parent = std::getenv("TMPDIR");
    path_ =
        std::string(parent ? parent : "/tmp") + "/convoy-bench-" + std::string(name) + ".XXXXXX";
    if (!::mkdtemp(path_.data())) throw std::runtime_error("no folder " + path_ + " can be made");
  }
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;
  ~RunFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Processes of this program beside the one that measures: `serve FOLDER RANK` for each rank from 1
// on.
class Workers {
 public:
  Workers(const RunFolder& folder, int size) {
    for (int rank = 1; rank < size; ++rank) {
      children_.push_back(convoy::ChildProcess::spawn(
          {.arguments = {"/proc/self/exe", "serve", folder.path(), std::to_string(rank)}}));
    }
  }
  // Until they have ended, at most a minute.
  void wait() {
    const auto deadline = convoy::Deadline::after(std::chrono::minutes(1));
    for (auto& child : children_) child.wait(deadline);
  }

 private:
  std::vector<convoy::ChildProcess> children_;
};

}  // namespace bench

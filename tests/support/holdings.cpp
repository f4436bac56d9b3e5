#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <sstream>

#include "base/concat.h"
#include "base/id.h"
#include "os/file.h"
#include "os/process.h"
#include "support/leak_oracle.h"

namespace convoy::test {
namespace {

constexpr const char* kTagVariable = "CONVOY_TEST_TAG";

std::string link_target(const std::string& path) {
  std::string target(4096, '\0');
  const ssize_t n = ::readlink(path.c_str(), target.data(), target.size());
  target.resize(n < 0 ? 0 : static_cast<std::size_t>(n));
  return target;
}

// Names of the numbered entries of a folder such as /proc/self/fd, without the descriptor that
// this function itself reads the folder with.
std::vector<long> numbered_entries(const std::string& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::opendir(folder.c_str()), &::closedir);
  std::vector<long> numbers;
  if (!stream) return numbers;
  const bool own_descriptors = folder == "/proc/self/fd";
  while (const dirent* entry = ::readdir(stream.get())) {
    const std::string_view name = entry->d_name;
    long number = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
    if (error != std::errc() || end != name.data() + name.size()) continue;
    if (own_descriptors && number == ::dirfd(stream.get())) continue;
    numbers.push_back(number);
  }
  return numbers;
}

std::string command_of(const std::string& folder) {
  std::string name = read_file(folder + "/comm").value_or("?");
  while (!name.empty() && name.back() == '\n') name.pop_back();
  return name;
}

void add_descriptors(std::vector<Holding>& out) {
  for (const long fd : numbered_entries("/proc/self/fd")) {
    out.push_back(
        {HoldingKind::kDescriptor, fd, link_target(concat("/proc/self/fd/", fd)), std::string()});
  }
}

// Where the name of memory that outlives its descriptor begins in a line of /proc/self/maps: a
// memfd, or a file in /dev/shm (not in TMPDIR, should that lie there: its files are counted).
std::size_t outliving_name(const std::string& line, const std::string& temporary) {
  const auto name = std::min(line.find("/memfd:"), line.find("/dev/shm/"));
  const bool counted = name != std::string::npos && !temporary.empty() &&
                       line.compare(name, temporary.size(), temporary) == 0;
  return counted ? std::string::npos : name;
}

void add_mappings(std::vector<Holding>& out) {
  const char* const temporary = std::getenv("TMPDIR");
  std::map<std::string, long> bytes;  // one segment may be several lines
  std::istringstream lines(read_file("/proc/self/maps").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    const auto name = outliving_name(line, temporary ? temporary : "");
    if (name == std::string::npos) continue;
    unsigned long begin = 0;
    unsigned long end = 0;
    std::string rights, offset, device, inode;
    char dash = 0;
    std::istringstream fields(line);
    fields >> std::hex >> begin >> dash >> end >> rights >> offset >> device >> inode;
    bytes[concat(line.substr(name), " inode ", inode)] += static_cast<long>(end - begin);
  }
  for (const auto& [key, total] : bytes) {
    out.push_back({HoldingKind::kMapping, total, key, std::string()});
  }
}

void add_threads(std::vector<Holding>& out) {
  for (const long tid : numbered_entries("/proc/self/task")) {
    out.push_back(
        {HoldingKind::kThread, tid, std::string(), command_of(concat("/proc/self/task/", tid))});
  }
}

void add_children(std::vector<Holding>& out) {
  for (const pid_t pid : children_of(::getpid())) {
    const char state = process_state(pid).value_or('?');
    out.push_back({HoldingKind::kChild, pid, std::string(),
                   concat(command_of(concat("/proc/", pid)), ", state ", state)});
  }
}

bool carries_tag(pid_t pid, const std::string& tag) {
  const auto environment = read_file(concat("/proc/", pid, "/environ"));
  return environment && (*environment + '\0').find(tag + '\0') != std::string::npos;
}

// This process's own /proc/self/environ shows what it was executed with, not what was set later, so
// the tag is seen in descendants only.
void add_strays(std::vector<Holding>& out) {
  const char* value = std::getenv(kTagVariable);
  if (!value) return;
  const std::string tag = concat(kTagVariable, "=", value);
  const auto mine = descendants_of(::getpid());
  for (const long number : numbered_entries("/proc")) {
    const auto pid = static_cast<pid_t>(number);
    if (pid == ::getpid() || std::find(mine.begin(), mine.end(), pid) != mine.end()) continue;
    if (!carries_tag(pid, tag)) continue;
    out.push_back({HoldingKind::kStray, pid, std::string(), command_of(concat("/proc/", pid))});
  }
}

// Those whose names begin with `prefix`.
void add_files(std::vector<Holding>& out, HoldingKind kind, const std::string& folder,
               const std::string& prefix = "") {
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    if (!it->path().filename().string().starts_with(prefix)) continue;
    out.push_back({kind, 0, it->path().string(), std::string()});
  }
}

// Whoever else uses /dev/shm, it does not know the tag.
std::string shared_file_prefix(const char* tag) { return concat("convoy-test.", tag, "."); }

}  // namespace

void tag_descendants() {
  const std::string tag = Id::random().to_string();
  ::setenv(kTagVariable, tag.c_str(), 1);
}

std::string shared_file_path(std::string_view name) {
  const char* tag = std::getenv(kTagVariable);
  return concat("/dev/shm/", shared_file_prefix(tag ? tag : ""), name);
}

std::vector<Holding> all_holdings(LeakScope scope) {
  std::vector<Holding> found;
  add_descriptors(found);
  add_mappings(found);
  add_threads(found);
  add_children(found);
  if (const char* folder = std::getenv("TMPDIR"); folder && *folder) {
    add_files(found, HoldingKind::kTempFile, folder);
  }
  if (scope == LeakScope::kMachine) {
    add_strays(found);
    if (const char* tag = std::getenv(kTagVariable)) {
      add_files(found, HoldingKind::kSharedFile, "/dev/shm", shared_file_prefix(tag));
    }
  }
  return found;
}

}  // namespace convoy::test

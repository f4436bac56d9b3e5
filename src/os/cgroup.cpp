#include <algorithm>
#include <charconv>
#include <filesystem>
#include <vector>

#include "base/concat.h"
#include "os/file.h"
#include "os/machine.h"

namespace convoy {
namespace {

// Calls `use` for each line, without its end.
template <class Use>
void for_each_line(std::string_view text, Use use) {
  while (!text.empty()) {
    const auto end = text.find('\n');
    use(text.substr(0, end));
    text.remove_prefix(end == text.npos ? text.size() : end + 1);
  }
}

std::string_view without_spaces(std::string_view text) {
  const auto first = text.find_first_not_of(" \t\n");
  return first == text.npos ? "" : text.substr(first);
}

bool lists(std::string_view names, std::string_view name) {
  for (;;) {
    const auto comma = names.find(',');
    if (names.substr(0, comma) == name) return true;
    if (comma == names.npos) return false;
    names.remove_prefix(comma + 1);
  }
}

// The folder of this process below `mount`, then those above it up to `mount` itself. In a
// container the path may be the host's, and its folders are not there; the mount then shows the
// container's own group, which is the last of the list.
std::vector<std::string> folders_above(const std::string& mount, std::string path) {
  while (path.ends_with('/')) path.pop_back();
  std::vector<std::string> folders;
  while (!path.empty() && path.front() == '/') {
    folders.push_back(mount + path);
    path.resize(path.rfind('/'));
  }
  folders.push_back(mount);
  return folders;
}

std::vector<std::string> v2_folders(const SystemRoot& root) {
  const auto path =
      parse_cgroup_path(read_file(root.proc + "/self/cgroup").value_or(""), std::string_view());
  if (!path) return {};
  auto folders = folders_above(root.cgroup, *path);
  // Where both versions are in use, v2 is mounted one level down.
  const auto hybrid = folders_above(root.cgroup + "/unified", *path);
  folders.insert(folders.end(), hybrid.begin(), hybrid.end());
  return folders;
}

std::vector<std::string> v1_folders(const SystemRoot& root, std::string_view controller) {
  const auto path =
      parse_cgroup_path(read_file(root.proc + "/self/cgroup").value_or(""), controller);
  return path ? folders_above(concat(root.cgroup, "/", controller), *path)
              : std::vector<std::string>();
}

std::optional<std::uint64_t> number_in(const std::string& path) {
  const auto text = read_file(path);
  return text ? parse_number(*text) : std::nullopt;
}

// What one version calls the files of its memory controller.
struct MemoryFiles {
  const char* limit;
  const char* used;
  const char* cache;  // field of memory.stat
};
constexpr MemoryFiles kMemoryV2{"/memory.max", "/memory.current", "inactive_file"};
constexpr MemoryFiles kMemoryV1{"/memory.limit_in_bytes", "/memory.usage_in_bytes",
                                "total_inactive_file"};

void tighten(MemoryState& state, const std::vector<std::string>& folders,
             const MemoryFiles& files) {
  for (const auto& folder : folders) {
    const auto limit = number_in(folder + files.limit);
    const auto used = number_in(folder + files.used);
    if (!limit || !used) continue;
    const auto cache =
        parse_field(read_file(folder + "/memory.stat").value_or(""), files.cache).value_or(0);
    const std::uint64_t busy = std::min(*used - std::min(*used, cache), *limit);
    if (!state.limit || *limit - busy < *state.limit - *state.used) {
      state.limit = limit;
      state.used = busy;
    }
  }
}

}  // namespace

std::optional<std::string> parse_cgroup_path(std::string_view text, std::string_view controller) {
  std::optional<std::string> path;
  for_each_line(text, [&](std::string_view line) {  // "4:cpu,cpuacct:/path", "0::/path"
    const auto first = line.find(':');
    const auto second = first == line.npos ? line.npos : line.find(':', first + 1);
    if (path || second == line.npos) return;
    const auto names = line.substr(first + 1, second - first - 1);
    const bool matches = controller.empty() ? names.empty() : lists(names, controller);
    if (matches) path = std::string(line.substr(second + 1));
  });
  return path;
}

std::optional<std::uint64_t> parse_number(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  return value;
}

std::optional<std::uint64_t> parse_field(std::string_view text, std::string_view key) {
  std::optional<std::uint64_t> value;
  for_each_line(text, [&](std::string_view line) {
    if (value || !line.starts_with(key)) return;
    line.remove_prefix(key.size());
    if (line.starts_with(':')) line.remove_prefix(1);
    const auto rest = without_spaces(line);
    if (rest.size() < line.size()) value = parse_number(rest);  // the whole word was `key`
  });
  return value;
}

std::optional<int> parse_cpu_max(std::string_view text) {
  const auto quota = parse_number(text);
  const auto space = text.find(' ');
  if (!quota || space == text.npos) return std::nullopt;
  const auto period = parse_number(text.substr(space + 1));
  if (!period || *period == 0) return std::nullopt;
  const std::uint64_t cores = *quota / *period + (*quota % *period != 0 ? 1 : 0);
  return static_cast<int>(std::clamp<std::uint64_t>(cores, 1, 1 << 20));
}

std::optional<int> cgroup_cores(const SystemRoot& root) {
  std::optional<int> cores;
  const auto tighten_to = [&](std::optional<int> found) {
    if (found && (!cores || *found < *cores)) cores = found;
  };
  for (const auto& folder : v2_folders(root)) {
    tighten_to(parse_cpu_max(read_file(folder + "/cpu.max").value_or("")));
  }
  for (const auto& folder : v1_folders(root, "cpu")) {
    const auto quota = read_file(folder + "/cpu.cfs_quota_us");  // -1: none
    const auto period = read_file(folder + "/cpu.cfs_period_us");
    if (!quota || !period) continue;
    tighten_to(parse_cpu_max(concat(quota->substr(0, quota->find('\n')), " ", *period)));
  }
  return cores;
}

MemoryState memory_state(const SystemRoot& root) {
  MemoryState state;
  const auto kib = parse_field(read_file(root.proc + "/meminfo").value_or(""), "MemAvailable");
  if (kib) state.available = *kib * 1024;
  tighten(state, v2_folders(root), kMemoryV2);
  tighten(state, v1_folders(root, "memory"), kMemoryV1);
  return state;
}

std::uint64_t MemoryState::headroom() const {
  return limit && used ? std::min(available, *limit - std::min(*limit, *used)) : available;
}

}  // namespace convoy

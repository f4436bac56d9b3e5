#include "launch/doctor.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/concat.h"
#include "convoy/version.h"
#include "launch/doctor_probes.h"
#include "launch/json.h"
#include "launch/writer.h"

namespace convoy::launch {
namespace {

const char* level_name(Level level) {
  switch (level) {
    case Level::kOk: return "ok";
    case Level::kWarn: return "warn";
    case Level::kFail: return "FAIL";
  }
  return "?";
}

std::string kernel_release() {
  utsname name{};
  return uname(&name) == 0 ? concat(name.sysname, " ", name.release, " ", name.machine) : "";
}

std::string padded(std::string text, std::size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

long count(const std::vector<Finding>& findings, Level level) {
  return std::count_if(findings.begin(), findings.end(),
                       [level](const Finding& finding) { return finding.level == level; });
}

}  // namespace

std::vector<Finding> examine() {
  // Probes that fork come before those that start threads.
  const std::vector<std::pair<const char*, std::function<Finding()>>> checks = {
      {"pidfd", [] { return check_pidfd(probe_pidfd()); }},
      {"subreaper", [] { return check_subreaper(probe_subreaper()); }},
      {"proc", [] { return check_proc(probe_proc()); }},
      {"memfd", [] { return check_memfd(probe_memfd()); }},
      {"noexec-seal", [] { return check_noexec_seal(probe_noexec_seal()); }},
      {"futex", [] { return check_futex(probe_futex()); }},
      {"peer-memory", [] { return check_peer_memory(probe_peer_memory()); }},
      {"cores", [] { return check_cores(probe_cores()); }},
      {"memory", [] { return check_memory(memory_state()); }},
      {"huge-pages", [] { return check_huge_pages(probe_huge_pages()); }},
      {"open-files",
       [] {
         return check_open_files(probe_limit(RLIMIT_NOFILE), probe_hard_limit(RLIMIT_NOFILE));
       }},
      {"locked-memory", [] { return check_locked_memory(probe_limit(RLIMIT_MEMLOCK)); }},
      {"file-size", [] { return check_file_size(probe_limit(RLIMIT_FSIZE)); }},
      {"address-space", [] { return check_address_space(probe_limit(RLIMIT_AS)); }},
      {"shm", [] { return check_shm(probe_shm()); }},
      {"temp-folder", [] { return check_temp(probe_temp()); }},
      {"unix-socket", [] { return check_unix_socket(probe_unix_socket()); }},
      {"loopback", [] { return check_loopback(probe_loopback()); }},
      {"environment", [] { return check_environment(current_environment()); }},
      {"core-distance",
       [] { return check_core_distance(measure_core_distance(), usable_cores()); }},
      {"tcp-ports", [] { return check_ports(probe_ports()); }}};
  std::vector<Finding> findings;
  for (const auto& [name, check] : checks) findings.push_back(guarded(name, check));
  return findings;
}

Finding guarded(const std::string& name, const std::function<Finding()>& check) {
  try {
    return check();
  } catch (const std::exception& error) {
    return {Level::kFail, name, concat("could not be checked: ", error.what()),
            "see what the message names; a job would meet it as well"};
  }
}

std::string format_findings(const std::vector<Finding>& findings) {
  std::string text =
      concat("convoy ", version(), " on ", host_name(), ", ", kernel_release(), "\n");
  for (const auto& finding : findings) {
    text +=
        concat(padded(level_name(finding.level), 6), padded(finding.name, 15), finding.text, "\n");
    if (!finding.fix.empty()) text += concat(padded("", 21), "fix: ", finding.fix, "\n");
  }
  return text + concat(count(findings, Level::kOk), " ok, ", count(findings, Level::kWarn),
                       " to look at, ", count(findings, Level::kFail), " failed\n");
}

std::string format_findings_json(const std::vector<Finding>& findings) {
  std::string checks;
  for (const auto& finding : findings) {
    checks += concat(
        checks.empty() ? "" : ",", "\n    {\"level\": ", quote_json(level_name(finding.level)),
        ", \"name\": ", quote_json(finding.name), ", \"text\": ", quote_json(finding.text),
        ", \"fix\": ", quote_json(finding.fix), "}");
  }
  return concat("{\n  \"version\": ", quote_json(version()),
                ",\n  \"host\": ", quote_json(host_name()),
                ",\n  \"kernel\": ", quote_json(kernel_release()),
                ",\n  \"failed\": ", count(findings, Level::kFail), ",\n  \"checks\": [", checks,
                "\n  ]\n}\n");
}

int run_doctor(const DoctorOptions& options) {
  const auto findings = examine();
  const std::string text =
      options.json ? format_findings_json(findings) : format_findings(findings);
  const bool written = write_fully(STDOUT_FILENO, text) == 0;
  return written && count(findings, Level::kFail) == 0 ? 0 : 1;
}

}  // namespace convoy::launch

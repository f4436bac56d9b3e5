#include "convoy/flight.h"

#include "base/error.h"
#include "os/flight_dump.h"
#include "os/flight_recorder.h"

namespace convoy {
namespace {

std::vector<flight::Log> own_log() {
  std::vector<flight::Log> logs;
  const auto& recorder = flight::Recorder::instance();
  if (!recorder.ring()) return logs;
  if (auto log = flight::read(*recorder.ring(), recorder.bytes())) logs.push_back(std::move(*log));
  return logs;
}

}  // namespace

std::string flight_record() {
  const auto logs = own_log();
  return logs.empty() ? "" : flight::to_json(logs.front(), logs);
}

void write_flight_record(const std::string& folder) {
  const auto logs = own_log();
  if (logs.empty()) {
    fail(ErrorKind::kUnsupported, "write_flight_record: this process writes none (CONVOY_FLIGHT)");
  }
  flight::write_dumps(folder, logs);
}

}  // namespace convoy

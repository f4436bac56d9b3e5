#include <fcntl.h>
#include <unistd.h>

#include <exception>
#include <string>
#include <vector>

#include "base/error.h"
#include "launch/doctor.h"
#include "launch/guardian.h"
#include "launch/options.h"
#include "launch/record.h"
#include "launch/writer.h"
#include "os/machine.h"

namespace {

using namespace convoy;
using namespace convoy::launch;

constexpr int kUsage = 2;

// Started with a standard descriptor closed, a pipe of ours would take its number.
void fill_standard_descriptors() {
  int fd = 0;
  do {
    fd = ::open("/dev/null", O_RDWR);
  } while (fd >= 0 && fd <= 2);
  if (fd > 2) ::close(fd);
}

int run(const std::vector<std::string>& arguments) {
  const CommandLine line = parse_command_line(arguments, usable_cores());
  switch (line.command) {
    case CommandLine::Command::kText: return write_fully(STDOUT_FILENO, line.text) == 0 ? 0 : 1;
    case CommandLine::Command::kRun: return run_guardian(line.run);
    case CommandLine::Command::kRecord: return run_record(line.record);
    case CommandLine::Command::kDoctor: return run_doctor(line.doctor);
  }
  return kUsage;
}

}  // namespace

int main(int argc, char** argv) {
  fill_standard_descriptors();
  try {
    return run({argv + 1, argv + argc});
  } catch (const Error& error) {
    write_fully(STDERR_FILENO, std::string(error.what()) + "\n");
    return error.kind() == ErrorKind::kInvalidArgument ? kUsage : 1;
  } catch (const std::exception& error) {
    write_fully(STDERR_FILENO, concat("convoy: ", error.what(), "\n"));
    return 1;
  }
}

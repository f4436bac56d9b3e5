#pragma once

#include <functional>
#include <string>
#include <vector>

#include "launch/doctor_checks.h"
#include "launch/options.h"

namespace convoy::launch {

// `convoy doctor`: looks at this machine and prints what it finds. Exit status 1 if anything fails.
// To be called before the process has threads.
int run_doctor(const DoctorOptions& options);

// All checks, on this machine.
std::vector<Finding> examine();
// What `check` finds; a failure named `name` if it throws.
Finding guarded(const std::string& name, const std::function<Finding()>& check);
std::string format_findings(const std::vector<Finding>& findings);
std::string format_findings_json(const std::vector<Finding>& findings);

}  // namespace convoy::launch

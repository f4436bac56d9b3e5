#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fault/cases.h"

namespace convoy::fault {

// A group, the store, shared memory, a queue and published versions, without torch.
std::vector<Scenario> core_scenarios();

// Examines it, and gives the findings to the current test.
void expect_no_findings(const Scenario& scenario, Extent extent);

// The same for `convoy run`: its processes end with a clear text, or as if nothing had been.
void expect_clear_launches(Extent extent);

}  // namespace convoy::fault

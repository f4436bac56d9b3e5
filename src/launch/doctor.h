#pragma once
#include "launch/options.h"
namespace convoy::launch {
int run_doctor(const DoctorOptions& options);
}

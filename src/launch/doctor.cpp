#include "launch/doctor.h"
namespace convoy::launch {
int run_doctor(const DoctorOptions&) { return 0; }
}  // namespace convoy::launch

#pragma once

#include <sys/types.h>

#include <string>

namespace convoy::test {

// Each thread of this process that gets the dump signal writes its stack to stderr. Called by the
// test main, in ranks too.
void install_stack_dump();

// Follows each stack in the output.
inline constexpr const char* kEndOfStack = "--- end of stack";

// Asks every thread of a process that runs a test program for its stack; returns how many were
// asked. For this process itself it waits, a second at most, until they have written.
int request_stacks(pid_t pid);

// Its threads: name, state, and where in the kernel each one waits.
std::string describe_process(pid_t pid);

}  // namespace convoy::test

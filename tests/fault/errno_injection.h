#pragma once

// System calls that fail on demand, for tests. libconvoy_errno_injection.so stands in front of the
// C library: a test program links it, and a program that knows nothing of it gets it by LD_PRELOAD
// and is told by the environment. What the C library calls inside itself (malloc's mmap) is not
// reached. The sanitizers stand in front of the same functions, so there is none in their builds.

// Instead of an errno: the call does only a part of its work. One byte for reads and writes; for
// recvmsg, where descriptors were passed: they are dropped (MSG_CTRUNC), as the kernel does when a
// process has no room for them.
#define CONVOY_INJECT_PART (-1)

extern "C" {

// Calls that are counted have numbers below this one.
int convoy_inject_calls(void);
// "mmap"; those that go through syscall(2) have names of their own: "futex_wait", "pidfd_open".
const char* convoy_inject_name(int call);
// How often this process has called it since convoy_inject_arm().
long convoy_inject_count(int call);

// From now on the `first`-th call of this name (from 1) fails with this errno, and so do those
// after it until `times` have failed; -1: all. Others are only counted. A name of nullptr fails
// none. Not while threads call.
void convoy_inject_arm(const char* name, int error, long first, long times);
// Nothing fails any more; returns how many calls have.
long convoy_inject_disarm(void);
// Calls of this thread are neither counted nor failed, until it is called with 0.
void convoy_inject_exempt(int exempt);
}

// For programs that get the library by LD_PRELOAD: "name:errno:first:times", from the start of
// every program whose file name is that of the second variable.
#define CONVOY_INJECT_VARIABLE "CONVOY_TEST_INJECT"
#define CONVOY_INJECT_PROGRAM_VARIABLE "CONVOY_TEST_INJECT_PROGRAM"
// If set: a file to which every such program appends one line "name count" for each call at its
// end.
#define CONVOY_INJECT_COUNTS_VARIABLE "CONVOY_TEST_INJECT_COUNTS"

// A rank as `convoy run` starts it: says what launcher_store() gives. Run by launcher_store_test.
//
//   say      writes one line: "none", "store", or "<kind>: <text>"
//   set      as say, and sets the key "said" to this process's id
//   hold     as set, and then waits until its standard input ends
//   fork     a forked child takes the store first, ends, and then this process does
//   twice    says it twice
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "base/concat.h"
#include "convoy/error.h"
#include "convoy/store.h"

namespace {

bool say(bool use) {
  try {
    const auto store = convoy::launcher_store();
    if (use && store) store->set("said", std::to_string(::getpid()));
    std::puts(store ? "store" : "none");
    if (store != convoy::launcher_store()) std::puts("another object");
  } catch (const convoy::Error& error) {
    std::printf("%s: %s\n", std::string(to_string(error.kind())).c_str(), error.what());
    std::fflush(stdout);
    return false;
  }
  std::fflush(stdout);
  return true;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "";
  if (what == "fork") {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(say(true) ? 0 : 1);
    ::waitpid(child, nullptr, 0);
  }
  const bool good = say(what != "say");
  if (what == "twice") say(false);
  if (what == "hold") {
    char byte = 0;
    while (::read(STDIN_FILENO, &byte, 1) > 0) {
    }
  }
  return good ? 0 : 1;
}

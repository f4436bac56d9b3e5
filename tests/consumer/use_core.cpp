// A program of somebody else's: the torch-free half of convoy through its public headers.
#include <convoy/error.h>
#include <convoy/store.h>
#include <convoy/version.h>

#include <chrono>
#include <cstdio>
#include <string>

int main() {
  using namespace std::chrono_literals;
  const auto store = convoy::make_local_store();
  store->set("greeting", "hello");
  if (store->get("greeting") != "hello") return 1;
  if (store->add("count", 40) + 2 != 42) return 2;
  try {
    store->get("nobody", convoy::Deadline::after(1ms));
    return 3;
  } catch (const convoy::Error& error) {
    if (error.kind() != convoy::ErrorKind::kTimeout) return 4;
  }
  const std::string headers = std::to_string(CONVOY_VERSION_MAJOR) + "." +
                              std::to_string(CONVOY_VERSION_MINOR) + "." +
                              std::to_string(CONVOY_VERSION_PATCH);
  if (headers != convoy::version()) return 5;
  std::printf("core %s works from outside\n", convoy::version());
  return 0;
}

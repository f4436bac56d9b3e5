#include "trip_wire.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#include "base/error.h"

namespace convoy::transport::test {
namespace {

std::atomic<std::byte*> g_page{nullptr};
std::atomic<void (*)()> g_tripped{nullptr};
struct sigaction g_before;

std::size_t page_bytes() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

void handle(int, siginfo_t* info, void*) {
  std::byte* const page = g_page.load();
  auto* const at = static_cast<std::byte*>(info->si_addr);
  if (!page || at < page || at >= page + page_bytes()) {
    ::sigaction(SIGSEGV, &g_before, nullptr);  // it happens again, and is somebody else's
    return;
  }
  g_tripped.load()();
}

}  // namespace

TripWire::TripWire(std::span<const std::byte> content, std::size_t at, void (*tripped)())
    : bytes_(content.size()),
      mapped_((content.size() + page_bytes() - 1) / page_bytes() * page_bytes()) {
  void* const memory =
      ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CONVOY_CHECK(memory != MAP_FAILED && at < bytes_, "no memory for a trip wire");
  data_ = static_cast<std::byte*>(memory);
  std::memcpy(data_, content.data(), content.size());
  std::byte* const page = data_ + at / page_bytes() * page_bytes();
  g_tripped.store(tripped);
  g_page.store(page);
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  ::sigaction(SIGSEGV, &action, &g_before);
  ::mprotect(page, page_bytes(), PROT_NONE);
}

TripWire::~TripWire() {
  g_page.store(nullptr);
  ::sigaction(SIGSEGV, &g_before, nullptr);
  ::munmap(data_, mapped_);
}

void TripWire::lift() { ::mprotect(g_page.load(), page_bytes(), PROT_READ); }

}  // namespace convoy::transport::test

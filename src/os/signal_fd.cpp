#include "os/signal_fd.h"

#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "base/error.h"

namespace convoy {

SignalFd::SignalFd(const std::vector<int>& signals) {
  sigset_t mask;
  sigemptyset(&mask);
  for (const int signal : signals) sigaddset(&mask, signal);
  if (const int error = pthread_sigmask(SIG_BLOCK, &mask, nullptr); error != 0) {
    errno = error;
    fail_errno("blocking signals");
  }
  fd_.reset(signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) fail_errno("making a signal descriptor");
}

std::optional<int> SignalFd::next() {
  signalfd_siginfo info{};
  if (::read(fd_.get(), &info, sizeof info) != sizeof info) return std::nullopt;
  return static_cast<int>(info.ssi_signo);
}

bool is_ignored(int signal) {
  struct sigaction action {};
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace convoy

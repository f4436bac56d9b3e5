#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>

#include "base/concat.h"
#include "base/unique_fd.h"
#include "convoy/error.h"

namespace convoy::test {

// Runs `function` in a child made by fork() and returns what it returned; "" is what tests want.
// How the child ended is in the text if it did not return. To be used in a rank that is a process.
inline std::string in_forked_child(const std::function<std::string()>& function) {
  int ends[2];
  if (::pipe(ends) != 0) return "no pipe";
  const UniqueFd from(ends[0]);
  UniqueFd to(ends[1]);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(30);  // whoever waits for a thread that is not there is ended by SIGALRM
    std::string text;
    try {
      text = function();
    } catch (const std::exception& error) {
      text = concat("threw ", std::string(error.what()).substr(0, 500));
    }
    const bool written = ::write(to.get(), text.data(), text.size()) >= 0;
    ::_exit(written ? 0 : 1);
  }
  to.reset();
  std::string text;
  char part[512];
  for (ssize_t got = 0; (got = ::read(from.get(), part, sizeof part)) > 0;) {
    text.append(part, static_cast<std::size_t>(got));
  }
  int status = -1;
  if (::waitpid(child, &status, 0) != child) return text + "; no child";
  if (WIFSIGNALED(status)) return concat(text, "; ended by signal ", WTERMSIG(status));
  if (WEXITSTATUS(status) != 0) return concat(text, "; exit code ", WEXITSTATUS(status));
  return text;
}

// Of calls that must all be refused in a forked child: which were not, one a line.
class Refusals {
 public:
  template <class Function>
  void expect(const char* what, Function&& function) {
    try {
      static_cast<void>(function());
      text_ += concat(what, ": accepted\n");
    } catch (const Error& error) {
      const std::string text = error.what();
      if (error.kind() != ErrorKind::kUnsupported) {
        text_ += concat(what, ": ", to_string(error.kind()), ": ", text, "\n");
      } else if (text.find("forked child") == std::string::npos) {
        text_ += concat(what, ": says ", text, "\n");
      }
    } catch (const std::exception& error) {
      text_ += concat(what, ": another exception: ", error.what(), "\n");
    }
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace convoy::test

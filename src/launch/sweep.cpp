#include "launch/sweep.h"

#include <signal.h>

#include <algorithm>

#include "base/concat.h"
#include "convoy/deadline.h"
#include "os/descendants.h"
#include "os/process.h"

namespace convoy::launch {
namespace {

using std::chrono::milliseconds;

// A child of a rank that is just ending is no left-over.
constexpr milliseconds kNaturalEnd{150};
constexpr milliseconds kLongestGrace{2000};
constexpr milliseconds kKillRound{10};
constexpr milliseconds kGiveUp{10'000};

}  // namespace

Sweep::~Sweep() {
  loop_.cancel(timer_);
  loop_.cancel(round_);
}

void Sweep::start(std::chrono::nanoseconds grace, std::set<pid_t> kept,
                  std::function<void()> done) {
  grace_ = std::min<std::chrono::nanoseconds>(grace, kLongestGrace);
  kept_ = std::move(kept);
  done_ = std::move(done);
  stage_ = Stage::kWaiting;
  if (none_left()) return finish();
  if (merciless_) return kill_now();
  set_timer(kNaturalEnd, &Sweep::next_stage);
}

void Sweep::set_timer(std::chrono::nanoseconds delay, void (Sweep::*step)()) {
  loop_.cancel(timer_);
  timer_ = loop_.call_at(Deadline::Clock::now() + delay, [this, step] { (this->*step)(); });
}

bool Sweep::none_left() {
  reap_orphans(kept_);
  return kept_.empty() ? has_no_children() : live_descendants(kept_).empty();
}

std::vector<std::string> Sweep::describe_left() const {
  std::vector<std::string> names;
  for (const pid_t pid : live_descendants(kept_)) {
    names.push_back(concat(process_name(pid), " (pid ", pid, ")"));
  }
  return names;
}

void Sweep::next_stage() {
  if (none_left()) return finish();
  if (stage_ == Stage::kAsked) return kill_now();
  stage_ = Stage::kAsked;
  ended_ = describe_left();
  signal_descendants(SIGTERM, kept_);
  signal_descendants(SIGCONT, kept_);
  set_timer(grace_, &Sweep::next_stage);
}

void Sweep::kill_now() {
  merciless_ = true;
  if (stage_ != Stage::kWaiting && stage_ != Stage::kAsked) return;
  if (ended_.empty()) ended_ = describe_left();
  stage_ = Stage::kKilling;
  set_timer(kGiveUp, &Sweep::finish);
  kill_round();
}

void Sweep::kill_round() {
  signal_descendants(SIGKILL, kept_);
  if (none_left()) return finish();
  loop_.cancel(round_);
  round_ = loop_.call_at(Deadline::Clock::now() + kKillRound, [this] { kill_round(); });
}

void Sweep::child_ended() {
  if (active() && none_left()) finish();
}

void Sweep::finish() {
  if (stage_ == Stage::kDone) return;
  stage_ = Stage::kDone;
  loop_.cancel(timer_);
  loop_.cancel(round_);
  unkillable_ = describe_left();
  done_();
}

}  // namespace convoy::launch

#include "agent/call_record.h"

#include <array>
#include <atomic>
#include <utility>

namespace convoy::agent {
namespace {

// The numbers of functions' names in the flight record, plus one; 0: not asked for yet. Functions
// have numbers of the process, as its record has; those beyond have no name there.
constexpr std::size_t kMostNames = 2048;
std::array<std::atomic<std::uint32_t>, kMostNames> function_texts;

thread_local bool is_together = false;

}  // namespace

CallRecord::~CallRecord() {
  if (group_ != 0) recorder_->remove_group(group_);
}

void CallRecord::join(const Id& session, WorkerId self,
                      const std::vector<std::string>& workers) noexcept {
  recorder_ = &flight::Recorder::instance();
  group_ = recorder_->add_group({.name = workers[self],
                                 .rank = static_cast<int>(self),
                                 .size = static_cast<int>(workers.size()),
                                 .processes = {},
                                 .session = hash_bytes(std::as_bytes(std::span(session.bytes))) | 1,
                                 .workers = workers});
}

void CallRecord::add_worker(WorkerId id, const std::string& name) noexcept {
  if (group_ != 0) recorder_->name_worker(group_, id, name);
}

CallRecord::Together::Together(CallRecord& record, std::string_view what) noexcept
    : record_(record), outer_(!std::exchange(is_together, true)) {
  if (!outer_ || record.group_ == 0) return;
  flight::Recorder& recorder = *record.recorder_;
  ticket_ = recorder.begin_call({.group = record.group_, .function = recorder.text(what)},
                                flight::Clock::now(), /*started=*/true);
}

CallRecord::Together::~Together() {
  if (!outer_) return;
  is_together = false;
  record_.ended(ticket_, std::uncaught_exceptions() == errors_ ? End::kWell : End::kFailed,
                flight::Clock::now());
}

CallRecord::Ticket CallRecord::takes_part(std::optional<WorkerId> root, std::uint64_t number,
                                          Time now) noexcept {
  if (group_ == 0) return 0;
  static const std::uint64_t text = flight::Recorder::instance().text("backward pass");
  return recorder_->begin_call({.group = group_,
                                .number = number,
                                .function = text,
                                .peer = root ? static_cast<int>(*root) : -1,
                                .served = root.has_value(),
                                .pass = true},
                               now, /*started=*/false);
}

std::uint64_t CallRecord::text_of(FunctionId function) noexcept {
  if (function >= kMostNames) return 0;
  const std::uint32_t known = function_texts[function].load(std::memory_order_relaxed);
  if (known != 0) [[likely]]
    return known - 1;
  const std::uint64_t text = flight::Recorder::instance().text(declared_function(function).name);
  function_texts[function].store(static_cast<std::uint32_t>(text) + 1, std::memory_order_relaxed);
  return text;
}

}  // namespace convoy::agent

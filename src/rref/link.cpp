#include "rref/link.h"

#include <algorithm>
#include <cstring>

#include "agent/call.h"

namespace convoy::rref {
namespace {

constexpr std::size_t kMostBytes = agent::Outgoing::kMostBody;
// So many records go without waiting for more.
constexpr std::size_t kFull = 256;
// What is sent again at once.
constexpr std::size_t kMostLetters = 16;

}  // namespace

void Link::put(const Record& record, When when, Time now) {
  out_.push_back(encode_record(record));
  ++next_number_;
  const bool urgent = when == When::kNow || out_.size() - sent_ >= kFull;
  due_ = std::min(due_, urgent ? now : now + times_.lazy);
}

Time Link::next() const { return std::min({due_, retry_, acknowledge_}); }

void Link::reconnected(Time now) {
  sent_ = 0;
  if (!out_.empty()) due_ = now;
  if (taken_ != 0) acknowledge_ = now;
}

void Link::collect(Time now, Send send) {
  const bool again = retry_ <= now;
  if (!again && due_ > now && acknowledge_ > now) return;
  // All that there is goes with it.
  if (again || sent_ < out_.size()) {
    send_letters(again ? 0 : sent_, send);
  } else {
    send_letters(out_.size(), send);
  }
  due_ = Time::max();
  acknowledge_ = Time::max();
  if (out_.empty()) {
    retry_ = Time::max();
  } else if (again || retry_ == Time::max()) {
    pause_ = again ? std::min(pause_ * 3 / 2, times_.last_retry) : times_.first_retry;
    retry_ = now + pause_;
  }
}

void Link::send_letters(std::size_t from, Send send) {
  std::size_t at = from;
  std::size_t letters = 0;
  do {
    LetterHead head{.from = from_, .to = to_, .taken = taken_, .first = first_ + at};
    std::string bytes(sizeof head, '\0');
    while (at < out_.size() && bytes.size() + out_[at].size() <= kMostBytes) {
      bytes += out_[at++];
      ++head.count;
    }
    std::memcpy(bytes.data(), &head, sizeof head);
    send(std::move(bytes));
  } while (at < out_.size() && ++letters < kMostLetters);
  sent_ = std::max(sent_, at);
  // More of them goes when some of these were taken.
}

std::vector<Record> Link::hear(ReferenceLetter&& letter, Time now) {
  const LetterHead& head = letter.head;
  if (head.taken >= first_ && head.taken < next_number_) {
    const auto count = static_cast<std::size_t>(head.taken - first_ + 1);
    out_.erase(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(count));
    first_ = head.taken + 1;
    sent_ -= std::min(sent_, count);
    // The others are waited for anew.
    pause_ = times_.first_retry;
    retry_ = sent_ == 0 ? Time::max() : now + pause_;
    if (sent_ < out_.size()) due_ = std::min(due_, now + times_.lazy);
  }
  std::vector<Record> fresh;
  if (head.count == 0) return fresh;
  // Whatever it is, the sender has not heard yet that it was taken.
  acknowledge_ = std::min(acknowledge_, now + times_.acknowledge);
  if (head.first > taken_ + 1) return fresh;  // some are missing before it: they come again
  for (std::uint32_t i = 0; i < head.count; ++i) {
    if (head.first + i <= taken_) continue;
    fresh.push_back(std::move(letter.records[i]));
    ++taken_;
  }
  return fresh;
}

}  // namespace convoy::rref

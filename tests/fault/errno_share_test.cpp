// Every system call may fail while tensors are shared: every call, errno and place. Hundreds of
// runs, some of which wait for a deadline: minutes.
#include <torch/types.h>

#include "base/concat.h"
#include "convoy/published.h"
#include "convoy/queue.h"
#include "convoy/share.h"
#include "fault/cases.h"
#include "os/file.h"
#include "share/depot.h"
#include "support/rank_group.h"

namespace convoy::fault {
namespace {

using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;

constexpr std::array<std::int64_t, 3> kSizes = {3, 30'000, 1'500'000};

at::Tensor filled(std::int64_t size, int salt) {
  return at::arange(size, at::kFloat).remainder_(997).add_(salt);
}

void check(const at::Tensor& tensor, std::int64_t size, int salt, const char* what) {
  if (tensor.numel() != size || !at::equal(tensor, filled(size, salt))) wrong(what);
}

void meet_by_channel(const Turn& turn, const std::function<void(const share::Channel&)>& use) {
  if (turn.rank == 0) {
    const TempFolder folder("errno");
    const auto listener = share::listen(folder.path() + "/s");
    turn.store->set("path", listener.path());
    use(listener.accept(turn.deadline));
  } else {
    use(share::connect(turn.store->get("path", turn.deadline), turn.deadline));
  }
}

void run_channel(const Turn& turn) {
  meet_by_channel(turn, [&](const share::Channel& channel) {
    for (int i = 0; i < 3; ++i) {
      const auto size = kSizes[static_cast<std::size_t>(i)];
      if (turn.rank == 0) {
        channel.send({filled(size, i), "text", i}, turn.deadline);
        check(channel.receive(turn.deadline), size, i + 1, "a tensor that came back");
      } else {
        const auto message = channel.receive_message(turn.deadline);
        check(message.tensor(0), size, i, "a tensor");
        if (message.text(1) != "text" || message.integer(2) != i) wrong("a message");
        channel.send({message.tensor(0) + 1}, turn.deadline);
      }
    }
  });
}

void run_queue(const Turn& turn) {
  meet_by_channel(turn, [&](const share::Channel& channel) {
    if (turn.rank == 0) {
      const share::Queue queue(share::QueueOptions{.capacity = 2});
      channel.send({queue}, turn.deadline);
      for (int i = 0; i < 6; ++i) {
        queue.put({filled(kSizes[static_cast<std::size_t>(i % 3)], i), i}, turn.deadline);
      }
      channel.receive_message(turn.deadline);
    } else {
      const share::Queue queue(channel.receive_message(turn.deadline).shared(0));
      for (int i = 0; i < 6; ++i) {
        const auto message = queue.get(turn.deadline);
        if (message.integer(1) != i) wrong("the order of items");
        check(message.tensor(0), kSizes[static_cast<std::size_t>(i % 3)], i, "an item");
      }
      channel.send({true}, turn.deadline);
    }
  });
}

std::vector<share::NamedTensor> weights(int version) {
  return {{"a", filled(1000, version)}, {"b", filled(70'000, version)}};
}

void run_published(const Turn& turn) {
  meet_by_channel(turn, [&](const share::Channel& channel) {
    if (turn.rank == 0) {
      const share::PublishedTensors published(weights(1), {});
      channel.send({published.handle()}, turn.deadline);
      for (int version = 2; version < 6; ++version) published.publish(weights(version));
      channel.receive_message(turn.deadline);
    } else {
      const auto published = share::PublishedTensors::open(channel.receive(turn.deadline));
      std::uint64_t seen = 0;
      while (seen < 5) {
        const auto snapshot = published.read_newer(seen, turn.deadline);
        seen = snapshot.version();
        check(snapshot["a"], 1000, static_cast<int>(seen), "published weights");
        check(snapshot["b"], 70'000, static_cast<int>(seen), "published weights");
      }
      channel.send({true}, turn.deadline);
    }
  });
}

std::string held() {
  const auto usage = share::usage();
  if (usage.blocks == 0 && usage.foreign == 0) return "";
  return concat(usage.blocks, " blocks of the pool, ", usage.foreign, " of others\n");
}

class ErrnoShareTest : public testing::TestWithParam<Scenario> {};
INSTANTIATE_TEST_SUITE_P(All, ErrnoShareTest,
                         testing::Values(Scenario{"Channel", &run_channel, &held},
                                         Scenario{"Queue", &run_queue, &held},
                                         Scenario{"Published", &run_published, &held}),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(ErrnoShareTest, AClearErrorOrSuccess) {
  RankGroup(1, RankMode::kProcesses, {.limit = std::chrono::minutes(14)}).run([&](Rank&) {
    const Findings findings = examine_here(GetParam());
    EXPECT_GT(findings.failed_calls, 0) << "no call was ever failed: is the library in front?";
    for (const auto& finding : findings.texts) ADD_FAILURE() << finding;
    std::printf("%d runs, %d with a failed call, %d with an error\n", findings.runs,
                findings.failed_calls, findings.errors);
  });
}

}  // namespace

}  // namespace convoy::fault

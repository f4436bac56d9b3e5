// The flight record: what is written, what readers make of it, and of garbage.
#include <gtest/gtest.h>
#include <unistd.h>

#include <random>
#include <thread>

#include "base/concat.h"
#include "os/file.h"
#include "os/flight_calls.h"
#include "os/flight_dump.h"
#include "os/flight_log.h"
#include "os/flight_recorder.h"

namespace convoy::flight {
namespace {

using namespace std::chrono_literals;

constexpr CallSite kPlace("/project/src/train.cpp", "step", 40);

Clock::time_point at(std::chrono::nanoseconds time) { return Clock::time_point(time); }

Operation all_reduce(std::uint64_t group, std::uint64_t number) {
  return {.group = group,
          .number = number,
          .name = OperationText::pack("all_reduce"),
          .type = TypeText::pack("f32"),
          .input = 256,
          .output = 256,
          .bytes = 1024};
}

Log read_of(const Recorder& recorder) { return read(*recorder.ring(), recorder.bytes()).value(); }

TEST(Flight, AnOperationFromItsCallToItsEnd) {
  Recorder recorder(make_memory("job", 3));
  const auto group =
      recorder.add_group({.name = "world", .rank = 1, .size = 3, .processes = {11, 12, 13}});
  const auto ticket = recorder.begin(all_reduce(group, 7), kPlace, at(10ms), false);
  auto log = read_of(recorder);
  ASSERT_EQ(log.entries.size(), 1U);
  EXPECT_EQ(log.pid, getpid());
  const Entry& first = log.entries[0];
  EXPECT_EQ(first.operation, "all_reduce");
  EXPECT_EQ(first.type, "f32");
  EXPECT_EQ(first.number, 7U);
  EXPECT_EQ(first.bytes, 1024U);
  EXPECT_EQ(first.state, State::kScheduled);
  EXPECT_EQ(first.created, 10ms);
  EXPECT_EQ(first.started, 0ms);
  EXPECT_EQ(first.peer, -1);
  EXPECT_EQ(describe_place(first), "train.cpp:40");
  EXPECT_EQ(first.function, "step");
  ASSERT_TRUE(log.group_of(first));
  EXPECT_EQ(log.group_of(first)->name, "world");
  EXPECT_EQ(log.group_of(first)->rank, 1);
  EXPECT_EQ(log.group_of(first)->processes, (std::vector<pid_t>{11, 12, 13}));

  recorder.start(ticket, at(20ms));
  EXPECT_TRUE(read_of(recorder).entries[0].under_way());
  log = read_of(recorder);
  EXPECT_EQ(describe_activity(log, log.latest(), 3220ms),
            "it is in all_reduce #7 of group \"world\" (train.cpp:40) for 3.2 s");
  recorder.end(ticket, State::kCompleted, at(30ms));
  log = read_of(recorder);
  EXPECT_EQ(log.entries[0].ended, 30ms);
  EXPECT_EQ(describe_activity(log, log.latest(), 3230ms),
            "it is in user code for 3.2 s, since all_reduce #7 of group \"world\" (train.cpp:40) "
            "ended");
  EXPECT_EQ(describe_line(log, log.entries[0], 3230ms),
            "all_reduce #7 of group \"world\", 256 x f32, completed in 20 ms, 3.2 s ago, "
            "train.cpp:40");
}

TEST(Flight, KeepsTheLastOnesAndForgetsLateEnds) {
  Recorder recorder(make_memory("job", 0));
  const auto old = recorder.begin(all_reduce(0, 1), {}, at(1ns), true);
  for (std::uint64_t i = 2; i <= kRecords + 1; ++i) {
    recorder.end(recorder.begin(all_reduce(0, i), {}, at(1ns), true), State::kFailed, at(2ns));
  }
  recorder.end(old, State::kCompleted, at(3ns));  // its place is another's
  const auto log = read_of(recorder);
  ASSERT_EQ(log.entries.size(), kRecords);
  EXPECT_GE(kRecords, 2000U);
  for (std::size_t i = 0; i < kRecords; ++i) {
    EXPECT_EQ(log.entries[i].number, i + 2);
    EXPECT_EQ(log.entries[i].state, State::kFailed);
    EXPECT_EQ(describe_place(log.entries[i]), "");
  }
}

TEST(Flight, ManyThreadsWriteAndOneReads) {
  Recorder recorder(make_memory("job", 0));
  constexpr std::uint64_t kEach = 5000;
  std::vector<std::thread> writers;
  for (int t = 0; t < 4; ++t) {
    writers.emplace_back([&recorder, t] {
      const auto group =
          recorder.add_group({.name = concat("group ", t), .rank = t, .size = 4, .processes = {}});
      for (std::uint64_t i = 1; i <= kEach; ++i) {
        auto operation = all_reduce(group, i);
        operation.input = operation.output = operation.bytes = i;
        recorder.end(recorder.begin(operation, kPlace, at(std::chrono::nanoseconds(i)), true),
                     State::kCompleted, at(std::chrono::nanoseconds(i)));
      }
      recorder.remove_group(group);
    });
  }
  // Whatever is read is whole.
  for (int look = 0; look < 20; ++look) {
    for (const auto& entry : read_of(recorder).entries) {
      EXPECT_EQ(entry.input, entry.number);
      EXPECT_EQ(entry.output, entry.number);
      EXPECT_EQ(entry.bytes, entry.number);
      EXPECT_EQ(entry.operation, "all_reduce");
      EXPECT_EQ(entry.created.count(), static_cast<std::int64_t>(entry.number));
    }
  }
  for (auto& writer : writers) writer.join();
  const auto log = read_of(recorder);
  EXPECT_EQ(log.entries.size(), kRecords);
  EXPECT_LE(log.entries.back().ticket, 4 * kEach);
  EXPECT_GT(log.entries.back().ticket, 4 * kEach - kRecords);  // some may be left out
}

TEST(Flight, GroupsComeAndGoAndAreNotMistaken) {
  Recorder recorder(make_memory("job", 0));
  const auto kept = recorder.add_group({.name = "kept", .rank = 0, .size = 1, .processes = {}});
  const auto gone = recorder.add_group({.name = "gone", .rank = 0, .size = 1, .processes = {}});
  recorder.begin(all_reduce(kept, 1), {}, at(1ns), true);
  recorder.begin(all_reduce(gone, 1), {}, at(1ns), true);
  recorder.remove_group(gone);
  auto log = read_of(recorder);
  EXPECT_EQ(log.group_of(log.entries[1])->name, "gone");  // as long as nobody needs its place
  for (std::size_t i = 0; i < 2 * kGroups; ++i) {
    const auto id =
        recorder.add_group({.name = concat("g", i), .rank = 0, .size = 1, .processes = {}});
    EXPECT_NE(id, 0U);
    recorder.remove_group(id);
  }
  log = read_of(recorder);
  EXPECT_EQ(log.group_of(log.entries[0])->name, "kept");
  EXPECT_EQ(log.group_of(log.entries[1]), nullptr);
  for (std::size_t i = 1; i < kGroups; ++i) {
    EXPECT_NE(recorder.add_group({.name = "more", .rank = 0, .size = 1, .processes = {}}), 0U);
  }
  EXPECT_EQ(recorder.add_group({.name = "too many", .rank = 0, .size = 1, .processes = {}}), 0U);
}

TEST(Flight, MoreSitesThanThereIsRoomForAreNotKnown) {
  Recorder recorder(make_memory("job", 0));
  std::size_t known = 0;
  for (unsigned line = 1; line <= 2 * kSites; ++line) {
    recorder.begin(all_reduce(0, line), CallSite(kPlace.file, kPlace.function, line), at(1ns),
                   true);
  }
  for (const auto& entry : read_of(recorder).entries) {
    if (entry.line == 0) continue;
    EXPECT_EQ(entry.line, entry.number);
    ++known;
  }
  EXPECT_GT(known, kSites / 2);
  EXPECT_LT(known, kSites);
}

TEST(Flight, LongTextsAreCut) {
  Recorder recorder(make_memory("job", 0));
  const std::string path = concat("/", std::string(200, 'd'), "/file.cpp");
  recorder.begin(
      all_reduce(recorder.add_group(
                     {.name = std::string(300, 'n'), .rank = 0, .size = 1, .processes = {}}),
                 1),
      CallSite(path.c_str(), std::string(100, 'f').c_str(), 1), at(1ns), true);
  const auto log = read_of(recorder);
  EXPECT_EQ(log.entries[0].file, path.substr(path.size() - 80));
  EXPECT_EQ(log.entries[0].function, std::string(32, 'f'));
  EXPECT_EQ(log.group_of(log.entries[0])->name, std::string(64, 'n'));
}

// A writer may be killed between any two stores, and memory may be anything.
TEST(Flight, GarbageIsReadWithoutHarm) {
  const Segment memory = make_memory("job", 0);
  EXPECT_FALSE(read(memory.data(), memory.size()));  // nobody wrote
  EXPECT_FALSE(read(memory.data(), 100));
  auto& ring = *reinterpret_cast<Ring*>(memory.data());
  std::mt19937_64 random(7);
  auto* words = reinterpret_cast<Word*>(memory.data());
  for (int round = 0; round < 20; ++round) {
    for (std::size_t i = 0; i < memory.size() / sizeof(Word); ++i) words[i].store(random());
    ring.head.magic.store(kMagic);
    for (std::size_t i = 0; i < kRecords; ++i) {
      Record& record = ring.records[i];
      // Some of them plausible up to here, with fields that are not.
      if (random() % 2 == 0) record.word.store(2 * (i + 1 + kRecords * (random() % 5)));
      if (random() % 2 == 0) record.state.store(random() % 6);
    }
    for (std::size_t i = 0; i < kCalls; ++i) {
      RecordHead& call = calls_of(ring)[i];
      if (random() % 2 == 0) call.word.store(2 * (i + 1 + kCalls * (random() % 5)));
      if (random() % 2 == 0) call.state.store(random() % 6);
      if (random() % 2 == 0) call.group.store(ring.groups[random() % kGroups].id.load());
      if (random() % 2 == 0) call.place.store((random() % kSites) << 32 | random() % 8);
    }
    for (Group& group : ring.groups) {
      if (random() % 2 == 0) group.size.store(8);
      if (random() % 2 == 0) group.rank.store(random() % 8);
    }
    const auto log = read(memory.data(), memory.size());
    ASSERT_TRUE(log);
    EXPECT_FALSE(log->entries.empty());
    EXPECT_FALSE(log->calls.empty());
    const std::vector<Log> job = {*log};
    EXPECT_FALSE(to_json(job[0], job).empty());
    EXPECT_FALSE(to_pickle(job[0], job).empty());
    EXPECT_FALSE(describe_activity(*log, log->latest(), 1s).empty());
    last_operations(*log, 100, 1s);
    who_waits_for(*log, job);
    const Calls calls(job);
    calls_under_way(job[0], calls, 100, 1s);
    last_calls(job[0], 100, 1s);
    who_called(job[0], calls, 100, 1s);
    EXPECT_FALSE(to_trace(job, 1s).empty());
  }
}

TEST(Flight, AHalfWrittenRecordIsLeftOut) {
  Recorder recorder(make_memory("job", 0));
  recorder.begin(all_reduce(0, 1), {}, at(1ns), true);
  recorder.begin(all_reduce(0, 2), {}, at(1ns), true);
  const_cast<Ring*>(recorder.ring())->records[0].word.store(3);  // odd: being written
  const auto log = read_of(recorder);
  ASSERT_EQ(log.entries.size(), 1U);
  EXPECT_EQ(log.entries[0].number, 2U);
}

TEST(Flight, AnotherProcessFindsItByNumberAndByName) {
  const std::string job = concat("test-", getpid());
  Recorder recorder(make_memory(job, 0));
  recorder.begin(all_reduce(0, 5), kPlace, at(1ns), true);
  const auto inode = Segment::key_of(recorder.descriptor()).inode;
  const auto log = read_process(getpid(), recorder.descriptor(), inode);
  ASSERT_TRUE(log);
  EXPECT_EQ(log->entries.at(0).number, 5U);
  EXPECT_FALSE(read_process(getpid(), recorder.descriptor(), inode + 1));
  EXPECT_FALSE(read_process(getpid(), 0, inode));
  EXPECT_EQ(read_job(job).size(), 1U);
  EXPECT_EQ(read_job(job + "x").size(), 0U);
  EXPECT_GE(read_job(std::to_string(getpid())).size(), 1U);
}

TEST(Flight, WritesNothingWithoutMemory) {
  Recorder recorder{Segment()};
  EXPECT_EQ(recorder.ring(), nullptr);
  EXPECT_EQ(recorder.add_group({.name = "world", .rank = 0, .size = 1, .processes = {}}), 0U);
  const auto ticket = recorder.begin(all_reduce(0, 1), kPlace, at(1ns), true);
  recorder.start(ticket, at(2ns));
  recorder.end(ticket, State::kCompleted, at(3ns));
  EXPECT_EQ(recorder.text("f"), 0U);
  const auto call = recorder.begin_call({.number = 1, .peer = 0}, at(1ns), true);
  EXPECT_EQ(call, 0U);
  recorder.start_call(call, at(2ns));
  recorder.delay_call(call);
  recorder.end_call(call, State::kCompleted, at(3ns));
  recorder.remove_group(0);
}

// Two ranks of which one did not come to the third collective.
std::vector<Log> two_ranks() {
  std::vector<Log> job(2);
  for (int r = 0; r < 2; ++r) {
    Log& log = job[static_cast<std::size_t>(r)];
    log.pid = 100 + r;
    log.rank = r;
    log.groups[64] = {.name = "world", .rank = r, .size = 2, .processes = {100, 101}};
    for (std::uint64_t number = 1; number <= (r == 0 ? 3U : 2U); ++number) {
      Entry entry;
      entry.ticket = number;
      entry.operation = "all_reduce";
      entry.type = "f32";
      entry.group = 64;
      entry.number = number;
      entry.input = entry.output = 4;
      entry.state = number == 3 ? State::kFailed : State::kCompleted;
      entry.created = entry.started = 1s;
      entry.ended = 2s;
      entry.file = "/src/train.cpp";
      entry.function = "main";
      entry.line = 12;
      log.entries.push_back(entry);
    }
  }
  return job;
}

TEST(FlightDump, TellsWhoWaitedForWhom) {
  auto job = two_ranks();
  const std::vector<std::string> nobody;
  const std::vector<std::string> first = {
      "rank 0 in all_reduce #3 of group \"world\" (train.cpp:12)"};
  EXPECT_EQ(who_waited_for(job[1], job, 2s), first);
  EXPECT_EQ(who_waited_for(job[1], job, 3s), nobody);  // it failed before, for another reason
  EXPECT_EQ(who_waited_for(job[0], job, 2s), nobody);
  EXPECT_EQ(who_waits_for(job[1], job), nobody);  // it waits no more
  job[0].entries.back().state = State::kStarted;
  EXPECT_EQ(who_waits_for(job[1], job), first);
  // It comes: it is not late any more, but may still end in the midst of it.
  job[1].entries.push_back(job[0].entries.back());
  EXPECT_EQ(who_waits_for(job[1], job), nobody);
  EXPECT_EQ(who_waited_for(job[1], job, 2s), first);
}

TEST(FlightDump, LeavesOutWhatFailedLongBefore) {
  auto log = two_ranks()[0];
  EXPECT_EQ(last_operations(log, 2, 9s).size(), 2u);
  EXPECT_NE(last_operations(log, 2, 9s).back().find("#3 of group \"world\""), std::string::npos);
  const auto recent = last_operations(log, 2, 9s, 3s);
  ASSERT_EQ(recent.size(), 2u);
  EXPECT_NE(recent.front().find("#1 of group"), std::string::npos) << recent.front();
  EXPECT_NE(recent.back().find("#2 of group"), std::string::npos) << recent.back();
}

TEST(FlightDump, JsonHasPyTorchsWords) {
  const auto job = two_ranks();
  const auto text = to_json(job[1], job);
  for (const char* part :
       {"\"version\": \"2.10\"", "\"ranks\": \"[0, 1]\"", "\"profiling_name\": \"gloo:all_reduce\"",
        "\"collective_seq_id\": 2", "\"input_sizes\": [[4]]", "\"input_dtypes\": [\"Float\"]",
        "\"state\": \"completed\"", "\"process_group\": [\"world\", \"undefined\"]",
        "\"filename\": \"/src/train.cpp\", \"line\": 12", "\"time_created_ns\": 1000000000"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  }
  EXPECT_EQ(to_json(job[1], job).find("\"started\""), std::string::npos);
  EXPECT_NE(to_json(job[0], job).find("\"started\""), std::string::npos);  // it failed
}

TEST(FlightDump, WritesAFileOfEachKindForEachRank) {
  const TempFolder folder("flight");
  write_dumps(folder.path() + "/deep/er", two_ranks());
  for (const char* name : {"rank_0", "rank_1", "0.json", "1.json"}) {
    EXPECT_TRUE(read_file(concat(folder.path(), "/deep/er/", name))) << name;
  }
}

// --- calls of RPC ---

constexpr std::uint64_t kSession = 77;

// One of two workers, "caller" and "callee".
struct Worker {
  Recorder recorder;
  std::uint64_t group;
  std::uint64_t step = recorder.text("model::train_step");

  explicit Worker(int rank, std::size_t calls = kCalls)
      : recorder(make_memory("job", rank, calls)),
        group(recorder.add_group({.name = rank == 0 ? "caller" : "callee",
                                  .rank = rank,
                                  .size = 2,
                                  .processes = {},
                                  .session = kSession,
                                  .workers = {"caller", "callee"}})) {}

  Recorder::Ticket makes(std::uint64_t number, std::chrono::nanoseconds now) {
    return recorder.begin_call({.group = group, .number = number, .function = step, .peer = 1},
                               at(now), true);
  }
  Recorder::Ticket takes(std::uint64_t number, std::chrono::nanoseconds now) {
    return recorder.begin_call(
        {.group = group, .number = number, .function = step, .peer = 0, .served = true}, at(now),
        false);
  }
};

std::vector<Log> read_both(const Worker& caller, const Worker& callee) {
  std::vector<Log> job = {read_of(caller.recorder), read_of(callee.recorder)};
  for (int r = 0; r < 2; ++r) {
    job[static_cast<std::size_t>(r)].rank = r;
    job[static_cast<std::size_t>(r)].pid = 100 + r;
  }
  return job;
}

std::vector<std::string> under_way(const std::vector<Log>& job, std::size_t rank) {
  return calls_under_way(job[rank], Calls(job), 5, 20s);
}

TEST(FlightCalls, TellWhoWaitsForWhomSinceWhen) {
  using Lines = std::vector<std::string>;
  Worker caller(0);
  Worker callee(1);
  EXPECT_EQ(under_way(read_both(caller, callee), 0), Lines{});
  const auto made = caller.makes(417, 8s);
  caller.recorder.delay_call(made);
  auto job = read_both(caller, callee);
  EXPECT_EQ(under_way(job, 0), Lines{"caller (rank 0): waits since 12 s for callee: "
                                     "model::train_step, call 417, which has not been sent yet"});
  caller.recorder.start_call(made, at(9s));
  job = read_both(caller, callee);
  EXPECT_EQ(under_way(job, 0), Lines{"caller (rank 0): waits since 12 s for callee: "
                                     "model::train_step, call 417; it has not come there"});
  const auto taken = callee.takes(417, 10s);
  job = read_both(caller, callee);
  EXPECT_EQ(under_way(job, 0), Lines{"caller (rank 0): waits since 12 s for callee: "
                                     "model::train_step, call 417; it is queued there since 10 s"});
  EXPECT_EQ(under_way(job, 1), Lines{"callee (rank 1): has queued since 10 s for caller: "
                                     "model::train_step, call 417"});
  callee.recorder.start_call(taken, at(15s));
  job = read_both(caller, callee);
  EXPECT_EQ(under_way(job, 0), Lines{"caller (rank 0): waits since 12 s for callee: "
                                     "model::train_step, call 417; it runs there since 5 s"});
  EXPECT_EQ(under_way(job, 1), Lines{"callee (rank 1): runs since 5 s for caller: "
                                     "model::train_step, call 417"});
  // It dies; the caller hears of it.
  EXPECT_EQ(who_called(job[1], Calls(job), 5, 20s),
            Lines{"caller (rank 0) since 12 s: model::train_step, call 417, which ran there"});
  caller.recorder.end_call(made, State::kFailed, at(20s));
  job = read_both(caller, callee);
  EXPECT_EQ(who_called(job[1], Calls(job), 5, 20s),
            Lines{"caller (rank 0) since 12 s: model::train_step, call 417, which ran there"});
  EXPECT_EQ(who_called(job[1], Calls(job), 5, 30s), Lines{});  // that was another reason
  EXPECT_EQ(who_called(job[0], Calls(job), 5, 20s), Lines{});
  EXPECT_EQ(under_way(job, 0), Lines{});
  EXPECT_EQ(last_calls(job[0], 5, 23s),
            Lines{"caller (rank 0): called callee: model::train_step, call 417, failed after 12 s, "
                  "3 s ago"});
  callee.recorder.end_call(taken, State::kCompleted, at(16s));
  job = read_both(caller, callee);
  EXPECT_EQ(last_calls(job[1], 5, 16s),
            Lines{"callee (rank 1): ran for caller: model::train_step, call 417, answered in 6 s, "
                  "0 us ago"});
  EXPECT_NE(to_json(job[1], job)
                .find("\"caller\": \"caller\", \"function\": "
                      "\"model::train_step\", \"number\": 417, \"state\": "
                      "\"answered\""),
            std::string::npos);
}

// What each worker does in it, in one line of its root's.
TEST(FlightCalls, BackwardPasses) {
  using Lines = std::vector<std::string>;
  Worker root(0);
  Worker other(1);
  const auto begin = [](Worker& worker, int peer, std::uint64_t number) {
    return worker.recorder.begin_call({.group = worker.group,
                                       .number = number,
                                       .function = worker.recorder.text("backward pass"),
                                       .peer = peer,
                                       .served = peer >= 0,
                                       .pass = true},
                                      at(8s), false);
  };
  // Calls and other passes of the same number have nothing to do with it.
  root.makes(3, 7s);
  other.recorder.end_call(begin(other, 0, 2), State::kCompleted, at(9s));
  const auto pass = begin(root, -1, 3);
  root.recorder.start_call(pass, at(9s));
  auto job = read_both(root, other);
  EXPECT_EQ(under_way(job, 0)[1], "caller (rank 0): backward pass 3 since 12 s, runs since 11 s");
  const auto part = begin(other, 0, 3);
  root.recorder.delay_call(pass);
  job = read_both(root, other);
  EXPECT_EQ(under_way(job, 0)[1],
            "caller (rank 0): backward pass 3 since 12 s, waits for others; "
            "callee waits for gradients");
  EXPECT_EQ(under_way(job, 1),
            Lines{"callee (rank 1): backward pass 3 of caller since 12 s, waits for gradients"});
  other.recorder.start_call(part, at(15s));
  job = read_both(root, other);
  EXPECT_EQ(under_way(job, 1),
            Lines{"callee (rank 1): backward pass 3 of caller since 12 s, runs since 5 s"});
  // Of all ranks: each pass once.
  const Lines all = calls_under_way(Calls(job), 5, 20s);
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(all[1],
            "caller (rank 0): backward pass 3 since 12 s, waits for others; callee runs since 5 s");
  // It dies.
  EXPECT_EQ(who_called(job[1], Calls(job), 5, 20s).back(),
            "caller (rank 0) since 12 s: backward pass 3, which ran there");
  EXPECT_EQ(who_called(job[0], Calls(job), 5, 20s), Lines{});
  EXPECT_NE(to_trace(job, 20s).find("backward pass 3 <- caller"), std::string::npos);
  EXPECT_NE(to_json(job[1], job)
                .find("\"function\": \"backward pass\", \"number\": 3, "
                      "\"state\": \"running\""),
            std::string::npos);
  other.recorder.end_call(part, State::kCompleted, at(16s));
  root.recorder.end_call(pass, State::kFailed, at(20s));
  job = read_both(root, other);
  EXPECT_EQ(last_calls(job[1], 1, 16s),
            Lines{"callee (rank 1): for caller: backward pass 3, done in 8 s, 0 us ago"});
  EXPECT_EQ(last_calls(job[0], 1, 20s),
            Lines{"caller (rank 0): backward pass 3, failed after 12 s, 0 us ago"});
}

// However many calls come after it.
TEST(FlightCalls, OneUnderWayIsNotForgotten) {
  Worker caller(0, 64);
  const auto stuck = caller.makes(1, 1s);
  for (std::uint64_t i = 2; i < 1000; ++i) {
    caller.recorder.end_call(caller.makes(i, 2s), State::kCompleted, at(3s));
  }
  auto log = read_of(caller.recorder);
  ASSERT_EQ(log.calls.size(), 64U);
  EXPECT_EQ(log.calls[0].number, 1U);
  EXPECT_TRUE(log.calls[0].under_way());
  EXPECT_EQ(log.calls[63].number, 999U);
  caller.recorder.end_call(stuck, State::kCompleted, at(4s));
  for (std::uint64_t i = 1000; i < 1100; ++i) {
    caller.recorder.end_call(caller.makes(i, 5s), State::kCompleted, at(5s));
  }
  log = read_of(caller.recorder);
  for (const Entry& call : log.calls) EXPECT_GT(call.number, 1U);
}

TEST(FlightCalls, WhatFindsNoRoomIsLeftOut) {
  Worker caller(0, 64);
  std::vector<Recorder::Ticket> tickets;
  for (std::uint64_t i = 1; i <= 100; ++i) tickets.push_back(caller.makes(i, 1s));
  EXPECT_EQ(std::count(tickets.begin(), tickets.end(), 0U), 36);
  EXPECT_EQ(read_of(caller.recorder).calls.size(), 64U);
  const std::vector<Log> job = {read_of(caller.recorder)};
  const auto lines = calls_under_way(job[0], Calls(job), 2, 2s);
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_EQ(lines[2], "and 62 more");
  // The session ends, and with it whatever it had.
  caller.recorder.remove_group(caller.group);
  for (const Entry& call : read_of(caller.recorder).calls) EXPECT_EQ(call.state, State::kFailed);
  EXPECT_NE(caller.makes(101, 3s), 0U);
}

TEST(FlightCalls, ManyThreadsWriteAndOneReads) {
  Worker caller(0, 256);
  std::vector<std::thread> writers;
  for (int t = 0; t < 4; ++t) {
    writers.emplace_back([&caller] {
      for (std::uint64_t i = 1; i <= 5000; ++i) {
        const auto ticket = caller.makes(i, std::chrono::nanoseconds(i));
        caller.recorder.end_call(ticket, State::kCompleted, at(std::chrono::nanoseconds(i)));
      }
    });
  }
  for (int look = 0; look < 20; ++look) {
    for (const Entry& call : read_of(caller.recorder).calls) {
      EXPECT_EQ(call.created.count(), static_cast<std::int64_t>(call.number));
      EXPECT_EQ(call.operation, "model::train_step");
      EXPECT_EQ(call.peer, 1);
    }
  }
  for (auto& writer : writers) writer.join();
  EXPECT_EQ(read_of(caller.recorder).calls.size(), 256U);
}

TEST(FlightCalls, TheTraceHasArrowsBetweenBothSides) {
  Worker caller(0);
  Worker callee(1);
  const auto made = caller.makes(1, 1s);
  const auto taken = callee.takes(1, 1s + 2us);
  callee.recorder.start_call(taken, at(1s + 3us));
  callee.recorder.end_call(taken, State::kCompleted, at(1s + 8us));
  caller.recorder.end_call(made, State::kCompleted, at(1s + 9us));
  caller.makes(2, 1s + 4us);  // overlaps, and is not there yet
  const std::string text = to_trace(read_both(caller, callee), 2s);
  for (
      const char* part :
      {R"("ph":"X","pid":0,"tid":1,"name":"model::train_step -> callee","ts":1000000.000,"dur":9.000)",
       R"("ph":"s","pid":0,"tid":1,"name":"call","cat":"call","id":0,"ts":1000000.000})",
       R"("ph":"f","pid":1,"tid":1,"name":"call","cat":"call","id":0,"ts":1000003.000,"bp":"e"})",
       R"("ph":"X","pid":1,"tid":1,"name":"queued","ts":1000002.000,"dur":1.000)",
       R"("ph":"X","pid":1,"tid":1,"name":"model::train_step <- caller","ts":1000003.000,"dur":5.000)",
       R"("ph":"s","pid":1,"tid":1,"name":"answer","cat":"call","id":1,"ts":1000008.000})",
       R"("ph":"f","pid":0,"tid":1,"name":"answer","cat":"call","id":1,"ts":1000009.000,"bp":"e"})",
       R"("ph":"X","pid":0,"tid":2,"name":"model::train_step -> callee","ts":1000004.000,"dur":999996.000)",
       R"({"name":"rank 1: callee"})", R"({"name":"calls 2"})", R"({"name":"handlers"})"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  }
  EXPECT_EQ(text.find("\"id\":2"), std::string::npos) << text;
}

}  // namespace
}  // namespace convoy::flight

// A training job under random faults, for SOAK_SECONDS (default 15; `make soak`: 600). Members
// train one model with a sharded optimizer; actors put items into a queue and read the weights that
// the members publish; this process starts them, disturbs them, and takes the items.
//
// Disturbed are, at random: members and actors by SIGKILL (others take their place) and by SIGSTOP;
// members also by steps that come late, children that they fork, and steps without a free
// descriptor, which actors have to do without too.
//
// In the end the loss is that of one process that nobody disturbed; every item of the queue came
// once, in order and whole; every version of the weights that was read was whole; every survivor
// was told of a death within a second; the leak oracle finds nothing.
//
// SOAK_SEED=n gives other faults.
#include <signal.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <sstream>
#include <thread>

#include "base/concat.h"
#include "convoy/ddp.h"
#include "convoy/elastic.h"
#include "convoy/init.h"
#include "convoy/published.h"
#include "convoy/queue.h"
#include "convoy/sharded_optimizer.h"
#include "convoy/spawn.h"
#include "support/forked.h"

namespace convoy::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Weights = share::Published<std::vector<at::Tensor>>;

constexpr int kMembers = 3;
constexpr int kActors = 2;
constexpr int kBatch = 12;  // of all members together: 1 to 4 members have equal parts of it
constexpr std::uint64_t kLookForStop = 10;
constexpr std::uint64_t kStopAhead = 500;  // steps: more than members can be apart
constexpr double kTold = 1000;             // milliseconds

double now_ms() {
  return std::chrono::duration<double, std::milli>(Clock::now().time_since_epoch()).count();
}

torch::nn::Sequential make_net() {
  torch::manual_seed(5);
  return torch::nn::Sequential(torch::nn::Linear(6, 40), torch::nn::Tanh(),
                               torch::nn::Linear(40, 1));
}

using Forward = std::function<at::Tensor(const at::Tensor&)>;

at::Tensor loss_of(const Forward& forward, std::uint64_t step, int rank, int size) {
  const auto all = at::randn({kBatch, 6}, at::detail::createCPUGenerator(step + 1));
  const auto mine = all.slice(0, kBatch * rank / size, kBatch * (rank + 1) / size);
  return (forward(mine) - (mine.sum(1, true) / 3).tanh()).pow(2).mean();
}

double final_loss(torch::nn::Sequential& net) {
  const torch::NoGradGuard no_grad;
  double sum = 0;
  for (std::uint64_t step = 1'000'000; step < 1'000'020; ++step) {
    sum += loss_of([&](const at::Tensor& x) { return net->forward(x); }, step, 0, 1).item<double>();
  }
  return sum / 20;
}

double undisturbed_loss(std::uint64_t steps) {
  auto net = make_net();
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
  for (std::uint64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    loss_of([&](const at::Tensor& x) { return net->forward(x); }, step, 0, 1).backward();
    optimizer.step();
  }
  return final_loss(net);
}

// As long as it lives, this process can open nothing more.
class NoDescriptors {
 public:
  NoDescriptors() {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    rlim_t highest = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      highest = std::max<rlim_t>(highest, std::stoul(entry.path().filename().string()));
    }
    // Holes below it stay open to others: those are the "nearly none" of a real shortage.
    const rlimit none{highest + 1, before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  rlimit before_{};
};

struct Place {
  std::string store;  // path of the store
  int id = 0;         // of this process, among all that there ever are
  bool joins = false;
  CONVOY_FIELDS(store, id, joins)
};

// What a member does beside its step, at times.
std::optional<NoDescriptors> disturb(std::mt19937_64& random, const ProcessGroup& group) {
  switch (random() % 400) {
    case 0: ::usleep(200'000); return std::nullopt;  // late
    case 1: {
      const std::string text = in_forked_child([&]() -> std::string {
        try {
          group.barrier();
          return "a forked child took part";
        } catch (const Error& error) {
          return error.kind() == ErrorKind::kUnsupported ? "" : error.what();
        }
      });
      if (!text.empty()) throw std::runtime_error("forked: " + text);
      return std::nullopt;
    }
    case 2: return std::optional<NoDescriptors>(std::in_place);
    default: return std::nullopt;
  }
}

// The first member makes the weights; a process that publishes gives way only by its death.
Weights weights_of(const Place& place) {
  const share::Channel& parent = spawned()->parent;
  if (place.id != 0) return Weights::open(parent.receive(Deadline::after(60s)));
  Weights made({at::zeros({1000}), at::zeros({3000})}, {.buffers = kActors + 3});
  parent.send(made.handle());
  return made;
}

void train(int /*index*/, const Place& place) {
  const auto store = connect_store(place.store, Deadline::after(30s));
  const Weights weights = weights_of(place);
  auto net = make_net();
  const std::string own = concat("own ", place.id);
  DistributedDataParallel model(net, new_group("convoy", {.timeout = 30s,
                                                          .store = store,
                                                          .rank = place.joins ? 0 : place.id,
                                                          .size = place.joins ? 1 : kMembers,
                                                          .name = place.joins ? own : "world"}));
  ShardedOptimizer<torch::optim::AdamW> optimizer(model.reducer(),
                                                  torch::optim::AdamWOptions(1e-3));
  std::mt19937_64 random(static_cast<std::uint64_t>(place.id) + 77);
  std::optional<std::uint64_t> stop;
  bool publishes = place.id == 0;
  const auto made = elastic::run(
      model,
      {.store = store,
       .joins = place.joins,
       .min_size = kMembers,
       .timeout = 60s,
       .on_change =
           [&](const elastic::Change& change) {
             publishes = true;  // who did may be dead
             if (change.group.rank() == 0 && change.group.size() == kMembers) {
               store->add("complete", 1);
             }
           }},
      [&](std::uint64_t step) {
        const auto group = model.group();
        if (step % kLookForStop == 0 && !stop) {
          if (const auto found = store->try_get("stop")) stop = std::stoull(*found);
          if (group.rank() == 0) store->set("progress", std::to_string(step));
        }
        const auto shortage = disturb(random, group);
        const double entered = now_ms();
        try {
          loss_of([&](const at::Tensor& x) { return model(x); }, step, group.rank(), group.size())
              .backward();
          optimizer.step();
        } catch (const Error& error) {
          if (error.kind() == ErrorKind::kPeerLost) {
            store->append("told",
                          concat(static_cast<int>(::getpid()), " ", entered, " ", now_ms(), "\n"));
          }
          throw;
        }
        if (publishes) {
          const auto value = static_cast<double>(step);
          try {
            weights.publish({at::full({1000}, value), at::full({3000}, value)});
          } catch (const Error& error) {
            if (error.kind() != ErrorKind::kInvalidArgument) throw;
            publishes = false;  // another member does, and lives
          }
        }
        return !stop || step + 1 < *stop;
      });
  store->set(concat("final/", place.id), concat(made, " ", final_loss(net)));
}

void act(int /*index*/, const Place& place, const share::Queue& queue, const Weights& weights) {
  const auto store = connect_store(place.store, Deadline::after(30s));
  std::mt19937_64 random(static_cast<std::uint64_t>(place.id) + 7777);
  std::uint64_t newest = 0;
  std::int64_t number = 0;
  while (!store->try_get("end of actors")) {
    for (int i = 0; i < 20; ++i) {
      std::optional<NoDescriptors> shortage;
      if (random() % 200 == 0) shortage.emplace();
      const auto tensor = at::full({static_cast<std::int64_t>(random() % 3000) + 1}, number);
      const share::Message item{std::int64_t{place.id}, number, tensor};
      for (;;) {
        try {
          queue.put(item, Deadline::after(60s));
          break;
        } catch (const Error& error) {
          if (error.kind() != ErrorKind::kResource || !shortage) throw;
          shortage.reset();
        }
      }
      ++number;
      const auto now = weights.read();
      if (now.version() < newest) throw std::runtime_error("weights went back");
      newest = now.version();
      const double value = now[0][0].item<double>();
      for (const auto& part : now.tensors()) {
        if (!(part == value).all().item<bool>()) throw std::runtime_error("weights in parts");
      }
    }
  }
  store->set(concat("items/", place.id), std::to_string(number));
}

// Takes items; each must be whole, and the next of its actor.
class Taker {
 public:
  explicit Taker(share::Queue queue) : queue_(std::move(queue)) {
    thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
  }

  // What came of each actor, after all was taken.
  std::map<std::int64_t, std::int64_t> finish() {
    thread_.request_stop();
    thread_.join();
    EXPECT_EQ(wrong_, "");
    return next_;
  }

 private:
  void run(const std::stop_token& stop) {
    while (wrong_.empty()) {
      std::optional<share::Message> item;
      try {
        item = queue_.get(Deadline::after(200ms));
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::kTimeout) wrong_ = error.what();
        if (stop.stop_requested()) return;
        continue;
      }
      const std::int64_t actor = item->integer(0), number = item->integer(1);
      if (number != next_[actor]) {
        wrong_ = concat("item ", number, " of actor ", actor, " instead of ", next_[actor]);
      } else if (!(item->tensor(2) == number).all().item<bool>()) {
        wrong_ = concat("item ", number, " of actor ", actor, " has other numbers");
      }
      ++next_[actor];
    }
  }

  share::Queue queue_;
  std::map<std::int64_t, std::int64_t> next_;  // the thread's until finish()
  std::string wrong_;
  std::jthread thread_;
};

struct Span {
  double begin = 0, end = 0;
};

class Soak {
 public:
  explicit Soak(std::uint64_t seed)
      : random_(seed),
        store_(connect_store(host_.path(), Deadline::after(30s))),
        queue_(share::QueueOptions{.capacity = 200}),
        taker_(queue_) {
    for (int i = 0; i < kMembers; ++i) members_.push_back(start_member(false));
    for (int i = 0; i < kActors; ++i) actors_.push_back(start_actor());
  }

  void run(std::chrono::seconds time) {
    const auto end = Deadline::after(time);
    wait_for_steps(20);
    while (!end.expired()) {
      switch (random_() % 6) {
        case 0:
        case 1: kill_member(); break;
        case 2: kill_actor(); break;
        case 3: stop_for_a_while(members_); break;
        case 4: stop_for_a_while(actors_); break;
        default: wait_for_steps(random_() % 200);
      }
      check_running();
    }
  }

  void finish() {
    const std::uint64_t stop = progress() + kStopAhead;
    store_->set("stop", std::to_string(stop));
    for (auto& member : members_) EXPECT_TRUE(member.process.join(2min));
    store_->set("end of actors", "");
    for (auto& actor : actors_) EXPECT_TRUE(actor.process.join(2min));
    const auto taken = taker_.finish();
    for (const auto& actor : actors_) {
      EXPECT_EQ(store_->get(concat("items/", actor.id)), std::to_string(taken.at(actor.id)));
    }
    const double expected = undisturbed_loss(stop);
    for (const auto& member : members_) {
      const std::string text = store_->get(concat("final/", member.id));
      EXPECT_EQ(std::stoull(text), stop);
      EXPECT_NEAR(std::stod(text.substr(text.find(' '))), expected, 1e-3 + 0.02 * expected);
    }
    std::int64_t items = 0;
    for (const auto& [actor, count] : taken) items += count;
    std::printf(
        "soak: %llu steps, %lld items, loss %.5f; killed: %d members, %d actors; stopped: "
        "%d; items lost with who was killed: %llu\n",
        static_cast<unsigned long long>(stop), static_cast<long long>(items), expected,
        killed_members_, killed_actors_, stops_,
        static_cast<unsigned long long>(queue_.lost().items));
    show_told();
  }

 private:
  struct Started {
    Processes process;
    int id = 0;
    int pid() const { return process.pids().at(0); }
  };

  Started start_member(bool joins) {
    const int id = next_id_++;
    Started member{spawn<train>(1, Place{host_.path(), id, joins}), id};
    const share::Channel channel = member.process.channel(0);
    if (id == 0) {
      weights_ = Weights::open(channel.receive(Deadline::after(60s)));
    } else {
      channel.send(weights_.handle());
    }
    return member;
  }
  Started start_actor() {
    const int id = next_id_++;
    return {spawn<act>(1, Place{host_.path(), id, false}, queue_, weights_), id};
  }

  std::uint64_t progress() {
    const auto found = store_->try_get("progress");
    return found ? std::stoull(*found) : 0;
  }
  void wait_for_steps(std::uint64_t more) {
    const std::uint64_t goal = progress() + more;
    wait_until("steps", [&] { return progress() >= goal; });
  }
  // Whoever fails ends the soak at once, with what it said.
  template <class Ready>
  void wait_until(const char* what, Ready ready) {
    const auto limit = Deadline::after(2min);
    while (!ready()) {
      check_running();
      if (limit.expired()) throw std::runtime_error(concat("no ", what, " for two minutes"));
      ::usleep(10'000);
    }
  }
  void check_running() {
    for (auto* const all : {&members_, &actors_}) {
      for (auto& each : *all) {
        for (const auto& failure : each.process.failures()) {
          throw std::runtime_error(failure.to_string() + " " + failure.exception);
        }
      }
    }
  }

  void kill_member() {
    const std::size_t victim = random_() % members_.size();
    const std::int64_t complete = store_->add("complete", 0);
    kills_.push_back(now_ms());
    ::kill(members_[victim].pid(), SIGKILL);
    ++killed_members_;
    members_[victim] = start_member(true);
    wait_until("complete group", [&] { return store_->add("complete", 0) > complete; });
  }
  void kill_actor() {
    const std::size_t victim = random_() % actors_.size();
    ::kill(actors_[victim].pid(), SIGKILL);
    ++killed_actors_;
    actors_[victim] = start_actor();
  }
  void stop_for_a_while(std::vector<Started>& among) {
    const int pid = among[random_() % among.size()].pid();
    Span& span = stopped_[pid].emplace_back();
    span.begin = now_ms();
    ::kill(pid, SIGSTOP);
    ::usleep(static_cast<useconds_t>(random_() % 500'000));
    ::kill(pid, SIGCONT);
    span.end = now_ms();
    ++stops_;
  }

  // From the death, or from when the survivor came to its step, until its call threw.
  void show_told() {
    std::vector<double> took;
    std::istringstream lines(store_->try_get("told").value_or(""));
    int pid = 0;
    for (double entered = 0, told = 0; lines >> pid >> entered >> told;) {
      const auto killed = std::upper_bound(kills_.begin(), kills_.end(), told);
      ASSERT_NE(killed, kills_.begin()) << "pid " << pid << " was told of a death that was none";
      double begin = std::max(entered, *std::prev(killed));
      for (const Span& span : stopped_[pid]) {
        if (span.begin < told && span.end > begin) begin = std::min(told, span.end);
      }
      took.push_back(told - begin);
    }
    if (killed_members_ == 0) return;
    ASSERT_FALSE(took.empty());
    std::sort(took.begin(), took.end());
    const auto at = [&](double part) {
      return took[static_cast<std::size_t>(part * static_cast<double>(took.size() - 1))];
    };
    std::printf(
        "soak: told of a death after: median %.1f, p99 %.1f, most %.1f ms (%zu survivors)\n",
        at(0.5), at(0.99), took.back(), took.size());
    EXPECT_LE(took.back(), kTold);
  }

  std::mt19937_64 random_;
  elastic::StoreHost host_;
  std::shared_ptr<Store> store_;
  share::Queue queue_;
  Weights weights_;
  Taker taker_;
  std::vector<Started> members_, actors_;
  int next_id_ = 0;
  int killed_members_ = 0, killed_actors_ = 0, stops_ = 0;
  std::vector<double> kills_;
  std::map<int, std::vector<Span>> stopped_;
};

std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text && *text ? std::stoull(text) : otherwise;
}

TEST(SoakTest, TrainsAsIfNothingHadHappened) {
  share::usage();  // the pool of this process, which stays, is there from now on
  const std::chrono::seconds time(number_from("SOAK_SECONDS", 15));
  {
    Soak soak(number_from("SOAK_SEED", 1));
    soak.run(time);
    soak.finish();
  }
  const auto left = share::usage();
  EXPECT_EQ(left.blocks, 0U);
  EXPECT_EQ(left.foreign, 0U);
}

}  // namespace
}  // namespace convoy::test

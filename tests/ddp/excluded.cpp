#include "ddp/excluded.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>
#include <sstream>

#include "base/concat.h"
#include "convoy/sharded_optimizer.h"
#include "convoy/window.h"
#include "optim/shard_support.h"

namespace convoy::test {
namespace {

constexpr int kVictim = 2;
// Of the collectives that rank 2 does not finish.
constexpr auto kPatience = 400ms;

ProcessGroup make_three(const Rank& r) {
  auto group = new_group(
      "convoy",
      {.timeout = 30s, .store = r.store(), .rank = r.id(), .size = r.size(), .name = "world"});
  group.barrier();
  group.set_timeout(kPatience);
  return group;
}

ProcessGroup leave_out(const ProcessGroup& group) {
  auto two = group.shrink({0, 1}, {.timeout = 30s});
  EXPECT_EQ(two.size(), 2);
  return two;
}

// Until the group is broken.
template <class Step>
void repeat(Step step) {
  try {
    for (int i = 0;; ++i) step(i);
  } catch (const Error& error) {
    const auto kind = error.kind();
    EXPECT_TRUE(kind == ErrorKind::kTimeout || kind == ErrorKind::kPeerLost) << error.what();
  }
}

// The victim has been continued, and has ended or done what it still does.
void wait_for_victim(Rank& r) {
  r.mark("shrunk");
  r.wait_for("look");
}

// --- memory that a program sees ---

constexpr std::int64_t kNumbers = 50'000;

// Writes as long as the test lets it: a word of the survivor's says that they have shrunk.
void write_on(float* const* theirs) {
  const auto word = [&](int rank) { return std::atomic_ref<float>(theirs[rank][0]); };
  while (word(0).load() == 0 || word(1).load() == 0) {
    for (const int rank : {0, 1}) std::fill_n(theirs[rank] + 1, kNumbers - 1, -1.F);
  }
  for (const int rank : {0, 1}) std::fill_n(theirs[rank] + 1, kNumbers - 1, -2.F);
}

void use_window(Rank& r, Before what) {
  const auto group = make_three(r);
  const at::Tensor mine = group.allocate({kNumbers}, at::kFloat).zero_();
  const auto window = group.window(mine);
  const std::vector<at::Tensor> all = {window.at(0), window.at(1)};
  float* const theirs[] = {all[0].data_ptr<float>(), all[1].data_ptr<float>()};
  if (r.id() == kVictim && what == Before::kChild) {
    // A bare fork on purpose: what data loaders do. The child uses nothing but memory.
    const pid_t child = ::fork();
    if (child == 0) {
      write_on(theirs);
      ::_exit(0);
    }
    r.store()->set("child", std::to_string(child));
    r.mark("working");
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    r.mark("quiet");
    return;
  }
  r.mark("working");
  if (r.id() == kVictim) {
    write_on(theirs);
    r.mark("quiet");
    return;
  }
  repeat([&](int) { group.barrier(); });
  const auto two = leave_out(group);
  mine.fill_(5);  // its first number tells the victim
  wait_for_victim(r);
  EXPECT_TRUE(mine.eq(5).all().item<bool>()) << mine.ne(5).sum();
}

void use_collectives(Rank& r) {
  const auto group = make_three(r);
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 3; ++i) tensors.push_back(group.allocate({700'000}, at::kFloat).zero_());
  r.mark("working");
  repeat([&](int i) { group.all_reduce(tensors[static_cast<std::size_t>(i % 3)]); });
  if (r.id() == kVictim) return r.mark("quiet");
  const auto two = leave_out(group);
  for (const auto& tensor : tensors) tensor.fill_(5);
  wait_for_victim(r);
  for (const auto& tensor : tensors) {
    EXPECT_TRUE(tensor.eq(5).all().item<bool>()) << tensor.ne(5).sum();
    two.all_reduce(tensor);
    EXPECT_TRUE(tensor.eq(10).all().item<bool>());
  }
}

// --- training ---

template <class Optimizer>
std::string saved(const Optimizer& optimizer) {
  std::stringstream bytes;
  torch::save(optimizer, bytes);
  return bytes.str();
}

// Steps of the two, twice from the same state: once while the victim may do what it does, once
// after it. `update` does a step with the gradients, if backward has not.
template <class Optimizer, class Update>
void train(Rank& r, unsigned seed, DistributedDataParallel<torch::nn::SequentialImpl>& model,
           torch::nn::Sequential& net, Optimizer& optimizer, const Update& update) {
  const auto step = [&](int number) {
    model(input_of(r.id(), number, {4, 6})).pow(2).mean().backward();
    update();
  };
  step(0);  // buckets are laid out anew after the first
  r.mark("working");
  repeat(step);
  if (r.id() == kVictim) return r.mark("quiet");
  const auto two = leave_out(model.group());
  model.update_process_group(two);
  const auto before = copies_of(*net);
  const std::string state = saved(optimizer);
  const auto go_on = [&] {
    for (int i = 100; i < 104; ++i) step(i);
    expect_equal_on_all(two, net->parameters());
    return copies_of(*net);
  };
  // Some seeds look at memory at rest, others train meanwhile.
  std::vector<at::Tensor> disturbed;
  if (seed % 2 == 0) {
    wait_for_victim(r);
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(at::equal(before[i], net->parameters()[i])) << i;
    }
    disturbed = go_on();
  } else {
    r.mark("shrunk");
    disturbed = go_on();
    r.wait_for("look");
  }
  two.barrier();
  {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < before.size(); ++i) net->parameters()[i].copy_(before[i]);
  }
  std::stringstream bytes(state);
  torch::load(optimizer, bytes);
  two.barrier();
  const auto undisturbed = go_on();
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(at::equal(disturbed[i], undisturbed[i])) << i;
  }
}

void train(Rank& r, Before what, unsigned seed) {
  const auto group = make_three(r);
  auto net = make_net();
  DistributedDataParallel model(net, group);
  if (what == Before::kDdp) {
    torch::optim::AdamW optimizer(net->parameters(), 0.01);
    return train(r, seed, model, net, optimizer, [&] {
      optimizer.step();
      optimizer.zero_grad();
    });
  }
  const bool in_backward = what == Before::kShardedInBackward;
  ShardedOptimizer<torch::optim::AdamW> optimizer(model.reducer(), 0.01,
                                                  {.in_backward = in_backward});
  train(r, seed, model, net, optimizer, [&] {
    if (!in_backward) optimizer.step();
  });
}

void continue_child(const std::string& pid) { ::kill(std::stoi(pid), SIGCONT); }

}  // namespace

void run_excluded(Before what, unsigned seed) {
  RankGroup ranks(3, RankMode::kProcesses);
  ranks.start([what, seed](Rank& r) {
    if (what == Before::kWindow || what == Before::kChild) {
      use_window(r, what);
    } else if (what == Before::kCollectives) {
      use_collectives(r);
    } else {
      train(r, what, seed);
    }
  });
  ranks.wait_mark("working");
  // Questions to the store take as long as a few operations of the ranks.
  std::mt19937 random(seed);
  for (auto left = random() % 100; left > 0; --left) ranks.store()->try_get("nothing");
  ranks.stop(kVictim);
  std::optional<std::string> child;
  if (what == Before::kChild) {
    child = ranks.store()->try_get("child");
    if (child) ::kill(std::stoi(*child), SIGSTOP);
    EXPECT_TRUE(child || in_rank());  // a rank's own process runs the groups before its own empty
  }
  for (const int r : {0, 1}) ranks.wait_mark("shrunk", r);
  if (child) continue_child(*child);
  ranks.resume(kVictim);
  try {
    ranks.wait_mark("quiet", kVictim);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();  // it is gone
  }
  ranks.post("look");
  ranks.join();
}

}  // namespace convoy::test

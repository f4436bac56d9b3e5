// Between processes: the scenarios of PyTorch's test_multiprocessing.py, under their names.
#include <gmock/gmock.h>
#include <torch/types.h>

#include <filesystem>

#include "base/concat.h"
#include "support.h"

namespace convoy::share {

inline std::string_view name_of(Strategy strategy) {
  return strategy == Strategy::kFile ? "fs" : "fd";
}
inline void PrintTo(Strategy strategy, std::ostream* out) { *out << name_of(strategy); }

namespace test {
namespace {

struct StrategyTest : testing::TestWithParam<Strategy> {
  void SetUp() override { set_sharing_strategy(GetParam()); }
  void TearDown() override {
    set_sharing_strategy(Strategy::kDescriptor);
    expect_nothing_held();
  }
};
INSTANTIATE_TEST_SUITE_P(, StrategyTest, testing::Values(Strategy::kDescriptor, Strategy::kFile),
                         [](const auto& test) { return std::string(name_of(test.param)); });

// test_fd_sharing, test_fs_sharing
TEST_P(StrategyTest, Sharing) {
  run_pair(
      [](const Channel& peer) {
        for (int i = 0; i < 30; ++i) {
          auto tensor = at::zeros({5, 5});
          peer.send(tensor.select(1, 1));
          peer.receive_message();
          EXPECT_TRUE(at::equal(tensor.select(1, 1), at::full({5}, 4.0)));
          EXPECT_EQ(tensor.sum().item<float>(), 20);
        }
      },
      [](const Channel& peer) {
        for (int i = 0; i < 30; ++i) {
          peer.receive().fill_(4);
          peer.send(Message{true});
        }
      });
}

// test_fd_preserve_sharing, test_fs_preserve_sharing
TEST_P(StrategyTest, PreserveSharing) {
  run_pair(
      [](const Channel& peer) {
        auto tensor = at::arange(1, 26, at::kFloat).view({5, 5});
        peer.send(Message{tensor, tensor[1], tensor.select(1, 1), tensor.view({25})});
        peer.send(tensor[2]);
        EXPECT_EQ(peer.receive_message().text(0), "filled");
        EXPECT_EQ(tensor.sum().item<float>(), 25);
        auto home = peer.receive();  // as what it left
        EXPECT_EQ(home.storage().unsafeGetStorageImpl(), tensor.storage().unsafeGetStorageImpl());
      },
      [](const Channel& peer) {
        const Message message = peer.receive_message();
        for (std::size_t i = 1; i < 4; ++i) {
          EXPECT_TRUE(message.tensor(i).is_alias_of(message.tensor(0)));
        }
        EXPECT_EQ(message.tensor(1)[0].item<float>(), 6);
        EXPECT_EQ(message.tensor(2)[0].item<float>(), 2);
        message.tensor(3).fill_(1);
        EXPECT_EQ(message.tensor(2).sum().item<float>(), 5);
        const auto later = peer.receive();
        EXPECT_EQ(later.storage().unsafeGetStorageImpl(),
                  message.tensor(0).storage().unsafeGetStorageImpl());
        peer.send(Message{"filled"});
        peer.send(later);
      });
}

// test_fd_pool, test_fs_pool
TEST_P(StrategyTest, Pool) {
  constexpr int kWorkers = 3, kBuffers = 10;
  RankGroup(1 + kWorkers, RankMode::kProcesses).run([](Rank& r) {
    {
      if (r.id() == 0) {
        const TempFolder folder("share");
        const auto listener = listen(folder.path() + "/s");
        r.store()->set("pool", listener.path());
        std::vector<Channel> workers;
        for (int i = 0; i < kWorkers; ++i) workers.push_back(listener.accept(r.deadline()));
        std::vector<at::Tensor> buffers;
        for (int i = 0; i < kBuffers; ++i) buffers.push_back(at::zeros({2, 2}));
        for (std::size_t i = 0; i < kBuffers; ++i) {
          workers[i % kWorkers].send(Message{buffers[i], static_cast<std::int64_t>(i)});
        }
        for (const Channel& worker : workers) worker.send(Message{});
        for (const Channel& worker : workers) worker.receive_message();
        for (int i = 0; i < kBuffers; ++i) {
          EXPECT_TRUE(at::equal(buffers[static_cast<std::size_t>(i)], at::full({2, 2}, 1.0 * i)));
        }
      } else {
        const Channel boss = connect(r.store()->get("pool", r.deadline()), r.deadline());
        for (;;) {
          const Message task = boss.receive_message();
          if (task.size() == 0) break;
          task.tensor(0).fill_(static_cast<double>(task.integer(1)));
        }
        boss.send(Message{});
        r.barrier();
      }
      if (r.id() == 0) r.barrier();
    }
    r.barrier();
    expect_nothing_held();
  });
}

// test_variable_sharing, test_parameter_sharing: data is shared, gradients are not.
TEST_P(StrategyTest, VariableSharing) {
  run_pair(
      [](const Channel& peer) {
        auto leaf = at::arange(1, 26, at::kFloat).view({5, 5}).set_requires_grad(true);
        for (const bool with_gradient : {false, true}) {
          leaf.mutable_grad() = with_gradient ? at::full({5, 5}, 4.0) : at::Tensor();
          peer.send(leaf);
          EXPECT_EQ(peer.receive_message().text(0), "changed");
          EXPECT_TRUE(at::equal(leaf.detach(), at::ones({5, 5})));
          EXPECT_EQ(leaf.grad().defined(), with_gradient);
        }
        const auto plain = at::arange(3);
        peer.send(plain);
        peer.receive_message();
      },
      [](const Channel& peer) {
        for (int i = 0; i < 2; ++i) {
          const auto leaf = peer.receive();
          EXPECT_TRUE(leaf.requires_grad());
          EXPECT_FALSE(leaf.grad().defined());
          leaf.detach().fill_(1);
          leaf.mutable_grad() = at::ones({5, 5});
          peer.send(Message{"changed"});
        }
        EXPECT_FALSE(peer.receive().requires_grad());  // an integer parameter
        peer.send(Message{});
      });
}

// test_integer_parameter_serialization_cpu, test_empty_tensor_sharing(_meta),
// test_tensor_sharing_meta
TEST_P(StrategyTest, EmptyAndMeta) {
  run_pair(
      [](const Channel& peer) {
        peer.send(Message{at::empty({0, 3}, at::kInt), at::empty({0}, at::kMeta),
                          at::empty({4, 2}, at::kMeta)});
        peer.receive_message();
      },
      [](const Channel& peer) {
        const Message got = peer.receive_message();
        EXPECT_EQ(got.tensor(0).sizes(), at::IntArrayRef({0, 3}));
        EXPECT_EQ(got.tensor(0).scalar_type(), at::kInt);
        EXPECT_TRUE(got.tensor(1).is_meta());
        EXPECT_EQ(got.tensor(2).sizes(), at::IntArrayRef({4, 2}));
        peer.send(Message{});
      });
}

// test_is_shared, test_fs_is_shared
TEST_P(StrategyTest, IsShared) {
  auto tensor = at::randn({5, 5});
  EXPECT_FALSE(is_shared(tensor));
  share_memory_(tensor);
  EXPECT_TRUE(is_shared(tensor));
}

// test_fs: the file is there while somebody has the tensor, and gone afterwards.
TEST(ShareProcessTest, Fs) {
  set_sharing_strategy(Strategy::kFile);
  RankGroup(2, RankMode::kProcesses).run([](Rank& r) {
    {
      const Channel peer = meet(r);
      if (r.id() == 0) {
        const std::size_t before = files("t-").size();
        auto tensor = at::ones({4});
        peer.send(tensor);
        EXPECT_EQ(files("t-").size(), before + 1);
        tensor.reset();
        peer.receive_message();  // the other process has it, this one not any more
        EXPECT_EQ(files("t-").size(), before + 1);
        peer.send(Message{});
        peer.receive_message();
        EXPECT_EQ(files("t-").size(), before);
      } else {
        auto tensor = peer.receive();
        peer.send(Message{});
        peer.receive_message();
        EXPECT_EQ(tensor.sum().item<float>(), 4);
        tensor.reset();
        peer.send(Message{});
      }
      r.barrier();
    }
    expect_nothing_held();
  });
  set_sharing_strategy(Strategy::kDescriptor);
}

// A tensor goes from its owner over a second process to a third, and the second one ends.
TEST(ShareProcessTest, PassedOn) {
  RankGroup(3, RankMode::kProcesses).run([](Rank& r) {
    {
      if (r.id() == 0) {
        const Channel next = meet(r, "first");
        auto tensor = at::arange(1000, at::kFloat);
        next.send(tensor);
        tensor.reset();
        EXPECT_EQ(r.store()->get("sum", r.deadline()), "499500");
      } else if (r.id() == 1) {
        const Channel back = meet(r, "first");
        const Channel next = meet(r, "second", 1);
        auto tensor = back.receive();
        next.send(tensor);
        r.store()->get("received", r.deadline());
      } else {
        const Channel back = meet(r, "second", 1);
        const auto tensor = back.receive();
        r.store()->set("received", "");
        expect_error(ErrorKind::kPeerLost, "", [&] { (void)back.receive(r.deadline()); });
        r.store()->set("sum", concat(static_cast<int>(tensor.sum().item<float>())));
      }
    }
    r.barrier();
    expect_nothing_held();
  });
}

// Handles may travel any way.
TEST(ShareProcessTest, BytesThroughTheStore) {
  for (const auto strategy : {Strategy::kDescriptor, Strategy::kFile}) {
    RankGroup(2, RankMode::kProcesses).run([&](Rank& r) {
      set_sharing_strategy(strategy);
      if (r.id() == 0) {
        auto tensor = at::ones({10});
        r.store()->set("tensor", to_bytes(tensor));
        r.store()->get("filled", r.deadline());
        EXPECT_EQ(tensor.sum().item<float>(), 50);
      } else {
        from_bytes(r.store()->get("tensor", r.deadline())).fill_(5);
        r.store()->set("filled", "");
      }
      r.barrier();
      expect_nothing_held();
    });
  }
}

}  // namespace
}  // namespace test
}  // namespace convoy::share

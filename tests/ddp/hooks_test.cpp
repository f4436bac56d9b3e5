// Comm hooks: scenarios 26, 53 to 59 of ../shared/reference/ddp.md, and B5 to B8, B14, B19.
#include "ddp/support.h"
#include "group/fake_backend.h"

namespace convoy::test {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using torch::nn::Linear;

struct TaskImpl : torch::nn::Module {
  TaskImpl() : p(register_parameter("p", at::ones({2, 2}))) {}
  at::Tensor forward(const at::Tensor& x) { return p * x; }
  at::Tensor p;
};
TORCH_MODULE(Task);

void backward(auto& model, int rank) {
  (model(at::ones({2, 2})) * rank).mean().backward();  // gradient rank / 4
}

// test_ddp_comm_hook_future_passing_cpu
TEST(HookTest, ResultOfAFuture) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    Task net;
    DistributedDataParallel model(net, world);
    model.register_comm_hook([](const GradBucket& bucket) {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->markCompleted(at::ones_like(bucket.buffer()) + 1);
      return HookResult(std::move(future));
    });
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      backward(model, r.id());
      expect_equal(net->p.grad(), full(2, {2, 2}));
    }
  });
}

// test_default_ddp_comm_hooks_nccl (all-reduce), test_ddp_comm_hook_noop_hook
TEST(HookTest, AllReduceAndNoop) {
  for (const bool views : {true, false}) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      Task reduced, alone;
      DistributedDataParallel all(reduced, world, {.gradient_as_bucket_view = views});
      all.register_comm_hook(hooks::all_reduce);
      DistributedDataParallel none(alone, world, {.gradient_as_bucket_view = views});
      none.register_comm_hook(hooks::noop);
      for (int step = 0; step < 3; ++step) {
        reduced->zero_grad();
        alone->zero_grad();
        backward(all, r.id() + 1);
        backward(none, r.id() + 1);
        expect_equal(reduced->p.grad(), full(0.375, {2, 2}));
        expect_equal(alone->p.grad(), full(0.25 * (r.id() + 1), {2, 2}));
        world.all_reduce(alone->p.grad(), {.op = ReduceOp::kAvg});
        expect_equal(alone->p.grad(), reduced->p.grad());
      }
    });
  }
}

// The example of PyTorch's documentation: encode, all-reduce, decode; and a hook around a hook.
TEST(HookTest, EncodeAllReduceDecode) {
  const CommHook halves = [](const GradBucket& bucket) {
    const auto encoded = bucket.buffer().to(at::kHalf);
    return HookResult(bucket.group().all_reduce_async(encoded),
                      [encoded] { return encoded.to(at::kFloat).div_(2); });
  };
  const CommHook doubled = [halves](const GradBucket& bucket) {
    return halves(bucket.with(bucket.buffer() * 2)).then([](const at::Tensor& reduced) {
      return reduced * 10;
    });
  };
  run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
    // Around the hook that is there without one.
    const CommHook inner = [](const GradBucket& bucket) {
      return hooks::all_reduce(bucket.with(bucket.buffer() * 3));
    };
    const CommHook outer = [](const GradBucket& bucket) {
      return hooks::all_reduce(bucket).then([](const at::Tensor& mean) { return mean * 5; });
    };
    for (const auto& [hook, factor] :
         {std::pair(halves, 1.0), {doubled, 20.0}, {inner, 3.0}, {outer, 5.0}}) {
      Task net;
      DistributedDataParallel model(net, world);
      model.register_comm_hook(hook);
      // test_accumulate_gradients_no_sync_allreduce_hook
      {
        const auto scope = model.no_sync();
        backward(model, r.id() + 1);
      }
      backward(model, r.id() + 1);
      expect_equal(net->p.grad(), full(0.75 * factor, {2, 2}));
    }
  });
}

// test_is_last_hook, B19: indices are right from the first backward on, also of a static graph.
TEST(HookTest, BucketsAreNumbered) {
  for (const bool is_static : {false, true}) {
    run_ranks(2, [&](Rank&, const ProcessGroup& world) {
      torch::nn::Sequential net(Linear(2, 40), Linear(40, 40), Linear(40, 2));
      DistributedDataParallel model(
          net, world,
          {.bucket_cap_mb = 0.001, .static_graph = is_static, .launch = BucketLaunch::kEarly});
      std::vector<std::size_t> indices;
      std::vector<bool> last;
      std::size_t count = 0;
      model.register_comm_hook([&](const GradBucket& bucket) {
        indices.push_back(bucket.index());
        last.push_back(bucket.is_last());
        count = bucket.count();
        EXPECT_EQ(bucket.parameters().size(), bucket.indices().size());
        return hooks::all_reduce(bucket);
      });
      for (int step = 0; step < 3; ++step) {
        indices.clear();
        last.clear();
        model(at::ones({2, 2})).sum().backward();
        ASSERT_GT(count, 1U);
        ASSERT_EQ(indices.size(), count);
        for (std::size_t i = 0; i < count; ++i) {
          EXPECT_EQ(indices[i], i);
          EXPECT_EQ(last[i], i + 1 == count);
        }
      }
    });
  }
}

// B7, B8: gradients() are as the parameters are, strided and complex ones too.
TEST(HookTest, TypedViewsOfGradients) {
  struct LayoutsImpl : torch::nn::Module {
    LayoutsImpl() {
      conv = register_parameter("conv",
                                at::ones({2, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast));
      wave = register_parameter("wave", at::ones({3}, at::kComplexFloat));
    }
    at::Tensor forward(const at::Tensor& x) {
      return (conv * x).sum() + at::real(wave * at::arange(3)).sum();
    }
    at::Tensor conv, wave;
  };
  run_ranks(2, [](Rank&, const ProcessGroup& world) {
    auto net = std::make_shared<LayoutsImpl>();
    DistributedDataParallel model(net, world);
    const auto x = at::arange(24, at::kFloat).view({2, 3, 2, 2});
    model.register_comm_hook([&](const GradBucket& bucket) {
      const auto gradients = bucket.gradients();
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        EXPECT_EQ(gradients[i].sizes(), bucket.parameters()[i].sizes());
        EXPECT_EQ(gradients[i].strides(), bucket.parameters()[i].strides());
        if (bucket.indices()[i] == 0) {
          expect_equal(gradients[i], x);
        } else {
          expect_equal(at::real(gradients[i]), at::arange(3, at::kFloat));
        }
        gradients[i].mul_(3);  // in the buffer
      }
      return bucket.buffer();
    });
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      model(x).backward();
      expect_equal(net->conv.grad(), x * 3);
    }
  });
}

// B5, B6: what a hook returns is checked, or read where it lies.
TEST(HookTest, ResultsAreChecked) {
  run_ranks(2, [](Rank&, const ProcessGroup& world) {
    {
      Task net;
      DistributedDataParallel model(net, world);
      model.register_comm_hook(
          [](const GradBucket&) { return HookResult(at::arange(10, at::kFloat).narrow(0, 3, 4)); });
      backward(model, 1);
      expect_equal(net->p.grad(), at::arange(3, 7, at::kFloat).view({2, 2}));
    }
    for (const auto& [bad, text] : {std::pair(at::ones({3}), "3 elements"),
                                    {at::ones({4}, at::kLong), "Long"},
                                    {at::ones({4}, at::kHalf), "Half, not 4 of Float"}}) {
      Task net;
      DistributedDataParallel model(net, world);
      model.register_comm_hook([bad = bad](const GradBucket&) { return HookResult(bad); });
      EXPECT_THAT(text_of([&] { backward(model, 1); }),
                  AllOf(HasSubstr(text), HasSubstr("bucket 0 of 1")));
    }
  });
}

// test_ddp_comm_hook_register_just_once
TEST(HookTest, Registration) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    Task net, late;
    DistributedDataParallel model(net, world), begun(late, world);
    EXPECT_THROW(model.register_comm_hook(nullptr), Error);
    model.register_comm_hook(hooks::all_reduce);
    EXPECT_THROW(model.register_comm_hook(hooks::all_reduce), Error);
    backward(begun, r.id());
    EXPECT_THROW(begun.register_comm_hook(hooks::all_reduce), Error);
    EXPECT_THROW(model.set_reduce(GradReduce::kSum), Error);
    Task other;
    DistributedDataParallel sums(other, world, {.reduce = GradReduce::kSum});
    EXPECT_THROW(sums.register_comm_hook(hooks::all_reduce), Error);
  });
}

// B14: a hook that throws on one rank, before or after its communication or in its last step, is an
// error on all ranks that names rank and cause; the next step works.
TEST(HookTest, AHookThrowsOnOneRank) {
  enum class When { kBefore, kAfter, kAtTheEnd };
  for (const auto when : {When::kBefore, When::kAfter, When::kAtTheEnd}) {
    run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
      torch::nn::Sequential net(Linear(2, 40), Linear(40, 40), Linear(40, 2));
      DistributedDataParallel model(net, world,
                                    {.bucket_cap_mb = 0.001, .launch = BucketLaunch::kEarly});
      int calls = 0;
      bool throws = false;
      model.register_comm_hook([&](const GradBucket& bucket) -> HookResult {
        const bool now = throws && r.id() == 1 && ++calls == 2;
        if (now && when == When::kBefore) throw std::runtime_error("no luck today");
        auto result = hooks::all_reduce(bucket);
        if (now && when == When::kAfter) throw std::runtime_error("no luck today");
        return std::move(result).then([now](const at::Tensor& tensor) {
          if (now) throw std::runtime_error("no luck today");
          return tensor;
        });
      });
      const auto step = [&] {
        net->zero_grad();
        model(random(static_cast<std::uint64_t>(r.id()), {4, 2})).pow(2).sum().backward();
      };
      for (int round = 0; round < 3; ++round) {
        step();
        expect_equal_on_all(world, gradients_of(*net));
        throws = true;
        calls = 0;
        EXPECT_THAT(text_of(step), AllOf(HasSubstr("rank 1: "), HasSubstr("bucket 1 of "),
                                         HasSubstr("no luck today")));
        throws = false;
      }
      step();
      expect_equal_on_all(world, gradients_of(*net));
    });
  }
}

// A backend of somebody else's, which has no mean and no memory of its own.
TEST(ForeignBackendTest, TrainsAndFails) {
  run_ranks(2, [](Rank& r, const ProcessGroup&) {
    const auto group =
        ProcessGroup::from(c10::make_intrusive<FakeBackend>(make_backend(r, "foreign")));
    Task net;
    DistributedDataParallel model(net, group);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      backward(model, r.id() + 1);
      expect_equal(net->p.grad(), full(0.375, {2, 2}));
    }
    const auto text = text_of([&] {
      auto y = model(at::ones({2, 2}));
      const auto deep = net->p.register_hook([&](const at::Tensor& gradient) {
        if (r.id() == 1) throw std::runtime_error("a bad day");
        return gradient;
      });
      try {
        y.sum().backward();
      } catch (...) {
        net->p.remove_hook(deep);
        throw;
      }
    });
    EXPECT_THAT(text, HasSubstr("a bad day"));
    net->zero_grad();
    backward(model, r.id() + 1);
    expect_equal(net->p.grad(), full(0.375, {2, 2}));
  });
}

}  // namespace
}  // namespace convoy::test

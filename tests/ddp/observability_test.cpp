// What a model tells of itself: scenarios 9, 46 and 71 of ../shared/reference/ddp.md.
#include <torch/csrc/autograd/engine.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "ddp/support.h"

namespace convoy::test {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using Time = std::chrono::steady_clock::time_point;

// test_ddp_logging_data_cpu
TEST(StatsTest, LoggingData) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    Net net;
    DistributedDataParallel model(net, world,
                                  {.bucket_cap_mb = 25, .launch = BucketLaunch::kEarly});
    model.set_runtime_logging_sample_rate(2);
    EXPECT_FALSE(model.stats().has_rebuilt_buckets);
    EXPECT_EQ(model.stats().iteration, -1);
    for (int i = 0; i < 20; ++i) {
      net->zero_grad();
      model(input_of(r.id(), i)).sum().backward();
      const DdpStats stats = model.stats();
      const bool sampled = i < 10 || i % 2 == 0;
      EXPECT_EQ(stats.iteration, sampled ? i : i - 1);
      EXPECT_GE(stats.backward_compute_time, stats.backward_compute_comm_overlap_time);
      EXPECT_GE(stats.backward_comm_time, stats.backward_compute_comm_overlap_time);
      const RoundTimes& times = stats.times;
      EXPECT_LE(times.forward_begin, times.forward_end);
      EXPECT_LE(times.forward_end, times.begin);
      EXPECT_LE(times.begin, times.computed);
      EXPECT_LE(times.computed, times.end);
    }
    const DdpStats stats = model.stats();
    EXPECT_EQ(stats.iteration, 18);
    EXPECT_EQ(stats.backwards, 20U);
    EXPECT_EQ(stats.world_size, 2);
    EXPECT_EQ(stats.rank, r.id());
    EXPECT_EQ(stats.backend_name, "convoy");
    EXPECT_THAT(stats.module_name, HasSubstr("NetImpl"));
    EXPECT_EQ(stats.num_parameter_tensors, 3);
    EXPECT_EQ(stats.total_parameter_size_bytes, 2880);
    EXPECT_EQ(stats.bucket_cap_bytes, 25 << 20);
    EXPECT_THAT(stats.rebuilt_bucket_sizes, ElementsAre(2880));
    EXPECT_THAT(stats.rebuilt_per_bucket_param_indices, ElementsAre(ElementsAre(2, 1, 0)));
    EXPECT_THAT(stats.prev_iteration_grad_ready_order_indices, ElementsAre(2, 1, 0));
    EXPECT_EQ(stats.num_buckets_reduced, 1);
    EXPECT_GT(stats.avg_backward_compute_time.count(), 0);
    EXPECT_GT(stats.avg_forward_compute_time.count(), 0);
    EXPECT_GT(stats.observing_time.count(), 0);
    EXPECT_TRUE(stats.can_set_static_graph);
    EXPECT_FALSE(stats.has_sync_bn || stats.has_error || stats.join_uneven_inputs);

    const auto map = stats.to_map();
    EXPECT_EQ(map.at("iteration"), "18");
    EXPECT_EQ(map.at("dtypes"), "Float");
    EXPECT_EQ(map.at("rebuilt_per_bucket_param_indices"), "2 1 0");
    EXPECT_EQ(map.at("prev_iteration_grad_ready_order_indices"), "2, 1, 0");
    EXPECT_EQ(map.at("find_unused_parameters"), "0");
    EXPECT_LE(std::stoll(map.at("backward_compute_time_start")),
              std::stoll(map.at("backward_comm_time_start")));
    EXPECT_THAT(text_of([&] { model.set_runtime_logging_sample_rate(0); }),
                HasSubstr("at least 1"));
  });
}

struct TwoPathsImpl : torch::nn::Module {
  TwoPathsImpl()
      : a(register_module("a", torch::nn::Linear(2, 2))),
        b(register_module("b", torch::nn::Linear(2, 2))) {}
  at::Tensor forward(const at::Tensor& x, bool both) { return both ? b(a(x)) : a(x); }
  torch::nn::Linear a, b;
};

// test_detect_ddp_is_actually_static; unused_parameter_size
TEST(StatsTest, IsStatic) {
  run_ranks(2, [](Rank&, const ProcessGroup& world) {
    for (const bool changes : {false, true}) {
      DistributedDataParallel model(std::make_shared<TwoPathsImpl>(), world,
                                    {.find_unused_parameters = true});
      for (int i = 0; i < 6; ++i) model(at::ones({1, 2}), changes && i % 2 == 0).sum().backward();
      EXPECT_EQ(model.stats().can_set_static_graph, !changes);
      EXPECT_EQ(model.stats().unused_parameter_size, 6 * 4);
    }
  });
}

// Who was waited for: rank 1 computes when rank 0 has come to the end.
TEST(TimelineTest, WaitedFor) {
  for (const BucketLaunch launch : {BucketLaunch::kEarly, BucketLaunch::kLate}) {
    run_ranks(2, [launch](Rank& r, const ProcessGroup& world) {
      auto net = seeded(1, [] { return Net(); });
      DistributedDataParallel model(net, world, {.bucket_cap_mb = 0.0005, .launch = launch});
      for (int step = 0; step < 3; ++step) {
        auto y = model(input_of(r.id(), step));
        y.register_hook([&](const at::Tensor& gradient) {
          const std::string go = "go " + std::to_string(step);
          if (r.id() == 0) {  // when it has all gradients, before it waits for anybody
            torch::autograd::Engine::get_default_engine().queue_callback(
                [&r, go] { r.store()->set(go, ""); });
          } else if (step > 0) {  // in the first one ranks agree on an order before that
            r.store()->get(go, r.deadline());
          }
          return gradient;
        });
        y.sum().backward();
        const RoundTimes& times = model.timeline();
        EXPECT_EQ(times.backward, static_cast<std::uint64_t>(step + 1));
        if (step == 0) continue;
        EXPECT_EQ(times.waited_for, r.id() == 0 ? 1 : -1);
        EXPECT_EQ(times.waited.count() > 0, r.id() == 0);
        ASSERT_EQ(times.buckets.size(), model.reducer().buckets().size());
        ASSERT_GT(times.buckets.size(), 1U);
        for (const BucketTimes& bucket : times.buckets) {
          EXPECT_LE(times.begin, bucket.ready);
          EXPECT_LE(bucket.ready, bucket.launched);
          EXPECT_LE(bucket.launched, bucket.done);
          EXPECT_LE(bucket.done, times.end);
          EXPECT_GT(bucket.bytes, 0U);
        }
        if (launch == BucketLaunch::kEarly) {  // late ones go after that
          EXPECT_EQ(times.buckets[0].waited_for, r.id() == 0 ? 1 : -1);
        }
        EXPECT_THAT(model.report(), AllOf(HasSubstr("step "), HasSubstr(" ms: compute "),
                                          HasSubstr(" %, "), HasSubstr("reduce ")));
        EXPECT_EQ(model.report().find("waited for rank 1") != std::string::npos, r.id() == 0);
      }
    });
  }
}

TEST(TimelineTest, Report) {
  RoundTimes times;
  EXPECT_EQ(times.report(), "no step yet");
  const auto at = [](int ms) {
    return Time{} + std::chrono::seconds(1) + std::chrono::milliseconds(ms);
  };
  times.backward = 120;
  times.last_end = at(0);
  times.begin = at(300);
  times.computed = at(710);
  times.end = at(1000);
  times.waited_for = 1;
  times.waited = 180ms;
  EXPECT_EQ(times.report(),
            "step 120, 1000.0 ms: compute 71 %, waited for rank 1 18 %, reduce 11 %");
  times.waited_for = -1;
  times.waited = 0ms;
  EXPECT_EQ(times.report(), "step 120, 1000.0 ms: compute 71 %, reduce 29 %");
}

// One file of all ranks, which is JSON.
TEST(TimelineTest, ChromeTrace) {
  const auto folder = std::filesystem::temp_directory_path() / "convoy_trace_test";
  std::filesystem::create_directories(folder);
  const std::string path = folder / "trace.json";
  run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return Net(); });
    DistributedDataParallel model(net, world, {.bucket_cap_mb = 0.0005});
    for (int step = 0; step < 2; ++step) model(input_of(r.id(), step)).sum().backward();
    model.write_trace(path);
    EXPECT_THAT(text_of([&] { model.write_trace("/nowhere/at/all.json"); }),
                AllOf(HasSubstr("cannot write "), HasSubstr("/nowhere/at/all.json")));
  });
  std::ifstream file(path);
  std::stringstream all;
  all << file.rdbuf();
  const std::string text = all.str();
  EXPECT_THAT(text, AllOf(HasSubstr("\"traceEvents\":["), HasSubstr("\"name\":\"rank 2\""),
                          HasSubstr("\"name\":\"forward\""), HasSubstr("\"name\":\"backward\""),
                          HasSubstr("bucket 1 of "), HasSubstr("\"waited_for\":")));
  long depth = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '"' && text[i - 1] != '\\') quoted = !quoted;
    if (quoted) continue;
    if (text[i] == '{' || text[i] == '[') ++depth;
    if (text[i] == '}' || text[i] == ']') --depth;
    EXPECT_GE(depth, 0);
  }
  EXPECT_EQ(depth, 0);
  EXPECT_FALSE(quoted);
  std::filesystem::remove_all(folder);
}

// The data are there after an error, which they tell; test_ddp_python_error_logged
TEST(StatsTest, AfterErrors) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    DistributedDataParallel model(std::make_shared<TwoPathsImpl>(), world);
    model(at::ones({1, 2}), true).sum().backward();
    const auto text = text_of([&] { model(at::ones({1, 2}), r.id() == 0).sum().backward(); });
    EXPECT_TRUE(model.stats().has_error);
    EXPECT_EQ(model.stats().error, text);
    EXPECT_THAT(text, AllOf(HasSubstr("backward 2"), HasSubstr("rank 1"), HasSubstr("b.weight")));
    EXPECT_EQ(model.stats().to_map().at("has_error"), "1");
    EXPECT_EQ(model.stats().backwards, 2U);
    model(at::ones({1, 2}), true).sum().backward();
    EXPECT_FALSE(model.stats().has_error);
  });
}

// test_static_graph_api_cpu: only before the first backward.
TEST(StatsTest, SetStaticGraph) {
  run_ranks(2, [](Rank&, const ProcessGroup& world) {
    DistributedDataParallel model(std::make_shared<TwoPathsImpl>(), world);
    model(at::ones({1, 2}), false);  // a forward alone does not matter
    model.set_static_graph();
    model.set_static_graph();  // again: nothing
    EXPECT_TRUE(model.options().static_graph);
    model->zero_grad();
    DistributedDataParallel other(std::make_shared<TwoPathsImpl>(), world,
                                  {.find_unused_parameters = true});
    other.set_static_graph();
    for (int i = 0; i < 2; ++i) other(at::ones({1, 2}), false).sum().backward();
    EXPECT_TRUE(other.stats().static_graph);
    EXPECT_THAT(text_of([&] { other(at::ones({1, 2}), true).sum().backward(); }),
                HasSubstr("said to be static"));
    EXPECT_THAT(text_of([&] { other.set_static_graph(); }),
                HasSubstr("before the first one that is reduced"));
  });
}

}  // namespace
}  // namespace convoy::test

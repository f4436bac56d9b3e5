// Trains a character-level GPT with as many processes as the launcher starts:
//
//   convoy run -n 2 char_gpt --text book.txt --seconds 110
//
// `make demo` runs it with one process for a while and then with two, which compare themselves with
// the one, and measures the same steps with two threads and in Python on Gloo.
#include <convoy/convoy.h>
#include <torch/torch.h>

#include <chrono>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <map>
#include <sstream>

#include "model.h"
#include "report.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Arguments {
  std::string text, curve, write_record, read_record, progress = "log";
  // `seconds` is the time that the learning rate is planned for; `stop` ends it before.
  int steps = 100000, seconds = 110, stop = 100000, batch = 16, sample = 500, threads = 1;
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  const std::map<std::string, std::string*> texts = {{"--text", &arguments.text},
                                                     {"--curve", &arguments.curve},
                                                     {"--record", &arguments.write_record},
                                                     {"--compare", &arguments.read_record},
                                                     {"--progress", &arguments.progress}};
  const std::map<std::string, int*> numbers = {
      {"--steps", &arguments.steps}, {"--seconds", &arguments.seconds},
      {"--stop", &arguments.stop},   {"--threads", &arguments.threads},
      {"--batch", &arguments.batch}, {"--sample", &arguments.sample}};
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (i + 1 == argc || (!texts.count(name) && !numbers.count(name))) {
      throw std::invalid_argument("unknown argument, or one without a value: " + name);
    }
    if (texts.count(name)) *texts.at(name) = argv[i + 1];
    if (numbers.count(name)) *numbers.at(name) = std::stoi(argv[i + 1]);
  }
  return arguments;
}

// Text as numbers of characters.
struct Text {
  explicit Text(const std::string& path) {
    std::ifstream in(path);
    std::stringstream all;
    all << in.rdbuf();
    std::string text = all.str();
    if (text.size() < 1000) throw std::runtime_error("no text of 1000 characters in " + path);
    std::vector<int64_t> values;
    for (const char c : text) {
      const auto [place, is_new] = numbers.emplace(c, static_cast<int64_t>(letters.size()));
      if (is_new) letters += c;
      values.push_back(place->second);
    }
    tokens = torch::tensor(values);
  }
  std::map<char, int64_t> numbers;
  std::string letters;
  torch::Tensor tokens;
};

// This rank's part of a step's batch. The whole batch is the same, however many ranks there are.
std::pair<torch::Tensor, torch::Tensor> batch_of(const Text& text, int step, int batch,
                                                 int64_t context, int rank, int size) {
  const auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step));
  const auto starts = torch::randint(0, text.tokens.size(0) - context - 1, {batch}, generator);
  std::vector<torch::Tensor> inputs, targets;
  for (int i = batch * rank / size; i < batch * (rank + 1) / size; ++i) {
    const auto start = starts[i].item<int64_t>();
    inputs.push_back(text.tokens.narrow(0, start, context));
    targets.push_back(text.tokens.narrow(0, start + 1, context));
  }
  return {torch::stack(inputs), torch::stack(targets)};
}

void write(const Curve& curve, const std::string& path) {
  std::ofstream out(path);
  out << std::setprecision(12);
  for (std::size_t i = 0; i < curve.losses.size(); ++i) {
    out << curve.seconds[i] << " " << curve.losses[i] << "\n";
  }
}

Curve read(const std::string& path) {
  Curve curve{.name = "one process"};
  std::ifstream in(path);
  for (double seconds = 0, loss = 0; in >> seconds >> loss;) {
    curve.seconds.push_back(seconds);
    curve.losses.push_back(loss);
  }
  if (curve.losses.empty()) throw std::runtime_error("cannot read " + path);
  return curve;
}

// The learning rate: 50 steps to warm up, and down to a tenth in the second half of the time. It
// depends on the step alone at first, so that runs of any speed have the same losses.
double learning_rate(int step, double part_of_time) {
  constexpr double kPeak = 3e-3, kPi = 3.14159265358979;
  const double warm = std::min(1.0, (step + 1) / 50.0);
  const double late = std::clamp(2 * part_of_time - 1, 0.0, 1.0);
  return kPeak * warm * (0.55 + 0.45 * std::cos(kPi * late));
}

std::string sample(Gpt& model, const Text& text, int64_t context, int characters) {
  const torch::NoGradGuard no_grad;
  const auto generator = at::detail::createCPUGenerator(1);
  auto line = torch::zeros({1, 1}, torch::kLong);
  std::string result;
  for (int i = 0; i < characters; ++i) {
    const auto seen = line.size(1) > context ? line.slice(1, line.size(1) - context) : line;
    const auto chances = torch::softmax(model(seen).select(1, -1) / 0.8, -1);
    const auto next = torch::multinomial(chances, 1, false, generator);
    line = torch::cat({line, next}, 1);
    result += text.letters[static_cast<std::size_t>(next.item<int64_t>())];
  }
  return result;
}

void compare(const Curve& one, const Curve& many, int ranks) {
  double difference = 0;
  const auto steps = std::min({one.losses.size(), many.losses.size(), std::size_t{50}});
  for (std::size_t i = 0; i < steps; ++i) {
    difference = std::max(difference, std::abs(one.losses[i] - many.losses[i]));
  }
  std::cout << std::setprecision(3) << "same loss as one process: over the first " << steps
            << " steps they differ by at most " << difference << "\n"
            << "faster than one process: " << one.seconds_per_step() / many.seconds_per_step()
            << " times, with " << ranks << " processes of one thread each\n";
}

// What a step tells the others: one small message.
struct News {
  double loss = 0, seconds = 0;
};
News averaged(const convoy::ProcessGroup& world, double loss, double seconds) {
  auto news = torch::tensor({loss, seconds}, torch::kDouble);
  world.all_reduce(news, {.op = convoy::ReduceOp::kAvg});
  return {news[0].item<double>(), news[1].item<double>()};
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Training {
 public:
  Training(const Arguments& arguments, convoy::ProcessGroup world)
      : arguments_(arguments), world_(std::move(world)), text_(arguments.text), net_(options()) {}

  void run() {
    convoy::DistributedDataParallel model(net_, world_);
    torch::optim::AdamW adam(net_->parameters(), torch::optim::AdamWOptions(0).weight_decay(0.05));
    if (is_first()) introduce();
    const auto start = Clock::now();
    double waited = 0;
    News news;
    for (int step = 0; step < arguments_.steps && news.seconds < limit(); ++step) {
      const double part = news.seconds / arguments_.seconds;
      adam.param_groups()[0].options().set_lr(learning_rate(step, part));
      const auto [input, target] =
          batch_of(text_, step, arguments_.batch, options_.context, world_.rank(), world_.size());
      adam.zero_grad();
      const auto loss = torch::cross_entropy_loss(model(input).flatten(0, 1), target.flatten());
      loss.backward();
      torch::nn::utils::clip_grad_norm_(net_->parameters(), 1.0);
      adam.step();
      news = averaged(world_, loss.item<double>(), seconds_since(start));
      curve_.losses.push_back(news.loss);
      curve_.seconds.push_back(news.seconds);
      waited += std::chrono::duration<double>(model.reducer().stats().exposed_time).count();
      if (is_first()) tell(step + 1, waited / news.seconds);
    }
    if (is_first()) finish();
  }

 private:
  const GptOptions& options() {
    options_.vocabulary = static_cast<int64_t>(text_.letters.size());
    torch::manual_seed(1);
    return options_;
  }
  bool is_first() const { return world_.rank() == 0; }
  double limit() const { return std::min(arguments_.seconds, arguments_.stop); }

  void introduce() const {
    int64_t parameters = 0;
    for (const auto& p : net_->parameters()) parameters += p.numel();
    std::cout << "char_gpt: " << parameters << " parameters, " << text_.tokens.size(0)
              << " characters of text, " << world_.size()
              << (world_.size() == 1 ? " process" : " processes") << " of " << arguments_.threads
              << (arguments_.threads == 1 ? " thread" : " threads") << std::endl;
  }

  // On a terminal one line that is drawn over itself; in a log a line for each tenth.
  void tell(int step, double waiting) {
    const double now = curve_.seconds.back();
    const bool last = now >= limit() || step == arguments_.steps;
    const auto line = progress_line({.step = step,
                                     .seconds = now,
                                     .limit = limit(),
                                     .loss = curve_.losses.back(),
                                     .tokens_per_second = tokens(step) / now,
                                     .waiting = waiting});
    if (arguments_.progress == "line") {
      std::cout << "\r" << line << (last ? "\n" : " ") << std::flush;
    } else if (arguments_.progress == "log" && (last || now >= told_ + limit() / 10)) {
      std::cout << line << std::endl;
      told_ = now;
    }
  }
  double tokens(int steps) const {
    return static_cast<double>(arguments_.batch * options_.context) * steps;
  }

  void finish() {
    if (arguments_.progress == "none") {
      std::cout << std::fixed << std::setprecision(1) << "  " << 1e3 * curve_.seconds_per_step()
                << " ms a step" << std::endl;
    }
    if (arguments_.sample > 0) {
      std::cout << "--- it writes ---\n"
                << sample(net_, text_, options_.context, arguments_.sample)
                << "\n-----------------\n";
    }
    if (!arguments_.write_record.empty()) write(curve_, arguments_.write_record);
    std::vector<Curve> curves;
    curve_.name = std::to_string(world_.size()) + " processes";
    if (!arguments_.read_record.empty()) {
      curves.push_back(read(arguments_.read_record));
      compare(curves.back(), curve_, world_.size());
    }
    curves.push_back(curve_);
    if (arguments_.curve.empty()) return;
    std::cout << std::setprecision(3) << "loss: " << curve_.losses.front() << " "
              << sparkline(curve_.losses) << " " << curve_.losses.back() << "\n";
    write_svg(arguments_.curve, curves, "A character-level GPT learns to write");
    std::cout << "as a picture: " << arguments_.curve << std::endl;
  }

  Arguments arguments_;
  convoy::ProcessGroup world_;
  Text text_;
  GptOptions options_;
  Gpt net_;
  Curve curve_;
  double told_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto arguments = parse(argc, argv);
    torch::set_num_threads(arguments.threads);
    Training(arguments, convoy::init()).run();
  } catch (const std::exception& error) {
    std::cerr << "char_gpt: " << error.what() << std::endl;
    return 1;
  }
}

// Trains a character-level GPT with as many processes as the launcher starts:
//
//   convoy run -n 2 char_gpt --text book.txt --steps 600
//
// `make demo` runs it with one process for a few steps and then with two, which compare themselves
// with the one.
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
  std::string text, curve, write_record, read_record;
  int steps = 600, seconds = 150, batch = 16, sample = 400;
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  const std::map<std::string, std::string*> texts = {{"--text", &arguments.text},
                                                     {"--curve", &arguments.curve},
                                                     {"--record", &arguments.write_record},
                                                     {"--compare", &arguments.read_record}};
  const std::map<std::string, int*> numbers = {{"--steps", &arguments.steps},
                                               {"--seconds", &arguments.seconds},
                                               {"--batch", &arguments.batch},
                                               {"--sample", &arguments.sample}};
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

struct Record {
  std::vector<double> losses;
  double seconds_per_step = 0;
};

void write(const Record& record, const std::string& path) {
  std::ofstream out(path);
  out << std::setprecision(12) << record.seconds_per_step << "\n";
  for (const double loss : record.losses) out << loss << "\n";
}

Record read(const std::string& path) {
  Record record;
  std::ifstream in(path);
  if (!(in >> record.seconds_per_step)) throw std::runtime_error("cannot read " + path);
  for (double loss = 0; in >> loss;) record.losses.push_back(loss);
  return record;
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

void compare(const Record& one, const Record& many, int ranks, double exposed) {
  double difference = 0;
  const auto steps = std::min(one.losses.size(), many.losses.size());
  for (std::size_t i = 0; i < steps; ++i) {
    difference = std::max(difference, std::abs(one.losses[i] - many.losses[i]));
  }
  std::cout << std::setprecision(6) << "same loss as one process: over the first " << steps
            << " steps they differ by at most " << difference << "\n"
            << std::setprecision(3)
            << "faster than one process: " << one.seconds_per_step / many.seconds_per_step
            << " times, with " << ranks << " processes of one thread each\n"
            << "share of communication that compute did not hide: " << 100 * exposed << " %\n";
}

void train(const Arguments& arguments) {
  torch::set_num_threads(1);
  const auto world = convoy::init();
  const bool first = world.rank() == 0;
  const Text text(arguments.text);
  GptOptions options;
  options.vocabulary = static_cast<int64_t>(text.letters.size());
  torch::manual_seed(1);
  Gpt net(options);
  convoy::DistributedDataParallel model(net, world);
  torch::optim::AdamW adam(net->parameters(), torch::optim::AdamWOptions(1e-3));
  int64_t parameters = 0;
  for (const auto& p : net->parameters()) parameters += p.numel();
  if (first) {
    std::cout << "char_gpt: " << parameters << " parameters, " << text.tokens.size(0)
              << " characters of text, " << world.size() << " process"
              << (world.size() == 1 ? "" : "es") << std::endl;
  }

  Record record;
  const auto start = Clock::now();
  double exposed = 0, seconds = 0;
  for (int step = 0; step < arguments.steps; ++step) {
    const auto begin = Clock::now();
    const auto [input, target] =
        batch_of(text, step, arguments.batch, options.context, world.rank(), world.size());
    adam.zero_grad();
    const auto loss = torch::cross_entropy_loss(model(input).flatten(0, 1), target.flatten());
    loss.backward();
    torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
    adam.step();
    // The loss of the whole batch, and whether the time is over: one small message.
    auto news =
        torch::tensor({loss.item<double>(),
                       Clock::now() - start > std::chrono::seconds(arguments.seconds) ? 1.0 : 0.0},
                      torch::kDouble);
    world.all_reduce(news, {.op = convoy::ReduceOp::kAvg});
    record.losses.push_back(news[0].item<double>());
    exposed += std::chrono::duration<double>(model.reducer().stats().exposed_time).count();
    seconds += std::chrono::duration<double>(Clock::now() - begin).count();
    const bool last = step + 1 == arguments.steps || news[1].item<double>() > 0;
    if (first && (step % 10 == 9 || last)) {
      const double tokens = static_cast<double>(arguments.batch * options.context * (step + 1));
      std::cout << progress_line(step + 1, arguments.steps, record.losses.back(), tokens / seconds,
                                 exposed / seconds)
                << std::flush;
    }
    if (last) break;
  }
  record.seconds_per_step = seconds / static_cast<double>(record.losses.size());
  if (!first) return;
  std::cout << "\n";
  if (arguments.sample > 0) {
    std::cout << "--- it writes ---\n"
              << sample(net, text, options.context, arguments.sample) << "\n-----------------\n";
  }
  if (!arguments.write_record.empty()) write(record, arguments.write_record);
  if (!arguments.read_record.empty()) {
    compare(read(arguments.read_record), record, world.size(), exposed / seconds);
  }
  std::cout << std::setprecision(3) << "loss: " << record.losses.front() << " "
            << sparkline(record.losses) << " " << record.losses.back() << "\n";
  if (!arguments.curve.empty()) {
    write_svg(arguments.curve, record.losses,
              "loss of a character-level GPT, " + std::to_string(world.size()) + " processes");
    std::cout << "as a picture: " << arguments.curve << "\n";
  }
  std::cout << std::flush;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    train(parse(argc, argv));
  } catch (const std::exception& error) {
    std::cerr << "char_gpt: " << error.what() << std::endl;
    return 1;
  }
}

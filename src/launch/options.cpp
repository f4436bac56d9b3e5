#include "launch/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <set>
#include <span>

#include "base/error.h"
#include "convoy/version.h"
#include "launch/environment.h"
#include "launch/text.h"

namespace convoy::launch {
namespace {

using Arguments = std::span<const std::string>;
using Words = std::vector<std::string>;

const std::vector<std::string> kCommands = {"run", "record", "doctor", "help"};

constexpr const char* kOverview =
    "convoy: starts and watches the ranks of a distributed job on this host\n"
    "\n"
    "  convoy run -n 4 ./train --epochs 3   start four ranks of a program\n"
    "  convoy record JOB                    what the ranks of a running job did last; no JOB: "
    "which run\n"
    "  convoy doctor                        check what a job needs here\n"
    "  convoy help run                      all options of a command\n"
    "\n"
    "Options:\n"
    "  -h, --help     show this text\n"
    "  --version      show the version\n";

template <class... Parts>
[[noreturn]] void usage(const Parts&... parts) {
  fail(ErrorKind::kInvalidArgument, parts...);
}

// The values of `convoy run` as they were typed.
struct RunTexts {
  std::string ranks;
  std::string grace;
  std::string timeout;
  std::string stdin_mode;
  std::string shown;
  std::string job_id;
  std::vector<std::string> environment;
  std::string working_folder;
  std::string log_folder;
  std::string trace;
  bool no_prefix = false;
  bool no_tune = false;
  bool pin = false;
  bool allocator = false;
};

class UsageFormatter : public CLI::Formatter {
 public:
  explicit UsageFormatter(std::string usage) : usage_(std::move(usage)) { column_width(28); }
  std::string make_usage(const CLI::App*, std::string) const override {
    return concat("Usage: ", usage_, "\n");
  }

 private:
  std::string usage_;
};

std::unique_ptr<CLI::App> make_run_app(RunTexts& texts) {
  auto app = std::make_unique<CLI::App>("Starts and monitors the ranks of a job.", "convoy run");
  app->formatter(std::make_shared<UsageFormatter>(
      "convoy run -n RANKS [options] [--] program [arguments...]\n"
      "Options stand before the program; what follows the program is passed on to it."));
  const auto add = [&](const char* group, const char* name, auto& target, const char* type,
                       const char* help) {
    app->add_option(name, target, help)->group(group)->type_name(type);
  };
  const auto add_flag = [&](const char* group, const char* name, bool& target, const char* help) {
    app->add_flag(name, target, help)->group(group);
  };
  add("Ranks", "-n,--ranks", texts.ranks, "N|auto", "How many ranks; auto: one per usable core");
  add("Ranks", "-e,--env", texts.environment, "NAME=VALUE",
      "Set a variable in every rank (may be repeated)");
  add("Ranks", "--workdir", texts.working_folder, "DIR", "Run the ranks in this folder");
  add("Ranks", "--job-id", texts.job_id, "ID",
      "Name of the job: letters, digits, '.', '_', '-' (default: random)");
  add("Ending", "--grace", texts.grace, "TIME",
      "Time that ranks get to end after a failure or signal, before SIGKILL (default 5s)");
  add("Ending", "--timeout", texts.timeout, "TIME",
      "End a job that takes longer, with exit status 124 (default: none)");
  add("Input and output", "--stdin", texts.stdin_mode, "none|all|RANK",
      "Which ranks read standard input (default none)");
  add("Input and output", "--show", texts.shown, "all|none|RANKS",
      "Whose output appears here, such as 0 or 0,2-3 (default all)");
  add("Input and output", "--log-dir", texts.log_folder, "DIR",
      "Also write each rank's output to DIR/rank-<r>.out and .err");
  add("Input and output", "--trace", texts.trace, "FILE",
      "Write a Chrome trace of all ranks' calls (RPC) and collectives at the end: the last 262144 "
      "and 2048 of each");
  add_flag("Input and output", "--no-prefix", texts.no_prefix, "No '[rank] ' before each line");
  add_flag("Tuning", "--pin", texts.pin, "Give each rank cores of its own");
  add_flag("Tuning", "--no-tune", texts.no_tune,
           "Leave thread counts and allocator settings as they are");
  add_flag("Tuning", "--allocator", texts.allocator,
           "Keep the memory of freed tensors for the next step (sets CONVOY_ALLOCATOR=1)");
  app->set_help_flag("-h,--help", "Show this text")->group("Other");
  return app;
}

std::unique_ptr<CLI::App> make_doctor_app(DoctorOptions& options) {
  auto app = std::make_unique<CLI::App>(
      "Checks what a job needs on this machine and says how to get what is missing.\n"
      "Exit status 1 if anything fails.",
      "convoy doctor");
  app->formatter(std::make_shared<UsageFormatter>("convoy doctor [options]"));
  app->set_help_flag("-h,--help", "Show this text");
  app->add_flag("--json", options.json, "Findings as JSON, for machines");
  return app;
}

std::unique_ptr<CLI::App> make_record_app(RecordOptions& options) {
  auto app = std::make_unique<CLI::App>(
      "Shows what the ranks of a running job did last, and what they do now: their flight "
      "records.\n"
      "JOB is the job's name (--job-id) or the process number of its launcher or of one rank.\n"
      "Without arguments: which jobs of this user run here.",
      "convoy record");
  app->formatter(std::make_shared<UsageFormatter>("convoy record [[options] JOB]"));
  app->set_help_flag("-h,--help", "Show this text");
  app->add_option("-o,--output", options.folder,
                  "Write files that torchfrtrace reads, and JSON, into this folder")
      ->type_name("DIR");
  app->add_option("--trace", options.trace,
                  "Write a Chrome trace of the last calls (RPC) and collectives of all ranks")
      ->type_name("FILE");
  app->add_option("--last", options.last, "Operations shown of each rank (default 20)")
      ->type_name("N")
      ->check(CLI::Range(1, 2048));
  app->add_flag("--json", options.json, "All of them, in the form of PyTorch's flight recorder");
  return app;
}

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const auto& name : option->get_lnames()) names.push_back("--" + name);
    for (const auto& name : option->get_snames()) names.push_back("-" + name);
  }
  return names;
}

// What other launchers call the number of ranks, as ours; the rest as it is.
std::string in_our_words(const std::string& word) {
  for (const std::string_view name : {"-np", "--np", "--nproc-per-node", "--nproc_per_node"}) {
    if (word == name) return "-n";
    if (word.starts_with(name) && word[name.size()] == '=') {
      return concat("--ranks", std::string_view(word).substr(name.size()));
    }
  }
  return word;
}

// Options of torchrun that mean nothing on one host.
bool is_about_hosts(const std::string& option) {
  static const std::set<std::string> known = {
      "--standalone",  "--nnodes",        "--node-rank",    "--node_rank",     "--rdzv-backend",
      "--rdzv-id",     "--rdzv-endpoint", "--rdzv_backend", "--rdzv_endpoint", "--rdzv_id",
      "--master-addr", "--master-port",   "--master_addr",  "--master_port"};
  return known.contains(option);
}

[[noreturn]] void unknown_option(const CLI::App& app, const std::string& option) {
  if (is_about_hosts(option)) {
    usage(app.get_name(), ": ", option,
          " is torchrun's; convoy starts ranks on this host only, and needs no more than -n: leave "
          "it out");
  }
  const auto guess = nearest(option, option_names(app));
  usage(app.get_name(), ": unknown option '", option, "'",
        guess ? concat("; did you mean '", *guess, "'?")
              : concat("; '", app.get_name(), " --help' lists them"));
}

// Where the options of `app` end: at the program, or at "--". Knows which options take a value, and
// refuses unknown ones. Other launchers' names for ours become ours.
std::size_t count_options(const CLI::App& app, Words& arguments) {
  const bool counts_ranks = app.get_option_no_throw("-n") != nullptr;
  std::size_t i = 0;
  while (i < arguments.size()) {
    if (counts_ranks) arguments[i] = in_our_words(arguments[i]);
    const std::string& word = arguments[i];
    if (word == "--" || word.size() < 2 || word[0] != '-') break;
    const bool is_long = word.starts_with("--");
    const auto equals = word.find('=');
    const std::string name = is_long ? word.substr(0, equals) : word.substr(0, 2);
    const CLI::Option* option = app.get_option_no_throw(name);
    if (!option) unknown_option(app, name);
    const bool wants_value = option->get_items_expected_min() > 0;
    const bool has_value = is_long ? equals != std::string::npos : word.size() > 2;
    if (!wants_value && has_value) {
      usage(app.get_name(), ": ", name, " takes no value, but '", word, "' gives it one");
    }
    if (wants_value && has_value && is_long && equals + 1 == word.size()) {
      usage(app.get_name(), ": '", word, "' gives no value");
    }
    if (wants_value && !has_value && ++i == arguments.size()) {
      usage(app.get_name(), ": ", name, " needs a value: ", name, " ", option->get_type_name());
    }
    ++i;
  }
  return i;
}

// Throws CLI::CallForHelp where help was asked for.
void parse_options(CLI::App& app, Arguments arguments) {
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
  try {
    app.parse(std::move(reversed));
  } catch (const CLI::CallForHelp&) {
    throw;
  } catch (const CLI::ParseError& error) {
    usage(app.get_name(), ": ", error.what());
  }
}

int parse_ranks(const std::string& text, int cores) {
  if (text == "auto") return cores;
  const auto ranks = parse_int(text);
  if (!ranks || *ranks < 1 || *ranks > kMaxRanks) {
    usage("convoy run: -n '", text, "' is not a number of ranks; give 1 to ", kMaxRanks,
          ", or 'auto' for one per core (", cores, " here)");
  }
  return *ranks;
}

std::chrono::nanoseconds parse_time(const char* option, const std::string& text) {
  const auto duration = parse_duration(text);
  if (!duration) {
    usage("convoy run: ", option, " '", text, "' is not a time; give one such as 5s, 500ms or 2m");
  }
  return *duration;
}

int parse_rank(const char* option, const std::string& text, int ranks) {
  const auto rank = parse_int(text);
  if (!rank || *rank < 0 || *rank >= ranks) {
    usage("convoy run: ", option, " '", text, "' names no rank; this job has ",
          ranks == 1 ? "rank 0 only" : concat("ranks 0 to ", ranks - 1));
  }
  return *rank;
}

std::optional<std::set<int>> parse_shown(const std::string& text, int ranks) {
  if (text == "all") return std::nullopt;
  std::set<int> shown;
  if (text == "none") return shown;
  for (const auto& item : split(text, ',')) {
    const auto dash = item.find('-', 1);
    const int first = parse_rank("--show", item.substr(0, dash), ranks);
    const int last =
        dash == std::string::npos ? first : parse_rank("--show", item.substr(dash + 1), ranks);
    if (last < first)
      usage("convoy run: --show '", item, "' is a descending range; write it as ", last, "-",
            first);
    for (int rank = first; rank <= last; ++rank) shown.insert(rank);
  }
  return shown;
}

std::pair<std::string, std::string> parse_variable(const std::string& text) {
  const auto equals = text.find('=');
  if (equals == std::string::npos || equals == 0) {
    usage("convoy run: --env '", text, "' is not NAME=VALUE");
  }
  std::string name = text.substr(0, equals);
  if (is_set_per_rank(name)) {
    usage("convoy run: --env ", name, ": the launcher sets this variable for each rank itself");
  }
  return {std::move(name), text.substr(equals + 1)};
}

void check_job_id(const std::string& id) {
  const auto fits = [](unsigned char c) {
    return std::isalnum(c) || c == '.' || c == '_' || c == '-';
  };
  if (id.size() > 64 || !std::all_of(id.begin(), id.end(), fits)) {
    usage("convoy run: --job-id '", id,
          "' is not a valid job name; use up to 64 letters, digits, '.', '_', '-'");
  }
}

[[noreturn]] void missing_ranks(Arguments program) {
  const bool behind = std::any_of(program.begin(), program.end(), [](const std::string& word) {
    const auto ours = in_our_words(word);
    return ours == "-n" || ours == "--ranks" || ours.starts_with("--ranks=");
  });
  usage("convoy run: how many ranks? Give -n 4, or -n auto for one per core",
        behind ? concat("; it must stand before the program '", program.front(), "'") : "");
}

RunOptions convert(const RunTexts& texts, Arguments program, int cores) {
  RunOptions run;
  if (texts.ranks.empty()) missing_ranks(program);
  run.ranks = parse_ranks(texts.ranks, cores);
  if (program.empty() || program.front().empty()) {
    usage("convoy run: no program to run; it follows the options: convoy run -n ", texts.ranks,
          " ./program [arguments...]");
  }
  run.program.assign(program.begin(), program.end());
  if (!texts.grace.empty()) run.grace = parse_time("--grace", texts.grace);
  if (!texts.timeout.empty()) {
    run.timeout = parse_time("--timeout", texts.timeout);
    if (run.timeout->count() == 0) usage("convoy run: --timeout 0 would end the job at once");
  }
  if (!texts.stdin_mode.empty() && texts.stdin_mode != "none") {
    run.stdin_mode = texts.stdin_mode == "all" ? StdinMode::kAll : StdinMode::kRank;
    if (run.stdin_mode == StdinMode::kRank) {
      if (!parse_int(texts.stdin_mode)) {
        usage("convoy run: --stdin '", texts.stdin_mode, "' is not none, all or a rank");
      }
      run.stdin_rank = parse_rank("--stdin", texts.stdin_mode, run.ranks);
    }
  }
  if (!texts.shown.empty()) run.shown = parse_shown(texts.shown, run.ranks);
  for (const auto& variable : texts.environment) {
    run.environment.push_back(parse_variable(variable));
  }
  if (texts.allocator) run.environment.emplace_back("CONVOY_ALLOCATOR", "1");
  check_job_id(texts.job_id);
  run.job_id = texts.job_id;
  run.working_folder = texts.working_folder;
  run.log_folder = texts.log_folder;
  run.trace = texts.trace;
  run.prefix = !texts.no_prefix;
  run.tune = !texts.no_tune;
  run.pin = texts.pin;
  if (run.pin && !run.tune) {
    usage("convoy run: --pin and --no-tune contradict each other; leave one out");
  }
  return run;
}

CommandLine help_text(std::string text) {
  CommandLine line;
  line.text = std::move(text);
  return line;
}

CommandLine parse_run(Arguments arguments, int cores) {
  RunTexts texts;
  const auto app = make_run_app(texts);
  Words words(arguments.begin(), arguments.end());
  const std::size_t options = count_options(*app, words);
  try {
    parse_options(*app, Arguments(words).first(options));
  } catch (const CLI::CallForHelp&) {
    return help_text(app->help());
  }
  Arguments program = arguments.subspan(options);
  if (!program.empty() && program.front() == "--") program = program.subspan(1);
  CommandLine line;
  line.command = CommandLine::Command::kRun;
  line.run = convert(texts, program, cores);
  return line;
}

CommandLine parse_doctor(Arguments arguments) {
  CommandLine line;
  line.command = CommandLine::Command::kDoctor;
  const auto app = make_doctor_app(line.doctor);
  Words words(arguments.begin(), arguments.end());
  const std::size_t options = count_options(*app, words);
  if (options < arguments.size()) {
    usage("convoy doctor: unexpected argument '", arguments[options], "'; it takes options only");
  }
  try {
    parse_options(*app, arguments);
  } catch (const CLI::CallForHelp&) {
    return help_text(app->help());
  }
  return line;
}

CommandLine parse_record(Arguments arguments) {
  CommandLine line;
  line.command = CommandLine::Command::kRecord;
  const auto app = make_record_app(line.record);
  Words words(arguments.begin(), arguments.end());
  const std::size_t options = count_options(*app, words);
  try {
    parse_options(*app, arguments.first(options));
  } catch (const CLI::CallForHelp&) {
    return help_text(app->help());
  }
  const Arguments rest = arguments.subspan(options);
  if (arguments.empty()) return line;
  if (rest.size() != 1 || rest.front().empty()) {
    usage("convoy record: ", rest.size() > 1 ? "one job at a time; give" : "no job given; give",
          " its name or a process number: convoy record JOB ('convoy record' lists the jobs)");
  }
  line.record.job = rest.front();
  return line;
}

[[noreturn]] void unknown_command(const std::string& word) {
  const auto guess = nearest(word, kCommands);
  usage("convoy: unknown command '", word, "'",
        guess ? concat("; did you mean 'convoy ", *guess, "'?")
              : "; to start a program: convoy run -n 4 " + word);
}

CommandLine parse_help(Arguments arguments) {
  if (arguments.empty()) return help_text(kOverview);
  RunTexts texts;
  DoctorOptions doctor;
  if (arguments[0] == "run") return help_text(make_run_app(texts)->help());
  RecordOptions record;
  if (arguments[0] == "record") return help_text(make_record_app(record)->help());
  if (arguments[0] == "doctor") return help_text(make_doctor_app(doctor)->help());
  if (arguments[0] == "help") return help_text(kOverview);
  unknown_command(arguments[0]);
}

}  // namespace

CommandLine parse_command_line(const std::vector<std::string>& arguments, int cores) {
  if (arguments.empty()) {
    usage(
        "convoy: no command given; start a job with 'convoy run -n 4 ./program', or see "
        "'convoy --help'");
  }
  const std::string& word = arguments[0];
  const Arguments rest = Arguments(arguments).subspan(1);
  if (word == "run") return parse_run(rest, cores);
  if (word == "record") return parse_record(rest);
  if (word == "doctor") return parse_doctor(rest);
  if (word == "help" || word == "--help" || word == "-h") return parse_help(rest);
  if (word == "--version" || word == "version")
    return help_text(concat("convoy ", version(), "\n"));
  if (word.starts_with('-')) {
    usage("convoy: unknown option '", word,
          "'; a command comes first: convoy run -n 4 ./program (or 'convoy --help')");
  }
  unknown_command(word);
}

}  // namespace convoy::launch

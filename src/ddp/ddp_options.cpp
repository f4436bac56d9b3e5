// DdpOptions as text: a first line, then "name value", lists with one line for each item.
#include <ATen/core/ivalue.h>
#include <torch/serialize/archive.h>

#include <functional>
#include <iomanip>
#include <limits>
#include <map>
#include <sstream>

#include "base/error.h"
#include "convoy/ddp_options.h"

namespace convoy {
namespace {

constexpr const char* kTitle = "convoy::DdpOptions 1";
constexpr const char* kKey = "convoy_ddp_options";

[[noreturn]] void refuse_line(const std::string& line) {
  fail(ErrorKind::kInvalidArgument, "DdpOptions: unknown or malformed line ", in_quotes(line));
}

template <class T>
T number(const std::string& text, const std::string& line) {
  std::istringstream in(text);
  T value{};
  if (!(in >> value) || in.peek() != std::istringstream::traits_type::eof()) refuse_line(line);
  return value;
}

template <class Enum>
Enum choice(const std::string& text, int count, const std::string& line) {
  const int value = number<int>(text, line);
  if (value < 0 || value >= count) refuse_line(line);
  return static_cast<Enum>(value);
}

// Names and flags of the options that are true or false.
template <class Options>
auto flags(Options& o) {
  return std::map<std::string, decltype(&o.static_graph)>{
      {"find_unused_parameters", &o.find_unused_parameters},
      {"static_graph", &o.static_graph},
      {"gradient_as_bucket_view", &o.gradient_as_bucket_view},
      {"skip_all_reduce_unused_params", &o.skip_all_reduce_unused_params},
      {"init_sync", &o.init_sync},
      {"forward_sync_buffers", &o.forward_sync_buffers},
  };
}

template <class Mixed>
auto types(Mixed& mixed) {
  return std::map<std::string, decltype(&mixed.param_dtype)>{
      {"param_dtype", &mixed.param_dtype},
      {"reduce_dtype", &mixed.reduce_dtype},
      {"buffer_dtype", &mixed.buffer_dtype},
  };
}

GradReduce reduce_of(const std::string& kind, double samples, const std::string& line) {
  if (kind == "mean") return GradReduce::kMean;
  if (kind == "sum") return GradReduce::kSum;
  if (kind != "weighted") refuse_line(line);
  return GradReduce::weighted(samples);
}

const char* name_of(GradReduce::Kind kind) {
  switch (kind) {
    case GradReduce::Kind::kMean: return "mean";
    case GradReduce::Kind::kSum: return "sum";
    case GradReduce::Kind::kWeighted: return "weighted";
  }
  return "mean";
}

}  // namespace

std::string DdpOptions::to_text() const {
  std::ostringstream out;
  out << std::setprecision(std::numeric_limits<double>::max_digits10);
  out << kTitle << "\n";
  if (bucket_cap_mb) out << "bucket_cap_mb " << *bucket_cap_mb << "\n";
  for (const double cap : bucket_cap_mb_list) out << "bucket_cap_mb_list " << cap << "\n";
  for (const auto& [name, flag] : flags(*this)) out << name << " " << (*flag ? 1 : 0) << "\n";
  out << "reduce " << name_of(reduce.kind()) << "\n";
  out << "samples " << reduce.samples() << "\n";
  out << "launch " << static_cast<int>(launch) << "\n";
  out << "nonfinite " << static_cast<int>(nonfinite) << "\n";
  out << "check_replicas_every " << check_replicas_every << "\n";
  out << "buffer_sync " << static_cast<int>(buffer_sync) << "\n";
  if (mixed_precision) {
    out << "cast_forward_inputs " << (mixed_precision->cast_forward_inputs ? 1 : 0) << "\n";
    for (const auto& [name, type] : types(*mixed_precision)) {
      if (*type) out << name << " " << static_cast<int>(**type) << "\n";
    }
  }
  for (const std::string& name : ignore) out << "ignore " << name << "\n";
  for (const std::string& name : delay_all_reduce_named_params) {
    out << "delay_all_reduce_named_params " << name << "\n";
  }
  return out.str();
}

DdpOptions DdpOptions::from_text(const std::string& text) {
  std::istringstream in(text);
  std::string line;
  if (!std::getline(in, line) || line != kTitle) refuse_line(line);
  DdpOptions made;
  std::string kind = "mean";
  double samples = 1;
  while (std::getline(in, line)) {
    const auto space = line.find(' ');
    if (space == std::string::npos) refuse_line(line);
    const std::string name = line.substr(0, space), value = line.substr(space + 1);
    const auto known = flags(made);
    if (const auto flag = known.find(name); flag != known.end()) {
      *flag->second = choice<int>(value, 2, line) != 0;
    } else if (name == "bucket_cap_mb") {
      made.bucket_cap_mb = number<double>(value, line);
    } else if (name == "bucket_cap_mb_list") {
      made.bucket_cap_mb_list.push_back(number<double>(value, line));
    } else if (name == "reduce") {
      kind = value;
    } else if (name == "samples") {
      samples = number<double>(value, line);
    } else if (name == "launch") {
      made.launch = choice<BucketLaunch>(value, 3, line);
    } else if (name == "nonfinite") {
      made.nonfinite = choice<NonFinite>(value, 3, line);
    } else if (name == "check_replicas_every") {
      made.check_replicas_every = number<std::uint64_t>(value, line);
    } else if (name == "buffer_sync") {
      made.buffer_sync = choice<BufferSync>(value, 2, line);
    } else if (name == "cast_forward_inputs") {  // the first of them
      made.mixed_precision.emplace().cast_forward_inputs = choice<int>(value, 2, line) != 0;
    } else if (made.mixed_precision && types(*made.mixed_precision).contains(name)) {
      *types(*made.mixed_precision)[name] =
          choice<c10::ScalarType>(value, static_cast<int>(c10::ScalarType::NumOptions), line);
    } else if (name == "ignore") {
      made.ignore.push_back(value);
    } else if (name == "delay_all_reduce_named_params") {
      made.delay_all_reduce_named_params.push_back(value);
    } else {
      refuse_line(line);
    }
    if (name == "reduce" || name == "samples") made.reduce = reduce_of(kind, samples, line);
  }
  return made;
}

void DdpOptions::save(torch::serialize::OutputArchive& archive) const {
  archive.write(kKey, c10::IValue(to_text()));
}

DdpOptions DdpOptions::load(torch::serialize::InputArchive& archive) {
  c10::IValue value;
  if (!archive.try_read(kKey, value) || !value.isString()) {
    fail(ErrorKind::kInvalidArgument,
         "DdpOptions: this archive has no options; write them with DdpOptions::save");
  }
  return from_text(value.toStringRef());
}

}  // namespace convoy

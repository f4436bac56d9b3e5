#include "coll/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <ostream>
#include <string>
#include <tuple>

#include "coll/isa.h"
#include "convoy/error.h"
#include "fenced.h"
#include "kernels_wide.h"
#include "reference.h"

namespace convoy::coll {

inline void PrintTo(DataType type, std::ostream* out) { *out << to_string(type); }

namespace {

using reference::Buffer;

constexpr StoreHint kHints[] = {StoreHint::kCached, StoreHint::kStreaming};

std::vector<DataType> all_types() {
  std::vector<DataType> types;
  for (int i = 0; i < kDataTypes; ++i) types.push_back(static_cast<DataType>(i));
  return types;
}
bool is_available(DataType type, ReduceOp op) {
  return active_kernels().reduce[static_cast<int>(type)][static_cast<int>(op)] != nullptr;
}
// That have a meaning and that the selected kernels know: only the wide ones know fewer.
std::vector<ReduceOp> ops_of(DataType type) {
  std::vector<ReduceOp> ops;
  for (int i = 0; i < kReduceOps; ++i) {
    const auto op = static_cast<ReduceOp>(i);
    if (!reference::has_meaning(type, op)) continue;
    if (is_available(type, op)) {
      ops.push_back(op);
    } else {
      EXPECT_EQ(&active_kernels(), &kWideKernels) << to_string(type) << " " << to_string(op);
    }
  }
  return ops;
}
std::vector<Isa> supported_isas() {
  std::vector<Isa> isas;
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (is_supported(isa)) isas.push_back(isa);
  }
  return isas;
}

struct KernelSet {
  std::string name;
  const KernelTable* table;
};
void PrintTo(const KernelSet& set, std::ostream* out) { *out << set.name; }
std::vector<KernelSet> kernel_sets() {
  std::vector<KernelSet> sets;
  for (const Isa isa : supported_isas()) {
    sets.push_back({std::string(to_string(isa)), &kernels_of(isa)});
  }
  sets.push_back({"wide", &kWideKernels});
  return sets;
}

std::string describe(const Reduction& r, std::size_t sources, std::size_t count, StoreHint hint) {
  return std::string(to_string(r.type)) + " " + std::string(to_string(r.op)) + ", " +
         std::to_string(sources) + " sources, " + std::to_string(count) + " elements, ranks " +
         std::to_string(r.ranks) + (hint == StoreHint::kStreaming ? ", streaming" : ", cached");
}

std::vector<Buffer> random_sources(DataType type, std::size_t sources, std::size_t count,
                                   std::mt19937_64& random) {
  std::vector<Buffer> out;
  for (std::size_t s = 0; s < sources; ++s) {
    out.push_back(reference::random_elements(type, count, random));
  }
  return out;
}

// The index of the first element that differs, as a readable message; empty if none does.
std::string difference(std::span<const std::byte> actual, std::span<const std::byte> expected,
                       std::size_t element) {
  if (actual.size() == expected.size() &&
      (actual.empty() || std::memcmp(actual.data(), expected.data(), actual.size()) == 0)) {
    return "";
  }
  const auto at = std::mismatch(actual.begin(), actual.end(), expected.begin(), expected.end());
  const auto index = static_cast<std::size_t>(at.first - actual.begin()) / element;
  std::string text = "element " + std::to_string(index) + " differs, bytes (actual/expected)";
  for (std::size_t i = index * element; i < (index + 1) * element; ++i) {
    char pair[16];
    std::snprintf(pair, sizeof pair, " %02x/%02x", std::to_integer<unsigned>(actual[i]),
                  std::to_integer<unsigned>(expected[i]));
    text += pair;
  }
  return text;
}

// Offsets from a cache line of the sources and targets, used in turn.
struct Layout {
  std::vector<std::size_t> source_offsets = {0};
  std::vector<std::size_t> target_offsets = {0};
};

void expect_reduced(const Reduction& r, const std::vector<Buffer>& sources, const Layout& layout,
                    StoreHint hint, const Buffer& expected) {
  const std::size_t element = size_of(r.type);
  std::vector<Fenced> inputs, outputs;
  std::vector<const std::byte*> source_pointers;
  std::vector<std::byte*> target_pointers;
  for (std::size_t s = 0; s < sources.size(); ++s) {
    inputs.emplace_back(sources[s], layout.source_offsets[s % layout.source_offsets.size()]);
  }
  for (const std::size_t offset : layout.target_offsets) {
    outputs.emplace_back(expected.size(), offset);
  }
  for (Fenced& input : inputs) source_pointers.push_back(input.data());
  for (Fenced& output : outputs) target_pointers.push_back(output.data());

  reduce(r, source_pointers, target_pointers, expected.size() / element, hint);

  SCOPED_TRACE(describe(r, sources.size(), expected.size() / element, hint));
  for (std::size_t t = 0; t < outputs.size(); ++t) {
    EXPECT_EQ(difference(outputs[t].bytes(), expected, element), "") << "target " << t;
    EXPECT_TRUE(outputs[t].fences_intact()) << "target " << t;
  }
  for (std::size_t s = 0; s < inputs.size(); ++s) {
    EXPECT_TRUE(inputs[s].equals(sources[s]) && inputs[s].fences_intact()) << "source " << s;
  }
}

// Selects kernels and puts the previous ones back.
class Selected {
 public:
  explicit Selected(const KernelSet& set) { select_kernels(*set.table); }
  ~Selected() { select_kernels(before_); }

 private:
  const KernelTable& before_ = active_kernels();
};

class Kernels : public testing::TestWithParam<KernelSet> {
  Selected selected_{GetParam()};
};

class KernelTypes : public testing::TestWithParam<std::tuple<KernelSet, DataType>> {
 protected:
  DataType type() const { return std::get<1>(GetParam()); }

 private:
  Selected selected_{std::get<0>(GetParam())};
};

TEST_P(KernelTypes, EveryOperationOverOneToNineAndSixtyFourSources) {
  std::mt19937_64 random(1);
  for (const ReduceOp op : ops_of(type())) {
    for (const std::size_t sources : {1, 2, 3, 4, 5, 6, 7, 8, 9, 64}) {
      const Reduction r{type(), op, static_cast<int>(sources), -0.37};
      const auto inputs = random_sources(type(), sources, 1009, random);
      const Buffer expected = reference::reduce(r, inputs);
      for (const StoreHint hint : kHints) expect_reduced(r, inputs, {}, hint, expected);
    }
  }
}

TEST_P(KernelTypes, EveryCountUpToSeveralTiles) {
  std::mt19937_64 random(2);
  const std::size_t element = size_of(type());
  const std::size_t most = (2 * 512 + 2 * 64) / element + 2;  // two tiles of the widest vectors
  const Reduction r{type(), ops_of(type()).front()};
  const auto inputs = random_sources(type(), 2, most, random);
  const Buffer all = reference::reduce(r, inputs);
  for (std::size_t count = 0; count <= most; ++count) {
    const auto first = [&](const Buffer& b) {
      return Buffer(b.begin(), b.begin() + static_cast<std::ptrdiff_t>(count * element));
    };
    for (const StoreHint hint : kHints) {
      expect_reduced(r, {first(inputs[0]), first(inputs[1])}, {}, hint, first(all));
    }
    if (HasFailure()) return;
  }
}

TEST_P(KernelTypes, InPlaceOnEachIndex) {
  std::mt19937_64 random(3);
  for (const std::size_t sources : {2, 3, 5}) {
    const Reduction r{type(), ops_of(type()).back()};
    const auto inputs = random_sources(type(), sources, 777, random);
    const Buffer expected = reference::reduce(r, inputs);
    for (std::size_t index = 0; index < sources; ++index) {
      for (const StoreHint hint : kHints) {
        for (const std::size_t offset : {std::size_t{0}, size_of(type())}) {
          std::vector<Fenced> memory;
          for (const Buffer& input : inputs) memory.emplace_back(input, offset);
          std::vector<const std::byte*> pointers;
          for (Fenced& m : memory) pointers.push_back(m.data());
          // Once into one source, once into all of them.
          std::vector<std::byte*> targets = {memory[index].data()};
          if (index + 1 == sources) {
            targets.clear();
            for (Fenced& m : memory) targets.push_back(m.data());
          }
          reduce(r, pointers, targets, 777, hint);
          for (std::size_t s = 0; s < sources; ++s) {
            const bool written = index + 1 == sources || s == index;
            EXPECT_EQ(
                difference(memory[s].bytes(), written ? expected : inputs[s], size_of(type())), "")
                << describe(r, sources, 777, hint) << ", in place on " << index << ", source " << s;
            EXPECT_TRUE(memory[s].fences_intact());
          }
        }
      }
    }
  }
}

TEST_P(KernelTypes, ManyTargetsThatLieDifferently) {
  std::mt19937_64 random(4);
  const Reduction r{type(), ops_of(type()).front()};
  const auto inputs = random_sources(type(), 3, 5003, random);
  const Buffer expected = reference::reduce(r, inputs);
  const std::size_t element = size_of(type());
  const std::vector<std::vector<std::size_t>> offsets = {
      {0, 0, 0}, {element, element}, {0, element, 2 * element}, {1, 1}, {1, 2, 3, 4, 5}, {3, 0}};
  for (const auto& targets : offsets) {
    for (const StoreHint hint : kHints) {
      expect_reduced(r, inputs, {{0, element, 7}, targets}, hint, expected);
    }
  }
}

std::string type_name(const testing::TestParamInfo<std::tuple<KernelSet, DataType>>& info) {
  return std::get<0>(info.param).name + "_" + std::string(to_string(std::get<1>(info.param)));
}
std::vector<std::tuple<KernelSet, DataType>> sets_and_types() {
  std::vector<std::tuple<KernelSet, DataType>> all;
  for (const KernelSet& set : kernel_sets()) {
    for (const DataType type : all_types()) {
      const auto& row = set.table->reduce[static_cast<int>(type)];
      if (std::ranges::any_of(row, [](ReduceFunction f) { return f != nullptr; })) {
        all.emplace_back(set, type);
      }
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, KernelTypes, testing::ValuesIn(sets_and_types()), type_name);

TEST_P(Kernels, EveryMisalignmentOfSourcesAndTarget) {
  std::mt19937_64 random(5);
  for (const DataType type : {DataType::kF32, DataType::kBF16, DataType::kU8}) {
    const Reduction r{type, ReduceOp::kSum};
    const auto inputs = random_sources(type, 2, 1300 / size_of(type), random);
    const Buffer expected = reference::reduce(r, inputs);
    for (std::size_t from = 0; from < 64; ++from) {
      for (std::size_t to = 0; to < 64; ++to) {
        const Layout layout{{from, (from * 7) % 64}, {to, (to + from) % 64}};
        for (const StoreHint hint : kHints) expect_reduced(r, inputs, layout, hint, expected);
      }
      if (HasFailure()) return;
    }
  }
}

template <class Code>
Buffer as_buffer(const std::vector<Code>& codes) {
  Buffer out(codes.size() * sizeof(Code));
  std::memcpy(out.data(), codes.data(), out.size());
  return out;
}

// All pairs of 8-bit codes: every value that a conversion can meet.
TEST_P(Kernels, EightBitFloatsExhaustively) {
  std::vector<std::uint8_t> left, right;
  for (int a = 0; a < 256; ++a) {
    for (int b = 0; b < 256; ++b) {
      left.push_back(static_cast<std::uint8_t>(a));
      right.push_back(static_cast<std::uint8_t>(b));
    }
  }
  const std::vector<Buffer> inputs = {as_buffer(left), as_buffer(right)};
  for (const DataType type : {DataType::kF8E4M3, DataType::kF8E5M2}) {
    for (const ReduceOp op : ops_of(type)) {
      const Reduction r{type, op, 3, 1.25};
      expect_reduced(r, inputs, {}, StoreHint::kCached, reference::reduce(r, inputs));
    }
  }
}

// Every code alone gives itself (NaN its canonical code), and with partners that reach every kind
// of rounding: ties, carries into the exponent, subnormal results, overflow.
TEST_P(Kernels, SixteenBitFloatsExhaustively) {
  std::vector<std::uint16_t> codes(65536);
  std::iota(codes.begin(), codes.end(), std::uint16_t{0});
  const Buffer all = as_buffer(codes);
  std::mt19937_64 random(6);
  for (const DataType type : {DataType::kF16, DataType::kBF16}) {
    const Reduction alone{type, ReduceOp::kSum};
    expect_reduced(alone, {all}, {}, StoreHint::kCached, reference::reduce(alone, {{all}}));
    for (int round = 0; round < 8; ++round) {
      std::vector<Buffer> inputs = {all, reference::random_elements(type, 65536, random)};
      for (const ReduceOp op : ops_of(type)) {
        const Reduction r{type, op, 3 + round, 1 + 0.0009765625 * round};
        expect_reduced(r, inputs, {}, StoreHint::kCached, reference::reduce(r, inputs));
      }
    }
  }
}

// In plain numbers: what a reference of one's own might get wrong in the same way.
TEST_P(Kernels, AveragesDoNotWrap) {
  const auto average = []<class T>(DataType type, const std::vector<T>& values) {
    std::vector<Buffer> inputs;
    for (const T value : values) inputs.push_back(as_buffer(std::vector<T>(77, value)));
    const Reduction r{type, ReduceOp::kAvg, static_cast<int>(values.size())};
    return [r, inputs](T expected) {
      if (!is_available(r.type, r.op)) return;
      expect_reduced(r, inputs, {}, StoreHint::kCached, as_buffer(std::vector<T>(77, expected)));
      expect_reduced(r, inputs, {}, StoreHint::kStreaming, as_buffer(std::vector<T>(77, expected)));
    };
  };
  const auto check_extremes = [&]<class T>(DataType type, T) {
    constexpr T kMost = std::numeric_limits<T>::max(), kLeast = std::numeric_limits<T>::min();
    average(type, std::vector<T>(64, kMost))(kMost);
    average(type, std::vector<T>(63, kLeast))(kLeast);
    average(type, std::vector<T>{kMost, kMost, kLeast})(
        static_cast<T>((static_cast<__int128>(kMost) * 2 + kLeast) / 3));
  };
  average(DataType::kI8, std::vector<std::int8_t>{100, 100, 100})(100);
  average(DataType::kU8, std::vector<std::uint8_t>{200, 100, 250})(183);
  average(DataType::kI8, std::vector<std::int8_t>{-100, -100, -101})(-100);  // toward zero
  check_extremes(DataType::kI8, std::int8_t{});
  check_extremes(DataType::kI16, std::int16_t{});
  check_extremes(DataType::kI32, std::int32_t{});
  check_extremes(DataType::kI64, std::int64_t{});
  check_extremes(DataType::kU8, std::uint8_t{});
  check_extremes(DataType::kU16, std::uint16_t{});
  check_extremes(DataType::kU32, std::uint32_t{});
  check_extremes(DataType::kU64, std::uint64_t{});
}

TEST_P(Kernels, AverageDividesTruly) {
  std::mt19937_64 random(7);
  for (const DataType type : all_types()) {
    if (!is_available(type, ReduceOp::kAvg)) continue;
    const auto inputs = random_sources(type, 2, 503, random);
    for (const int ranks : {1, 2, 3, 5, 7, 8, 64, 127, 128, 200, 256, 1000, 65536, 100003}) {
      const Reduction r{type, ReduceOp::kAvg, ranks};
      expect_reduced(r, inputs, {}, StoreHint::kCached, reference::reduce(r, inputs));
    }
  }
}

TEST_P(Kernels, PremulFactorsOfEveryKind) {
  std::mt19937_64 random(8);
  for (const DataType type : all_types()) {
    if (!is_available(type, ReduceOp::kPremulSum)) continue;
    const auto inputs = random_sources(type, 3, 503, random);
    for (const double factor : {0.0, -0.0, 1.0, 0.1, -3e38, 1e-45, 1e300, double(INFINITY)}) {
      const Reduction r{type, ReduceOp::kPremulSum, 1, factor};
      expect_reduced(r, inputs, {}, StoreHint::kCached, reference::reduce(r, inputs));
    }
  }
}

// Sums of f32 that are rounded on the way: every code and its neighbourhood, and what a 16-bit
// tensor of the same values would have given.
TEST_P(Kernels, RoundedOnTheWay) {
  std::mt19937_64 random(9);
  std::vector<float> grid;  // both sides of each place where the rounding changes
  for (std::uint32_t high = 0; high < 0x10000; ++high) {
    for (const std::uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      grid.push_back(std::bit_cast<float>(high << 16 | low));
    }
    grid.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  }
  const Buffer every = as_buffer(grid);
  for (const Rounding rounding : {Rounding::kF16, Rounding::kBF16}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
      const auto& row = active_kernels().rounded[static_cast<int>(rounding)];
      if (row[static_cast<int>(op)] == nullptr) {
        EXPECT_EQ(&active_kernels(), &kWideKernels);
        continue;
      }
      Reduction r{DataType::kF32, op, 1, 1, rounding};
      expect_reduced(r, {every}, {}, StoreHint::kCached, reference::reduce(r, {{every}}));
      for (const int ranks : {2, 3, 5}) {
        r.ranks = ranks;
        for (const std::size_t count : {1, 7, 64, 1009}) {
          const auto inputs =
              random_sources(DataType::kF32, static_cast<std::size_t>(ranks), count, random);
          for (const StoreHint hint : kHints) {
            expect_reduced(r, inputs, {.target_offsets = {0, 4}}, hint,
                           reference::reduce(r, inputs));
          }
        }
      }
    }
  }
}

TEST(CheckReduction, RoundsOnlySumsOfF32) {
  for (const auto& [type, op] : {std::pair(DataType::kF64, ReduceOp::kSum),
                                 {DataType::kF16, ReduceOp::kSum},
                                 {DataType::kF32, ReduceOp::kMax},
                                 {DataType::kF32, ReduceOp::kPremulSum}}) {
    EXPECT_THROW(check_reduction(type, op, Rounding::kF16), Error);
  }
  EXPECT_THROW(check_reduction(DataType::kF32, ReduceOp::kSum, static_cast<Rounding>(3)), Error);
  check_reduction(DataType::kF32, ReduceOp::kAvg, Rounding::kBF16);
}

// The value of f32 corner cases, written out: the reference could share a mistake.
TEST_P(Kernels, CornersOfF32) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = INFINITY;
  struct Case {
    ReduceOp op;
    float a, b, result;
  };
  const std::vector<Case> cases = {
      {ReduceOp::kSum, inf, -inf, nan},      {ReduceOp::kSum, -0.f, -0.f, -0.f},
      {ReduceOp::kSum, 0.f, -0.f, 0.f},      {ReduceOp::kSum, 1e-45f, 1e-45f, 2.8e-45f},
      {ReduceOp::kSum, 3e38f, 3e38f, inf},   {ReduceOp::kMax, 1.f, nan, nan},
      {ReduceOp::kMax, nan, 1.f, nan},       {ReduceOp::kMin, nan, -inf, nan},
      {ReduceOp::kMin, -inf, nan, nan},      {ReduceOp::kMax, -0.f, 0.f, -0.f},
      {ReduceOp::kMax, 0.f, -0.f, 0.f},      {ReduceOp::kMin, 0.f, -0.f, 0.f},
      {ReduceOp::kMin, -0.f, 0.f, -0.f},     {ReduceOp::kProduct, 0.f, -inf, nan},
      {ReduceOp::kProduct, -0.f, 2.f, -0.f}, {ReduceOp::kAvg, 1e-45f, 0.f, 0.f}};
  for (const Case& c : cases) {
    if (!is_available(DataType::kF32, c.op)) continue;
    const Reduction r{DataType::kF32, c.op, 2};
    const auto bytes = [](float f) { return as_buffer(std::vector<float>(19, f)); };
    expect_reduced(r, {bytes(c.a), bytes(c.b)}, {}, StoreHint::kCached, bytes(c.result));
  }
}

TEST_P(Kernels, CopyOfEverySizeAndMisalignment) {
  std::mt19937_64 random(9);
  const Buffer bytes = reference::random_elements(DataType::kU8, 20000, random);
  const auto expect_copied = [&](std::size_t size, std::size_t from, std::size_t to) {
    const std::span<const std::byte> part(bytes.data(), size);
    for (const StoreHint hint : kHints) {
      Fenced source(part, from);
      Fenced target(size, to);
      copy(target.data(), source.data(), size, hint);
      EXPECT_TRUE(target.equals(part) && target.fences_intact())
          << size << " bytes from offset " << from << " to " << to;
    }
  };
  for (std::size_t size = 0; size <= 1200; ++size) expect_copied(size, size % 3, size % 5);
  for (std::size_t from = 0; from < 64; ++from) {
    for (std::size_t to = 0; to < 64; ++to) expect_copied(2000 + from, from, to);
  }
  expect_copied(20000, 1, 0);
}

TEST_P(Kernels, NoTargetsAndNoElementsTouchNothing) {
  const std::byte* const source = nullptr;
  std::byte* const target = nullptr;
  reduce({}, {&source, 1}, {}, 100, StoreHint::kCached);
  for (const StoreHint hint : kHints) {
    reduce({}, {&source, 1}, {&target, 1}, 0, hint);
    copy(nullptr, nullptr, 0, hint);
  }
}

std::string set_name(const testing::TestParamInfo<KernelSet>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(All, Kernels, testing::ValuesIn(kernel_sets()), set_name);

template <class Function>
Error error_of(Function function) {
  try {
    function();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorKind::kInternal, "");
}

TEST(CheckReduction, RefusesWhatHasNoMeaningAndNamesIt) {
  for (const DataType type : all_types()) {
    for (int i = 0; i < kReduceOps; ++i) {
      const auto op = static_cast<ReduceOp>(i);
      if (reference::has_meaning(type, op)) {
        EXPECT_NO_THROW(check_reduction(type, op));
        continue;
      }
      const Error error = error_of([&] { check_reduction(type, op); });
      EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find(to_string(type)), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(to_string(op)), std::string::npos) << error.what();
    }
  }
}

TEST(CheckReduction, RefusesUnknownValues) {
  const auto kind = [](int type, int op) {
    return error_of(
               [&] { check_reduction(static_cast<DataType>(type), static_cast<ReduceOp>(op)); })
        .kind();
  };
  EXPECT_EQ(kind(kDataTypes, 0), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind(0, kReduceOps), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind(255, 255), ErrorKind::kInvalidArgument);
}

TEST(Reduce, ThrowsBeforeItTouchesData) {
  float value = 1;
  auto* bytes = reinterpret_cast<std::byte*>(&value);
  const std::byte* const source = bytes;
  const auto kind = [&](const Reduction& r, std::span<const std::byte* const> sources) {
    return error_of([&] { reduce(r, sources, {&bytes, 1}, 1, StoreHint::kCached); }).kind();
  };
  EXPECT_EQ(kind({DataType::kF32, ReduceOp::kBand}, {&source, 1}), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind({DataType::kF32, ReduceOp::kAvg, 0}, {&source, 1}), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind({DataType::kF32, ReduceOp::kSum}, {}), ErrorKind::kInvalidArgument);
  EXPECT_EQ(value, 1.f);
}

TEST(Isa, ChoosesTheNamedOrTheBest) {
  EXPECT_EQ(choose_isa("portable"), Isa::kPortable);
  EXPECT_EQ(choose_isa(nullptr), supported_isas().back());
  EXPECT_EQ(choose_isa(""), supported_isas().back());
  EXPECT_EQ(error_of([] { choose_isa("sse9"); }).kind(), ErrorKind::kInvalidArgument);
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512}) {
    if (is_supported(isa)) {
      EXPECT_EQ(choose_isa(std::string(to_string(isa)).c_str()), isa);
    } else {
      EXPECT_EQ(error_of([&] { select_isa(isa); }).kind(), ErrorKind::kUnsupported);
    }
  }
}

}  // namespace
}  // namespace convoy::coll

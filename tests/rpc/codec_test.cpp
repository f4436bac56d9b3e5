// Values and tensors as bytes of a call.
#include <torch/types.h>

#include <array>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "convoy/detail/rpc_signature.h"
#include "convoy/detail/rpc_values.h"
#include "convoy/error.h"
#include "convoy/share.h"
#include "rpc/tensor_codec.h"
#include "rpc/tensor_head.h"
#include "support/expect_error.h"

namespace convoy::rpc::test {
namespace {

template <class Function>
std::optional<ErrorKind> kind_thrown(Function function) {
  const auto error = convoy::test::error_of(function);
  return error ? std::optional(error->kind()) : std::nullopt;
}

using detail::Body;
using detail::TensorMode;
using detail::ValueSource;

enum class Color : std::uint8_t { kRed = 1, kBlue = 200 };

struct Point {
  double x = 0, y = 0;
};
[[maybe_unused]] inline auto fields(Point& point) { return std::tie(point.x, point.y); }

struct Job {
  int seed = 0;
  std::optional<std::string> name;
  std::vector<Point> path;
  at::Tensor start;
  CONVOY_FIELDS(seed, name, path, start)
};

struct Tree {
  int value = 0;
  std::vector<Tree> below;
  CONVOY_FIELDS(value, below)
};

// A message as it travels.
struct Wire {
  std::vector<std::byte> body;
  std::vector<TensorMemory> pieces;
  std::vector<bool> stays;

  std::size_t piece_bytes() const {
    std::size_t bytes = 0;
    for (const auto& piece : pieces) bytes += piece.bytes.size();
    return bytes;
  }
};

template <class... T>
Wire encode_as(TensorMode mode, bool lend, const T&... values) {
  Wire wire;
  detail::with_body(
      nullptr, mode, lend,
      [&](const Body& body) {
        wire.body.resize(body.bytes);
        body.write(body.values, wire.body.data(), body.bytes);
        std::vector<at::Tensor> kept;
        for (const auto& piece : pieces_of(*body.tensors, kept)) {
          auto memory = allocate_for_tensor(piece.bytes.size());
          std::memcpy(memory.bytes.data(), piece.bytes.data(), piece.bytes.size());
          wire.pieces.push_back(std::move(memory));
          wire.stays.push_back(piece.stays);
        }
      },
      values...);
  return wire;
}
template <class T>
Wire encode(const T& value) {
  return encode_as(TensorMode::kStay, false, value);
}

template <class T>
T decode(const Wire& wire) {
  std::vector<transport::Part> parts;
  for (const auto& piece : wire.pieces) {
    parts.push_back({piece.bytes, transport::Part::Where::kPlaced, piece.hold});
  }
  std::span<transport::Part> span(parts);
  ValueSource source(wire.body.data(), wire.body.size(), &span);
  T value = source.take<T>();
  source.finish();
  return value;
}

template <class T>
T through(const T& value) {
  return decode<T>(encode(value));
}

TEST(RpcCodecTest, EveryKindOfValue) {
  EXPECT_EQ(through(true), true);
  EXPECT_EQ(through(std::int8_t{-7}), -7);
  EXPECT_EQ(through(std::uint64_t{1} << 63), std::uint64_t{1} << 63);
  EXPECT_EQ(through(1.5F), 1.5F);
  EXPECT_EQ(through(Color::kBlue), Color::kBlue);
  EXPECT_EQ(through(std::string("two\nlines\0", 10)), std::string("two\nlines\0", 10));
  EXPECT_EQ(through(std::vector<float>{1, 2, 3}), (std::vector<float>{1, 2, 3}));
  EXPECT_EQ(through(std::vector<bool>{true, false}), (std::vector<bool>{true, false}));
  EXPECT_EQ(through(std::vector<std::byte>(3)), std::vector<std::byte>(3));
  EXPECT_EQ(through(std::vector<std::string>{"a", ""}), (std::vector<std::string>{"a", ""}));
  const std::map<std::string, std::vector<int>> map = {{"a", {1}}, {"b", {}}};
  EXPECT_EQ(through(map), map);
  EXPECT_EQ(through(std::optional<int>()), std::nullopt);
  EXPECT_EQ(through(std::make_tuple(1, std::string("x"), 2.5)),
            std::make_tuple(1, std::string("x"), 2.5));
  EXPECT_EQ(through(std::array<int, 2>{4, 5}), (std::array<int, 2>{4, 5}));
  const std::variant<int, std::string, std::monostate> variant = "text";
  EXPECT_EQ(through(variant), variant);
  const Job job = through(Job{7, "job", {{1, 2}, {3, 4}}, torch::arange(4)});
  EXPECT_EQ(job.seed, 7);
  EXPECT_EQ(job.name, "job");
  EXPECT_EQ(job.path.at(1).y, 4);
  EXPECT_TRUE(job.start.equal(torch::arange(4)));
  const Tree tree = through(Tree{1, {{2, {{3, {}}}}, {4, {}}}});
  EXPECT_EQ(tree.below.at(0).below.at(0).value, 3);
}

TEST(RpcCodecTest, NumbersTakeTheirOwnWidth) {
  EXPECT_EQ(encode(std::int16_t{1}).body.size(), 2U);
  EXPECT_EQ(encode(std::vector<float>(100)).body.size(), 8U + 400);
  EXPECT_EQ(encode(std::string(100, 'x')).body.size(), 108U);
}

// The same elements, strides, type and flags.
void expect_same(const at::Tensor& a, const at::Tensor& b) {
  ASSERT_EQ(a.defined(), b.defined());
  if (!a.defined()) return;
  EXPECT_EQ(a.scalar_type(), b.scalar_type());
  EXPECT_EQ(a.layout(), b.layout());
  EXPECT_EQ(a.requires_grad(), b.requires_grad());
  EXPECT_EQ(a.sizes(), b.sizes());
  EXPECT_TRUE(b.is_leaf());
  if (a.layout() == c10::kStrided) {
    EXPECT_EQ(a.strides(), b.strides());
    EXPECT_EQ(a.is_conj(), b.is_conj());
    EXPECT_EQ(a.is_neg(), b.is_neg());
    if (!a.is_meta()) {
      EXPECT_TRUE(a.detach().resolve_conj().equal(b.detach().resolve_conj()));
    }
  } else {
    EXPECT_TRUE(a.detach().to_dense().equal(b.detach().to_dense()));
  }
}

TEST(RpcCodecTest, TensorsOfEveryType) {
  for (const auto type :
       {torch::kBool, torch::kUInt8, torch::kInt8, torch::kInt16, torch::kInt32, torch::kInt64,
        torch::kFloat16, torch::kBFloat16, torch::kFloat32, torch::kFloat64, torch::kComplexFloat,
        torch::kComplexDouble, torch::kUInt16, torch::kUInt32, torch::kUInt64}) {
    const auto small = torch::arange(6).reshape({2, 3}).to(type);
    expect_same(small, through(small));
  }
}

TEST(RpcCodecTest, TensorsOfEverySize) {
  expect_same(at::Tensor(), through(at::Tensor()));
  expect_same(torch::tensor(3.5), through(torch::tensor(3.5)));
  for (const std::int64_t n : {0, 1, 17, 512, 513, 100'003}) {
    const auto tensor = torch::arange(n, torch::kFloat);
    expect_same(tensor, through(tensor));
    EXPECT_EQ(encode(tensor).pieces.size(), n > 512 ? 1U : 0U) << n;
  }
  expect_same(torch::empty({0, 3}), through(torch::empty({0, 3})));
  expect_same(torch::empty({3, 0}).t(), through(torch::empty({3, 0}).t()));
}

TEST(RpcCodecTest, OnlyTheUsedBytesOfAViewTravel) {
  const auto matrix = torch::rand({1000, 1000});
  const auto row = matrix[7];
  EXPECT_EQ(encode(row).piece_bytes(), 4000U);
  expect_same(row, through(row));
  const auto column = matrix.select(1, 3);  // every 1000th
  EXPECT_EQ(encode(column).piece_bytes(), 4000U);
  const auto there = through(column);  // gaps that large do not come to be there
  EXPECT_TRUE(there.equal(column));
  EXPECT_EQ(there.storage().nbytes(), 4000U);
  const auto repeated = torch::rand({1, 4}).expand({100'000, 4});
  EXPECT_LT(encode(repeated).body.size(), 100U);
  expect_same(repeated, through(repeated));
}

TEST(RpcCodecTest, StridesAreKept) {
  const auto matrix = torch::rand({5, 5});
  for (const auto& view :
       {matrix.t(), matrix.narrow(1, 2, 2), matrix.narrow(1, 2, 2).t(), matrix.slice(0, 0, 5, 2),
        torch::rand({4, 1, 6}).transpose(0, 2), torch::rand({64, 64, 3}).permute({2, 0, 1}),
        torch::rand({100, 100}).narrow(1, 10, 80), torch::rand({10}).unfold(0, 3, 1),
        torch::rand({6}).as_strided({3, 3}, {1, 1})}) {
    EXPECT_FALSE(view.is_contiguous());
    expect_same(view, through(view));
  }
  const auto gaps = torch::rand({100, 100}).narrow(1, 10, 80);
  EXPECT_EQ(encode(gaps).piece_bytes(), 100U * 80 * 4);
}

TEST(RpcCodecTest, LazyConjugateAndNegative) {
  const auto numbers = torch::rand({3, 2}, torch::kComplexFloat);
  EXPECT_TRUE(numbers.conj().is_conj());
  expect_same(numbers.conj(), through(numbers.conj()));
  EXPECT_TRUE(torch::imag(numbers.conj()).is_neg());
  expect_same(torch::imag(numbers.conj()), through(torch::imag(numbers.conj())));
}

TEST(RpcCodecTest, GradientsAreRequiredAlsoOfResults) {
  const auto leaf = torch::rand({3}, torch::requires_grad());
  expect_same(leaf, through(leaf));
  const auto result = leaf * 2;
  EXPECT_FALSE(result.is_leaf());
  expect_same(result, through(result));
  EXPECT_FALSE(through(result.detach()).requires_grad());
}

TEST(RpcCodecTest, SparseNestedAndMetaTensors) {
  const auto dense = torch::tensor({{0, 1, 0, 0}, {2, 0, 0, 3}}, torch::kFloat);
  for (const auto& sparse : {dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(),
                             dense.to_sparse_bsr({1, 2}), dense.to_sparse_bsc({2, 1})}) {
    expect_same(sparse, through(sparse));
  }
  const auto coo = torch::sparse_coo_tensor(torch::tensor({{0, 0, 1}, {2, 2, 0}}),
                                            torch::rand({3, 2000}), {2, 3, 2000});
  EXPECT_FALSE(through(coo).is_coalesced());
  expect_same(coo, through(coo));
  EXPECT_GE(encode(coo).pieces.size(), 1U);
  const auto with_gradient = dense.to_sparse().requires_grad_();
  expect_same(with_gradient, through(with_gradient));
  const auto meta = torch::empty({3, 2}, torch::kMeta).t();
  expect_same(meta, through(meta));
  const auto nested =
      at::_nested_tensor_from_tensor_list({torch::rand({2, 3}), torch::rand({1, 3})});
  const auto there = through(nested);
  EXPECT_TRUE(there.is_nested());
  EXPECT_TRUE(there.unbind()[1].equal(nested.unbind()[1]));
}

TEST(RpcCodecTest, ACalleesWritesStayThere) {
  const auto tensor = torch::zeros({1000});
  through(tensor).fill_(1);
  EXPECT_EQ(tensor.sum().item<float>(), 0);
}

// Large ones lie in memory that they took over, small ones in memory of the pool.
TEST(RpcCodecTest, WhatArrivedCanBeResized) {
  for (const std::int64_t size : {3, 100'000}) {
    at::Tensor tensor = through(at::arange(size));
    tensor.resize_({2 * size});
    EXPECT_TRUE(tensor.slice(0, 0, size).equal(at::arange(size)));
    const at::Tensor ones = at::ones({size, 4}, at::kLong);
    at::add_out(tensor, ones, ones);
    EXPECT_EQ(tensor.sum().item<std::int64_t>(), 8 * size);
  }
}

TEST(RpcCodecTest, ManyTensorsOfAllSizes) {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 400; ++i) tensors.push_back(torch::full({i % 3 == 0 ? 2000 : 2}, i));
  const auto there = through(tensors);
  ASSERT_EQ(there.size(), tensors.size());
  for (std::size_t i = 0; i < there.size(); ++i) expect_same(tensors[i], there[i]);
  std::vector<at::Tensor> large(300, torch::rand({1000}));
  const Wire wire = encode(large);
  EXPECT_EQ(wire.pieces.size(), kMostTensorPieces);  // the rest is in the message
  for (const auto& tensor : decode<std::vector<at::Tensor>>(wire)) expect_same(large[0], tensor);
}

TEST(RpcCodecTest, ResultsThatOthersCanReachDoNotStay) {
  const auto encode_result = [](const at::Tensor& result) -> bool {
    return encode_as(TensorMode::kResult, false, result).stays.at(0);
  };
  const auto global = torch::rand({100'000});
  EXPECT_FALSE(encode_result(at::Tensor(global)));
  EXPECT_FALSE(encode_result(global.view({10, 10'000})));
  EXPECT_TRUE(encode_result(torch::rand({100'000})));
  EXPECT_TRUE(encode_result(global.narrow(0, 0, 50'000).view({100, 500}).narrow(1, 0, 400)));
  EXPECT_FALSE(encode_as(TensorMode::kCopy, false, global).stays.at(0));
  EXPECT_TRUE(encode_as(TensorMode::kStay, false, global).stays.at(0));
  // Memory that is not the tensor's can be written to, or be gone, while it is read.
  std::vector<float> foreign(10'000);
  const auto size = static_cast<std::int64_t>(foreign.size());
  EXPECT_FALSE(encode_result(torch::from_blob(foreign.data(), {size})));
  EXPECT_FALSE(encode_result(torch::from_blob(foreign.data(), {size}, [](void*) {})));
  EXPECT_FALSE(
      encode_as(TensorMode::kStay, false, torch::from_blob(foreign.data(), {size})).stays.at(0));
  EXPECT_TRUE(encode_result(through(global))) << "what came with a message is ours";
}

TEST(RpcCodecTest, LentTensorsAreTheSameMemory) {
  const auto shared = share::empty({100'000}).zero_();
  const Wire wire = encode_as(TensorMode::kStay, true, shared);
  EXPECT_EQ(wire.piece_bytes(), 0U);
  decode<at::Tensor>(wire).fill_(3);
  EXPECT_EQ(shared[99'999].item<float>(), 3);
  const auto own = torch::zeros({1000});  // was not shared before: it is copied
  decode<at::Tensor>(encode_as(TensorMode::kStay, true, own)).fill_(3);
  EXPECT_EQ(own.sum().item<float>(), 0);
  EXPECT_FALSE(share::is_shared(own));
}

TEST(RpcCodecTest, WhatCannotBePassedIsNamed) {
  const auto quantized = at::quantize_per_tensor(torch::rand({3}), 0.1, 0, torch::kQInt8);
  EXPECT_EQ(kind_thrown([&] { static_cast<void>(encode(quantized)); }), ErrorKind::kUnsupported);
  const auto freed = torch::rand({10});
  freed.storage().unsafeGetStorageImpl()->set_nbytes(0);
  EXPECT_EQ(kind_thrown([&] { static_cast<void>(encode(freed)); }), ErrorKind::kInvalidArgument);
  for (const std::int64_t dimensions : {65, 256, 300}) {
    std::vector<std::int64_t> sizes(static_cast<std::size_t>(dimensions), 1);
    sizes.front() = 2;
    for (const auto& tensor :
         {torch::empty(sizes), torch::empty(sizes).transpose(0, dimensions - 1),
          torch::empty(sizes).expand(sizes).narrow(0, 0, 1)}) {
      EXPECT_EQ(kind_thrown([&] { static_cast<void>(encode(tensor)); }), ErrorKind::kUnsupported)
          << dimensions;
    }
  }
  const auto most = torch::ones(std::vector<std::int64_t>(64, 1));
  const auto back = decode<at::Tensor>(encode(most));
  EXPECT_EQ(back.sizes(), most.sizes());
  EXPECT_EQ(back.item<float>(), 1);
}

// --- Bytes that may be anything ---------------------------------------------------------------

using Everything = std::tuple<std::vector<at::Tensor>, std::string, std::vector<Job>,
                              std::variant<int, std::string>, std::vector<float>, bool>;

Wire sample() {
  const auto dense = torch::tensor({{0, 1}, {2, 0}}, torch::kFloat);
  return encode(Everything{{torch::rand({2, 3}, torch::requires_grad()), torch::rand({5, 5}).t(),
                            torch::rand({5, 5}).narrow(1, 1, 2), dense.to_sparse(),
                            dense.to_sparse_csr(), at::Tensor(), torch::rand({1000})},
                           "text",
                           {{1, "job", {{1, 2}}, torch::rand({2})}},
                           "other",
                           {1, 2, 3},
                           true});
}

// kInvalidArgument or a value; nothing else.
void expect_survives(const Wire& wire) {
  try {
    decode<Everything>(wire);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument) << error.what();
  } catch (const c10::Error&) {  // parts of a sparse tensor that do not fit together
  }
}

TEST(RpcCodecHostileTest, CutOffAnywhere) {
  const Wire whole = sample();
  for (std::size_t n = 0; n < whole.body.size(); ++n) {
    Wire wire = whole;
    wire.body.resize(n);
    EXPECT_EQ(kind_thrown([&] { static_cast<void>(decode<Everything>(wire)); }),
              ErrorKind::kInvalidArgument)
        << n;
  }
  Wire longer = whole;
  longer.body.push_back({});
  EXPECT_EQ(kind_thrown([&] { static_cast<void>(decode<Everything>(longer)); }),
            ErrorKind::kInvalidArgument);
  Wire without = whole;
  without.pieces.clear();
  EXPECT_EQ(kind_thrown([&] { static_cast<void>(decode<Everything>(without)); }),
            ErrorKind::kInvalidArgument);
}

TEST(RpcCodecHostileTest, ChangedBytes) {
  const Wire whole = sample();
  std::mt19937 random(7);
  for (int i = 0; i < 20'000; ++i) {
    Wire wire = whole;
    for (int changes = 1 + static_cast<int>(random() % 3); changes > 0; --changes) {
      const std::size_t at = random() % wire.body.size();
      constexpr std::array<unsigned, 6> kBytes = {0, 1, 0x7f, 0x80, 0xff, 8};
      wire.body[at] =
          static_cast<std::byte>(random() % 2 == 0 ? kBytes[random() % 6] : random() % 256);
    }
    expect_survives(wire);
  }
}

// A tensor with this head, and four bytes.
Wire with_head(const std::function<void(TensorHead&)>& change) {
  TensorHead head;
  head.kind = TensorKind::kExtent;
  head.type = static_cast<std::uint8_t>(torch::kFloat);
  head.dimensions = 1;
  head.bytes = 4;
  head.sizes[0] = 1;
  head.strides[0] = 1;
  change(head);
  Wire wire;
  wire.body.resize(TensorHead::wire_bytes(head.dimensions, (head.flags & 8) != 0) + 4);
  WireWriter out{std::span<std::byte>(wire.body)};
  head.write(out);
  return wire;
}

TEST(RpcCodecHostileTest, HeadsThatLie) {
  EXPECT_EQ(decode<at::Tensor>(with_head([](TensorHead&) {})).numel(), 1);
  const std::vector<std::function<void(TensorHead&)>> lies = {
      [](TensorHead& h) { h.sizes[0] = 2; },
      [](TensorHead& h) { h.sizes[0] = -1; },
      [](TensorHead& h) { h.sizes[0] = INT64_MAX; },
      [](TensorHead& h) { h.bytes = UINT64_MAX; },
      [](TensorHead& h) { h.bytes = 8, h.sizes[0] = 2; },
      [](TensorHead& h) { h.type = 200; },
      [](TensorHead& h) { h.type = static_cast<std::uint8_t>(torch::kQInt8); },
      [](TensorHead& h) { h.piece = 1; },
      [](TensorHead& h) { h.piece = UINT32_MAX; },
      [](TensorHead& h) { h.kind = static_cast<TensorKind>(9); },
      [](TensorHead& h) { h.kind = TensorKind::kUndefined; },
      [](TensorHead& h) { h.kind = TensorKind::kLent, h.dimensions = 0; },
      [](TensorHead& h) { h.kind = TensorKind::kHandle, h.dimensions = 0; },
      [](TensorHead& h) { h.flags = TensorHead::kConjugate; },
      [](TensorHead& h) { h.flags = 128; },
      [](TensorHead& h) {
        h.flags = TensorHead::kRequiresGrad;
        h.type = static_cast<std::uint8_t>(torch::kInt32);
      },
      // Four bytes that would become memory without end.
      [](TensorHead& h) {
        h.kind = TensorKind::kPacked;
        h.flags = TensorHead::kStrides;
        h.type = static_cast<std::uint8_t>(torch::kInt8);
        h.sizes[0] = 4;
        h.strides[0] = std::int64_t{1} << 40;
      },
      [](TensorHead& h) {
        h.flags = TensorHead::kStrides;
        h.sizes[0] = 2;
        h.strides[0] = INT64_MAX;
      },
      [](TensorHead& h) {
        h.dimensions = 2;
        h.sizes[0] = h.sizes[1] = std::int64_t{1} << 32;
      },
  };
  for (std::size_t i = 0; i < lies.size(); ++i) {
    EXPECT_EQ(kind_thrown([&] { static_cast<void>(decode<at::Tensor>(with_head(lies[i]))); }),
              ErrorKind::kInvalidArgument)
        << i;
  }
}

TEST(RpcCodecHostileTest, TreesWithoutEnd) {
  Wire wire;
  for (int i = 0; i < 1'000'000; ++i) {
    const std::array<std::uint8_t, 12> level = {7, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0};
    for (const auto byte : level) wire.body.push_back(std::byte{byte});
  }
  EXPECT_EQ(kind_thrown([&] { static_cast<void>(decode<Tree>(wire)); }),
            ErrorKind::kInvalidArgument);
}

TEST(RpcCodecHostileTest, CountsWithoutValues) {
  Wire wire;
  wire.body.resize(8, std::byte{0x7f});
  EXPECT_EQ(kind_thrown([&] { static_cast<void>(decode<std::string>(wire)); }),
            ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind_thrown([&] { static_cast<void>(decode<std::vector<double>>(wire)); }),
            ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind_thrown([&] { static_cast<void>(decode<std::vector<Job>>(wire)); }),
            ErrorKind::kInvalidArgument);
}

// --- Signatures -------------------------------------------------------------------------------

template <class T>
std::string described() {
  detail::Describer text;
  text.add<T>();
  return text.text();
}

TEST(RpcCodecTest, SignaturesTellOfFields) {
  EXPECT_EQ(described<at::Tensor>(), "at::Tensor");
  EXPECT_NE(described<Job>().find("Job{int, std::optional<std::string>"), std::string::npos)
      << described<Job>();
  EXPECT_NE(described<Tree>().find("Tree{int, std::vector<"), std::string::npos);
  static_assert(detail::is_passable<std::tuple<Job, std::map<std::string, at::Tensor>>>());
}

}  // namespace
}  // namespace convoy::rpc::test

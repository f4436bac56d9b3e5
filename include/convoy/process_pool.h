#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "convoy/deadline.h"
#include "convoy/error.h"
#include "convoy/functions.h"
#include "convoy/spawn.h"
#include "convoy/values.h"

namespace convoy {

struct ProcessPoolOptions {
  // Of one call of map() without a deadline.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  // How often an item is tried again whose worker died. What the function throws is not.
  int retries = 0;
  std::vector<std::string> environment = {};  // as in ProcessOptions
};

namespace detail {

template <auto Function>
struct Task {
  using Values = typename SignatureOf<Function>::Values;
  using Result = typename SignatureOf<Function>::Result;

  static share::Message run(int, share::ValueReader& arguments) {
    auto values = arguments.take<Values>();
    share::Message result;
    share::put(result, std::apply([](auto&... value) { return Function(value...); }, values));
    return result;
  }
  static inline const FunctionEntry* const kEntry =
      &register_function<Function>(FunctionUse::kItem, &run);
};

}  // namespace detail

// What became of an item.
template <class T>
struct ItemResult {
  std::optional<T> value;
  std::optional<Error> error;  // if there is no value
};

// Processes that apply functions to items.
//
//   double score(const at::Tensor& position) { ... }
//
//   convoy::ProcessPool pool(4);                      // main has called convoy::start()
//   const std::vector<double> scores = pool.map<score>(positions);
//
// A worker that dies is replaced by another. Items and results are what convoy/values.h knows;
// tensors are shared. map() of several threads take turns. The destructor ends the workers.
class ProcessPool {
 public:
  // kInvalidArgument in a program whose main has not called start(); kResource.
  explicit ProcessPool(int workers, const ProcessPoolOptions& options = {});
  ProcessPool(const ProcessPool&) = delete;
  ProcessPool& operator=(const ProcessPool&) = delete;
  ~ProcessPool();

  // Function(item) for each item, in some worker; the results in the order of the items. After all
  // items were tried, throws the error of the first that failed: kRemote with what the function
  // threw, kPeerLost if its worker died (`retries`), kTimeout. Items that are tuples are the
  // function's arguments.
  template <auto Function, class Items>
  auto map(const Items& items) {
    return map<Function>(items, deadline());
  }
  template <auto Function, class Items>
  auto map(const Items& items, const Deadline& deadline) {
    auto outcomes = try_map<Function>(items, deadline);
    std::vector<typename detail::Task<Function>::Result> results;
    for (auto& outcome : outcomes) {
      if (outcome.error) throw *outcome.error;
      results.push_back(std::move(*outcome.value));
    }
    return results;
  }
  // The same, with what became of each item.
  template <auto Function, class Items>
  auto try_map(const Items& items) {
    return try_map<Function>(items, deadline());
  }
  template <auto Function, class Items>
  auto try_map(const Items& items, const Deadline& deadline) {
    using Task = detail::Task<Function>;
    static_assert(!std::is_void_v<typename Task::Result>, "map: the function returns a value");
    std::vector<share::Message> requests;
    for (const auto& item : items) {
      requests.push_back(detail::function_request(*Task::kEntry));
      share::put(requests.back(), arguments<typename Task::Values>(item));
    }
    std::vector<ItemResult<typename Task::Result>> outcomes;
    for (Answer& answer : run(requests, deadline)) {
      auto& outcome = outcomes.emplace_back();
      if (answer.error) {
        outcome.error = std::move(answer.error);
      } else {
        outcome.value = share::ValueReader(answer.result, 1).take<typename Task::Result>();
      }
    }
    return outcomes;
  }

  std::size_t size() const;
  std::vector<int> pids() const;
  // Workers that were replaced.
  std::size_t replaced() const;

 private:
  struct Impl;
  struct Answer {
    share::Message result;
    std::optional<Error> error;
  };
  // One argument, or a tuple of all of them.
  template <class Values, class Item>
  static Values arguments(const Item& item) {
    if constexpr (std::is_convertible_v<Item, Values>) {
      return item;
    } else {
      return Values(item);
    }
  }
  std::vector<Answer> run(const std::vector<share::Message>& requests, const Deadline& deadline);
  Deadline deadline() const;

  const std::unique_ptr<Impl> impl_;
};

}  // namespace convoy

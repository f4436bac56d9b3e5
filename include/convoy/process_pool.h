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
  // Timeout of a map() without a deadline.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  // How often an item is retried after its worker died. An item whose function threw is not
  // retried.
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

// The result of one item: a value or an error.
template <class T>
struct ItemResult {
  std::optional<T> value;
  std::optional<Error> error;  // set if there is no value
};

// Processes that apply functions to items.
//
//   double score(const at::Tensor& position) { ... }
//
//   convoy::ProcessPool pool(4);                      // main has called convoy::start()
//   const std::vector<double> scores = pool.map<score>(positions);
//
// A worker that dies is replaced by another. Items and results may be of the types of
// convoy/values.h. Tensors are shared, not copied. Thread-safe: concurrent calls of map() take
// turns. In a forked child map() throws kUnsupported. The destructor ends the workers, and kills
// those that are still busy after 5 s.
class ProcessPool {
 public:
  // Throws kInvalidArgument if main has not called start(), or if `workers` is less than 1;
  // kResource if a process cannot be started.
  explicit ProcessPool(int workers, const ProcessPoolOptions& options = {});
  ProcessPool(const ProcessPool&) = delete;
  ProcessPool& operator=(const ProcessPool&) = delete;
  ~ProcessPool();

  // Calls Function(item) for each item, on some worker. Blocks until all items were tried, and
  // returns the results in the order of the items. An item that is a tuple holds all arguments of
  // the function. Throws the error of the first item that failed: kRemote if the function threw,
  // kPeerLost if its worker died (after `retries`), kTimeout if it had not finished by the
  // deadline.
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
  // The same, but returns the value or the error of each item.
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
  // How many workers were replaced so far.
  std::size_t replaced() const;

 private:
  struct Impl;
  struct Answer {
    share::Message result;
    std::optional<Error> error;
  };
  // An item is the only argument, or a tuple of all arguments.
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

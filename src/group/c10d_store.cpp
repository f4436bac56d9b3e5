#include "convoy/c10d_store.h"

#include <algorithm>
#include <mutex>
#include <system_error>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <type_traits>

#include "base/error.h"
#include "base/id.h"
#include "os/fork_guard.h"

namespace convoy {
namespace {

using Bytes = std::vector<std::uint8_t>;
using std::chrono::milliseconds;

std::string_view text_of(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
Bytes bytes_of(std::string_view text) { return {text.begin(), text.end()}; }

// Runs `function`; our errors become torch's.
template <class Function>
std::invoke_result_t<Function> as_torch(Function function) {
  try {
    return function();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kTimeout) C10_THROW_ERROR(DistStoreError, error.what());
    C10_THROW_ERROR(DistNetworkError, error.what());
  }
}

// Runs `function`; torch's errors become ours.
template <class Function>
std::invoke_result_t<Function> as_ours(Function function) {
  try {
    return function();
  } catch (const c10::DistStoreError& error) {
    fail(ErrorKind::kTimeout, "torch's store: ", error.what_without_backtrace());
  } catch (const c10::NotImplementedError& error) {
    fail(ErrorKind::kUnsupported, "torch's store: ", error.what_without_backtrace());
  } catch (const c10::Error& error) {
    fail(ErrorKind::kPeerLost, "torch's store: ", error.what_without_backtrace());
  } catch (const std::system_error& error) {  // FileStore's
    fail(ErrorKind::kPeerLost, "torch's store: ", error.what());
  }
}

class TorchStore final : public c10d::Store {
 public:
  using c10d::Store::compareSet;
  using c10d::Store::set;

  explicit TorchStore(std::shared_ptr<convoy::Store> store, milliseconds timeout)
      : c10d::Store(timeout), store_(std::move(store)) {}

  const std::shared_ptr<convoy::Store>& inner() const { return store_; }

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<TorchStore>(store_, timeout_);
  }
  void set(const std::string& key, const Bytes& value) override {
    as_torch([&] { store_->set(key, text_of(value)); });
  }
  Bytes compareSet(const std::string& key, const Bytes& current, const Bytes& next) override {
    return as_torch(
        [&] { return bytes_of(store_->compare_set(key, text_of(current), text_of(next))); });
  }
  Bytes get(const std::string& key) override {
    return as_torch([&] { return bytes_of(store_->get(key, deadline(timeout_))); });
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    return as_torch([&] { return store_->add(key, value); });
  }
  bool deleteKey(const std::string& key) override {
    return as_torch([&] { return store_->erase(key); });
  }
  bool check(const std::vector<std::string>& keys) override {
    return as_torch([&] { return store_->check(keys); });
  }
  std::int64_t getNumKeys() override {
    return as_torch([&] { return static_cast<std::int64_t>(store_->keys("").size()); });
  }
  std::vector<std::string> listKeys() override {
    return as_torch([&] { return store_->keys(""); });
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    as_torch([&] { store_->wait(keys, deadline(timeout)); });
  }
  void append(const std::string& key, const Bytes& value) override {
    as_torch([&] { store_->append(key, text_of(value)); });
  }
  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override {
    return as_torch([&] {
      const Deadline until = deadline(timeout_);
      std::vector<Bytes> values;
      for (const auto& key : keys) values.push_back(bytes_of(store_->get(key, until)));
      return values;
    });
  }
  void multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) override {
    TORCH_CHECK(keys.size() == values.size(), "multiSet: ", keys.size(), " keys and ",
                values.size(), " values");
    for (std::size_t i = 0; i < keys.size(); ++i) set(keys[i], values[i]);
  }
  bool hasExtendedApi() const override { return true; }

 private:
  // Torch means "no limit" by a time-out of 0.
  static Deadline deadline(milliseconds timeout) {
    return timeout == kNoTimeout ? Deadline::never() : Deadline::after(timeout);
  }

  const std::shared_ptr<convoy::Store> store_;
};

// Torch's stores answer one request at a time and know no deadline for most of them: calls are
// serialised, and waiting is done by polling in small steps, so that a waiting thread does not keep
// the others out.
class ForeignStore final : public Store {
 public:
  using Store::get;

  explicit ForeignStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
  // Its connection is the parent's in a forked child, and so are a server's threads.
  ~ForeignStore() override {
    if (!home_.is_here()) static_cast<void>(store_.release());
  }
  ForeignStore(const ForeignStore&) = delete;
  ForeignStore& operator=(const ForeignStore&) = delete;

  void set(const std::string& key, std::string_view value) override {
    locked([&] { store_->set(key, bytes_of(value)); });
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    wait({&key, 1}, deadline);
    return locked([&] { return std::string(text_of(store_->get(key))); });
  }
  std::optional<std::string> try_get(const std::string& key) override {
    return locked([&]() -> std::optional<std::string> {
      if (!store_->check({key})) return std::nullopt;
      return std::string(text_of(store_->get(key)));
    });
  }
  void wait(std::span<const std::string> keys, const Deadline& deadline) override {
    poll_until(
        deadline, [&] { return check(keys); },
        [&] {
          std::string missing;
          for (const auto& key : keys) {
            if (!check({&key, 1})) missing += concat(missing.empty() ? "key '" : ", '", key, "'");
          }
          return missing;
        });
  }
  bool check(std::span<const std::string> keys) override {
    return locked([&] { return store_->check({keys.begin(), keys.end()}); });
  }
  std::int64_t add(const std::string& key, std::int64_t delta) override {
    return locked([&] { return store_->add(key, delta); });
  }
  void append(const std::string& key, std::string_view value) override {
    locked([&] { store_->append(key, bytes_of(value)); });
  }
  std::string compare_set(const std::string& key, std::string_view expected,
                          std::string_view desired) override {
    return locked([&] {
      return std::string(text_of(store_->compareSet(key, bytes_of(expected), bytes_of(desired))));
    });
  }
  bool erase(const std::string& key) override {
    return locked([&] { return store_->deleteKey(key); });
  }
  std::vector<std::string> keys(const std::string& prefix) override {
    auto all = locked([&] { return store_->listKeys(); });
    std::erase_if(all, [&](const auto& key) { return !key.starts_with(prefix); });
    std::sort(all.begin(), all.end());
    return all;
  }
  // Torch's stores do not number changes: a hash of the value stands for its version.
  Versioned watch(const std::string& key, std::uint64_t since, const Deadline& deadline) override {
    Versioned now;
    poll_until(
        deadline,
        [&] {
          now.value = try_get(key);
          now.version = now.value ? hash_text(*now.value) | 1 : 0;
          return now.version != since;
        },
        [&] { return concat("a change of key '", key, "'"); });
    return now;
  }
  milliseconds timeout() const override { return store_->getTimeout(); }

 private:
  template <class Function>
  std::invoke_result_t<Function> locked(Function function) {
    // Both would speak on one connection, and the parent would get the child's answers.
    if (!home_.is_here()) {
      fail(ErrorKind::kUnsupported,
           "torch's store: this process is a forked child of the one that connected to it; connect "
           "again in the child");
    }
    const std::lock_guard lock(mutex_);
    return as_ours(function);
  }

  template <class Ready, class Missing>
  static void poll_until(const Deadline& deadline, Ready ready, Missing missing) {
    auto pause = std::chrono::microseconds(50);
    while (!ready()) {
      if (deadline.expired()) {
        fail(ErrorKind::kTimeout, "store: timed out waiting for ", missing());
      }
      std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause, deadline.remaining()));
      pause = std::min(pause * 2, std::chrono::microseconds(10'000));
    }
  }

  const HomeProcess home_;
  c10::intrusive_ptr<c10d::Store> store_;  // changed at the end only
  std::mutex mutex_;
};

}  // namespace

c10::intrusive_ptr<c10d::Store> to_c10d(std::shared_ptr<Store> store) {
  if (!store) fail(ErrorKind::kInvalidArgument, "to_c10d: no store");
  const auto timeout = store->timeout();
  return c10::make_intrusive<TorchStore>(std::move(store), timeout);
}

std::shared_ptr<Store> from_c10d(c10::intrusive_ptr<c10d::Store> store) {
  if (!store) fail(ErrorKind::kInvalidArgument, "from_c10d: the store is nullptr");
  if (const auto* ours = dynamic_cast<TorchStore*>(store.get())) return ours->inner();
  return std::make_shared<ForeignStore>(std::move(store));
}

}  // namespace convoy

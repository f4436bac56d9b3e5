#include "base/error.h"
#include "convoy/store.h"

namespace convoy {
namespace {

class PrefixStore final : public Store {
 public:
  using Store::get;

  PrefixStore(std::shared_ptr<Store> store, std::string prefix)
      : store_(std::move(store)), prefix_(std::move(prefix)) {}

  void set(const std::string& key, std::string_view value) override {
    store_->set(prefix_ + key, value);
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    return store_->get(prefix_ + key, deadline);
  }
  std::optional<std::string> try_get(const std::string& key) override {
    return store_->try_get(prefix_ + key);
  }
  void wait(std::span<const std::string> keys, const Deadline& deadline) override {
    store_->wait(prefixed(keys), deadline);
  }
  bool check(std::span<const std::string> keys) override { return store_->check(prefixed(keys)); }
  std::int64_t add(const std::string& key, std::int64_t delta) override {
    return store_->add(prefix_ + key, delta);
  }
  void append(const std::string& key, std::string_view value) override {
    store_->append(prefix_ + key, value);
  }
  std::string compare_set(const std::string& key, std::string_view expected,
                          std::string_view desired) override {
    return store_->compare_set(prefix_ + key, expected, desired);
  }
  bool erase(const std::string& key) override { return store_->erase(prefix_ + key); }
  std::vector<std::string> keys(const std::string& prefix) override {
    auto found = store_->keys(prefix_ + prefix);
    for (auto& key : found) key.erase(0, prefix_.size());
    return found;
  }
  Versioned watch(const std::string& key, std::uint64_t since, const Deadline& deadline) override {
    return store_->watch(prefix_ + key, since, deadline);
  }
  std::chrono::milliseconds timeout() const override { return store_->timeout(); }

 private:
  std::vector<std::string> prefixed(std::span<const std::string> keys) const {
    std::vector<std::string> result;
    result.reserve(keys.size());
    for (const auto& key : keys) result.push_back(prefix_ + key);
    return result;
  }

  const std::shared_ptr<Store> store_;
  const std::string prefix_;  // with its "/"
};

}  // namespace

std::shared_ptr<Store> with_prefix(std::shared_ptr<Store> store, const std::string& prefix) {
  if (!store) fail(ErrorKind::kInvalidArgument, "with_prefix('", prefix, "'): no store");
  return std::make_shared<PrefixStore>(std::move(store), prefix + "/");
}

}  // namespace convoy

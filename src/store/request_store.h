#pragma once

#include "convoy/store.h"
#include "store/protocol.h"

namespace convoy {

// The Store interface over an exchange of messages: what differs between the connected and the
// in-process store is only how a request gets its reply.
class RequestStore : public Store {
 public:
  using Store::get;

  void set(const std::string& key, std::string_view value) override;
  std::string get(const std::string& key, const Deadline& deadline) override;
  std::optional<std::string> try_get(const std::string& key) override;
  void wait(std::span<const std::string> keys, const Deadline& deadline) override;
  bool check(std::span<const std::string> keys) override;
  std::int64_t add(const std::string& key, std::int64_t delta) override;
  void append(const std::string& key, std::string_view value) override;
  std::string compare_set(const std::string& key, std::string_view expected,
                          std::string_view desired) override;
  bool erase(const std::string& key) override;
  std::vector<std::string> keys(const std::string& prefix) override;
  Versioned watch(const std::string& key, std::uint64_t since, const Deadline& deadline) override;
  std::chrono::milliseconds timeout() const override { return kDefaultTimeout; }

 protected:
  // Sends the request (its id is not set yet) and returns the reply; throws what the reply says.
  // The request carries the time left until `deadline`, so the other side times out first and can
  // say what is missing.
  virtual StoreMessage exchange(StoreMessage request, const Deadline& deadline) = 0;

 private:
  StoreMessage ask(StoreOp op, std::vector<std::string> parts, std::int64_t number = 0);
  StoreMessage ask_until(StoreOp op, std::vector<std::string> parts, std::int64_t number,
                         const Deadline& deadline);
};

}  // namespace convoy

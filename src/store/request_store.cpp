#include "store/request_store.h"

#include "base/error.h"

namespace convoy {
namespace {

std::string only_part(StoreMessage& reply) {
  if (reply.parts.size() != 1) {
    fail(ErrorKind::kInternal, "store: a reply with ", reply.parts.size(), " parts instead of 1");
  }
  return std::move(reply.parts[0]);
}

std::vector<std::string> copy_of(std::span<const std::string> keys) {
  return {keys.begin(), keys.end()};
}

}  // namespace

StoreMessage RequestStore::ask(StoreOp op, std::vector<std::string> parts, std::int64_t number) {
  return exchange(
      {.code = static_cast<std::uint8_t>(op), .number = number, .parts = std::move(parts)},
      Deadline::after(timeout()));
}

StoreMessage RequestStore::ask_until(StoreOp op, std::vector<std::string> parts,
                                     std::int64_t number, const Deadline& deadline) {
  const auto left = std::chrono::ceil<std::chrono::microseconds>(deadline.remaining()).count();
  return exchange(
      {.code = static_cast<std::uint8_t>(op),
       .number = number,
       .timeout_us = deadline.is_never() ? UINT64_MAX : static_cast<std::uint64_t>(left),
       .parts = std::move(parts)},
      deadline);
}

void RequestStore::set(const std::string& key, std::string_view value) {
  ask(StoreOp::kSet, {key, std::string(value)});
}

std::string RequestStore::get(const std::string& key, const Deadline& deadline) {
  auto reply = ask_until(StoreOp::kGet, {key}, 0, deadline);
  return only_part(reply);
}

std::optional<std::string> RequestStore::try_get(const std::string& key) {
  auto reply = ask(StoreOp::kTryGet, {key});
  if (reply.parts.empty()) return std::nullopt;
  return only_part(reply);
}

void RequestStore::wait(std::span<const std::string> keys, const Deadline& deadline) {
  ask_until(StoreOp::kWait, copy_of(keys), 0, deadline);
}

bool RequestStore::check(std::span<const std::string> keys) {
  return ask(StoreOp::kCheck, copy_of(keys)).number != 0;
}

std::int64_t RequestStore::add(const std::string& key, std::int64_t delta) {
  return ask(StoreOp::kAdd, {key}, delta).number;
}

void RequestStore::append(const std::string& key, std::string_view value) {
  ask(StoreOp::kAppend, {key, std::string(value)});
}

std::string RequestStore::compare_set(const std::string& key, std::string_view expected,
                                      std::string_view desired) {
  auto reply = ask(StoreOp::kCompareSet, {key, std::string(expected), std::string(desired)});
  return only_part(reply);
}

bool RequestStore::erase(const std::string& key) { return ask(StoreOp::kErase, {key}).number != 0; }

std::vector<std::string> RequestStore::keys(const std::string& prefix) {
  return ask(StoreOp::kKeys, {prefix}).parts;
}

Store::Versioned RequestStore::watch(const std::string& key, std::uint64_t since,
                                     const Deadline& deadline) {
  auto reply = ask_until(StoreOp::kWatch, {key}, static_cast<std::int64_t>(since), deadline);
  Versioned result{.version = static_cast<std::uint64_t>(reply.number)};
  if (!reply.parts.empty()) result.value = only_part(reply);
  return result;
}

}  // namespace convoy

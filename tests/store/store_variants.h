#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "convoy/error.h"
#include "convoy/store.h"
#include "os/file.h"
#include "store/server.h"
#include "support/deadlines.h"
#include "support/eventually.h"

namespace convoy::test {

// What the call throws; nullopt if it returns.
std::optional<Error> error_of(const std::function<void()>& call);

// EXPECT_ERROR(kTimeout, "no key 'a'", store->get("a", at_once()));
#define EXPECT_ERROR(expected_kind, part, ...)                                              \
  do {                                                                                      \
    const auto caught = ::convoy::test::error_of([&] { static_cast<void>(__VA_ARGS__); });  \
    ASSERT_TRUE(caught.has_value()) << "did not throw: " #__VA_ARGS__;                      \
    EXPECT_EQ(caught->kind(), ::convoy::ErrorKind::expected_kind) << caught->what();        \
    EXPECT_NE(std::string(caught->what()).find(part), std::string::npos) << caught->what(); \
  } while (false)

enum class StoreVariant { kLocal, kSocket, kPath, kPrefixLocal, kPrefixSocket, kPrefixPath };

// One store of the given kind and as many clients of it as asked for.
class StoreWorld {
 public:
  explicit StoreWorld(StoreVariant variant);

  std::shared_ptr<Store> client();
  // nullptr: the store is in-process.
  StoreServer* server() { return server_.get(); }
  void destroy_server() { server_.reset(); }
  // Returns when so many requests wait. Only the server can tell; at once for an in-process store.
  void await_waiting(std::size_t count);

 private:
  const StoreVariant variant_;
  std::shared_ptr<Store> local_;
  std::optional<TempFolder> folder_;
  std::unique_ptr<StoreServer> server_;
  std::string path_;
};

std::string name_of(StoreVariant variant);
inline void PrintTo(StoreVariant variant, std::ostream* out) { *out << name_of(variant); }
inline std::string variant_name(const testing::TestParamInfo<StoreVariant>& info) {
  return name_of(info.param);
}
inline auto all_variants() {
  return testing::Values(StoreVariant::kLocal, StoreVariant::kSocket, StoreVariant::kPath,
                         StoreVariant::kPrefixLocal, StoreVariant::kPrefixSocket,
                         StoreVariant::kPrefixPath);
}

}  // namespace convoy::test

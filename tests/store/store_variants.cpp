#include "store_variants.h"

#include <thread>

#include "store/socket_store.h"

namespace convoy::test {

std::optional<Error> error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

StoreWorld::StoreWorld(StoreVariant variant) : variant_(variant) {
  switch (variant) {
    case StoreVariant::kLocal:
    case StoreVariant::kPrefixLocal: local_ = make_local_store(); break;
    case StoreVariant::kPath:
    case StoreVariant::kPrefixPath:
      folder_.emplace("store");
      server_ = std::make_unique<StoreServer>();
      path_ = server_->listen(folder_->path() + "/private", "socket");
      break;
    case StoreVariant::kSocket:
    case StoreVariant::kPrefixSocket: server_ = std::make_unique<StoreServer>(); break;
  }
}

std::shared_ptr<Store> StoreWorld::client() {
  switch (variant_) {
    case StoreVariant::kLocal: return local_;
    case StoreVariant::kSocket: return make_socket_store(Socket(server_->connect()));
    case StoreVariant::kPath: return connect_store(path_, soon());
    case StoreVariant::kPrefixLocal: return with_prefix(local_, "outer");
    case StoreVariant::kPrefixSocket:
      return with_prefix(make_socket_store(Socket(server_->connect())), "outer");
    case StoreVariant::kPrefixPath: return with_prefix(connect_store(path_, soon()), "outer");
  }
  return nullptr;
}

void StoreWorld::await_waiting(std::size_t count) {
  if (!server_) return;
  EXPECT_TRUE(eventually([&] { return server_->stats().waiting == count; }));
}

std::string name_of(StoreVariant variant) {
  switch (variant) {
    case StoreVariant::kLocal: return "Local";
    case StoreVariant::kSocket: return "Socket";
    case StoreVariant::kPath: return "Path";
    case StoreVariant::kPrefixLocal: return "PrefixLocal";
    case StoreVariant::kPrefixSocket: return "PrefixSocket";
    case StoreVariant::kPrefixPath: return "PrefixPath";
  }
  return "?";
}

}  // namespace convoy::test

#include "group/rendezvous_url.h"

#include "base/error.h"

namespace convoy {
namespace {

using Scheme = RendezvousUrl::Scheme;

template <class... Parts>
[[noreturn]] void fail_url(const std::string& text, const Parts&... parts) {
  fail(ErrorKind::kInvalidArgument, "rendezvous: method ", in_quotes(text), ": ", parts...);
}

// Takes up to the first `end` off the front of `text`; all of it if there is none.
std::string_view take_until(std::string_view& text, char end) {
  const auto at = text.find(end);
  const std::string_view part = text.substr(0, at);
  text.remove_prefix(at == std::string_view::npos ? text.size() : at + 1);
  return part;
}

GivenRank parse_query(const std::string& text, std::string_view query) {
  GivenRank given;
  while (!query.empty()) {
    std::string_view value = take_until(query, '&');
    const std::string_view name = take_until(value, '=');
    if (name != "rank" && name != "world_size") {
      fail_url(text, "what is ", in_quotes(name), "? Known: rank, world_size");
    }
    const auto number = parse_whole(value);
    if (!number) fail_url(text, name, " is not a number: ", in_quotes(value));
    auto& field = name == "rank" ? given.rank : given.size;
    if (field && *field != *number) fail_url(text, name, " is given twice");
    field = number;
  }
  return given;
}

Endpoint parse_endpoint(const std::string& text, std::string_view place) {
  std::string_view host = place;
  std::string_view rest;
  if (place.starts_with('[')) {
    const auto end = place.find(']');
    if (end == std::string_view::npos) fail_url(text, "']' is missing behind the IPv6 address");
    host = place.substr(1, end - 1);
    rest = place.substr(end + 1);
  } else {
    const auto colon = place.find(':');
    if (colon != std::string_view::npos && place.find(':', colon + 1) != std::string_view::npos) {
      fail_url(text, "write an IPv6 address in brackets: tcp://[::1]:29500");
    }
    host = place.substr(0, colon);
    if (colon != std::string_view::npos) rest = place.substr(colon);
  }
  if (host.empty()) fail_url(text, "the host is missing: tcp://host:port");
  if (!rest.starts_with(':')) fail_url(text, "the port is missing: tcp://host:port");
  const auto port = parse_whole(rest.substr(1));
  if (!port || *port < 1 || *port > 65535) {
    fail_url(text, "the port must be a number from 1 to 65535");
  }
  return {std::string(host), static_cast<std::uint16_t>(*port)};
}

}  // namespace

RendezvousUrl parse_rendezvous_url(const std::string& text) {
  std::string_view query = text;
  std::string_view place = take_until(query, '?');
  const auto is = [&](std::string_view scheme) {
    if (!place.starts_with(scheme)) return false;
    place.remove_prefix(scheme.size());
    return true;
  };
  RendezvousUrl url;
  if (is("env://")) {
    if (!place.empty()) fail_url(text, "nothing may stand behind env:// but ?rank=&world_size=");
  } else if (is("file://")) {
    url.scheme = Scheme::kFile;
    url.path = place;
    if (place.empty()) fail_url(text, "the path is missing: file:///folder/file");
    if (!place.starts_with('/')) {
      fail_url(text, "the path must be absolute, with three slashes: file:///folder/file");
    }
    if (place.ends_with('/')) fail_url(text, "the path must name a file, not a folder");
  } else if (is("tcp://")) {
    url.scheme = Scheme::kTcp;
    url.endpoint = parse_endpoint(text, place);
  } else {
    fail_url(text, "unknown; known: env://, file://, tcp://");
  }
  url.given = parse_query(text, query);
  return url;
}

}  // namespace convoy

#pragma once

#include <string>

#include "group/launch_environment.h"

namespace convoy {

struct RendezvousUrl {
  enum class Scheme { kEnvironment, kFile, kTcp };

  Scheme scheme = Scheme::kEnvironment;
  std::string path;   // of file://, absolute
  Endpoint endpoint;  // of tcp://; the host without brackets
  GivenRank given;    // ?rank=&world_size=
};

// Throws kInvalidArgument naming what is wrong and what there is.
RendezvousUrl parse_rendezvous_url(const std::string& text);

}  // namespace convoy

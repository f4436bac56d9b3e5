#pragma once

#include <memory>

#include "coll/engine.h"
#include "coll/medium.h"

namespace convoy::coll {

// Ranks of one host, by Engine and Mail. Collective.
std::shared_ptr<Medium> make_shared_memory(Store& store, int rank, int size,
                                           const EngineOptions& options);

// Of a broken group on such a medium: Engine::has_given_up().
bool has_given_up(Medium& medium, int rank);
// How such ranks are connected; nullptr for a medium of another kind.
std::shared_ptr<Mesh> mesh_of(Medium& medium);

}  // namespace convoy::coll

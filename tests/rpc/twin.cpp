#include "rpc/twin.h"

#include <typeinfo>

#include "convoy/rpc.h"

namespace convoy::rpc::test {
namespace {

int twin() { return 2; }
struct TwinScope {};

}  // namespace

void export_second_twin() { detail::export_function<twin>("twin", typeid(TwinScope)); }

}  // namespace convoy::rpc::test

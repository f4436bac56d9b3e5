#pragma once

namespace convoy::rpc::test {

// Lets others call a function of that file which has the name of another file's.
void export_second_twin();

}  // namespace convoy::rpc::test

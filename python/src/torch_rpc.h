#pragma once

namespace pybind11 {
class module_;
}

namespace convoy::python {

// Adds TorchRpcAgent, and end_torch_rpc() for the end of the interpreter.
void bind_torch_rpc(pybind11::module_& module);

}  // namespace convoy::python

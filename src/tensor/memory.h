#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace convoy {

// Allocates CPU memory that the other processes of this host can work on in place. Thread-safe;
// throws kResource before the machine or its cgroup runs out. Lives forever.
c10::Allocator* shared_allocator();

// A contiguous tensor in such memory, not cleared. kUnsupported for another device than the CPU, or
// another layout than strided.
at::Tensor empty_shared(at::IntArrayRef sizes, const at::TensorOptions& options = {});

// The same in memory of another allocator of CPU memory.
at::Tensor empty_from(c10::Allocator* allocator, at::IntArrayRef sizes,
                      const at::TensorOptions& options);

// True if all of the tensor's storage lies in such memory of this process.
bool is_shared_memory(const at::Tensor& tensor);

// Gives the whole pages of a dense tensor in such memory back to the system until somebody touches
// them again: its contents are lost, in all processes.
void give_pages_back(const at::Tensor& tensor);

}  // namespace convoy

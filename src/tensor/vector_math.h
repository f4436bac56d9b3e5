#pragma once

namespace convoy {

// Makes the first call of every function of oneMKL's vector mathematics that libtorch uses. oneMKL
// 2024.2, which libtorch 2.13 has, looks for a function's kernel when it is first called; two
// threads that do so at once may get one with half of the digits, for that call (PyTorch's issue
// 188792). What one rank then computes is not what the others do, and nobody is told. Once a
// process, in less than a millisecond; any thread; throws nothing.
void warm_vector_math() noexcept;

}  // namespace convoy

#pragma once

namespace convoy::autograd::kill_test {

// Processes. One after the other is killed in backward passes, each with its n-th letter, n from
// `first` to `last`: with lineages, and (other ones) without, so that workers are asked. The root
// is told who it was, nothing of such a pass is added anywhere, nothing is left of its context, and
// the others go on.
void kill_workers_with_letters(int first, int last);

}  // namespace convoy::autograd::kill_test

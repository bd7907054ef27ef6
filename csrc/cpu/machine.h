// Which instruction set is in use.
#pragma once

#include "kernels.h"

namespace kvasir {

const Kernels &kernels();

}  // namespace kvasir

// For any CPU that a C++ compiler knows.
#include "table.inl"

const kvasir::Kernels *kvasir::portable_kernels() {
  static const Kernels kernels = make_kernels("portable");
  return &kernels;
}

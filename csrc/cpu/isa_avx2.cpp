// For x86-64 with AVX2, FMA and F16C.
#include "table.inl"

const kvasir::Kernels *kvasir::avx2_kernels() {
  static const Kernels kernels = make_kernels("avx2");
  return &kernels;
}

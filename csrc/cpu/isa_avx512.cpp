// For x86-64 with AVX-512 and its products of bfloat16 and of bytes.
#include "table.inl"

const kvasir::Kernels *kvasir::avx512_kernels() {
  static const Kernels kernels = make_kernels("avx512");
  return &kernels;
}

// The table of this instruction set's functions, declared in kernels.h.
#pragma once

#include "adapters.inl"
#include "attention.inl"
#include "product.inl"
#include "quantize.inl"
#include "sampling.inl"

namespace {

inline kvasir::Kernels make_kernels(const char *name) {
  return {name,      cut_rows,     pack_rows_bf16, pack_rows_quant, product,        adapter_shrink, adapter_expand,
          add_norm,  normalise,    scale_row,      add_rows,        gated_row,      activate_row,   clamped_row,
          store_token, attend,     merge,          attend_scratch,  expand_row,     quantize_group, best_logit,
          drawn_token, reach_of};
}

}  // namespace

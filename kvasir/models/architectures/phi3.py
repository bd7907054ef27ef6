"""Phi-3 to Phi-4."""

from __future__ import annotations

from kvasir.models.architectures import llama
from kvasir.models.config_reader import Config
from kvasir.models.spec import Architecture, DecoderSpec, pre_norm
from kvasir.models.spec_reader import read_attention, read_decoder, read_gated_mlp, read_rms_norm, read_window
from kvasir.models.tensor_layout import GATE_UP, QKV, TensorLayout, halves, stacked_qkv

NAMES: dict[str, str | TensorLayout] = {
    **{name: ours for name, ours in llama.NAMES.items() if ".attention.qkv:" not in ours and ".gate_up:" not in ours},
    "model.layers.*.self_attn.qkv_proj": TensorLayout(QKV, stacked_qkv),
    "model.layers.*.mlp.gate_up_proj": TensorLayout(GATE_UP, halves),
}


def read_spec(config: Config) -> DecoderSpec:
    """Phi-3, Phi-3.5 and Phi-4: Llama with fused matrices in the checkpoint, LongRoPE, partial rotation in some."""
    norm, attention = read_rms_norm(config, 1e-5), read_attention(config, window=read_window(config))
    return read_decoder(config, pre_norm(norm, attention, read_gated_mlp(config)), norm)


ARCHITECTURE = Architecture(read_spec, NAMES)

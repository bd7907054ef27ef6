"""Phi-3, Phi-3.5 and Phi-4: Llama with fused matrices in the checkpoint; long rotations, some of part of a head."""

from __future__ import annotations

from kvasir.models.architectures import llama
from kvasir.models.config_reader import Config, real
from kvasir.models.fused import GATE_UP, QKV, Stored, halves, stacked_qkv
from kvasir.models.spec import Architecture, DecoderSpec, one_window, read_decoder

NAMES: dict[str, str | Stored] = {
    **{name: ours for name, ours in llama.NAMES.items() if ".attention.qkv:" not in ours and ".gate_up:" not in ours},
    "model.layers.*.self_attn.qkv_proj": Stored(QKV, stacked_qkv),
    "model.layers.*.mlp.gate_up_proj": Stored(GATE_UP, halves),
}


def read_spec(config: Config) -> DecoderSpec:
    return read_decoder(config, norm_eps=real(config, "rms_norm_eps", 1e-5), windows=one_window(config))


ARCHITECTURE = Architecture(read_spec, NAMES)

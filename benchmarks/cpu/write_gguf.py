"""Writes a checkpoint of benchmarks/make_model.py as a GGUF file in bfloat16, for llama.cpp, with made-up tokens.

python benchmarks/cpu/write_gguf.py MODEL_DIR OUT.gguf
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file


def write(source: Path, target: Path) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(target, "qwen2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"<{number}>" for number in range(config["vocab_size"])])
    writer.add_token_types([3, 3] + [1] * (config["vocab_size"] - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    for theirs, tensor in load_file(source / "model.safetensors").items():
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert name is not None, theirs
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor.float().numpy())
        else:
            raw = tensor.contiguous().view(torch.int16).numpy().view(np.uint8)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))

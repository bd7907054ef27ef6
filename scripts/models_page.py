"""Write docs/models.md from the registry: the supported architectures, and the test that proves each.

usage: models_page.py [--check]
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from kvasir.frontend.text.tokenizer_gguf import PRE_TOKENIZERS
from kvasir.models import architectures, gguf
from kvasir.quantization.gguf_file import TENSOR_TYPES

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
TEST = "test_logits_and_text_equal_transformers_under_every_kind_of_load"

HEAD = """# Models

Written by `make docs`; do not edit. A model's config.json names its architecture in `architectures`.

The proof of each is `tests/cpu/test_engine.py::{test}[NAME]`: log-probabilities
within 1e-4 of transformers' and its greedy text, in float32, chunked, batched, with prefix hits and after preemption.
`tests/cpu/test_models_parity.py` compares all logits with scattered blocks. The last column gives NAME; the names of
an architecture's variants begin with it.

| architecture | what it is | proof |
|---|---|---|
"""
POOLING = """
## Encoders

They embed, classify and score: see [embeddings](embeddings.md). With `ForSequenceClassification`,
`ForTokenClassification` or `ForMaskedLM` in place of `Model` at the end of the name they run as well; so do the
decoders above, with these endings, `Model`, `ForRewardModel` and `ForProcessRewardModel`. The proof is
`tests/cpu/test_pooling_models.py`.

| architecture | what it is |
|---|---|
"""
TAIL = """
RoPE scaling: linear, dynamic, yarn, llama3, longrope. ALiBi is not supported.

## Adding an architecture

An architecture is two things: a function that reads config.json into a `DecoderSpec`, and a table from the
checkpoint's names to the decoder's. `examples/add_a_model.py` adds Phi-2 in under 60 lines. A `DecoderSpec` has the two
ends (vocabulary, embeddings, head) and one `LayerSpec` per layer, so layers may differ:

```python
def read_spec(config: Config) -> DecoderSpec:
    norm = read_rms_norm(config)
    attention = read_attention(config, qkv_bias=True)  # heads, head size and rotation from the usual entries
    layer = pre_norm(norm, attention, read_gated_mlp(config))
    windows = read_layer_windows(config)  # one per layer, or None
    return read_decoder(config, vary_attention(layer, window=windows), norm)


ModelRegistry.register_model("MyForCausalLM", Architecture(read_spec, NAMES))
```

| part | kinds (`kvasir/layers/spec.py`, `kvasir/models/spec.py`) | modules register with |
|---|---|---|
| layer | `LayerSpec`, `ParallelLayerSpec`, `PostNormLayerSpec` | `models.transformer.LAYERS` |
| attention | `AttentionSpec`, `LatentAttentionSpec`, `EncoderAttentionSpec` | `layers.attention.ATTENTIONS` |
| feed-forward | `GatedMLPSpec`, `MLPSpec`, `MoESpec` | `layers.mlp.FEED_FORWARDS` |
| choice of experts | `TopKRoutingSpec`, `SparseMixerRoutingSpec` | `layers.mlp.ROUTINGS` |
| norm | `RMSNormSpec`, `LayerNormSpec` | `layers.norm.NORMS` |

A new kind is a frozen dataclass and a module registered for it: `@ATTENTIONS.register(MySpec)` above a subclass of
`AttentionLayer`, which declares the shape of its cache pages (`page_shape`). The module also declares what may be fused
(`fuses_one_row`, `leave_parts`); by default nothing is.

## Everything else

Any other model that transformers has as `AutoModelForCausalLM`, and whose code uses its attention interface, runs
through transformers' own code with Kvasir's paged attention, scheduling and sampling (`model_impl`, on one device;
proof: `tests/cpu/test_fallback.py`). Models whose layers carry another state from token to token (Mamba, convolutions)
or make attention masks other than a window are refused, as are settings of the CPU library (`quantization`,
`packed_weights_dir`, `kv_cache_dtype=int8`) for all of these models.
An installed package can register architectures from an entry point of the group `kvasir.plugins`.

## GGUF

`LLM("model.gguf")` runs files of {kinds} (Mistral's are `llama`), with tensors of {types},
which the CPU library [keeps as they are](cpu.md#gguf-files); other devices expand them to the model's dtype. The
tokenizer is made from the file: SentencePiece vocabularies, and byte-level ones with the pre-tokenizers {splits}.
Proof: `tests/cpu/test_gguf.py`, and on the CPU library `tests/cpu/test_gguf_native.py`.
"""


def page() -> str:
    lines, pooling = [], []
    for name, place in sorted(architectures._ARCHITECTURES.items()):
        assert isinstance(place, str), f"{name} was registered by a user"
        text = " ".join((architectures.find({"architectures": [name]}).read_spec.__doc__ or "").split())
        proof = re.split("[.:]", place)[-1].lower()
        if name.endswith("Model") and not name.endswith("LMHeadModel"):
            pooling.append(f"| `{name}` | {text} |\n")
        else:
            lines.append(f"| `{name}` | {text} | `{proof}` |\n")
    kinds = ", ".join(gguf.ARCHITECTURES)
    types = ", ".join(kind for kind, _, _ in TENSOR_TYPES.values())
    splits = ", ".join(PRE_TOKENIZERS)
    tail = TAIL.format(kinds=kinds, types=types, splits=splits)
    return HEAD.format(test=TEST) + "".join(lines) + POOLING + "".join(pooling) + tail


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is not up to date")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit("docs/models.md is not up to date: run `make docs`.")


if __name__ == "__main__":
    main()

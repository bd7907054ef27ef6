"""Compiles for an H200 what its steps launch, on a machine that has no GPU: launching needs one, compiling does not.

    PYTHONPATH=. python tests/compile_for_gpu.py        prints how many variants of each kernel there are

Models of real width run the steps that graphs are captured from, on CPU tensors that say they are a GPU's. So this also
finds a call that reaches no kernel for GPUs, and one that a graph cannot capture. Nothing is launched, and nothing that
is computed means anything.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import numpy as np
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kvasir import kernels
from kvasir.attention.base import AttentionBatch
from kvasir.attention.triton import TritonAttention
from kvasir.config.speculative import SpeculativeConfig
from kvasir.kernels.triton import linear
from kvasir.kernels.triton.launch import _Zeros
from kvasir.layers.adapters import StepAdapters
from kvasir.layers.base import Build, WeightLayer
from kvasir.layers.embedding import Head
from kvasir.layers.linear import Linear
from kvasir.layers.mlp import Experts
from kvasir.lora.device import AdapterFeature
from kvasir.messages import Int32Array
from kvasir.models import architectures
from kvasir.models.draft_checkpoints import read_eagle3
from kvasir.models.draft_head import DraftHead
from kvasir.models.transformer import Transformer
from kvasir.platforms.cpu import prepare_cpu
from kvasir.quantization.base import Unquantized
from kvasir.quantization.coded import Coded, Coding, RandomCoding, fp8, int4, int8
from kvasir.quantization.coded_linear import CodedMethods, Quantizer
from kvasir.sampling.features import ForwardUse, Uses
from kvasir.sampling.logprobs import ScoreKey
from kvasir.sampling.overrides import OverrideKey
from kvasir.sampling.sampler import SamplingKey, SamplingParameters
from kvasir.worker.expert_load import expert_load_of
from kvasir.worker.graph_keys import ForwardGraphKey, HeadGraphKey
from kvasir.worker.memory import KVMemory
from kvasir.worker.model_runner import ModelRunner
from kvasir.worker.speculative.drafter import Drafter, DrafterSettings
from kvasir.worker.speculative.heads import HeadDrafter
from kvasir.worker.speculative.lookup import LookupDrafter
from kvasir.worker.step_inputs import other_group_batches
from tests.capturing import capturing

CPU, BF16 = torch.device("cpu"), torch.bfloat16
COMMON = {
    "num_hidden_layers": 2,  # the last one may run for fewer tokens than the others
    "vocab_size": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 8192,
    "attention_bias": False,
}
QWEN3 = COMMON | {
    **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "tie_word_embeddings": True},
    **{"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128},
    **{"num_attention_heads": 16, "num_key_value_heads": 8},
}
GEMMA2 = COMMON | {
    **{"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh"},
    **{"hidden_size": 1024, "intermediate_size": 2048, "head_dim": 256, "query_pre_attn_scalar": 256},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3, "sliding_window": 512},
    **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "tie_word_embeddings": True},
}
MIXTRAL = COMMON | {
    **{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu"},
    **{"hidden_size": 1024, "intermediate_size": 2048, "head_dim": 128, "num_local_experts": 8},
    **{"num_experts_per_tok": 2, "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": False},
}
DEEPSEEK = COMMON | {
    **{"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_act": "silu"},
    **{"hidden_size": 2048, "intermediate_size": 2048, "num_attention_heads": 16, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": None, "n_routed_experts": 16},
    **{"n_shared_experts": 2, "moe_intermediate_size": 1408, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
}
KIMI = DEEPSEEK | {
    **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 1024, "q_lora_rank": 512},
    **{"num_attention_heads": 128, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 512, "n_shared_experts": 1},
}
GPT_OSS = COMMON | {
    **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "head_dim": 64},
    **{"intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 8},
    **{"num_experts_per_tok": 4, "sliding_window": 128, "num_hidden_layers": 3, "attention_bias": True},
}
BERT = {
    **{"architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu", "layer_norm_eps": 1e-12},
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 2, "num_attention_heads": 12},
    **{"vocab_size": 4096, "max_position_embeddings": 512, "type_vocab_size": 2},
}
LONE, TWO, DECODES = ForwardGraphKey(1, 1, 512), ForwardGraphKey(2, 2, 512), ForwardGraphKey(64, 64, 2048)
SHARING, MIXED = ForwardGraphKey(256, 256, 1 << 30, shares=True), ForwardGraphKey(512, 128, 1 << 30)
SMALL = ForwardGraphKey(64, 56, 1 << 30)  # too few tokens for the kernel that takes chunks of larger steps
# Steps above all graphs, whose sizes and places in memory 16 divides or not.
CHUNKS = [
    [1, 100, 412],
    [1, 1, 300, 333],
    [640, 384],
    [1, 1, 1, 401, 16, 480],
    [1, 1, 1, 1, 333],
    [777],
]


# One of each kind of code and way of scaling it: by row, long groups with and without minima, short groups.
CODINGS: list[Quantizer] = [
    fp8,
    int8,
    lambda weight: RandomCoding(Coding("e2m1", 16), has_row=True).make(*weight.shape, CPU),
    lambda weight: RandomCoding(Coding("u6", 16, 32)).make(*weight.shape, CPU),
    lambda weight: RandomCoding(Coding("u4", 32), has_minimum=True).make(*weight.shape, CPU),
    lambda weight: RandomCoding(Coding("nf4", 64)).make(*weight.shape, CPU),
]


def mxfp4(weight: torch.Tensor) -> Coded:
    return RandomCoding(Coding("e2m1", 32)).make(weight.shape[0], weight.shape[1], CPU)


VERIFYING = ForwardGraphKey(64, 16, 1 << 30, drafts=3)


def make_lookup(method: str, model: Transformer) -> Drafter:
    return LookupDrafter(DrafterSettings(SpeculativeConfig(method, 3), 257, 4096, CPU))


def make_eagle3(model: Transformer) -> Drafter:
    hf = {**QWEN3, "num_hidden_layers": 1, "draft_vocab_size": 1024, "eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    build = Build(BF16, methods=Unquantized(), device=CPU)
    head = DraftHead(build, read_eagle3(hf, model.spec, None)[0], TritonAttention(), 4096, model)
    for layer in head.modules():
        if isinstance(layer, WeightLayer):
            layer.process()
    config = SpeculativeConfig("eagle3", 3)
    return HeadDrafter(DrafterSettings(config, 257, 4096, CPU, 64, BF16, load=lambda: head, record=model.record))


class H200Compiler:
    """In Triton's place of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend() -> None:
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, total_memory=140 << 30)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: properties  # type: ignore[assignment, return-value]
    linear.device_name = lambda _: properties.name  # type: ignore[assignment]
    torch.version.cuda = "12"
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]
    kernels.library = lambda: None
    kernels.onednn.usable = lambda _: False
    driver.set_active(H200Compiler())


def make_runner(
    hf: dict[str, Any],
    kv_dtype: torch.dtype,
    make_drafter: Callable[[Transformer], Drafter] | None = None,
    quantize: Quantizer | None = None,
    max_rank: int = 0,
) -> ModelRunner:
    """`max_rank`: of the adapters that the model takes; 0: it takes none."""
    step = StepAdapters(8, max_rank) if max_rank else None
    build = Build(BF16, methods=CodedMethods() if quantize else Unquantized(), device=CPU, adapters=step)
    model = Transformer(build, architectures.find(hf).read_spec(hf), TritonAttention(), 4096)
    for layer in model.modules():
        if isinstance(layer, WeightLayer):
            if quantize is not None and isinstance(layer, Linear | Experts | Head):
                for key, shape in layer.tensors().items():
                    values = torch.zeros(shape)
                    layer.load(key, quantize(values) if len(shape) > 1 else values)  # type: ignore[arg-type]
            layer.process()
    kv = KVMemory(model.kv_spec(64, kv_dtype), 100, CPU)
    model.bind_kv(kv.views(model.page_shape(64, kv_dtype), kv_dtype))
    drafter = None if make_drafter is None else make_drafter(model)
    store: Any = SimpleNamespace(resident={})
    further = () if step is None else (AdapterFeature(store, step, 257, CPU),)
    return ModelRunner(model, kv, 256, 4096, CPU, use_graphs=True, drafter=drafter, further=further)


def run_steps(
    hf: dict[str, Any],
    keys: list[ForwardGraphKey],
    kv_dtype: torch.dtype = BF16,
    everything: bool = False,
    make_drafter: Callable[[Transformer], Drafter] | None = None,
    quantize: Quantizer | None = None,
    max_rank: int = 0,
    counts_experts: bool = False,
) -> None:
    runner = make_runner(hf, kv_dtype, make_drafter, quantize, max_rank)
    if counts_experts:
        assert isinstance(runner.model, Transformer)
        assert expert_load_of(runner.model, CPU) is not None
    graphs = runner.graphs
    assert graphs is not None
    for queries in CHUNKS:  # before graphs, as a start measures the largest step
        run_chunks(runner, np.array(queries, np.int32))
    for key in keys:
        graphs.buffers.clear()
        rows = 8 if key.is_mixed else key.rows
        with capturing():
            graphs._forward(key, runner.model)
            graphs._head(HeadGraphKey(rows, all_uses(runner) if everything else ()))
    for one in graphs.pass_keys():
        if one.rows in (1, 64):
            with capturing():
                graphs._draft(one)


def all_uses(runner: ModelRunner) -> Uses:
    """All that a head graph can do. No table has been filled yet."""
    parameters, overrides, scores, *_ = runner.features
    assert isinstance(parameters, SamplingParameters)
    stages = tuple(stage for stage in parameters.stages._stages if stage.capturable)
    return (
        (parameters, SamplingKey(filters=True, bans=True, stages=stages)),
        (overrides, OverrideKey(masks=True, forces=True)),
        (scores, ScoreKey(lines=1, likeliest=5, named=False)),
    )


def run_chunks(runner: ModelRunner, queries: Int32Array) -> None:
    """A step above all graphs; those of one token are decodes."""
    tokens, decodes, count = int(queries.sum()), int((queries == 1).sum()), len(queries)
    lengths = queries + np.arange(count, dtype=np.int32) * 100
    zeros = torch.zeros(tokens, dtype=torch.int64)
    batch = AttentionBatch(
        slots=torch.zeros(tokens, dtype=torch.int64),
        query_start=torch.from_numpy(np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)),
        seq_lens=torch.from_numpy(lengths),
        tables=runner.rows.tables,
        rows=torch.arange(count),
        num_decodes=decodes,
        query_lens=queries,
        seq_bounds=lengths,
        block_size=64,
    )
    if runner.rows.other_tables:
        batch.other_groups = other_group_batches(runner.rows, batch, zeros, batch.slots)
    for feature in runner.features:
        if feature.changes_forward:
            feature.begin_forward(ForwardUse.GRAPH, zeros, batch.rows, False, None)
    runner.model.forward(zeros, zeros, batch)


def run_others() -> None:
    """What steps need now and then."""
    pages, index = torch.zeros(2, 9, 4096, dtype=torch.uint8), torch.zeros(3, dtype=torch.int32)
    kernels.copy_blocks(pages, pages, index, index)
    for kind in kernels.ACTIVATIONS:
        kernels.gated_activation(torch.zeros(3, 2048, dtype=BF16), kind)
    score = RandomCoding(Coding("u4", 128, 8)).make(1, 1024, CPU).packed()
    for rows in (1, 3, 20):
        kernels.coded_linear(torch.zeros(rows, 1024, dtype=BF16), score)


def run_encoders() -> None:
    """LayerNorm; attention in both directions: short and long texts, with a reach, with a bias, in every type."""
    for dtype, width in ((BF16, 768), (BF16, 1000), (torch.float32, 1024)):
        x, gain = torch.zeros(3, width, dtype=dtype), torch.zeros(width, dtype=dtype)
        for bias in (gain, None):
            kernels.layer_norm(x, gain, bias, 1e-12)
            kernels.layer_norm(x, gain, bias, 1e-12, x)
            kernels.add_layer_norm(x, x, gain, bias, 1e-12)
    for dtype, heads, kv_heads, dim in (
        (BF16, 12, 12, 64),
        (BF16, 12, 12, 32),
        (BF16, 8, 4, 128),
        (torch.float32, 12, 12, 64),
    ):
        for lengths, options in (
            ([9, 30], {}),
            ([128, 77], {"reach": 64}),
            ([400, 16], {"softcap": 30.0}),
            ([512], {"bias": 1}),
        ):
            counts = np.array(lengths, np.int32)
            qkv = torch.zeros(int(counts.sum()), heads + 2 * kv_heads, dim, dtype=dtype)
            starts = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
            bias = torch.zeros(heads, 1023, dtype=dtype) if "bias" in options else None
            kernels.encoder_attention(
                *qkv.split((heads, kv_heads, kv_heads), dim=1), starts, counts, 0.125, options.get("reach"), bias,
                options.get("softcap"),
            )  # fmt: skip


def run_encoder_graphs() -> None:
    """The steps of an encoder that become graphs."""
    model = Transformer(Build(BF16, device=CPU), architectures.find(BERT).read_spec(BERT), TritonAttention(), 512)
    runner = ModelRunner(model, KVMemory(model.kv_spec(64, BF16), 1, CPU), 64, 512, CPU, use_graphs=True)
    assert runner.graphs is not None and runner.graphs.leaves_all
    for key in runner.graphs.keys.forwards():
        if key.tokens in (16, 128, 512):
            runner.graphs.buffers.clear()
            with capturing():
                runner.graphs._forward(key, model)


def main() -> int:
    prepare_cpu()
    pretend()
    wanted: dict[tuple[Any, str], str] = {}

    def skip(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        wanted[fn.jit_function, compile["key"]] = compile["specialization_data"]
        return True

    knobs.runtime.jit_cache_hook = skip
    with _Zeros(), torch.inference_mode():
        run_steps(QWEN3, [LONE, DECODES, SHARING, MIXED, SMALL], everything=True)
        run_steps(GEMMA2, [DECODES, MIXED], torch.float8_e4m3fn)
        run_steps(MIXTRAL, [LONE, TWO, DECODES])
        run_steps(QWEN3, [LONE, DECODES, MIXED], quantize=int4)
        for quantize in CODINGS:
            run_steps(QWEN3, [LONE, DECODES], quantize=quantize)
        run_steps(MIXTRAL, [DECODES], quantize=int4)
        run_steps(DEEPSEEK, [LONE, DECODES, SHARING, MIXED])
        run_steps(KIMI, [DECODES, MIXED], torch.float8_e4m3fn)
        run_steps(KIMI, [LONE, DECODES])
        run_steps(GPT_OSS, [LONE, DECODES, SHARING, MIXED], counts_experts=True)
        run_steps(GPT_OSS, [LONE, DECODES, MIXED], quantize=mxfp4, counts_experts=True)
        for method in ("ngram", "suffix"):
            run_steps(QWEN3, [DECODES, VERIFYING], make_drafter=partial(make_lookup, method))
        run_steps(QWEN3, [LONE, DECODES, VERIFYING], make_drafter=make_eagle3)
        for rank in (16, 128):
            run_steps(QWEN3, [replace(key, is_changed=True) for key in (LONE, DECODES, MIXED)], max_rank=rank)
        run_others()
        run_encoders()
        run_encoder_graphs()
    knobs.runtime.jit_cache_hook = None
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda one: one[0][0].preload(one[1]), wanted.items()))  # raises what the compiler did
    print(json.dumps(Counter(f"{kernel.__module__.split('.')[-1]}.{kernel.__name__}" for kernel, _ in wanted)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

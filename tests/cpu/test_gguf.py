"""GGUF files: logits, tokenizers and refusals."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")

import gguf
from gguf import GGMLQuantizationType as Kind

from kvasir import LLM, SamplingParams
from kvasir.config.engine import EngineConfig, ModelConfig
from kvasir.errors import ConfigError, ModelError
from kvasir.frontend.requests.input import InputProcessor
from kvasir.frontend.text.tokenizer_files import load_tokenizer
from kvasir.quantization.gguf import _SCALES, CODES, PackedRows
from kvasir.quantization.gguf_file import read_gguf
from tests.cpu.test_engine import SMALL, check_logprobs, generate
from tests.gguf_builders import IQ, write_model, write_tokenizer
from tests.model_builders import DEEPSEEK_YARN, GRANITE, TINY, make_hf_model
from tests.native_builders import SETS
from tests.pairwise import few

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=10)
LARGE_ROWS = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}  # K-quants have blocks of 256
CORPUS = [
    "Hello, world!", "  leading and   inner    spaces\t\ttabs\n\n\nlines \r\n windows  ", "", " ", "\n",
    "a\u00a0b\u2003c",
    "def f(x: int) -> int:\n    return x**2 + 10_000  # 3.14159, 0xFF, 1e-9\n\n\tif x != 0: pass",
    "12345678901234567890 v1.2.3 1,000,000 ½ ²³ ٣٤", "don't I'LL we've THEY'RE it's 'tis", 
    "naïve café \u0065\u0301 Ångström",
    "日本語のテキストと漢字、ひらがな。中文混合English文字123", "한국어 텍스트", "مرحبا بالعالم", "Привет, мир!",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 end", "<|im_start|>user\nhi<|im_end|>",
    "https://example.com/a?b=c&d=%20#x", "CamelCaseAndSHOUTING_snake",
]  # fmt: skip


class Written:
    """A GGUF file and transformers' model with the same weights."""

    def __init__(
        self, name: str, arch: str, path: Path, kind: Kind = Kind.F32, change: Any = None, **sizes: Any
    ) -> None:
        self.hf = make_hf_model(name, **sizes)
        self.path = str(path)
        write_model(path, self.hf, arch, kind, change)
        rng = np.random.default_rng(3)
        self.prompts = [rng.integers(2, 96, int(n)).tolist() for n in rng.integers(1, 40, 5)]

    def logprobs(self, text: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return torch.log_softmax(self.hf(torch.tensor([text]), use_cache=False).logits[0].double(), -1)

    def llm(self, **settings: Any) -> LLM:
        settings = {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 128, "use_tqdm_on_load": False, **settings}
        return LLM(self.path, dtype="float32", skip_tokenizer_init=True, **SMALL, **settings)

    def check(self, num_prompts: int = 5) -> None:
        with self.llm() as llm:
            check_logprobs(self, generate(llm, self.prompts[:num_prompts], PARAMS))  # type: ignore[arg-type]


# ---------------------------------------------------------------- families and types


def gemma2(writer: Any) -> None:
    writer.add_sliding_window(6)
    writer.add_attn_logit_softcapping(3.0)
    writer.add_final_logit_softcapping(5.0)


def moe(writer: Any) -> None:
    writer.add_expert_count(6)
    writer.add_expert_used_count(3)
    writer.add_expert_feed_forward_length(24)
    writer.add_expert_shared_feed_forward_length(40)


def experts_of(model: str, **more: Any) -> Any:
    """What llama.cpp writes of the experts of DeepSeek and its like."""
    sizes = TINY[model][1]

    def change(writer: Any) -> None:
        writer.add_expert_count(sizes["n_routed_experts"])
        writer.add_expert_used_count(sizes["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(sizes["moe_intermediate_size"])
        writer.add_leading_dense_block_count(1)
        writer.add_expert_weights_scale(sizes["routed_scaling_factor"])
        if sizes.get("n_group") is not None and model != "deepseek_v2_lite":
            writer.add_expert_group_count(sizes["n_group"])
            writer.add_expert_group_used_count(sizes["topk_group"])
        for name, value in more.items():
            getattr(writer, f"add_{name}")(value)

    return change


def latent(model: str, **more: Any) -> Any:
    """The sizes of heads, as files with keys and values in one matrix have them, and later ones."""
    experts, apart = experts_of(model, expert_shared_count=2, kv_lora_rank=16, **more), model == "deepseek_v3"

    def change(writer: Any) -> None:
        experts(writer)
        writer.add_key_length(20 if apart else 12)
        writer.add_value_length(16 if apart else 6)
        if apart:
            writer.add_key_length_mla(12)
            writer.add_value_length_mla(6)
        writer.add_rope_dimension_count(4)

    return change


def gpt_oss(writer: Any) -> None:
    writer.add_expert_count(6)
    writer.add_expert_used_count(3)
    writer.add_expert_feed_forward_length(48)
    writer.add_sliding_window(6)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


def granite(writer: Any) -> None:
    writer.add_expert_count(5)
    writer.add_expert_used_count(3)
    writer.add_attention_scale(GRANITE["attention_multiplier"])
    writer.add_embedding_scale(GRANITE["embedding_multiplier"])
    writer.add_residual_scale(GRANITE["residual_multiplier"])
    writer.add_logit_scale(GRANITE["logits_scaling"])


def dbrx(writer: Any) -> None:
    writer.add_feed_forward_length(24)
    writer.add_expert_count(6)
    writer.add_expert_used_count(3)
    writer.add_clamp_kqv(0.7)


YARN = {"rope_parameters": {**DEEPSEEK_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}
WRITTEN_YARN = {
    "rope_scaling_type": gguf.RopeScalingType.YARN,
    "rope_scaling_factor": 4.0,
    "rope_scaling_orig_ctx_len": 32,
    "rope_scaling_yarn_log_mul": 0.07,
}
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
SCALE_16 = {"query_pre_attn_scalar": 16}
FAMILIES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "llama": ("llama", None, {}),
    "llama_tied_biases_llama3": ("llama", None, {"rope_parameters": None, "mlp_bias": False}),
    "mistral": ("llama", None, {}),
    "qwen2": ("qwen2", None, {}),
    "qwen3": ("qwen3", None, {}),
    "gemma": ("gemma", None, {"num_key_value_heads": 1}),
    "gemma2": ("gemma2", gemma2, {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3", lambda w: w.add_sliding_window(6), {**SCALE_16, "layer_types": None, "num_hidden_layers": 7}),
    "phi3": ("phi3", lambda w: (w.add_sliding_window(9), w.add_rope_dimension_count(8)), {}),
    "mixtral": ("llama", lambda w: (w.add_expert_count(5), w.add_expert_used_count(2)), {}),
    "qwen2_moe": ("qwen2moe", moe, {"mlp_only_layers": []}),
    "qwen3_moe": ("qwen3moe", moe, {"decoder_sparse_step": 1}),
    "olmoe": ("olmoe", lambda w: (w.add_expert_count(6), w.add_expert_used_count(3)), {"clip_qkv": None}),
    "deepseek_v2_lite": ("deepseek2", latent("deepseek_v2_lite"), {}),
    "deepseek_v2": ("deepseek2", latent("deepseek_v2", q_lora_rank=12, **WRITTEN_YARN), YARN),
    "deepseek_v3": (
        "deepseek2",
        latent("deepseek_v3", q_lora_rank=12, expert_weights_norm=True),
        {**PLAIN_ROPE, "attention_bias": False},
    ),
    "glm4_moe": (
        "glm4moe",
        lambda w: (experts_of("glm4_moe", expert_shared_count=1)(w), w.add_rope_dimension_count(4)),
        {},
    ),
    "gpt_oss": ("gpt-oss", gpt_oss, {"swiglu_limit": 7.0}),
    "granitemoe": ("granitemoe", granite, {}),
    "granitemoeshared": ("granitemoe", lambda w: (granite(w), w.add_expert_shared_feed_forward_length(20)), {}),
    "dbrx": ("dbrx", dbrx, {}),
    "minimax_m2": (
        "minimax-m2",
        lambda w: (w.add_expert_count(6), w.add_expert_used_count(3), w.add_rope_dimension_count(4)),
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    arch, change, sizes = FAMILIES[name]
    Written(name, arch, tmp_path / "m.gguf", change=change, **sizes).check()


KINDS = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]


@pytest.mark.parametrize("kind", KINDS)
def test_types(kind: str, tmp_path: Path) -> None:
    model = Written("llama", "llama", tmp_path / "m.gguf", Kind[kind], **LARGE_ROWS)
    assert read_gguf(model.path).tensors["blk.0.attn_q.weight"].kind == kind
    model.check(num_prompts=2)


@pytest.mark.parametrize("kind", few([kind.name for kind in IQ], fast=["IQ4_NL", "IQ2_XXS", "TQ1_0"]))
def test_types_without_codes_are_expanded(kind: str, tmp_path: Path, log_lines: list[str]) -> None:
    """The CPU library says so."""
    model = Written("llama", "llama", tmp_path / "m.gguf", Kind[kind], **LARGE_ROWS)
    assert read_gguf(model.path).tensors["blk.0.attn_q.weight"].kind == kind
    model.check(num_prompts=1)
    if SETS:
        del log_lines[:]
        with LLM(model.path, dtype="bfloat16", skip_tokenizer_init=True, **SMALL, use_tqdm_on_load=False):
            assert any("expanded to bf16" in line and "IQ" in line for line in log_lines)


def test_gpt_oss_in_mxfp4(tmp_path: Path, log_lines: list[str]) -> None:
    """As its files are: the library keeps the experts' numbers."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "swiglu_limit": 7.0}
    change = lambda writer: (gpt_oss(writer), writer.add_expert_feed_forward_length(64))  # noqa: E731
    model = Written("gpt_oss", "gpt-oss", tmp_path / "m.gguf", Kind.MXFP4, change, **sizes)
    model.check(num_prompts=2)
    if SETS:
        del log_lines[:]
        with LLM(model.path, dtype="bfloat16", skip_tokenizer_init=True, **SMALL, use_tqdm_on_load=False):
            assert not any("expanded" in line for line in log_lines)


def test_llama3_factors_come_from_a_tensor(tmp_path: Path) -> None:
    """llama.cpp writes them out instead of naming the kind of scaling."""
    from kvasir.layers.rope import inverse_frequencies
    from kvasir.layers.spec import RopeSpec
    from kvasir.models.config_reader import read_rope

    hf = TINY["llama_tied_biases_llama3"][1]["rope_parameters"]
    scaled = inverse_frequencies(read_rope({"rope_parameters": hf}, 8), 128)
    factors = inverse_frequencies(RopeSpec(8, hf["rope_theta"]), 128) / scaled
    change = lambda writer: writer.add_tensor("rope_freqs.weight", factors.numpy())  # noqa: E731
    Written("llama", "llama", tmp_path / "m.gguf", change=change, rope_parameters=hf).check()


@pytest.mark.parametrize("kind", CODES)
def test_codes_have_the_files_values(kind: str) -> None:
    """Bit by bit those of the gguf package, for random bytes; two codes in a byte, too."""
    (block, size), rng = gguf.GGML_QUANT_SIZES[Kind[kind]], np.random.default_rng(0)
    rows = rng.integers(0, 256, (6, 4, size), dtype=np.uint8)
    if kind == "MXFP4":
        rows[:, :, 0] = rng.integers(0, 140, (6, 4))  # exponents, the subnormal ones too
    for at in _SCALES.get(kind, (size, ()))[1]:
        rows[:, :, at : at + 2] = rng.normal(0, 1, (6, 4, 1)).astype(np.float16).view(np.uint8)
    packed = PackedRows(torch.from_numpy(rows.reshape(6, -1)), kind, (6, 4 * block))
    coded, wanted = packed.coded(), torch.from_numpy(gguf.dequantize(rows.reshape(6, -1), Kind[kind]))
    assert coded is not None and torch.equal(coded.expand(), wanted) and torch.equal(coded.packed().expand(), wanted)
    assert coded.packed().coding.tile == (min(32, coded.coding.group) if coded.coding.kind in ("u4", "e2m1") else 0)


# ---------------------------------------------------------------- tokenizers

REAL = {
    "llama3_1": ("llama-bpe", True), "qwen2_5": ("qwen2", False), "deepseek_v3": ("deepseek-v3", False),
    "mistral_nemo": ("tekken", True), "gpt2": ("gpt-2", False),
}  # fmt: skip


@pytest.mark.parametrize("name", few(list(REAL), fast=["qwen2_5", "gpt2"]))
def test_tokenizers_equal_the_real_ones(name: str, test_data: Path, tmp_path: Path) -> None:
    """A file with a real vocabulary, its way of splitting only named: the same ids as from tokenizer.json."""
    with tarfile.open(test_data / "tokenizers" / f"{name}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    directory = next(tmp_path.rglob("tokenizer.json")).parent
    pre, bos = REAL[name]
    write_tokenizer(tmp_path / "m.gguf", directory, pre, bos)
    real, ours = load_tokenizer(directory), load_tokenizer(tmp_path / "m.gguf")
    sonnet = (test_data / "sonnet.txt").read_text()[:5000]
    for text in [*CORPUS, sonnet]:
        ids = real.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == real.decode(ids)


def test_composed_texts(tmp_path: Path) -> None:
    """The tokenizers of these models normalize to NFC, which their files do not say."""
    import gguf
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), "ab"]
    for pre, composes in {"gpt-2": False, "qwen2": True, "olmo": True, "mpt": True, "command-r": True}.items():
        writer = gguf.GGUFWriter(tmp_path / f"{pre}.gguf", "llama")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(tokens))
        writer.add_token_merges(["a b"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        tokenizer = load_tokenizer(tmp_path / f"{pre}.gguf")
        assert (tokenizer.encode("caf\u0065\u0301") == tokenizer.encode("caf\u00e9")) == composes, pre


def test_sentencepiece(tmp_path: Path) -> None:
    """Merges by score, bytes for what is unknown, and the space before the first word."""
    import gguf

    pieces = [("<unk>", 2, 0.0), ("<s>", 3, 0.0), ("</s>", 3, 0.0)]
    pieces += [(f"<0x{byte:02X}>", 6, 0.0) for byte in range(256)]
    words = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "abc", "d"]
    pieces += [(word, 1, -float(rank)) for rank, word in enumerate(words)]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece for piece, _, _ in pieces])
    writer.add_token_types([kind for _, kind, _ in pieces])
    writer.add_token_scores([score for _, _, score in pieces])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = load_tokenizer(tmp_path / "m.gguf")

    def pieces_of(text: str) -> list[str | None]:
        return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))

    assert pieces_of("abc d") == ["<s>", "▁", "abc", "▁", "d"] or pieces_of("abc d") == ["<s>", "▁ab", "c", "▁", "d"]
    assert pieces_of("é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    for text in ("abc d", "é a😀b", "  a  b "):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


# ---------------------------------------------------------------- end tokens

# Those of llama.cpp's special_eog_ids.
ENDS = [
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend▁of▁sentence\uff5c>", "[e~[",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
    "<reponame>", "<|file_sep|>",
]  # fmt: skip
LETTERS = [chr(ord("a") + i) for i in range(26)]


def add_vocabulary(writer: Any, tokens: list[str], kinds: dict[str, int], ids: dict[str, str], model: str) -> None:
    """A tokenizer whose tokens are normal unless `kinds` says otherwise; `ids` names tokens by role."""
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, 1) for token in tokens])
    writer.add_token_scores([-float(rank) for rank in range(len(tokens))])
    writer.add_token_merges(["a b"])
    writer.add_add_bos_token(False)
    for role, token in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", tokens.index(token))


def end_texts_of(
    path: Path,
    tokens: list[str],
    kinds: dict[str, int],
    ids: dict[str, str],
    *,
    model: str = "gpt2",
    skip: bool = False,
) -> set[str]:
    """The texts of the tokens that end a request to a model with this vocabulary."""
    import gguf

    tokens = [*LETTERS, "ab", *tokens]
    writer = gguf.GGUFWriter(path, "llama")
    add_vocabulary(writer, tokens, kinds, ids, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    settled = {"path": str(path), "tokenizer": str(path), "vocab_size": len(tokens), "max_model_len": 32}
    config = EngineConfig(model=ModelConfig(model="m", **settled))
    tokenizer = None if skip else load_tokenizer(path)
    processor = InputProcessor(config, tokenizer)
    request, state = processor.process("r", [1], SamplingParams(min_tokens=3), 0, 0.0)
    assert set(request.sampling.stop_token_ids) == state.eos_token_ids, "min_tokens bans all of them"
    assert request.sampling.banned_until == 4
    request, state = processor.process("r", [1], SamplingParams(ignore_eos=True, stop_token_ids=[5]), 1, 0.0)
    assert request.sampling.stop_token_ids == (5,) and not state.eos_token_ids
    ends = {tokens[number] for number in processor.eos_token_ids}
    if tokenizer is not None:
        for text in ends & set(ENDS):
            assert tokenizer.encode("ab" + text)[-1] == tokens.index(text), "an end token is matched as a whole"
            assert tokenizer.decode([tokens.index(text)], skip_special_tokens=True) == "", "and hidden"
    return ends


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("skip", [False, True])
def test_end_tokens_are_those_of_llama_cpp(tmp_path: Path, model: str, skip: bool) -> None:
    def ends(tokens: list[str], kinds: dict[str, int], ids: dict[str, str]) -> set[str]:
        return end_texts_of(tmp_path / "m.gguf", tokens, kinds, ids, model=model, skip=skip)

    for text in ENDS:
        assert ends([text, "<x>"], {text: 3}, {}) == {text}
        if text != "</s>":  # an HTML tag in the vocabularies of some models
            assert ends([text, "<x>"], {}, {"eos": "<x>"}) == {text, "<x>"}, "whatever the token's type"
    assert ends(["</s>", "<x>"], {}, {"eos": "<x>"}) == {"<x>"}
    for role in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"):
        assert ends(["<x>", "<y>"], {}, {role: "<x>"}) == {"<x>"}
    harmony = ["<|return|>", "<|call|>", "<|end|>", "<|endoftext|>"]
    assert ends(harmony, dict.fromkeys(harmony, 3), {"eos": "<|return|>"}) == set(harmony) - {"<|end|>"}
    solar = ["<|flush|>", "<|calls|>", "<|end|>"]
    assert ends(solar, dict.fromkeys(solar, 3), {}) == {"<|flush|>", "<|calls|>"}
    gemma = ["<|tool_response>", "</s>", "<turn|>"]
    assert ends(gemma, dict.fromkeys(gemma, 3), {}) == {"<|tool_response>", "<turn|>"}


def test_text_ends_at_any_end_token(tmp_path: Path) -> None:
    """A file that only names <|im_end|>, and a model that produces <|endoftext|>."""
    tokens = [*LETTERS, "ab", "<|im_end|>", "<|endoftext|>", "<x>"]
    tokens += [f"[{i}]" for i in range(len(tokens), 96)]
    end, other = tokens.index("<|endoftext|>"), tokens.index("<x>")

    def change(writer: Any) -> None:
        kinds = {"<|im_end|>": 3, "<|endoftext|>": 3}
        add_vocabulary(writer, tokens, kinds, {"eos": "<|im_end|>"}, "gpt2")

    Written("llama", "llama", tmp_path / "m.gguf", change=change)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {other}}}')
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 8 << 20, "max_model_len": 64, "use_tqdm_on_load": False}

    def finish(llm: LLM, token: int, **params: Any) -> tuple[str, str | None, int]:
        # The prompt's tokens come first, so that the text has something before its end.
        asked = SamplingParams(temperature=0, max_tokens=8, logit_bias={token: 100.0}, **params)
        (output,) = llm.generate(["ab"], asked, use_tqdm=False)
        choice = output.outputs[0]
        return choice.text, choice.finish_reason, len(choice.token_ids)

    with LLM(str(tmp_path / "m.gguf"), dtype="float32", **SMALL, **settings) as llm:
        assert finish(llm, end) == ("", "stop", 1)
        text, reason, length = finish(llm, end, min_tokens=3)
        assert (reason, length) == ("stop", 4) and "<|" not in text
        assert finish(llm, end, ignore_eos=True)[1:] == ("length", 8)
        assert finish(llm, other)[1:] == ("length", 8)
    with LLM(str(tmp_path / "m.gguf"), dtype="float32", generation_config=str(tmp_path), **SMALL, **settings) as llm:
        assert finish(llm, end)[1] == finish(llm, other)[1] == "stop", "the file's ends and the directory's"


# ---------------------------------------------------------------- a real model


@pytest.mark.slow
def test_smollm2_logits_equal_transformers(starter_model: Path) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    options = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    hf = AutoModelForCausalLM.from_pretrained(starter_model.parent, gguf_file=starter_model.name, **options)
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 28}
    with LLM(str(starter_model), use_tqdm_on_load=False, **settings) as llm:
        tokenizer = llm.get_tokenizer()
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        prompts = [tokenizer.encode("Once upon a time, in 1984,"), tokenizer.apply_chat_template(messages)]
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=5, ignore_eos=True)
        outputs = generate(llm, prompts, params)  # type: ignore[arg-type]
        (answer,) = llm.chat([messages], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    assert "Paris" in answer.outputs[0].text and answer.outputs[0].finish_reason == "stop"

    class Reference:
        def logprobs(self, text: list[int]) -> torch.Tensor:
            with torch.inference_mode():
                return torch.log_softmax(hf(torch.tensor([text]), use_cache=False).logits[0].double(), -1)

    check_logprobs(Reference(), outputs)  # type: ignore[arg-type]


@pytest.mark.slow
def test_smollm2_tokenizer(starter_model: Path, test_data: Path) -> None:
    """transformers' own conversion, but with digits split as the model's real tokenizer.json has them."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(starter_model.parent, gguf_file=starter_model.name)
    digits, letters = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    ours = load_tokenizer(starter_model)
    for text in [*CORPUS, (test_data / "sonnet.txt").read_text()]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids) == text, "byte-level tokens lose nothing"
    assert (ours.eos_token, ours.bos_token, ours.pad_token) == ("<|im_end|>", "<|im_start|>", "<|im_end|>")
    assert len(ours.encode("1984")) == 4
    messages = [{"role": "user", "content": "hi"}]
    rendered = ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


# ---------------------------------------------------------------- refusals


def test_wrong_and_damaged_files(tmp_path: Path) -> None:
    good = Written("llama", "llama", tmp_path / "good.gguf")
    data = Path(good.path).read_bytes()
    name = b"blk.1.ffn_norm.weight"
    kind_at = data.index(name) + len(name) + 4 + 8
    cases = {
        "GGUF file: it does not begin with GGUF": b"not a model at all",
        "is truncated or damaged: its header ends early": data[:300],
        "is truncated: it ends before the end of": data[:-4000],
        "version 9; versions 2 and 3": data[:4] + b"\x09" + data[5:],
        "blk.1.ffn_norm.weight is of tensor type 99": data[:kind_at] + b"\x63" + data[kind_at + 1 :],
        "1 of 30 tensors are missing": data.replace(name, b"blk.1.ffn_morn.weight"),
        "of the kind 'lloma'": data.replace(b"llama", b"lloma"),
    }
    for message, content in cases.items():
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(ModelError, match=message) as error:
            LLM(str(tmp_path / "bad.gguf"), skip_tokenizer_init=True, dtype="float32")
        assert "\n" not in str(error.value)
    with pytest.raises(ModelError, match="there is no such file"):
        LLM(str(tmp_path / "none.gguf"))
    with pytest.raises(ModelError, match=r"good.gguf has no tokenizer. Set tokenizer"):
        LLM(good.path)
    with pytest.raises(ConfigError, match="load_format='safetensors'.*is a gguf"):
        good.llm(load_format="safetensors")


def test_unknown_ways_of_splitting_are_named(tmp_path: Path, test_data: Path) -> None:
    with tarfile.open(test_data / "tokenizers" / "gpt2.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    write_tokenizer(tmp_path / "m.gguf", next(tmp_path.rglob("tokenizer.json")).parent, "strange", False)
    with pytest.raises(ModelError, match="the pre-tokenizer 'strange', which is not supported; supported are default"):
        load_tokenizer(tmp_path / "m.gguf")


def test_transformers_runs_no_files(tmp_path: Path) -> None:
    written = Written("llama", "llama", tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="model_impl='transformers' runs no GGUF files"):
        LLM(str(written.path), model_impl="transformers", **SMALL)

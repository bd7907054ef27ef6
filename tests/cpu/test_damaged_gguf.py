"""GGUF files with entries that cannot be: each is refused in one sentence that names the file and the entry.

And a great many more, of which only is asked that nothing but our own errors comes out, soon and without much memory.
"""

from __future__ import annotations

import math
import resource
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from kvasir import LLM
from kvasir.config.args import EngineArgs
from kvasir.config.resolve import resolve
from kvasir.errors import KvasirError, ModelError
from kvasir.frontend.text.tokenizer_files import load_tokenizer
from kvasir.models.checkpoint import is_finite
from kvasir.models.loader import load
from kvasir.quantization.gguf import _SCALES, PackedRows
from kvasir.quantization.gguf_file import GGUFFile, read_gguf
from tests.gguf_builders import write_model
from tests.model_builders import make_hf_model
from tests.pairwise import few

TOKENS = [*(chr(ord("a") + i) for i in range(26)), "ab", "bc", "abc", "<s>", "</s>"]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * 29 + [3, 3],
    "tokenizer.ggml.merges": ["a b", "b c", "ab c"],
    "tokenizer.ggml.bos_token_id": 29,
    "tokenizer.ggml.eos_token_id": 30,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages }}",
    "general.alignment": 32,
}
SENTENCEPIECE = {
    **TOKENIZER,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.scores": [float(-i) for i in range(31)],
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.add_space_prefix": True,
}


def packed(value: Any) -> tuple[int, bytes]:
    """The kind of a value, and its bytes."""
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return (11, struct.pack("<q", value)) if value < 0 else (10, struct.pack("<Q", value))
        case float():
            return 12, struct.pack("<d", value)
        case str():
            return packed(value.encode("utf-8", "surrogateescape"))
        case bytes():
            return 8, struct.pack("<Q", len(value)) + value
        case list():
            each = [packed(item) for item in value]
            kind = each[0][0] if each else 4
            return 9, struct.pack("<IQ", kind, len(each)) + b"".join(data for _, data in each)
    raise AssertionError(f"{value!r} has no kind")


def rewrite(source: GGUFFile, path: Path, changes: dict[str, Any]) -> Path:
    """The file with other metadata; an entry that is None is left out."""
    metadata = {key: value for key, value in (source.metadata | changes).items() if value is not None}
    header = b"GGUF" + struct.pack("<IQQ", 3, len(source.tensors), len(metadata))
    for key, value in metadata.items():
        kind, data = packed(value)
        header += packed(key)[1] + struct.pack("<I", kind) + data
    content, body = source.path.read_bytes(), b""
    for name, tensor in source.tensors.items():
        assert tensor.kind == "F32", "the small model is not quantized"
        header += packed(name)[1] + struct.pack("<I", len(tensor.shape))
        header += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape[::-1]) + struct.pack("<IQ", 0, len(body))
        body += content[tensor.offset : tensor.offset + tensor.num_rows * tensor.row_bytes]
        body += bytes(-len(body) % 32)
    path.write_bytes(header + bytes(-len(header) % 32) + body)
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    folder = tmp_path_factory.mktemp("gguf")
    write_model(folder / "plain.gguf", make_hf_model("llama"), "llama")
    return read_gguf(rewrite(read_gguf(folder / "plain.gguf"), folder / "good.gguf", TOKENIZER))


def load_all(path: Path) -> None:
    """What starting an engine reads of a file."""
    config = resolve(EngineArgs(str(path), device="cpu", use_tqdm_on_load=False).create_engine_config())
    load_tokenizer(config.model.tokenizer)
    load(config, torch.device("cpu"))


def test_the_file_as_it_should_be(good: GGUFFile, tmp_path: Path) -> None:
    load_all(good.path)
    load_all(rewrite(good, tmp_path / "m.gguf", SENTENCEPIECE))
    assert load_tokenizer(str(good.path)).encode("abc") == [29, 28]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.attention.head_count", 0, "llama.attention.head_count must be a whole number of at least 1, but is 0"),
        ("llama.attention.head_count", -8, "attention.head_count must be a whole number of at least 1, but is -8"),
        ("llama.attention.head_count", "8", "attention.head_count must be a whole number of at least 1, but is '8'"),
        ("llama.attention.head_count_kv", 3, "is 4, not a multiple of attention.head_count_kv, 3"),
        ("llama.block_count", 1 << 31, "llama.block_count must be at most 4096, but is 2147483648"),
        ("llama.block_count", 4000, "llama.block_count is 4000, but the file has 3 layers"),
        ("llama.embedding_length", 512, "llama.embedding_length is 512, but token_embd.weight has"),
        ("llama.attention.layer_norm_rms_epsilon", math.nan, "rms_epsilon must be a positive number, but is nan"),
        ("llama.rope.freq_base", math.inf, "llama.rope.freq_base must be a positive number, but is inf"),
        ("llama.context_length", 1 << 62, "llama.context_length must be at most"),
        ("llama.attention.key_length", 7, "rotary embeddings turn pairs of numbers"),
        ("tokenizer.ggml.tokens", [*TOKENS[:7], b"\xff", *TOKENS[8:]], "entry 7 of tokenizer.ggml.tokens is not UTF-8"),
        ("tokenizer.ggml.tokens", TOKENS * 50, "it names 1550 tokens, and token_embd.weight has"),
        ("tokenizer.ggml.merges", ["a b", "nospace"], "its tokens and merges do not make a tokenizer"),
        ("tokenizer.ggml.eos_token_id", "x", "tokenizer.ggml.eos_token_id must be the number of a token, but is 'x'"),
        ("tokenizer.ggml.pre", 5, "tokenizer.ggml.pre is not a string"),
        ("tokenizer.ggml.add_bos_token", "no", "tokenizer.ggml.add_bos_token is not a boolean"),
        ("tokenizer.chat_template", b"\xff", "tokenizer.chat_template is not UTF-8"),
        ("general.alignment", 0, "general.alignment is 0"),
        ("llama.embedding_length", None, "it does not say what hidden_size is"),
    ],
)
def test_an_impossible_entry_is_named(good: GGUFFile, tmp_path: Path, key: str, value: Any, said: str) -> None:
    path = rewrite(good, tmp_path / "m.gguf", {key: value})
    with pytest.raises(ModelError) as caught:
        load_all(path)
    assert str(caught.value).startswith(f"{path} is damaged: ") and said in str(caught.value)
    assert str(caught.value).endswith("; download it again.") and "\n" not in str(caught.value)


def test_heads_that_do_not_share_the_embedding(good: GGUFFile, tmp_path: Path) -> None:
    changes = {"attention.head_count": 7, "attention.head_count_kv": 1, "attention.key_length": None}
    path = rewrite(good, tmp_path / "m.gguf", {f"llama.{key}": value for key, value in changes.items()})
    with pytest.raises(ModelError, match=r"embedding_length is \d+, not a multiple of llama.attention.head_count, 7"):
        load_all(path)


def test_the_engine_says_it_too(good: GGUFFile, tmp_path: Path) -> None:
    path = rewrite(good, tmp_path / "m.gguf", {"llama.attention.head_count": 0})
    with pytest.raises(ModelError, match="is damaged: llama.attention.head_count must be"):
        LLM(str(path), device="cpu")


# ---------------------------------------------------------------- anything

HOSTILE: list[Any] = [
    *(0, 1, 3, 7, -1, 4097, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 62, -(1 << 62)),
    *(0.0, -1.0, 1e-320, 1e308, math.nan, math.inf, -math.inf),
    *(True, False, "", "x", "linear", "yarn", "gpt2", "llama", b"\xff\xfe", "a" * 100_000),
    *([], [0], ["a"], [b"\xff"], [""], [1.5, math.nan], [[1], [2]], [1 << 40] * 3, ["a b", "a b"]),
    None,
]
FURTHER = (
    *("llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scaling.original_context_length"),
    *("llama.rope.dimension_count", "llama.expert_count", "llama.attention.sliding_window", "general.architecture"),
)


def check_only_our_errors(path: Path) -> None:
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        load_all(path)
    except KvasirError as error:
        assert len(str(error)) < 1500 and "\n" not in str(error)
    assert time.monotonic() - began < 60, "a moment, on a quiet machine"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10, "KiB"


def every_key() -> list[str]:
    numbers = (
        *("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"),
        *("attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "rope.freq_base"),
    )
    return [*(f"llama.{name}" for name in numbers), *FURTHER, *SENTENCEPIECE]


PARTS = 4  # of HOSTILE, of which the fast tests have one for each entry
CASES = [(key, kind, part) for key in every_key() for kind in ("gpt2", "llama") for part in range(PARTS)]
FAST = [
    (key, kind, part)
    for key, kind, part in CASES
    if part == every_key().index(key) % PARTS and (kind == "llama" or key in TOKENIZER)
]


@pytest.mark.parametrize(("key", "kind", "part"), few(CASES, fast=FAST))
def test_hostile_entries(good: GGUFFile, tmp_path: Path, key: str, kind: str, part: int) -> None:
    base = TOKENIZER if kind == "gpt2" else SENTENCEPIECE
    for number, value in enumerate(HOSTILE[part::PARTS]):
        check_only_our_errors(rewrite(good, tmp_path / f"{number}.gguf", {**base, key: value}))


@pytest.mark.parametrize("scaling", ["linear", "yarn", "longrope", "llama3"])
def test_hostile_scaling(good: GGUFFile, tmp_path: Path, scaling: str) -> None:
    for key in FURTHER[1:3]:
        for number, value in enumerate(HOSTILE):
            changes = {"llama.rope.scaling.type": scaling, "llama.rope.scaling.factor": 2.0, key: value}
            check_only_our_errors(rewrite(good, tmp_path / f"{number}.gguf", changes))


def test_lists_in_lists_without_end(tmp_path: Path) -> None:
    entry = packed("x")[1] + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    with pytest.raises(ModelError, match="is truncated or damaged"):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", sorted(_SCALES))
def test_scales_that_are_not_finite(kind: str) -> None:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    assert _SCALES[kind][0] == size
    rows = torch.zeros(4, 3 * size, dtype=torch.uint8)
    packed_rows = PackedRows(rows, kind, (4, 3 * block))
    assert all(is_finite(part) for part in packed_rows.scales())
    for place in _SCALES[kind][1]:
        broken = rows.clone()
        broken[2, size + place : size + place + 2] = torch.tensor([0, 0x7E], dtype=torch.uint8)  # NaN
        values = dequantize(broken.numpy(), GGMLQuantizationType[kind])
        assert math.isnan(values[2, block]) or math.isnan(values[2, 2 * block - 1]), "this is a scale"
        assert not all(is_finite(part) for part in PackedRows(broken, kind, packed_rows.shape).scales())


def test_a_file_with_such_a_scale_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, make_hf_model("llama", hidden_size=64, intermediate_size=96), "llama", GGMLQuantizationType.Q8_0)
    tensor = read_gguf(path).tensors["blk.1.attn_k.weight"]
    with path.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(b"\0\x7e")
    config = resolve(EngineArgs(str(path), device="cpu", use_tqdm_on_load=False).create_engine_config())
    with pytest.raises(ModelError, match=r"blk\.1\.attn_k\.weight in model\.gguf has values that are not finite"):
        load(config, torch.device("cpu"))

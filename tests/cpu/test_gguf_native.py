"""GGUF files on the CPU library, in bfloat16: the file's own numbers in every matrix, and what they compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")

import gguf
from gguf import GGMLQuantizationType as Kind

from kvasir.config.args import EngineArgs
from kvasir.config.resolve import resolve
from kvasir.kernels.cpu.packed import BF16, GGUF, PLAIN, PackedMatrix
from kvasir.layers.base import Build
from kvasir.layers.embedding import Embedding, Head
from kvasir.layers.linear import Linear, qkv_linear, row_linear
from kvasir.layers.mesh import Mesh
from kvasir.models.gguf import GGUFCheckpoint
from kvasir.models.loader import load
from kvasir.models.native import NativeDecoder
from kvasir.models.transformer import Transformer
from kvasir.quantization.cpu import KEPT, VOCABULARIES, CpuMethods, matrix_of, pack_as_in_file
from kvasir.quantization.gguf import PackedRows
from kvasir.quantization.gguf_file import read_gguf
from tests.cpu.test_gguf import LARGE_ROWS, Written
from tests.gguf_builders import random_blocks
from tests.model_builders import PagedModel
from tests.native_builders import require_library

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),  # tied, with biases
    "phi3": ("phi3", {"sliding_window": None}),  # fused
}
KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K"]
TEXT = np.random.default_rng(1).integers(2, 96, 23).tolist()


@pytest.fixture(autouse=True)
def library() -> None:
    require_library()


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def written(name: str, kind: str, path: Path) -> Written:
    arch, sizes = FAMILIES[name]
    return Written(name, arch, path / "m.gguf", Kind[kind], **LARGE_ROWS, **sizes)


def load_file(path: str, **settings: Any) -> Any:
    config = resolve(EngineArgs(path, device="cpu", skip_tokenizer_init=True, use_tqdm_on_load=False, **settings))
    assert (config.device.attention_backend, config.model.dtype) == ("cpu", "bfloat16")
    return load(config, torch.device("cpu"))


def logits(path: str, **settings: Any) -> torch.Tensor:
    paged = PagedModel(load_file(path, **settings))
    return torch.cat([paged.step({"text": TEXT[:20]})["text"], *(paged.step({"text": [t]})["text"] for t in TEXT[20:])])


def kept(matrix: PackedMatrix) -> torch.Tensor:
    return matrix.rows(torch.arange(matrix.layout.outputs)).float()


def matrices(model: Transformer) -> dict[str, PackedMatrix]:
    """By the names that files of split projections have."""
    head = model.embedding if model.spec.tie_embeddings else model.head
    assert isinstance(head, Embedding) and model.embedding.matrix is not None and head.matrix is not None
    found = {"token_embd": model.embedding.matrix, "output": head.matrix}
    for index, layer in enumerate(model.layers):
        for name, linear in layer.named_modules():
            if isinstance(linear, Linear):
                found[f"blk.{index}.{name}"] = matrix_of(linear)
    return found


def values_of(path: str) -> dict[str, torch.Tensor]:
    """A file's matrices expanded by the gguf package, by the names of `matrices`."""
    checkpoint = GGUFCheckpoint(read_gguf(path))
    read = {name.removesuffix(".weight"): checkpoint.packed(name) for name in checkpoint.entries}
    values = {name: rows.expand().float() for name, rows in read.items() if len(rows.shape) == 2}
    found = {"token_embd": values["token_embd"], "output": values.get("output", values["token_embd"])}
    for index in range(LARGE_ROWS["num_hidden_layers"]):
        at = f"blk.{index}"
        found[f"{at}.attention.o"], found[f"{at}.mlp.down"] = values[f"{at}.attn_output"], values[f"{at}.ffn_down"]
        if f"{at}.attn_qkv" in values:
            found[f"{at}.attention.qkv"], found[f"{at}.mlp.gate_up"] = values[f"{at}.attn_qkv"], values[f"{at}.ffn_up"]
        else:
            found[f"{at}.attention.qkv"] = torch.cat([values[f"{at}.attn_{part}"] for part in "qkv"])
            found[f"{at}.mlp.gate_up"] = torch.cat([values[f"{at}.ffn_{part}"] for part in ("gate", "up")])
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_matrix_has_the_files_numbers(name: str, kind: str, tmp_path: Path) -> None:
    path = written(name, kind, tmp_path).path
    model, wanted = load_file(path), values_of(path)
    assert isinstance(model, NativeDecoder)
    found = matrices(model.model)
    assert found.keys() == wanted.keys() and len(found) == 2 + 4 * LARGE_ROWS["num_hidden_layers"]
    for place, matrix in found.items():
        assert matrix.layout.format == GGUF[kind][1], place
        # Scales of the K types are products that are rounded to float16; all is compared as bfloat16.
        if kind.endswith("_K"):
            assert error(kept(matrix), wanted[place]) < 2.5e-3, place
        else:
            assert torch.equal(kept(matrix), wanted[place].bfloat16().float()), place


@pytest.mark.parametrize("kind", ["F16", *KINDS])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits(name: str, kind: str, tmp_path: Path) -> None:
    """Near to transformers' in float32: activations have 8 bits where weights are quantized."""
    model = written(name, kind, tmp_path)
    with torch.inference_mode():
        exact = model.hf(torch.tensor([TEXT]), use_cache=False).logits[0]
    assert error(logits(model.path), exact) < (0.05 if kind == "F16" else 0.1)
    assert error(logits(model.path, quantization="none"), exact) < 0.05


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_not_quantized_becomes_bfloat16(name: str, tmp_path: Path, log_lines: list[str]) -> None:
    path = written(name, "F16", tmp_path).path
    model, wanted = load_file(path).model, values_of(path)
    for place, matrix in matrices(model).items():
        looked_up_only = place == "token_embd" and not model.spec.tie_embeddings
        assert matrix.layout.format == (PLAIN if looked_up_only else BF16), place
        assert torch.equal(kept(matrix), wanted[place].bfloat16().float()), place
    assert not any("are expanded" in line for line in log_lines), "it was not small before"


# ---------------------------------------------------------------- layers


def rows_of(kind: str, outputs: int, inputs: int) -> PackedRows:
    rng = np.random.default_rng(outputs)
    number = Kind[kind]
    if kind.endswith("_K"):
        data = random_blocks((outputs, inputs), number, rng)
    else:
        data = gguf.quantize(rng.standard_normal((outputs, inputs), np.float32), number).view(np.uint8)
    return PackedRows(torch.from_numpy(data), kind, (outputs, inputs))


def build(mesh: Mesh | None = None) -> Build:
    return Build(torch.bfloat16, mesh or Mesh(), CpuMethods(KEPT), torch.device("cpu"))


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        (("Q4_0", "Q4_0", "Q8_0"), GGUF["Q4_0"][1].joined(GGUF["Q8_0"][1])),
        (("Q4_K", "Q4_K", "Q6_K"), GGUF["Q4_K"][1].joined(GGUF["Q6_K"][1])),
        (("Q5_0", "F16", "Q5_0"), BF16),  # one without a scale: the matrix is expanded
    ],
    ids=str,
)
def test_parts_of_several_types(kinds: tuple[str, ...], wanted: Any, log_lines: list[str]) -> None:
    layer = qkv_linear(build(), "qkv", 256, heads=4, kv_heads=2, head_dim=16, bias=False)
    parts = {part: rows_of(kind, 64 if part == "q" else 32, 256) for part, kind in zip("qkv", kinds, strict=True)}
    for part, rows in parts.items():
        layer.load(("weight", part), rows)  # type: ignore[arg-type]
    layer.process()
    assert matrix_of(layer).layout.format == wanted
    values = torch.cat([rows.expand().float() for rows in parts.values()])
    assert error(kept(matrix_of(layer)), values) < 2.5e-3
    assert any("are expanded to bf16" in line for line in log_lines) == (wanted == BF16)


@pytest.mark.parametrize(("kind", "wanted"), [("Q4_0", GGUF["Q4_0"][1]), ("Q6_K", BF16)])
def test_a_ranks_share_of_the_inputs(kind: str, wanted: Any, log_lines: list[str]) -> None:
    """Cut where a block ends it is the file's; a cut through a block (those of K types are 256 long) expands it."""
    rows, halves = rows_of(kind, 48, 256), []
    for rank in range(2):
        layer = row_linear(build(Mesh(rank, 2)), "down", 256, 48, bias=False)
        layer.load(("weight", None), rows)  # type: ignore[arg-type]
        layer.process()
        assert matrix_of(layer).layout.format == wanted
        halves.append(kept(matrix_of(layer)))
    assert error(torch.cat(halves, dim=1), rows.expand()) < 2.5e-3
    assert any("are expanded to bf16" in line for line in log_lines) == (wanted == BF16)


def test_a_ranks_share_of_the_vocabulary() -> None:
    rows = rows_of("Q6_K", 96, 256)
    for kind in (Embedding, Head):
        shares = []
        for rank in range(2):
            layer = kind(replace(build(Mesh(rank, 2)), vocabulary=VOCABULARIES[KEPT]), 96, 256)
            layer.load(("weight", None), rows)
            layer.process()
            assert layer.matrix is not None and layer.matrix.layout.format == GGUF["Q6_K"][1]
            assert layer.weight.numel() == 0
            shares.append(kept(layer.matrix))
        assert error(torch.cat(shares), rows.expand()) < 2.5e-3


def test_mxfp4_keeps_its_numbers(tmp_path: Path, log_lines: list[str]) -> None:
    require_library()
    values = torch.randn(48, 64) * 0.1
    data = gguf.quantize(values.numpy(), gguf.GGMLQuantizationType.MXFP4)
    rows = PackedRows(torch.from_numpy(data), "MXFP4", (48, 64))
    packed = pack_as_in_file(rows, None)
    assert str(packed.layout.format).startswith("6-bit")
    wanted = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType.MXFP4))
    assert torch.equal(packed.rows(torch.arange(48)).float(), wanted)
    assert not any("expanded" in line for line in log_lines)

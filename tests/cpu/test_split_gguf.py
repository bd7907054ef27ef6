"""GGUF models in several files, as llama.cpp splits them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf")

from kvasir.errors import ModelError
from kvasir.models.gguf import GGUFCheckpoint, read_config
from kvasir.quantization.gguf_file import read_gguf
from tests.gguf_builders import write_model
from tests.model_builders import make_hf_model


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    write_model(tmp_path / "m.gguf", make_hf_model("llama"), "llama", tensors_in_a_file=9)
    return sorted(tmp_path.glob("m-*.gguf"))


def test_parts_are_one_model(parts: list[Path], tmp_path: Path) -> None:
    write_model(tmp_path / "whole.gguf", make_hf_model("llama"), "llama")
    whole, found = read_gguf(tmp_path / "whole.gguf"), read_gguf(parts[0])
    assert len(parts) > 2 and found.tensors.keys() == whole.tensors.keys()
    assert {tensor.file for tensor in found.tensors.values()} == set(parts)
    assert read_config(found)["num_hidden_layers"] == read_config(whole)["num_hidden_layers"]
    ours, theirs = GGUFCheckpoint(found), GGUFCheckpoint(whole)
    for name in whole.tensors:
        assert torch.equal(ours.packed(name).data, theirs.packed(name).data), name
    last = next(name for name, tensor in found.tensors.items() if tensor.file == parts[-1] and len(tensor.shape) == 1)
    assert found.floats(last) == whole.floats(last)


def test_what_is_wrong_with_parts_is_said(parts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"name the first one, {parts[0].name}"):
        read_gguf(parts[1])
    renamed = shutil.copy(parts[0], tmp_path / "renamed.gguf")
    with pytest.raises(ModelError, match=f"should end in -00001-of-{len(parts):05}.gguf"):
        read_gguf(renamed)
    last = parts[-1].read_bytes()
    parts[-1].unlink()
    parts[0].touch()
    with pytest.raises(ModelError, match=f"lacks 1 of the {len(parts)} files .*{parts[-1].name}.*download"):
        read_gguf(parts[0])
    shutil.copy(parts[1], parts[-1])
    with pytest.raises(ModelError, match=f"is not part {len(parts)} of {len(parts)} of a model"):
        read_gguf(parts[0])
    parts[-1].write_bytes(last[:-200])
    with pytest.raises(ModelError, match="is truncated"):
        read_gguf(parts[0])
    parts[-1].write_bytes(last.replace(b"split.tensors.count", b"split.tensors.kount"))
    first = parts[0].read_bytes()
    at = first.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    parts[0].write_bytes(first[:at] + b"\x63" + first[at + 1 :])
    with pytest.raises(ModelError, match="tensors, but should have 99"):
        read_gguf(parts[0])

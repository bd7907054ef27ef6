"""Real tokenizers, each as Kvasir's Tokenizer and as transformers' AutoTokenizer; a small one like SentencePiece's."""

from __future__ import annotations

import json
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.frontend.text.tokenizer_files import load_tokenizer

REAL = ("deepseek_v3", "gpt2", "llama3_1", "mistral_nemo", "qwen2_5")


class RealTokenizers:
    """Unpacked and loaded when first asked for."""

    def __init__(self, archives: Path, directory: Path) -> None:
        self._archives = archives
        self._directory = directory
        self.ours = cache(self._ours)
        self.theirs = cache(self._theirs)

    def path(self, name: str) -> Path:
        if not (self._directory / name).is_dir():
            with tarfile.open(self._archives / f"{name}.tar.gz") as archive:
                archive.extractall(self._directory, filter="data")
        return self._directory / name

    def _ours(self, name: str) -> Tokenizer:
        return load_tokenizer(self.path(name))

    def _theirs(self, name: str) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path(name))


@pytest.fixture(scope="session")
def real(test_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RealTokenizers:
    return RealTokenizers(test_data / "tokenizers", tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture(scope="session", params=REAL)
def name(request: pytest.FixtureRequest) -> str:
    """Each real tokenizer in turn."""
    return str(request.param)


def _sentencepiece_like() -> tokenizers.Tokenizer:
    """Like Llama 2's: a space is ▁, one is put in front and taken off again, and unknown characters become bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "h", "e", "l", "o", "w", "r", "d", ".", "é", "世", "▁h", "▁w", "he", "lo", "wo", "▁wo", "rd"]
    merges = [("▁", "h"), ("▁", "w"), ("▁", "▁"), ("h", "e"), ("l", "o"), ("w", "o"), ("▁", "wo"), ("r", "d")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.fixture(scope="session")
def sentencepiece_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sentencepiece_like")
    _sentencepiece_like().save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_dir: Path) -> Tokenizer:
    return load_tokenizer(sentencepiece_dir)

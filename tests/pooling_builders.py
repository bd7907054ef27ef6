"""Tiny pooling models with a tokenizer, as sentence-transformers and transformers save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = """
the a cat dog sat on mat barks what is of and to moon cheese made bread small animal kind sky blue
grass green who wrote it rain falls in spain mainly plain one two three four five six seven eight
nine ten
""".split()  # noqa: SIM905
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [f"{mark}{letter}" for letter in "abcdefghijklmnopqrstuvwxyz.?!,'" for mark in ("", "##")]
VOCABULARY = SPECIAL + WORDS + LETTERS
SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
}


def save_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=48, model_input_names=inputs, **names
    )
    fast.save_pretrained(directory)


def save_bert(directory: Path, ending: str = "Model", **options: Any) -> Any:
    """A BERT with random weights and a tokenizer."""
    torch.manual_seed(7)
    model = getattr(transformers, f"Bert{ending}")(transformers.BertConfig(**{**SIZES, **options})).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.05)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return model


def save_sentence_bert(directory: Path, *modules: str, prompts: dict[str, str] | None = None, **options: Any) -> Any:
    """The same as sentence-transformers saves it, with these modules (such as Dense) between Pooling and Normalize."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules as parts

    save_bert(directory / "base", **options)
    word = parts.Transformer(str(directory / "base"), max_seq_length=40)
    pooling = parts.Pooling(32, pooling_mode="mean")
    between = [parts.Dense(32, 24) for name in modules if name == "Dense"]
    model = SentenceTransformer(modules=[word, pooling, *between, parts.Normalize()], device="cpu", prompts=prompts)
    model.save(str(directory))
    return model


def set_entries(directory: Path, **entries: Any) -> None:
    """Change entries of a model's config.json."""
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))

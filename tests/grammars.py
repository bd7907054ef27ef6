"""A small vocabulary for grammars, random JSON schemas, and the output that masking alone gives on the fake device."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvasir.engine.grammar_guide import GrammarGuides
from kvasir.executor.fake import echo_next

EOS, THINK_END, CALL = "<eos>", "</think>", "<call>"
_TEXTS = [
    '{"name": "Bob", "age": 12, "city": "Paris", "tags": ["red", "green"], "count": 3.5, "flag": true, "none": null}',
    '{"name": "Alice", "age": 7, "city": "London", "tags": [], "count": -1, "flag": false, "items": [{"id": 1}]}',
    "The quick brown fox jumps over the lazy dog and the name of the city is not known to many people.",
]


@cache
def small_tokenizer() -> Tokenizer:
    """Bytes and some three hundred merges of JSON and English, with three added tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False, special_tokens=[EOS, THINK_END, CALL]
    )
    backend.train_from_iterator(_TEXTS * 3, trainer)
    backend.add_tokens([AddedToken(text, special=True) for text in (EOS, THINK_END, CALL)])
    return backend


def token_id(text: str) -> int:
    return int(small_tokenizer().token_to_id(text))


@cache
def small_vocabulary() -> LLTokenizer:
    return LLTokenizer(small_tokenizer().to_str(), vocab_size(), token_id(EOS))


def vocab_size() -> int:
    return int(small_tokenizer().get_vocab_size())


def small_guides() -> GrammarGuides:
    return GrammarGuides(small_vocabulary, vocab_size(), num_threads=2)


def decode(tokens: list[int]) -> str:
    return str(small_tokenizer().decode(tokens, skip_special_tokens=True))


def masked_text(prompt: list[int], grammar: str, max_tokens: int) -> list[int]:
    """The output of the fake model for a request that runs alone and is only masked: one token per step, until the
    grammar is complete."""
    matcher = LLMatcher(small_vocabulary(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens, vocab = list(prompt), vocab_size()
    while len(tokens) < len(prompt) + max_tokens:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        token = echo_next(tokens, vocab)
        while not bits[token]:
            token = (token + 1) % vocab
        tokens.append(token)
        if token == token_id(EOS):
            break
        assert matcher.consume_token(token), matcher.get_error()
        if matcher.is_stopped():
            break
    return tokens[len(prompt) :]


_names = st.sampled_from(["name", "age", "city", "tags", "a", "b_c", "count of items", "é", "flag"])
_scalars: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "integer"}),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": "number"}),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.just({"type": "string"}),
    st.builds(lambda values: {"enum": values}, st.lists(_names, min_size=1, max_size=4, unique=True)),
    st.builds(lambda value: {"const": value}, st.sampled_from(["a fixed text", 12, True, None, ["x", 1]])),
    st.just({"type": "string", "pattern": "^[a-f]{2,4}-[0-9]+$"}),
    st.builds(lambda low: {"type": "integer", "minimum": low, "maximum": low + 40}, st.integers(-50, 50)),
)


def _objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def make(properties: dict[str, Any], required: bool, more: bool) -> dict[str, Any]:
        made: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": more}
        return {**made, "required": list(properties)} if required else made

    return st.builds(make, st.dictionaries(_names, inner, min_size=1, max_size=4), st.booleans(), st.booleans())


def _nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    lists = st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3))
    either = st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
    return st.one_of(lists, either, _objects(inner))


schemas: st.SearchStrategy[dict[str, Any]] = _objects(st.recursive(_scalars, _nested, max_leaves=6))

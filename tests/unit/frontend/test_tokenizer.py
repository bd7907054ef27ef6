from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.config.engine import ModelConfig
from kvasir.errors import ConfigError, ModelError, RequestError
from kvasir.frontend.text import tokenizer_classes
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.frontend.text.tokenizer_files import TransformersTokenizer, load_tokenizer, tokenizer_of
from tests.unit.frontend.conftest import RealTokenizers

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\t\tnewlines\n\n\r\n  mixed \t \n end\n",
    " " * 70 + "x" + "\n" * 17,
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": x ** 2}  # comment\n\n\nclass A:\n\tpass\n",
    '<div class="a">&amp;</div> https://example.org/?q=1&r=%20#x',
    "日本語のテキスト。中文字符，混合。한국어 텍스트",
    "Ünïcödé e\u0301 n\u0303 ﬁ Ⅷ ㎏ ½ ٣ ०१२",
    "👩‍👩‍👧‍👦 🇳🇴 👍🏽 🤖🤖🤖 ☃\ufe0f",
    "Привет мир Γειά σου κόσμε שלום עולם مرحبا بالعالم नमस्ते สวัสดี",
    "1234567890 12 345 6,789.01 1e10 0xDEADBEEF",
    "I'm you're he'd WE'LL can't 's 'S",
    "a\u0000b\u200b\u200dc\ufeffd\ufffde",
    "<|begin_of_text|>hi<|eot_id|> <|im_start|>user\nhi<|im_end|><|endoftext|>",
    "<s>[INST] hi [/INST]</s> <unk> <pad> <｜begin▁of▁sentence｜>x<｜end▁of▁sentence｜> <|fim_prefix|>",
    "x" * 500,
    "aAbBcC" * 30 + "!?" * 40,
]


@pytest.mark.parametrize("special", [True, False])
def test_encode_and_decode_equal_transformers(real: RealTokenizers, name: str, special: bool) -> None:
    ours, theirs = real.ours(name), real.theirs(name)
    batch = ours.encode_batch(CORPUS, add_special_tokens=special)
    for text, from_batch in zip(CORPUS, batch, strict=True):
        ids = theirs.encode(text, add_special_tokens=special)
        assert ours.encode(text, add_special_tokens=special) == from_batch == ids, text
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected, text


def test_vocabulary_equals_transformers(real: RealTokenizers, name: str) -> None:
    ours, theirs = real.ours(name), real.theirs(name)
    assert (len(ours), ours.vocab_size) == (len(theirs), theirs.vocab_size)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert ours.all_special_ids == theirs.all_special_ids
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (
        theirs.bos_token_id,
        theirs.eos_token_id,
        theirs.pad_token_id,
    )
    assert ours.chat_template == theirs.chat_template
    ids = [0, 1, 5, 1000, len(ours) - 1]
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert ours.convert_ids_to_tokens(7) == theirs.convert_ids_to_tokens(7)
    tokens = [*theirs.convert_ids_to_tokens(ids), "no such token \u2603"]
    assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
    assert ours.convert_tokens_to_ids("hello") == theirs.convert_tokens_to_ids("hello")


@settings(max_examples=60)
@given(text=st.text(max_size=80))
def test_any_text_encodes_like_transformers(real: RealTokenizers, name: str, text: str) -> None:
    assert real.ours(name).encode(text) == real.theirs(name).encode(text)


@settings(max_examples=100)
@given(data=st.data())
def test_token_bytes_give_the_text_of_any_tokens(real: RealTokenizers, name: str, data: st.DataObject) -> None:
    """The table of bytes stands for the library's decoder, invalid UTF-8, special and unknown tokens included."""
    tokenizer = real.ours(name)
    size = len(tokenizer)
    ids = data.draw(st.lists(st.one_of(st.integers(0, 300), st.integers(0, size + 5)), max_size=30))
    for skip in (True, False):
        table = tokenizer.token_bytes(skip)
        assert table is not None
        assert b"".join(table[i] for i in ids).decode("utf-8", "replace") == tokenizer.decode(ids, skip)


def test_chat_equals_transformers(real: RealTokenizers) -> None:
    messages = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello"}]
    messages.append({"role": "user", "content": "Tell me <|im_end|> more 👍"})
    for name in ("llama3_1", "qwen2_5", "deepseek_v3", "mistral_nemo"):
        ours, theirs = real.ours(name), real.theirs(name)
        for prompt in (True, False):
            expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
            assert ours.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False) == expected
            text = theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
            assert ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt) == text


def test_chat_options_that_are_no_variables_are_refused(sentencepiece: Tokenizer) -> None:
    with pytest.raises(RequestError, match="return_tensors"):
        sentencepiece.apply_chat_template([{"role": "user", "content": "x"}], chat_template="x", return_tensors="pt")
    with pytest.raises(RequestError, match="pass one as chat_template"):
        sentencepiece.apply_chat_template([{"role": "user", "content": "x"}])


def test_token_text_keeps_the_leading_space(real: RealTokenizers, sentencepiece: Tokenizer) -> None:
    llama = real.ours("llama3_1")
    assert [llama.token_text(i) for i in llama.encode("Hello world", add_special_tokens=False)] == ["Hello", " world"]
    assert llama.token_text(128009) == "<|eot_id|>"
    assert [sentencepiece.token_text(i) for i in sentencepiece.encode("he wo")] == [" h", "e", " w", "o"]


def test_sentencepiece_like_equals_transformers(sentencepiece: Tokenizer, sentencepiece_dir: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(sentencepiece_dir)
    for text in ("hello world", "  hello", "é世界 <s>he</s>", "🤖"):
        assert sentencepiece.encode(text) == theirs.encode(text)
        assert sentencepiece.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))
    assert sentencepiece.token_bytes(True) is None


def test_decode_takes_arrays_and_single_ids(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("hello")
    assert sentencepiece.decode(np.array(ids, np.int32)) == "hello"
    assert sentencepiece.decode(ids[1]) == "e"


def test_text_that_is_no_unicode_is_refused(sentencepiece: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"cannot be tokenized: '\\ud83d' is a lone surrogate"):
        sentencepiece.encode("half a pair: \ud83d")
    with pytest.raises(RequestError, match="it is not a string but int"):
        sentencepiece.encode(5)  # type: ignore[arg-type]


# ---------------------------------------------------------------- files


@pytest.fixture
def copy(sentencepiece_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sentencepiece_dir, tmp_path / "model"))


def _config(directory: Path, **entries: Any) -> None:
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.mark.parametrize("with_decoder", [True, False])
def test_special_tokens_come_from_where_transformers_looks(copy: Path, with_decoder: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    as_dict = {"content": "<end>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
    typed = {"__type": "AddedToken", **as_dict}
    _config(
        copy,
        eos_token=typed,
        sep_token={**typed, "content": "<sep>"},
        pad_token="<pad>",
        image_token="<img>",
        additional_special_tokens=["<a>", "<b>"],
    )
    if with_decoder:
        _config(copy, added_tokens_decoder={"400": {**as_dict, "special": True}, "290": {**as_dict, "content": "<x>"}})
    special = {"eos_token": "</s>", "mask_token": {"content": "<m>"}}
    (copy / "special_tokens_map.json").write_text(json.dumps(special))
    ours, theirs = load_tokenizer(copy), PreTrainedTokenizerFast.from_pretrained(copy)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert set(ours.all_special_ids) == set(theirs.all_special_ids)
    assert ours.get_vocab() == theirs.get_vocab()
    for text in ("he  <end>lo", "<a><b><img>he<pad>", "he  <sep> lo", "a <x> b <m>"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


def test_add_bos_token_is_handled_as_transformers_does(copy: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    for entries in ({"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False, "add_eos_token": False}):
        _config(copy, **entries)
        assert load_tokenizer(copy).encode("he") == PreTrainedTokenizerFast.from_pretrained(copy).encode("he")


def test_chat_template_files(copy: Path) -> None:
    assert load_tokenizer(copy).chat_template is None
    (copy / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert load_tokenizer(copy).chat_template == "from json"
    _config(copy, chat_template="from config")
    assert load_tokenizer(copy).chat_template == "from config"
    _config(copy, chat_template=[{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}])
    assert load_tokenizer(copy).chat_template == {"default": "A", "tool_use": "B"}
    (copy / "chat_template.jinja").write_text("from file")
    assert load_tokenizer(copy).chat_template == "from file"
    (copy / "additional_chat_templates").mkdir()
    (copy / "additional_chat_templates" / "rag.jinja").write_text("with documents")
    assert load_tokenizer(copy).chat_template == {"default": "from file", "rag": "with documents"}


def test_templates_that_do_not_compile_are_found_at_the_start(copy: Path, log_lines: list[str]) -> None:
    model = ModelConfig(model="m", tokenizer=str(copy))
    with pytest.raises(ConfigError, match="The chat_template setting is wrong.* does not compile at line 1"):
        tokenizer_of(replace(model, chat_template="{{ bad"))
    assert tokenizer_of(replace(model, skip_tokenizer_init=True)) is None
    _config(copy, chat_template="{% endif %}")
    broken = tokenizer_of(model)
    assert broken is not None and broken.encode("he"), "texts can still be completed"
    assert "The model cannot be used for chat: The chat template does not compile at line 1" in log_lines[-1]
    assert tokenizer_of(replace(model, chat_template="{{ messages[0].content }}")) is not None
    assert len(log_lines) == 1, "its own template is not used"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"model": {}}'),
        ("tokenizer_config.json", "not json"),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", '{"eos_token": {"lstrip": true}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "y"}}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("special_tokens_map.json", '{"eos_token"'),
        ("chat_template.json", b"\xff\xfe{"),
    ],
)
def test_corrupt_files_are_named(copy: Path, file: str, content: str | bytes) -> None:
    (copy / file).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ModelError) as caught:
        load_tokenizer(copy)
    assert str(copy / file) in str(caught.value)
    assert "skip_tokenizer_init=True" in str(caught.value)


def test_missing_tokenizer_names_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "tokenizer.json" in str(caught.value)
    assert "skip_tokenizer_init=True" in str(caught.value) and "\n" not in str(caught.value)


def test_vocabulary_and_merges_alone_go_through_transformers(tmp_path: Path, log_lines: list[str]) -> None:
    letters = [chr(c) for c in range(0x21, 0x7F)] + ["Ġ"]
    vocab = {token: i for i, token in enumerate([*letters, "he", "ll", "Ġhe", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\nl l\nĠ he\n", encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = load_tokenizer(tmp_path)
    assert any("with transformers" in line for line in log_lines)
    ids = tokenizer.encode("hello hell")
    assert tokenizer.convert_ids_to_tokens(ids) == ["he", "ll", "o", "Ġhe", "ll"]
    assert tokenizer.decode(ids) == "hello hell"
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.token_bytes(True) is not None


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("bert", None, "tokenizer.json (or vocab.txt, from which it can be made) is missing"),
        ("bert", "BertTokenizer", "tokenizer.json (or vocab.txt, from which it can be made) is missing"),
        ("qwen2", "Qwen2Tokenizer", "tokenizer.json (or vocab.json and merges.txt, from which"),
        ("t5", "T5Tokenizer", "tokenizer.json (or spiece.model, from which"),
        ("deberta-v2", "DebertaV2Tokenizer", "tokenizer.json (or spm.model, from which"),
        ("gemma", "GemmaTokenizer", "tokenizer.json is missing"),
        ("llama", "LlamaTokenizer", "is missing"),
        ("splinter", "SplinterTokenizer", "tokenizer.json (or vocab.txt, from which"),
    ],
)
def test_a_tokenizer_without_its_vocabulary_is_refused(kind: str, name: str | None, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 30522}))
    if name is not None:
        own = {"content": "<kept>", "special": False, "lstrip": False, "rstrip": False, "normalized": False}
        config = {"tokenizer_class": name, "added_tokens_decoder": {"30000": {**own, "single_word": False}}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        load_tokenizer(tmp_path)
    assert said in str(caught.value) and str(tmp_path) in str(caught.value) and "download" in str(caught.value)
    assert ("tokenizer_config.json" in str(caught.value)) is (name is None)


def test_a_cut_vocabulary_is_refused(tmp_path: Path) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 100}))
    for num_words, loads in ((11, True), (10, False), (0, False)):
        words = "".join(f"{token}\n" for token in [*special, *(f"w{i}" for i in range(num_words))])
        (tmp_path / "vocab.txt").write_text(words)
        if loads:
            assert load_tokenizer(tmp_path).encode("w3") == [2, 8, 3]
            continue
        with pytest.raises(ModelError, match=f"vocab.txt in .* only {num_words} tokens .* vocabulary has 100"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize(("lost", "kept"), [("merges.txt", "vocab.json"), ("vocab.json", "merges.txt")])
def test_half_of_a_vocabulary_is_refused(lost: str, kept: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / kept).write_text(json.dumps({"a": 0, "b": 1}) if kept == "vocab.json" else "#version: 0.2\na b\n")
    with pytest.raises(ModelError, match=f"tokenizer.json .or {lost}, from which it can be made. is missing"):
        load_tokenizer(tmp_path)


def test_a_saved_tokenizer_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    from transformers import BertTokenizer

    BertTokenizer().save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    with pytest.raises(ModelError, match=r"tokenizer.json has no token that stands for text, only special ones"):
        load_tokenizer(tmp_path)


def test_python_tokenizers_have_the_same_surface(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    ByT5Tokenizer(extra_ids=4).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, TransformersTokenizer)
    ids = tokenizer.encode("hé", add_special_tokens=True)
    assert ids == [107, 198, 172, 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hé"
    assert tokenizer.decode_batch([ids[:1], ids[1:3]]) == ["h", "é"]
    assert tokenizer.eos_token_id == 1 and tokenizer.end_token_ids == {1}
    assert tokenizer.convert_ids_to_tokens([107]) == ["h"]
    assert tokenizer.convert_tokens_to_ids("h") == 107
    assert len(tokenizer) == len(tokenizer.get_vocab()) >= tokenizer.vocab_size
    assert tokenizer.token_text(107) == "h"


# ---------------------------------------------------------------- classes that bring a normalizer

COMPOSED = "Ang\u0308strom e\u0301 n\u0303 \u1112\u1161\u11ab Ⅷ Hello 123"
CLASSES = [
    *("Qwen2Tokenizer", "Qwen2TokenizerFast", "Qwen3_5Tokenizer", "CohereTokenizerFast", "GPTNeoXTokenizerFast"),
    *("GPT2Tokenizer", "PreTrainedTokenizerFast", "LlamaTokenizerFast", None),
]
TYPES = ["qwen2", "qwen3", "cohere2", "gpt_neox", "olmo2", "phi3", "stablelm", "llama", None]


@pytest.mark.parametrize("name", CLASSES)
def test_normalizers_are_those_of_the_class(tmp_path: Path, name: str | None) -> None:
    """tokenizer.json has none or another; which class transformers takes depends on two names."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers
    from transformers import AutoTokenizer

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for normalizer in (None, normalizers.NFKC()):
        backend = tokenizers.Tokenizer(models.BPE(letters, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        if normalizer is not None:
            backend.normalizer = normalizer
        for kind in TYPES:
            backend.save(str(tmp_path / "tokenizer.json"))
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name} if name else {}))
            (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} if kind else {}))
            try:
                theirs = AutoTokenizer.from_pretrained(tmp_path)
            except ValueError:
                continue  # neither name is known
            if type(theirs).__name__ in ("GPT2Tokenizer", "LlamaTokenizer"):
                continue  # their other steps differ from those of this tokenizer.json
            assert load_tokenizer(tmp_path).encode(COMPOSED) == theirs.encode(COMPOSED), (name, kind, normalizer)


WORDS = [*"abcdefghijklmnopqrstuvwxyzHWÉéö日本", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyzéö日本")]
BERT_CLASSES = ["BertTokenizer", "DistilBertTokenizerFast", "MPNetTokenizerFast", "PreTrainedTokenizerFast", None]


@pytest.mark.parametrize("name", BERT_CLASSES)
def test_berts_normalizer_is_that_of_the_class(tmp_path: Path, name: str | None) -> None:
    """tokenizer_config.json says what is lowercased, not tokenizer.json."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers
    from transformers import AutoTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", "<pad>", "<mask>", *WORDS]
    backend = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    said: list[dict[str, Any]] = [{}, {"do_lower_case": False}, {"tokenize_chinese_chars": False}]
    for lowercase, entries in itertools.product(
        (True, False), [*said, {"do_lower_case": False, "strip_accents": True}]
    ):
        backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        for kind in ("bert", "distilbert", "mpnet", "nomic_bert"):
            backend.save(str(tmp_path / "tokenizer.json"))
            named = {"tokenizer_class": name} if name else {}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(named | entries))
            (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
            theirs = AutoTokenizer.from_pretrained(tmp_path).encode("Hello Éa wörld 日本ab", add_special_tokens=False)
            ours = load_tokenizer(tmp_path).encode("Hello Éa wörld 日本ab", add_special_tokens=False)
            assert ours == theirs, (name, kind, lowercase, entries)


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "CodeGenTokenizer", "RobertaTokenizerFast", "GPTNeoXTokenizerFast"])
def test_a_space_before_texts_is_that_of_the_class(tmp_path: Path, name: str) -> None:
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import AutoTokenizer

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(letters, []))
    backend.decoder = decoders.ByteLevel()
    for before, asked in itertools.product((True, False), (True, False, None)):
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=before)
        backend.save(str(tmp_path / "tokenizer.json"))
        entries = {"tokenizer_class": name} | ({} if asked is None else {"add_prefix_space": asked})
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries))
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        ours = load_tokenizer(tmp_path)
        assert ours.encode("hi", add_special_tokens=False) == theirs.encode("hi", add_special_tokens=False)
        assert len(ours.encode("hi", add_special_tokens=False)) == 2 + bool(asked)


def test_classes_of_types_are_those_of_transformers() -> None:
    from transformers.models.auto import tokenization_auto

    theirs = tokenization_auto.TOKENIZER_MAPPING_NAMES
    for kind, name in tokenizer_classes._CLASSES.items():
        assert theirs[kind] == name, kind
    plain = {"TokenizersBackend", "MistralCommonBackend"}
    assert {theirs[kind] for kind in tokenizer_classes._PLAIN_TYPES} <= plain
    assert set(tokenizer_classes._OVERRULING_TYPES) <= tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS


def test_a_real_tokenizer_without_its_normalizer(real: RealTokenizers, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for name in ("qwen2_5", "gpt2"):
        directory = tmp_path / name
        shutil.copytree(real.path(name), directory)
        entries = json.loads((directory / "tokenizer.json").read_text())
        (directory / "tokenizer.json").write_text(json.dumps({**entries, "normalizer": None}))
        ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
        for text in [*CORPUS, COMPOSED]:
            assert ours.encode(text) == theirs.encode(text), text


# ---------------------------------------------------------------- end tokens


def test_hidden_end_tokens_end_a_text(sentencepiece_dir: Path, tmp_path: Path) -> None:
    """Special tokens that are known to end a text do, whatever eos_token is; a visible token of that text does not."""
    shutil.copytree(sentencepiece_dir, tmp_path, dirs_exist_ok=True)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens(["<|endoftext|>", "<|im_end|>", "<|other|>"])
    backend.add_tokens(["<|eot_id|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    ends = {tokenizer.convert_tokens_to_ids(text) for text in ("</s>", "<|endoftext|>", "<|im_end|>")}
    assert tokenizer.end_token_ids == ends
    assert load_tokenizer(sentencepiece_dir).end_token_ids == {2}


def test_end_tokens_of_real_tokenizers(real: RealTokenizers) -> None:
    for name, texts in {
        "qwen2_5": ["<|im_end|>", "<|endoftext|>"],
        "llama3_1": ["<|eot_id|>", "<|end_of_text|>"],
        "deepseek_v3": ["<\uff5cend▁of▁sentence\uff5c>"],
        "mistral_nemo": ["</s>"],
        "gpt2": ["<|endoftext|>"],
    }.items():
        ours = real.ours(name)
        assert ours.end_token_ids == set(ours.convert_tokens_to_ids(texts)), name


def test_neither_transformers_nor_torch_is_imported(sentencepiece_dir: Path) -> None:
    code = f"""
import sys
from kvasir.frontend.requests.input import InputProcessor
from kvasir.frontend.requests.output import OutputProcessor
from kvasir.frontend.text.tokenizer_files import load_tokenizer
load_tokenizer({str(sentencepiece_dir)!r}).apply_chat_template([{{"role": "user", "content": "x"}}], chat_template="x")
assert not {{"torch", "transformers"}} & set(sys.modules), "the API process must stay light"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sentence_transformers_lowercases(tmp_path: Path) -> None:
    """With do_lower_case, sentence-transformers lowercases texts whatever the tokenizer does."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "cat": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    for says, ids in ((False, [2, 2]), (True, [0, 1])):
        file = tmp_path / "sentence_bert_config.json"
        file.write_text(json.dumps({"max_seq_length": 40, "do_lower_case": says}))
        assert load_tokenizer(tmp_path).encode("The CAT") == ids

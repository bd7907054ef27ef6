"""Structured output of real models: valid answers, and the same ones with jumps and without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvasir import LLM, BeamSearchParams, RequestOutput, SamplingParams, StructuredOutputsParams
from kvasir.errors import RequestError
from tests.grammars import EOS, small_tokenizer, token_id

TEXT = {"type": "string", "maxLength": 12}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "first_name": TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "address": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "London", "Rome"]}, "postal_code": {"pattern": "^[0-9]{4}$"}},
            "required": ["city", "postal_code"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"enum": ["gold", "silver"]}, "maxItems": 2},
    },
    "required": ["first_name", "age", "address", "tags"],
    "additionalProperties": False,
}
PERSON["properties"]["address"]["properties"]["postal_code"]["type"] = "string"
PROMPT = "A person as JSON: "


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, with more tokens in the model's vocabulary than in the tokenizer's."""
    directory = tmp_path_factory.mktemp("tiny")
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": False, "eos_token_id": token_id(EOS),
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    small_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "chat_template": _TEMPLATE}))
    return directory


_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(
    scope="module", params=[pytest.param(False, id="in_step", marks=pytest.mark.slow), pytest.param(True, id="ahead")]
)
def llm(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24, "load_format": "dummy", "max_num_seqs": 16}
    with LLM(str(tiny_model), async_scheduling=request.param, **settings) as made:
        yield made


def generate(
    llm: LLM, params: list[SamplingParams], jumps: bool = True
) -> tuple[list[RequestOutput], dict[str, float]]:
    """The answers, and by how much the metrics kvasir:guided_* grew."""
    llm.llm_engine.input_processor.structured.may_jump = jumps
    before = _metrics(llm)
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    return outputs, {name: value - before[name] for name, value in _metrics(llm).items()}


def _metrics(llm: LLM) -> dict[str, float]:
    found = {metric.name: metric.value for metric in llm.get_metrics()}
    return {name.removeprefix("kvasir:guided_"): value for name, value in found.items() if "guided_" in name}


def held(**given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 200, "structured_outputs": StructuredOutputsParams(json=PERSON), **given})


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1, "seed": 1},
    "penalties": {
        "temperature": 1, "seed": 2, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3,
    },
    "bias": {"temperature": 1, "seed": 3, "logit_bias": {33: 2.0}, "top_p": 0.9, "top_k": 40},
    "cut": {"temperature": 0, "max_tokens": 11},
    "stop string": {"temperature": 0, "stop": ['"age"']},
    "several": {"temperature": 1, "seed": 4, "n": 2},
    "minimum": {"temperature": 1, "seed": 5, "min_tokens": 20},
    "compact": {
        "temperature": 1, "seed": 6, "structured_outputs": StructuredOutputsParams(json=PERSON, whitespace="compact"),
    },
}  # fmt: skip


def test_jumps_change_nothing_but_the_number_of_passes(llm: LLM) -> None:
    params = [held(**case) for case in CASES.values()]
    jumped, quick = generate(llm, params)
    masked, slow = generate(llm, params, jumps=False)
    for name, one, other in zip(CASES, jumped, masked, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert (a.text, list(a.token_ids), a.finish_reason, a.stop_reason) == (
                (b.text, list(b.token_ids), b.finish_reason, b.stop_reason)
            ), name
            if name not in ("cut", "stop string"):
                assert a.finish_reason == "stop" and a.stop_reason is None
                jsonschema.validate(json.loads(a.text), PERSON)
                assert max(a.token_ids) < small_tokenizer().get_vocab_size()
    assert quick["tokens"] == slow["tokens"] and slow["jumps"] == 0
    assert quick["jumps"] > len(CASES) and quick["passes"] < 0.75 * slow["passes"]
    assert jumped[list(CASES).index("stop string")].outputs[0].stop_reason == '"age"'
    assert len(jumped[list(CASES).index("cut")].outputs[0].token_ids) == 11


@pytest.mark.parametrize("rules", [{"allowed_token_ids": [token_id(EOS), 40]}, {"bad_words": ["first"]}], ids=str)
def test_where_other_rules_forbid_what_is_allowed_the_request_fails(llm: LLM, rules: dict[str, Any]) -> None:
    """It must not look like an answer that ended by itself."""
    (output,), _ = generate(llm, [held(temperature=0, **rules)])
    assert output.outputs[0].finish_reason == "error" and "bad_words" in str(output.outputs[0].stop_reason)


def test_every_token_has_its_logprobs(llm: LLM) -> None:
    (plain, scored), done = generate(llm, [held(temperature=0), held(temperature=0, logprobs=2)])
    (one,), (other,) = plain.outputs, scored.outputs
    assert list(one.token_ids) == list(other.token_ids)
    assert other.logprobs is not None and len(other.logprobs) == len(other.token_ids)
    for token, found in zip(other.token_ids, other.logprobs, strict=True):
        assert token in found
    assert done["jumps"] > 0


def test_other_rows_are_not_changed(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=30)
    alone = generate(llm, [free])[0][0].outputs[0].token_ids
    assert generate(llm, [held(temperature=0), free])[0][1].outputs[0].token_ids == alone


def test_chat_and_beam_search(llm: LLM) -> None:
    only = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    (reply,) = llm.chat([{"role": "user", "content": "Is water wet?"}], only, use_tqdm=False)
    assert reply.outputs[0].text in ("yes", "no")
    with pytest.raises(RequestError, match="structured_outputs cannot be used with beam search"):
        BeamSearchParams(2, 4, structured_outputs=StructuredOutputsParams(json_object=True)).to_sampling_params()


@pytest.mark.slow
def test_two_workers_agree_on_masks_and_jumps(tiny_model: Path) -> None:
    params = [held(temperature=0), held(temperature=1, seed=3, presence_penalty=0.5), SamplingParams(temperature=0)]
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24, "load_format": "dummy", "max_num_seqs": 4}
    with LLM(str(tiny_model), tensor_parallel_size=2, async_scheduling=True, **settings) as llm:
        jumped, done = generate(llm, params)
        masked, _ = generate(llm, params, jumps=False)
    assert done["jumps"] > 0
    for one, other in zip(jumped, masked, strict=True):
        assert list(one.outputs[0].token_ids) == list(other.outputs[0].token_ids)
    for output in jumped[:2]:
        jsonschema.validate(json.loads(output.outputs[0].text), PERSON)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_a_thousand_answers_of_the_starter_model_validate(starter_model: Path, ahead: bool) -> None:
    schemas = [
        PERSON,
        {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}, "s": TEXT},
         "required": ["x"], "additionalProperties": False}, "minItems": 1, "maxItems": 3},
        {"anyOf": [{"type": "object", "properties": {"kind": {"const": "a"}, "n": {"type": "integer"}},
         "required": ["kind"]}, {"enum": ["none", None]}]},
        {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
        {"$defs": {"t": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"anyOf": [
         {"$ref": "#/$defs/t"}, {"type": "null"}]}}, "required": ["v", "next"]}}, "$ref": "#/$defs/t"},
    ]  # fmt: skip
    params = [
        held(temperature=1, seed=i, max_tokens=160, structured_outputs={"json": schemas[i % len(schemas)]})
        for i in range(500)
    ]
    with LLM(str(starter_model), max_model_len=512, async_scheduling=ahead, kv_cache_memory_bytes=1 << 28) as llm:
        outputs, _ = generate(llm, params)
    finished = 0
    for i, output in enumerate(outputs):
        if output.outputs[0].finish_reason == "stop":
            finished += 1
            jsonschema.validate(json.loads(output.outputs[0].text), schemas[i % len(schemas)])
        else:
            assert output.outputs[0].finish_reason == "length"
    # numbers, names and recursion have no end of their own, so some answers reach max_tokens; most do not
    assert finished > 0.5 * len(outputs)

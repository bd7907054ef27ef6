"""Bodies: every parameter that clients of vLLM, OpenAI or Anthropic know works or is refused by name."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from kvasir.errors import RequestError
from kvasir.frontend.requests.pooling import PoolingParams
from kvasir.sampling_params import SamplingParams, StructuredOutputsParams
from kvasir.server.responses import messages_of
from kvasir.server.routes.completions import CompletionRequest
from kvasir.server.routes.messages import MessagesRequest
from kvasir.server.routes.other_embeddings import CohereEmbedRequest
from kvasir.server.routes.pooling import written
from kvasir.server.routes.tokens import GenerateRequest, TokenizeRequest
from kvasir.server.schema import structured
from kvasir.server.schema.base import Body, BoundedModel, Refusal
from kvasir.server.schema.chat import ChatRequest
from kvasir.server.schema.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingBodyRequest,
    RerankRequest,
    ScoreRequest,
)
from kvasir.server.schema.responses import ResponsesRequest
from kvasir.server.schema.sampling import SAMPLING_FIELDS, SamplingBody, sampling_params

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"prompt": "Hi"}
MESSAGE: dict[str, Any] = {"model": "m", "max_tokens": 1, **CHAT}

# vLLM's extras of chat and completions (both, or the one named), and OpenAI's own parameters.
VLLM = (
    *("use_beam_search", "length_penalty", "truncate_prompt_tokens", "add_special_tokens", "mm_processor_kwargs"),
    *("structured_outputs", "priority", "request_id", "session_id", "cache_salt", "return_token_ids"),
    *("return_tokens_as_token_ids", "echo", "prompt_embeds", "vllm_xargs", "kv_transfer_params", "best_of"),
)
VLLM_CHAT = (
    *("add_generation_prompt", "continue_final_message", "documents", "chat_template", "chat_template_kwargs"),
    *("reasoning_effort", "include_reasoning"),
)
OPENAI = (
    *("model", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed", "stop"),
    *("stream", "stream_options", "temperature", "top_p", "user"),
)
OPENAI_CHAT = (
    *("messages", "audio", "function_call", "functions", "max_completion_tokens", "metadata", "modalities"),
    *("parallel_tool_calls", "prediction", "prompt_cache_key", "reasoning_effort", "response_format"),
    *("safety_identifier", "service_tier", "store", "tool_choice", "tools", "top_logprobs", "verbosity"),
    *("web_search_options",),
)
# of SamplingParams, what a client over HTTP has no use for
NOT_OVER_HTTP = {"output_kind", "detokenize", "flat_logprobs", "extra_args", "keep_special_tokens", "reasoning_tokens"}


def test_vllms_parameters_are_known() -> None:
    for name in (*VLLM, *OPENAI):
        assert name in ChatRequest.model_fields and name in CompletionRequest.model_fields, name
    for name in (*VLLM_CHAT, *OPENAI_CHAT):
        assert name in ChatRequest.model_fields, name
    for name in ("prompt", "suffix"):
        assert name in CompletionRequest.model_fields


def test_every_sampling_parameter_is_known() -> None:
    for field in fields(SamplingParams):
        if field.name not in NOT_OVER_HTTP:
            for body in (ChatRequest, CompletionRequest, GenerateRequest):
                assert field.name in body.model_fields, f"{field.name} of {body.__name__}"
    assert set(SAMPLING_FIELDS) <= {field.name for field in fields(SamplingParams)}


def test_what_sampling_takes_reaches_it_or_is_refused() -> None:
    """A field of the shared body is a sampling parameter, is read elsewhere by name, or is refused."""
    elsewhere = {
        "truncate_prompt_tokens",
        "truncation_side",
        "priority",
        "timeout",
        "request_id",
        "cache_salt",
        "return_token_ids",
    }
    elsewhere |= {"return_tokens_as_token_ids", "vllm_xargs"} | structured.FIELDS
    for name, field in SamplingBody.model_fields.items():
        refused = any(isinstance(note, Refusal) for note in field.metadata)
        assert (name in SAMPLING_FIELDS) + (name in elsewhere) + refused == 1, name


def test_a_side_goes_with_every_way_to_cut_texts() -> None:
    rerank = {"query": "a", "documents": ["b"], "truncation_side": "left"}
    for cut in ({"truncate_prompt_tokens": 5}, {"max_tokens_per_doc": 5}, {"truncate": True}):
        RerankRequest(**rerank, **cut)
    cohere = {"texts": ["a"], "truncation_side": "left"}
    for cut in ({}, {"max_tokens": 5}, {"truncate": "END"}):
        CohereEmbedRequest(**cohere, **cut)
    for body, given in ((RerankRequest, rerank), (CohereEmbedRequest, {**cohere, "truncate": "NONE"})):
        with pytest.raises((ValidationError, RequestError), match="truncation_side"):
            body(**given)


def test_an_empty_text_is_still_one_of_two_names() -> None:
    with pytest.raises((ValidationError, RequestError), match="text_1 and queries say the same"):
        ScoreRequest(text_1="", queries="a", text_2="b")


def test_sides_of_scores_have_all_of_vllms_names() -> None:
    for names in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        given: Any = dict(zip(names, ("a", ["b", "c"]), strict=True))
        assert ScoreRequest(**given).sides() == (["a"], ["b", "c"])
    with pytest.raises((ValidationError, RequestError), match="items and data_2 say the same"):
        ScoreRequest(queries="a", items="b", data_2="b")


@pytest.mark.parametrize("kind", [ScoreRequest, RerankRequest, ClassifyRequest])
def test_older_names_of_use_activation(kind: Any) -> None:
    texts = {"text_1": "a", "text_2": "b", "query": "a", "documents": ["b"], "input": "a"}
    given = {name: text for name, text in texts.items() if name in kind.model_fields}
    if kind is ScoreRequest:
        del given["documents"]
    assert kind(**given).activates is None
    for name in ("use_activation", "activation", "softmax"):
        assert kind(**given, **{name: False}).activates is False
    with pytest.raises((ValidationError, RequestError), match="say the same thing"):
        kind(**given, softmax=True, activation=False)


def test_raw_scores_are_scores_without_activation() -> None:
    with pytest.raises((ValidationError, RequestError), match="raw_scores and use_activation"):
        RerankRequest(query="a", texts=["b"], raw_scores=True, use_activation=True)


@pytest.mark.parametrize("kind", [EmbeddingRequest, PoolingBodyRequest])
def test_the_type_of_numbers_is_for_base64(kind: Any) -> None:
    kind(input="a", encoding_format="base64", embed_dtype="bfloat16", endianness="big")
    kind(input="a", embed_dtype="float32", endianness="native")
    for given in ({"embed_dtype": "float16"}, {"endianness": "big", "encoding_format": "float"}):
        with pytest.raises((ValidationError, RequestError), match="set encoding_format to base64"):
            kind(input="a", **given)


@pytest.mark.parametrize("endianness", ["native", "little", "big"])
def test_numbers_in_base64(endianness: str) -> None:
    vector = np.random.default_rng(3).standard_normal(64).astype(np.float32)
    order = {"native": "=", "little": "<", "big": ">"}[endianness]
    for kind, code in (("float32", "f4"), ("float16", "f2"), ("bfloat16", "u2")):
        found = np.frombuffer(base64.b64decode(written(vector, "base64", kind, endianness)), order + code)
        if kind == "bfloat16":
            found = (found.astype(np.uint32) << 16).view(np.float32)
        allowed = {"float32": 0, "float16": 2**-11, "bfloat16": 2**-8}[kind]  # of the nearest number
        assert (np.abs(found.astype(np.float32) - vector) <= allowed * np.abs(vector)).all(), kind


def refusals(body: type[Body]) -> dict[str, Refusal]:
    return {
        name: note for name, field in body.model_fields.items() for note in field.metadata if isinstance(note, Refusal)
    }


@pytest.mark.parametrize(
    ("body", "good"),
    [(ChatRequest, CHAT), (CompletionRequest, TEXT), (ResponsesRequest, {"input": "Hi"}), (MessagesRequest, MESSAGE)],
)
def test_refused_fields_are_refused_by_name(body: type[Body], good: dict[str, Any]) -> None:
    found = refusals(body)
    assert len(found) > 5
    for name, note in found.items():
        with pytest.raises(ValidationError) as caught:
            body.model_validate({**good, name: "something else"})
        (error,) = caught.value.errors()
        assert error["ctx"]["param"] == name and error["msg"] == f"{name} is not available: {note.why}"
        for harmless in (None, *note.harmless):
            body.model_validate({**good, name: harmless})


def test_harmless_means_the_very_value() -> None:
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({**TEXT, "suffix": False})  # neither null nor ""


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprob_token_ids": [3]}, "logprob_token_ids"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ],
)
def test_what_does_not_go_together(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({**CHAT, **wrong})
    assert caught.value.errors()[0]["ctx"]["param"] == param


def test_tools_that_are_not_to_be_called_are_taken() -> None:
    assert ChatRequest.model_validate({**CHAT, "tools": [{"type": "function"}], "tool_choice": "none"}).tools


def test_unknown_fields_are_named_with_the_nearest() -> None:
    with pytest.raises(ValidationError, match="max_tokns. Did you mean max_tokens"):
        ChatRequest.model_validate({**CHAT, "max_tokns": 1})
    with pytest.raises(ValidationError):
        TokenizeRequest.model_validate({})


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"n": "2"}, 2),
        ({"n": True}, 1),
        ({"max_tokens": 2.0}, 2),
        ({"temperature": "0.5"}, 0.5),
        ({"stream": 1}, True),
        ({"logprobs": "true"}, True),
        ({"logprobs": "no"}, False),
    ],
)
def test_values_are_converted_as_in_vllm(given: dict[str, Any], value: object) -> None:
    (name,) = given
    found = getattr(ChatRequest.model_validate({**CHAT, **given}), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": "two"},
        {"n": 2.5},
        {"temperature": "nan"},
        {"timeout": "inf"},
        {"stop": 3},
        {"seed": 1.5},
        {"user": 1},
        {"cache_salt": "x" * 2000},
    ],
)
def test_wrong_types_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ChatRequest.model_validate({**CHAT, **wrong})


def test_an_empty_stop_string_means_none() -> None:
    body = ChatRequest.model_validate({**CHAT, "stop": ""})
    made = sampling_params(body, SamplingParams(), max_tokens=1, logprobs=None, stream=False)
    assert made.stop == []


# ---------------------------------------------------------------- lists of wrong things

MANY = 100_000
HOSTILE: list[Any] = [
    *([1] * MANY, ["a"] * MANY, [None] * MANY, [[1]] * MANY, [{}] * MANY, [[1, "a"]] * MANY, [1] * MANY + ["a"]),
    *({str(i): value for i in range(MANY)} for value in (1, "a", None, [1])),
]


def models() -> list[type[BoundedModel]]:
    found, todo = [], [BoundedModel]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        found += [kind] if kind.__module__.startswith("kvasir.") and kind.model_fields else []
    return list(dict.fromkeys(found))


def nodes(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        schema = [value for key, value in schema.items() if key != "metadata" or "type" not in schema]
    if isinstance(schema, list | tuple):
        for each in schema:
            yield from nodes(each)


def test_every_list_and_object_of_every_schema_is_bounded() -> None:
    assert len(models()) > 10
    for kind in models():
        for node in nodes(kind.__pydantic_core_schema__):
            if node.get("type") in ("list", "dict", "set", "tuple", "generator"):
                assert node.get("fail_fast") and node.get("max_length"), (kind, node)


@pytest.mark.parametrize("kind", models(), ids=lambda kind: kind.__name__)
def test_long_lists_of_wrong_things_have_one_error(kind: type[BoundedModel]) -> None:
    good = next((g for g in (CHAT, TEXT, MESSAGE, {"input": "Hi"}, {"tokens": [1]}, {}) if takes(kind, g)), {})
    for name in kind.model_fields:
        for value in HOSTILE:
            try:
                kind.model_validate({**good, name: value})
            except ValidationError as error:
                assert error.error_count() <= 8 + len(kind.model_fields) * (not good), (name, str(value)[:40])


def takes(kind: type[BoundedModel], body: dict[str, Any]) -> bool:
    try:
        kind.model_validate(body)
    except ValidationError:
        return False
    return True


def test_a_message_has_few_entries() -> None:
    message = {"role": "user", "content": "Hi", **{f"x{i}": i for i in range(100)}}
    with pytest.raises(ValidationError, match="at most 64 entries"):
        ChatRequest.model_validate({"messages": [message]})


def test_messages_keep_what_templates_may_read() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}
    body = ChatRequest.model_validate({"messages": [message]})
    assert body.messages[0].model_dump(exclude_unset=True) == message


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"type": "text", "json_schema": None}, None),
        ({"type": "json_object", "json_schema": None, "schema": None}, {"json_object": True}),
        (
            {"type": "json_schema", "schema": None, "json_schema": {"name": "x", "schema": True, "strict": None}},
            {"json": True},
        ),
    ],
)
def test_null_in_a_format_says_nothing(given: dict[str, Any], asked: dict[str, Any] | None) -> None:
    found = structured.structured_outputs(ChatRequest(**CHAT, response_format=given))
    assert found == (None if asked is None else StructuredOutputsParams(**asked, source="response_format"))


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (RerankRequest, {"query": "a", "documents": ["b"], "truncate": True, "truncate_prompt_tokens": 3}),
        (RerankRequest, {"query": "a", "documents": ["b"], "max_tokens_per_doc": 3, "truncate_prompt_tokens": -1}),
        (CohereEmbedRequest, {"texts": ["a"], "max_tokens": 3, "truncate_prompt_tokens": 3}),
        (CohereEmbedRequest, {"texts": ["a"], "max_tokens": 3, "truncate": "NONE"}),
    ],
)
def test_one_field_says_what_happens_to_long_texts(kind: type[Body], given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="say the same thing: give one of them"):
        kind(**given)
    kind(**dict(list(given.items())[:-1]))
    CohereEmbedRequest(texts=["a"], max_tokens=3, truncate="END")


def test_two_names_of_one_parameter_agree() -> None:
    PoolingParams(use_activation=True, normalize=True)
    with pytest.raises(RequestError, match="older name of use_activation"):
        PoolingParams(use_activation=False, normalize=True)


def test_reasoning_between_a_text_and_its_calls_is_kept() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    said = {"type": "message", "role": "assistant", "content": "I look."}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    (message,) = messages_of([thought("One."), thought("Two."), said, thought("Three."), call])
    found = message.model_dump(exclude_unset=True)
    assert found["reasoning_content"] == "One.\nTwo.\nThree." and len(found["tool_calls"]) == 1
    (message,) = messages_of([said, thought("Three."), call])
    assert message.model_dump(exclude_unset=True)["reasoning_content"] == "Three."

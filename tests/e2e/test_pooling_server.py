"""The endpoints of pooling models, by the clients that people use, against sentence-transformers and transformers."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from kvasir.entrypoints.cli.main import main
from tests import web
from tests.model_builders import make_hf_model, save
from tests.pooling_builders import save_bert, save_sentence_bert, save_tokenizer, set_entries
from tests.server_process import LiveServer, metric_in

pytestmark = pytest.mark.slow  # two servers, and sentence-transformers takes seconds to import
TEXTS = ["the cat sat on the mat", "what is the moon made of?", "grass"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Any, Path]]:
    directory = tmp_path_factory.mktemp("embedder")
    reference = save_sentence_bert(directory, prompts={"query": "what is ", "document": ""})
    set_entries(directory, matryoshka_dimensions=[8, 16])
    files = str(tmp_path_factory.mktemp("files"))
    flags = ("--served-model-name", "tiny", "--dtype", "float32", "--files-dir", files)
    with LiveServer.real(directory, *flags) as server:
        yield server.wait_until_ready(), reference, directory


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Any]]:
    from sentence_transformers import CrossEncoder

    directory = tmp_path_factory.mktemp("reranker")
    save_bert(directory, "ForSequenceClassification", num_labels=1)
    with LiveServer.real(directory, "--served-model-name", "tiny", "--dtype", "float32") as server:
        yield server.wait_until_ready(), CrossEncoder(str(directory), device="cpu", max_length=48)


def post(server: LiveServer, path: str, body: dict[str, Any], status: int = 200) -> Any:
    reply = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.json()


def test_embeddings_by_openai(embedder: tuple[LiveServer, Any, Path]) -> None:
    import openai

    server, reference, _ = embedder
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-")
    expected = reference.encode(TEXTS)
    whole = client.embeddings.create(model="tiny", input=TEXTS)  # the client asks for base64
    np.testing.assert_allclose([each.embedding for each in whole.data], expected, atol=1e-5)
    assert whole.usage.prompt_tokens == whole.usage.total_tokens > len(TEXTS)
    short = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=8, encoding_format="float")
    cut = expected[0][:8] / np.linalg.norm(expected[0][:8])
    np.testing.assert_allclose(short.data[0].embedding, cut, atol=1e-5)
    ids = reference.tokenizer(TEXTS)["input_ids"]
    by_ids = client.embeddings.create(model="tiny", input=ids, encoding_format="float")
    np.testing.assert_allclose([each.embedding for each in by_ids.data], expected, atol=1e-5)


def test_encodings(embedder: tuple[LiveServer, Any, Path]) -> None:
    from sentence_transformers.util.quantization import quantize_embeddings

    server, reference, _ = embedder
    expected = reference.encode(TEXTS)

    def given(how: str) -> list[Any]:
        found = post(server, "/v1/embeddings", {"input": TEXTS, "encoding_format": how})["data"]
        return [each["embedding"] for each in found]

    floats = [np.frombuffer(base64.b64decode(each), np.float32) for each in given("base64")]
    np.testing.assert_allclose(floats, expected, atol=1e-5)
    assert np.array_equal(given("binary"), quantize_embeddings(expected, "binary"))
    assert np.array_equal(given("ubinary"), quantize_embeddings(expected, "ubinary"))
    assert np.abs(np.array(given("int8")) - expected * 127).max() <= 0.51
    assert np.array_equal(np.array(given("uint8")) - 128, given("int8"))


def test_prompts_and_truncation(embedder: tuple[LiveServer, Any, Path]) -> None:
    server, reference, _ = embedder
    long = " ".join(TEXTS * 20)
    found = post(
        server, "/v1/embeddings", {"input": ["cheese", long], "prompt_name": "query", "truncate_prompt_tokens": -1}
    )
    expected = reference.encode(["cheese", long], prompt_name="query")
    np.testing.assert_allclose([each["embedding"] for each in found["data"]], expected, atol=1e-5)


def test_truncation_at_either_side(embedder: tuple[LiveServer, Any, Path]) -> None:
    server, reference, _ = embedder
    long = "cheese " * 30 + " ".join(TEXTS * 20)
    ids = reference.tokenizer(long)["input_ids"]
    cut = [ids[0], *ids[-39:]]  # [CLS] stays
    expected = [post(server, "/v1/embeddings", {"input": cut})["data"][0]["embedding"]]
    assert np.abs(expected - reference.encode([long])).max() > 0.01, "the ends differ"
    asked = {"input": long, "truncate_prompt_tokens": -1, "truncation_side": "left"}
    np.testing.assert_allclose([post(server, "/v1/embeddings", asked)["data"][0]["embedding"]], expected, atol=1e-5)
    tei = post(server, "/embed", {"inputs": long, "truncate": True, "truncation_direction": "Left"})
    np.testing.assert_allclose(tei, expected, atol=1e-5)
    cohere = post(server, "/v2/embed", {"texts": [long], "truncate": "START"})["embeddings"]["float"]
    np.testing.assert_allclose(cohere, expected, atol=1e-5)
    ranked = {"query": "cat", "texts": [long], "truncate": True}
    left, right = (post(server, "/rerank", {**ranked, "truncation_direction": side}) for side in ("left", "right"))
    assert abs(left[0]["score"] - right[0]["score"]) > 1e-4


def test_vllms_names_of_fields(embedder: tuple[LiveServer, Any, Path]) -> None:
    server, reference, _ = embedder
    raw = post(server, "/v1/embeddings", {"input": TEXTS[0], "use_activation": False})["data"][0]["embedding"]
    assert abs(np.linalg.norm(raw) - 1) > 0.01, "it is not normalised"
    ids = reference.tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    bare = post(server, "/v1/embeddings", {"input": TEXTS[0], "add_special_tokens": False})
    by_ids = post(server, "/v1/embeddings", {"input": ids})
    np.testing.assert_allclose(bare["data"][0]["embedding"], by_ids["data"][0]["embedding"], atol=1e-6)
    given = post(server, "/score", {"text_1": TEXTS[0], "text_2": TEXTS})["data"]
    assert post(server, "/score", {"queries": TEXTS[0], "documents": TEXTS})["data"] == given
    half = {"input": TEXTS[0], "encoding_format": "base64", "embed_dtype": "float16", "endianness": "big"}
    for path, name in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
        found = np.frombuffer(base64.b64decode(post(server, path, half)["data"][0][name]), ">f2")
        np.testing.assert_allclose(found.astype(np.float32), reference.encode(TEXTS[0]), atol=1e-3)


def test_other_servers_interfaces(embedder: tuple[LiveServer, Any, Path]) -> None:
    server, reference, _ = embedder
    expected = reference.encode(TEXTS)
    np.testing.assert_allclose(post(server, "/embed", {"inputs": TEXTS}), expected, atol=1e-5)
    ollama = post(server, "/api/embed", {"model": "tiny:latest", "input": TEXTS})
    np.testing.assert_allclose(ollama["embeddings"], expected, atol=1e-5)
    assert ollama["model"] == "tiny:latest" and ollama["prompt_eval_count"] > 3
    older = post(server, "/api/embeddings", {"model": "tiny", "prompt": TEXTS[0]})["embedding"]
    np.testing.assert_allclose(older / np.linalg.norm(older), expected[0], atol=1e-5)
    scores = post(server, "/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS})
    np.testing.assert_allclose([each["score"] for each in scores["data"]], expected @ expected[0], atol=1e-5)
    tokens = post(server, "/pooling", {"input": TEXTS[0], "task": "token_embed"})["data"][0]["data"]
    assert len(tokens) == len(reference.tokenizer(TEXTS[0])["input_ids"]) and len(tokens[0]) == 32


def test_embeddings_by_cohere(embedder: tuple[LiveServer, Any, Path]) -> None:
    import cohere

    server, reference, _ = embedder
    client = cohere.ClientV2(api_key="-", base_url=server.url)
    long = " ".join(TEXTS * 20)  # is cut, as Cohere does
    kinds = ["float", "binary", "base64"]
    made = client.embed(model="tiny", texts=["cheese", long], input_type="search_query", embedding_types=kinds)
    expected = reference.encode(["cheese", long], prompt_name="query")
    np.testing.assert_allclose(made.embeddings.float_, expected, atol=1e-5)
    assert np.array_equal(made.embeddings.binary, np.packbits(expected > 0, axis=1).astype(int) - 128)
    first = np.frombuffer(base64.b64decode(made.embeddings.base64[0]), "<f4")
    np.testing.assert_allclose(first, expected[0], atol=1e-5)
    assert made.meta is not None and made.meta.billed_units is not None and made.meta.billed_units.input_tokens
    short = client.embed(model="tiny", texts=TEXTS, input_type="clustering", output_dimension=8, max_tokens=9999)
    assert [len(each) for each in short.embeddings.float_] == [8] * len(TEXTS)
    with pytest.raises(cohere.BadRequestError, match="truncate"):
        client.embed(model="tiny", texts=[long], input_type="search_document", truncate="NONE")


def test_langchain(embedder: tuple[LiveServer, Any, Path]) -> None:
    from langchain_openai import OpenAIEmbeddings

    server, reference, _ = embedder
    chain = OpenAIEmbeddings(
        model="tiny",
        base_url=f"{server.url}/v1",
        api_key="-",
        check_embedding_ctx_length=False,  # type: ignore[arg-type]
    )
    np.testing.assert_allclose(chain.embed_documents(TEXTS), reference.encode(TEXTS), atol=1e-5)


def test_batches(embedder: tuple[LiveServer, Any, Path], tmp_path: Path) -> None:
    _, reference, directory = embedder
    bodies = {
        "/v1/embeddings": {"input": TEXTS},
        "/v1/score": {"text_1": TEXTS[0], "text_2": TEXTS},
        "/v1/rerank": {"query": TEXTS[0], "documents": TEXTS},
        "/v2/rerank": {"query": TEXTS[0], "documents": TEXTS},
        "/v1/completions": {"prompt": "the"},
    }
    lines = [json.dumps({"custom_id": url, "method": "POST", "url": url, "body": bodies[url]}) for url in bodies]
    (tmp_path / "in").write_text("\n".join(lines))
    arguments = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--model", str(directory)]
    assert main(["run-batch", *arguments, "--dtype", "float32"]) == 0
    results = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    found = {each["custom_id"]: each["response"]["body"] for each in results}
    expected = reference.encode(TEXTS)
    vectors = [each["embedding"] for each in found["/v1/embeddings"]["data"]]
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    scores = [each["score"] for each in found["/v1/score"]["data"]]
    np.testing.assert_allclose(scores, expected @ expected[0], atol=1e-5)
    assert [each["index"] for each in found["/v1/rerank"]["results"]] == np.argsort(scores)[::-1].tolist()
    assert found["/v2/rerank"]["results"] == found["/v1/rerank"]["results"]
    assert "does not generate text" in found["/v1/completions"]["error"]["message"]


def test_batches_of_a_server_by_openai(embedder: tuple[LiveServer, Any, Path]) -> None:
    import openai

    server, reference, _ = embedder
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-")
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": "tiny", "input": TEXTS}}
    given = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch").id
    batch = client.batches.create(input_file_id=given, endpoint="/v1/embeddings", completion_window="24h")
    end = time.monotonic() + 30
    while batch.status != "completed" and time.monotonic() < end:
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id is not None, batch.status
    (result,) = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    vectors = [each["embedding"] for each in result["response"]["body"]["data"]]
    np.testing.assert_allclose(vectors, reference.encode(TEXTS), atol=1e-5)


def test_a_chat_in_the_terminal_says_that_the_model_pools(
    embedder: tuple[LiveServer, Any, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", str(embedder[2])]) != 0
    assert "is a pooling model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/embeddings", {"input": []}, "empty"),
        ("/v1/embeddings", {"input": [[]]}, "empty"),
        ("/v1/embeddings", {"input": ["cat", ""]}, "input[1] is empty"),
        ("/v1/embeddings", {"input": "cat " * 100}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "cat", "dimensions": 64}, "more than the 32"),
        ("/v1/embeddings", {"input": "cat", "dimensions": 9}, "8, 16"),
        ("/v1/embeddings", {"input": "cat", "truncate_prompt_tokens": 41}, "more than the 40"),
        ("/v1/embeddings", {"input": "cat", "truncation_side": "left"}, "needs truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "cat", "normalize": True, "use_activation": False}, "give one of them"),
        ("/v1/embeddings", {"input": "cat", "prompt_name": "title"}, "document, query"),
        ("/v1/embeddings", {"input": [5, 10**6]}, "vocabulary"),
        ("/v1/embeddings", {"input": {"text": "cat"}}, "list of texts"),
        ("/v1/embeddings", {"input": "cat", "encoding_format": "hex"}, "encoding_format"),
        ("/classify", {"input": "cat"}, "does not do 'classify'"),
        ("/v1/completions", {"prompt": "the"}, "does not generate text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}]}, "does not generate text"),
        (
            "/v1/messages",
            {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}]},
            "does not generate text",
        ),
        ("/v1/responses", {"input": "the"}, "does not generate text"),
        ("/generate", {"prompt": "the"}, "does not generate text"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "as many"),
        ("/score", {"text_1": "a"}, "text_2 is missing"),
        ("/score", {"queries": "a", "text_1": "a", "text_2": "a"}, "text_1 and queries"),
        ("/score", {"queries": "a", "documents": [""]}, "documents[0] is empty"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query is empty"),
        ("/rerank", {"query": "a", "documents": ["a", ""]}, "documents[1] is empty"),
        ("/score", {"text_1": "a", "text_2": [""]}, "text_2[0] is empty"),
        ("/embed", {"inputs": []}, "inputs is empty"),
        ("/v2/embed", {"texts": []}, "texts is empty"),
        ("/v2/embed", {"texts": ["a"], "images": ["data:,"]}, "images"),
        ("/v2/embed", {"texts": ["a"], "input_type": "image"}, "input_type"),
        ("/api/embeddings", {"prompt": ""}, "prompt is empty"),
        ("/embed", {"inputs": "cat " * 100}, "set truncate to true"),
        ("/api/embed", {"input": "cat " * 100, "truncate": False}, "set truncate to true"),
        ("/v2/embed", {"texts": ["cat " * 100], "truncate": "NONE"}, "set truncate to END"),
        ("/v1/embeddings", {"input": "cat", "embed_dtype": "float16"}, "set encoding_format to base64"),
        ("/v1/embeddings", {"input": "cat", "padding": "max_length"}, "padding is not available"),
    ],
)
def test_bad_input(embedder: tuple[LiveServer, Any, Path], path: str, body: dict[str, Any], says: str) -> None:
    server, _, _ = embedder
    assert says in str(post(server, path, body, status=400)["error"]), "the error says what to do"


def test_what_operators_see_of_an_idle_server_and_of_requests(reranker: tuple[LiveServer, Any]) -> None:
    server, _ = reranker
    assert web.get(f"{server.url}/load").json() == {"server_load": 0, "running": 0, "waiting": 0}
    state = web.get(f"{server.url}/engine/state").json()
    assert state["blocks"]["total"] == state["blocks"]["used"] == 0 and state["requests"] == []
    before = partial(metric_in, server.metrics())
    assert before("kvasir:kv_cache_blocks") == before("kvasir:kv_cache_usage_perc") == 0, "it has no KV cache"
    post(server, "/score", {"text_1": "what is a cat", "text_2": TEXTS})
    after = partial(metric_in, server.metrics())
    tokens = after("kvasir:prompt_tokens_total") - before("kvasir:prompt_tokens_total")
    assert after("kvasir:iteration_tokens_total_sum") - before("kvasir:iteration_tokens_total_sum") == tokens > 0
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_inference_time"):
        assert after(f"kvasir:{name}_seconds_count") - before(f"kvasir:{name}_seconds_count") == len(TEXTS), name
    for name in ("time_to_first_token_seconds", "request_params_max_tokens", "request_params_n"):
        assert after(f"kvasir:{name}_count") == 0, f"{name} is of generation"
    assert after("kvasir:request_generation_tokens_count") == after("kvasir:generation_tokens_total") == 0
    assert after("kvasir:num_requests_running") == after("kvasir:api_requests_in_flight") == 0


def test_cached_prefixes_are_shared_within_a_salt(tmp_path: Path) -> None:
    save(make_hf_model("llama", vocab_size=200), tmp_path)
    save_tokenizer(tmp_path)
    with LiveServer.real(tmp_path, "--runner", "pooling", "--dtype", "float32", "--block-size", "4") as server:
        server.wait_until_ready()
        ids = [*range(5, 30)]
        for salt, hit in (("a", False), ("a", True), ("b", False), (None, False), (None, True)):
            usage = post(server, "/v1/embeddings", {"input": ids, "cache_salt": salt})["usage"]
            assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == hit, salt


def test_rerank_by_cohere_and_others(reranker: tuple[LiveServer, Any]) -> None:
    import cohere

    server, reference = reranker
    documents = ["a small animal", "a kind of bread", "the sky is blue and the grass is green"]
    expected = reference.predict([("what is a cat", each) for each in documents])
    order = np.argsort(-expected).tolist()
    client = cohere.ClientV2(api_key="-", base_url=server.url)
    made = client.rerank(model="tiny", query="what is a cat", documents=documents, top_n=2)
    assert [each.index for each in made.results] == order[:2]
    np.testing.assert_allclose([each.relevance_score for each in made.results], expected[order[:2]], atol=1e-5)
    ranked = {"query": "what is a cat", "documents": documents, "top_n": 0}
    jina = post(server, "/v1/rerank", ranked)
    assert [each["document"]["text"] for each in jina["results"]] == [documents[i] for i in order], "0 is all"
    assert "document" not in post(server, "/v1/rerank", {**ranked, "return_documents": False})["results"][0]
    tei = post(server, "/rerank", {"query": "what is a cat", "texts": documents, "raw_scores": True})
    logits = reference.predict([("what is a cat", each) for each in documents], activation_fn=torch.nn.Identity())
    np.testing.assert_allclose([each["score"] for each in tei], logits[order], atol=1e-5)
    assert "text" not in tei[0]
    raw = post(server, "/rerank", {**ranked, "use_activation": False})["results"]
    np.testing.assert_allclose([each["relevance_score"] for each in raw], logits[order], atol=1e-5)
    scores = post(server, "/score", {"text_1": "what is a cat", "text_2": documents})["data"]
    np.testing.assert_allclose([each["score"] for each in scores], expected, atol=1e-5)
    classes = post(server, "/classify", {"input": documents[0]})["data"][0]
    assert classes["num_classes"] == 1 and classes["label"] == "LABEL_0"
    long = post(server, "/score", {"text_1": "cat " * 40, "text_2": "dog " * 9, "truncate_prompt_tokens": -1})["data"]
    np.testing.assert_allclose(long[0]["score"], reference.predict([("cat " * 40, "dog " * 9)])[0], atol=1e-5)
    assert "does not do 'embed'" in post(server, "/v1/embeddings", {"input": "a"}, 400)["error"]["message"]

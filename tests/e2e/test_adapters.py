"""Adapters over HTTP: names as models in every route, loading and unloading with a key, a watched folder."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from tests.server_process import LiveServer

pytestmark = pytest.mark.slow  # it loads a model; tests/unit/server/test_adapters.py has what needs none
HIDDEN, LAYERS, RANK = 576, 30, 4  # of the starter model
ADMIN = {"Authorization": "Bearer open-adapters"}


def write_adapter(path: Path, seed: int, **changes: Any) -> Path:
    """A LoRA for the starter model's output projections, strong enough to change every text."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=generator)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 1, "target_modules": ["o_proj"], **changes}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def server(starter_model: Path, folder: Path) -> Iterator[LiveServer]:
    one, two = write_adapter(folder / "given" / "one", 1), write_adapter(folder / "given" / "two", 2)
    write_adapter(folder / "watched" / "early", 3)
    flags = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--max-model-len", "512"]
    flags += ["--lora-modules", f"one={one}", json.dumps({"name": "two", "path": str(two)})]
    flags += ["--lora-dir", str(folder / "watched"), "--lora-admin-key", "open-adapters", "--api-key", "sesame"]
    with LiveServer.real(starter_model, *flags) as server:
        yield server.wait_until_ready()


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"Authorization": "Bearer sesame"}, timeout=60) as client:
        yield client


def text_of(client: httpx.Client, model: str | None, prompt: str = "The capital of France is") -> str:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **({} if model is None else {"model": model})}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def eventually(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.1)


def test_adapters_are_models_with_a_parent(client: httpx.Client, folder: Path) -> None:
    models = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    (base,) = (card for card in models.values() if card["parent"] is None)
    assert {"one", "two", "early"} <= models.keys()
    assert models["one"]["parent"] == base["id"] and models["one"]["root"] == str(folder / "given" / "one")
    assert client.get("/v1/models/two").json()["parent"] == base["id"]
    wrong = client.post("/v1/completions", json={"model": "three", "prompt": "a", "max_tokens": 1})
    assert wrong.status_code == 404 and "one" in wrong.json()["error"]["message"]


def test_every_route_takes_an_adapter_as_its_model(client: httpx.Client) -> None:
    texts = {name: text_of(client, name) for name in (None, "one", "two", "early")}
    assert len(set(texts.values())) == 4
    assert text_of(client, "one") == texts["one"]  # after others had its slot
    messages = [{"role": "user", "content": "Hello"}]
    chats = {}
    for name in (None, "one"):
        common = {"max_tokens": 6, "temperature": 0, **({} if name is None else {"model": name})}
        chat = client.post("/v1/chat/completions", json={"messages": messages, **common}).json()
        answer = {**common, "max_output_tokens": common.pop("max_tokens"), "input": messages}
        answer.pop("max_tokens", None)
        response = client.post("/v1/responses", json=answer).json()
        anthropic = client.post(
            "/v1/messages",
            json={"messages": messages, "max_tokens": 6, "temperature": 0, "model": name or chat["model"]},
        ).json()
        said = chat["choices"][0]["message"]["content"]
        assert response["output"][0]["content"][0]["text"] == said == anthropic["content"][0]["text"]
        assert name is None or chat["model"] == response["model"] == anthropic["model"] == name
        chats[name] = said
    assert chats[None] != chats["one"]


def test_loading_needs_its_own_key_and_names_what_is_wrong(client: httpx.Client, folder: Path) -> None:
    path = write_adapter(folder / "loaded" / "new", 7)
    body = {"lora_name": "new", "lora_path": str(path)}
    assert client.post("/v1/load_lora_adapter", json=body).status_code == 401  # an API key is not enough
    card = client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
    assert card.status_code == 200 and card.json()["id"] == "new"
    first = text_of(client, "new")
    assert client.post("/v1/load_lora_adapter", json=body, headers=ADMIN).status_code == 400  # it is there already
    write_adapter(path, 8)
    again = client.post("/v1/load_lora_adapter", json={**body, "load_inplace": True}, headers=ADMIN)
    assert again.status_code == 200 and text_of(client, "new") != first  # no stale blocks, no stale weights
    gone = client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/no/such"}, headers=ADMIN)
    assert gone.status_code == 404 and "/no/such" in gone.json()["error"]["message"]
    wide = write_adapter(folder / "loaded" / "wide", 9, r=99)
    wrong = client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(wide)}, headers=ADMIN)
    assert wrong.status_code == 400 and "layers.0.self_attn.o_proj.lora_A.weight" in wrong.json()["error"]["message"]
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "new"}, headers=ADMIN).status_code == 200
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "new"}, headers=ADMIN).status_code == 404
    assert client.post("/v1/completions", json={"model": "new", "prompt": "a"}).status_code == 404


def test_the_watched_folder_is_followed(client: httpx.Client, folder: Path) -> None:
    def served() -> set[str]:
        return {card["id"] for card in client.get("/v1/models").json()["data"]}

    write_adapter(folder / "watched" / "late", 11)
    eventually(lambda: "late" in served())
    first = text_of(client, "late")
    write_adapter(folder / "watched" / "late", 12)
    eventually(lambda: text_of(client, "late") != first)
    shutil.rmtree(folder / "watched" / "late")
    eventually(lambda: "late" not in served())

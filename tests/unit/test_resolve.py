"""How `auto` is settled, where a model is found, and what is said when it is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
import pytest
from huggingface_hub import errors

from kvasir import platforms
from kvasir.config.args import EngineArgs
from kvasir.config.engine import EngineConfig
from kvasir.config.resolve import resolve
from kvasir.errors import ConfigError, ModelError
from kvasir.kernels.cpu import library
from kvasir.platforms import attention_packages
from kvasir.platforms.cpu import CpuPlatform

ROOT = Path(__file__).parent.parent.parent
GIB = 2**30
LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "max_position_embeddings": 4096}


class FakePlatform(platforms.Platform):
    """A device of any kind and size."""

    compute_capability: tuple[int, int] | None = None

    def __init__(self, device: str, gib: int, capability: tuple[int, int] | None = None) -> None:
        super().__init__(device)
        self.gib, self.compute_capability = gib, capability
        self.default_block_size = 64 if device == "cuda" else 16

    def available(self) -> bool:
        return True

    def memory_bytes(self) -> int | None:
        return self.gib * GIB

    def memory_free(self) -> int | None:
        return self.gib * GIB

    def memory_used(self) -> int:
        return 0

    def memory_peak(self) -> int:
        return 0

    def _settle_dtype(self, checkpoint_dtype: str) -> str:
        return "bfloat16" if self.device == "cuda" else checkpoint_dtype


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "cpu", 100)


def use(monkeypatch: pytest.MonkeyPatch, device: str, gib: int, capability: tuple[int, int] | None = None) -> None:
    monkeypatch.setattr(platforms, "select", lambda asked: FakePlatform(device, gib, capability))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "models" / "tiny", LLAMA)


def write(path: Path, hf: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(hf))
    return path


def settle(path: Path, hf: dict[str, Any] | None = None, **settings: Any) -> EngineConfig:
    if hf is not None:
        write(path, LLAMA | hf)
    return resolve(EngineArgs(str(path), **settings))


# ---------------------------------------------------------------- dtype


@pytest.mark.parametrize(
    ("device", "written", "settled"),
    [
        ("cpu", {"torch_dtype": "bfloat16"}, "bfloat16"),
        ("cpu", {"dtype": "float32"}, "float32"),
        ("cpu", {"dtype": "torch.bfloat16"}, "bfloat16"),
        ("cpu", {}, "float32"),
        ("cuda", {"dtype": "float32"}, "bfloat16"),
    ],
)
def test_dtype_follows_checkpoint_and_device(
    device: str,
    written: dict[str, str],
    settled: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    log_lines: list[str],
) -> None:
    use(monkeypatch, device, 10)
    assert settle(model, written).model.dtype == settled
    assert any(line.startswith(f"INFO dtype={settled} (for a ") for line in log_lines)


def test_dtype_that_was_asked_for_is_kept(model: Path) -> None:
    assert settle(model, {"dtype": "bfloat16"}, dtype="float32").model.dtype == "float32"


# ---------------------------------------------------------------- length


@pytest.mark.parametrize(
    ("written", "limit"),
    [
        ({}, 4096),
        ({"sliding_window": 128}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}}, 4096),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}}, 16384),
        ({"rope_scaling": None}, 4096),
    ],
)
def test_length_by_the_models_own_word(written: dict[str, Any], limit: int, model: Path) -> None:
    assert settle(model, written).model.max_model_len == limit
    assert settle(model, max_model_len=limit).model.max_model_len == limit
    with pytest.raises(ConfigError, match=f"max_model_len={limit + 1} is more than the {limit} tokens"):
        settle(model, max_model_len=limit + 1)


def test_length_may_be_raised_on_purpose(model: Path) -> None:
    assert settle(model, hf_overrides={"max_position_embeddings": 9000}, max_model_len=9000).model.max_model_len == 9000
    assert settle(model, rope_scaling={"type": "linear", "factor": 2.0}).model.max_model_len == 8192


def test_length_unknown(model: Path) -> None:
    write(model, {"architectures": LLAMA["architectures"], "vocab_size": 5})
    assert settle(model, max_model_len=77).model.max_model_len == 77
    with pytest.raises(ModelError, match="Set max_model_len"):
        settle(model)


# ---------------------------------------------------------------- config.json


def test_rope_is_written_one_way(model: Path) -> None:
    scaling = {"type": "linear", "factor": 2.0}
    expected = {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
    older = settle(model, {"rope_theta": 5e5, "rope_scaling": scaling}).model.hf
    newer = settle(model, {"rope_parameters": expected}).model.hf
    overridden = settle(
        model, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, rope_theta=5e5, rope_scaling=scaling
    ).model.hf
    assert older == newer == overridden == LLAMA | {"rope_parameters": expected}


def test_the_text_part_of_a_larger_config(model: Path) -> None:
    outer = {"architectures": LLAMA["architectures"], "dtype": "bfloat16"}
    write(model, outer | {"text_config": {"vocab_size": 7, "n_positions": 64}})
    config = settle(model, hf_overrides={"text_config": {"vocab_size": 8}}).model
    assert (config.vocab_size, config.max_model_len, config.dtype) == (8, 64, "bfloat16")
    assert config.hf["architectures"] == LLAMA["architectures"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is empty. A model needs config.json, its weights"),
        ("{", "cannot be read as JSON"),
        ("", "Is the download complete"),
        ("[]", "must hold a JSON object, not a list"),
        ("{}", "does not name the model's architecture"),
        ('{"architectures": ["LlamaForCausalLM"]}', "vocab_size=None"),
        ('{"architectures": ["LlamaForCausalLM"], "vocab_size": "many"}', "vocab_size='many'"),
        ('{"architectures": ["Nothing"]}', "The architecture Nothing is not supported"),
    ],
)
def test_a_wrong_config_is_refused(text: str | None, message: str, model: Path) -> None:
    (model / "config.json").unlink()
    if text is not None:
        (model / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        settle(model)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_rope_that_is_no_mapping(name: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name}='linear' must be a mapping"):
        settle(model, {"rope_theta": 1e4, name: "linear"})


# ---------------------------------------------------------------- generation config, template


def test_generation_config(model: Path, tmp_path: Path) -> None:
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.6}')
    assert settle(model).model.generation == {"eos_token_id": [1, 2], "temperature": 0.6}
    for none in ("kvasir", "vllm"):
        config = settle(model, generation_config=none, override_generation_config={"top_k": 5})
        assert config.model.generation == {"eos_token_id": [1, 2], "top_k": 5}
    with pytest.raises(ConfigError, match=r"there is no .*generation_config.json"):
        settle(model, generation_config=str(tmp_path))
    (model / "generation_config.json").write_text("oops")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        settle(model)


def test_chat_template_is_a_file_or_text(model: Path) -> None:
    (model / "t.jinja").write_text("{{ one }}")
    assert settle(model, chat_template=str(model / "t.jinja")).model.chat_template == "{{ one }}"
    assert settle(model, chat_template="{{ two }}").model.chat_template == "{{ two }}"
    with pytest.raises(ConfigError, match="neither a readable file nor Jinja text"):
        settle(model, chat_template="t.jinj")


# ---------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("device", "gib", "seqs", "tokens", "block"),
    [
        ("cpu", 200, 256, 2048, 16),
        ("cuda", 40, 256, 8192, 64),
        ("cuda", 80, 1024, 16896, 64),
        ("mps", 16, 256, 8192, 16),
    ],
)
def test_budgets_by_device(
    device: str, gib: int, seqs: int, tokens: int, block: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, device, gib)
    config = settle(model)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (seqs, tokens)
    assert (config.cache.block_size, config.device.device) == (block, device)
    assert config.device.attention_backend == "torch"
    assert (config.device.cpu_threads is None) == (device != "cpu")


def test_budgets_follow_each_other(model: Path) -> None:
    assert settle(model, max_num_seqs=3000).scheduler.max_num_batched_tokens == 3000
    assert settle(model, max_num_batched_tokens=64).scheduler.max_num_seqs == 64


def test_without_chunks_a_prompt_must_fit(model: Path) -> None:
    whole = settle(model, enable_chunked_prefill=False)
    assert whole.scheduler.max_num_batched_tokens == 4096
    with pytest.raises(ConfigError, match="max_num_batched_tokens=4095 is less than max_model_len=4096"):
        settle(model, enable_chunked_prefill=False, max_num_batched_tokens=4095)


# ---------------------------------------------------------------- finding the model


def test_a_missing_directory_names_its_neighbours(model: Path) -> None:
    with pytest.raises(ModelError, match="there is no such directory. Did you mean tiny"):
        settle(model.parent / "tinny")
    with pytest.raises(ModelError, match="contains: tiny"):
        settle(model.parent / "something-else")
    with pytest.raises(ModelError, match="does not exist either"):
        settle(model.parent / "no" / "such")


def test_files_are_refused(model: Path) -> None:
    with pytest.raises(ModelError, match="there is no such file"):
        settle(model / "model.gguf")
    with pytest.raises(ModelError, match="is a file, but not a GGUF file"):
        settle(model / "config.json")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["notes.txt"], "{} holds no config.json. Is the download complete? A model needs config.json"),
        (["x.gguf"], "{0} holds no config.json. It holds x.gguf; give {0}/x.gguf."),
        (["a.gguf", "b.gguf"], "It holds a.gguf, b.gguf; give one of them, such as {}/a.gguf."),
        ([f"{letter}.gguf" for letter in "abcde"], "It holds a.gguf, b.gguf, c.gguf and 2 more; give one of them"),
        (["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"], "It holds m-00001-of-00002.gguf; give {}/m-00001-of"),
    ],
)
def test_a_directory_without_a_config_says_what_it_holds(files: list[str], message: str, model: Path) -> None:
    (model / "config.json").unlink()
    for name in files:
        (model / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=re.escape(message.format(model))):
        settle(model)


@pytest.mark.parametrize("folder", ["1_Pooling", "2_Dense"])
def test_a_missing_file_of_a_module_is_said_to_be_missing(folder: str, model: Path) -> None:
    modules = [{"type": f"models.{kind}", "path": path} for kind, path in (("Transformer", ""), (folder[2:], folder))]
    (model / "modules.json").write_text(json.dumps(modules))
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    write(model, {"architectures": ["BertModel"], "vocab_size": 9, "max_position_embeddings": 8, **sizes})
    with pytest.raises(ModelError) as caught:
        settle(model)
    missing = model / folder / "config.json"
    assert str(caught.value) == f"{missing} is missing, and modules.json names its directory. Is the download complete?"


def test_a_directory_has_no_revisions(model: Path) -> None:
    with pytest.raises(ConfigError, match="only the Hub has revisions"):
        settle(model, revision="v1")


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (errors.RepositoryNotFoundError, "the Hub has no such model"),
        (errors.GatedRepoError, "you must request access to it"),
        (errors.RevisionNotFoundError, "it has no revision 'v9'"),
        (errors.LocalEntryNotFoundError, "not in the local cache, and HF_HUB_OFFLINE is set"),
        (ConnectionResetError, r"could not be downloaded from the Hub \(ConnectionResetError: gone\)"),
    ],
)
def test_what_the_hub_answers_is_said_plainly(
    raised: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    error = raised.__new__(raised, "gone")  # their constructors differ between versions and want an HTTP response

    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=f"model='org/name': .*{message}"):
        resolve(EngineArgs("org/name", revision="v9"))


def test_a_hub_name_that_may_have_been_a_path(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise OSError("unreachable")

    monkeypatch.chdir(model.parent.parent)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match="There is no such directory either. Did you mean tiny"):
        resolve(EngineArgs("models/tinyy"))


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a snapshot needs: the list of files, and the files."""

    commit = "0" * 40
    files: ClassVar = {
        "config.json": json.dumps(LLAMA),
        "model.safetensors": "w",
        "pytorch_model.bin": "x",
        "sparse_linear.pt": "y",
        "training_args.pt": "z",
        "a/b.json": "{}",
        "4bit/config.json": "{}",
        "onnx/1_Pooling/config.json": "{}",
        "1_Pooling/config.json": "{}",
        "2_Dense/model.safetensors": "d",
    }
    tokens: ClassVar[set[str | None]] = set()

    def do_GET(self) -> None:
        self.tokens.add(self.headers.get("authorization"))
        path = self.path.partition("?")[0]
        text = self.files.get(path.removeprefix(f"/org/tiny/resolve/{self.commit}/"))
        if path.startswith("/api/models/org/tiny/revision/"):
            siblings = [{"rfilename": name, "size": len(text)} for name, text in self.files.items()]
            text = json.dumps({"id": "org/tiny", "sha": self.commit, "siblings": siblings})
        elif path.startswith("/api/models/org/tiny/tree/"):
            text = json.dumps(
                [{"type": "file", "path": n, "size": len(t), "oid": "1" * 40} for n, t in self.files.items()]
            )
        self.send_response(404 if text is None else 200)
        body = (text or "").encode()
        for name, value in {
            "ETag": f'"{hash(body)}"',
            "X-Repo-Commit": self.commit,
            "Content-Length": len(body),
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub_environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a process for which a hub on this machine is the hub. The client reads it when imported."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.tokens.clear()
    ours = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    yield os.environ | ours | {"HF_TOKEN": "abc", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
    server.shutdown()


def resolve_elsewhere(model: str, environment: dict[str, str]) -> Any:
    program = (
        "import sys, json, dataclasses; from kvasir.config.args import EngineArgs;"
        "from kvasir.config.resolve import resolve;"
        "print(json.dumps(dataclasses.asdict(resolve(EngineArgs(sys.argv[1], device='cpu')))))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, model], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_a_model_is_fetched_by_name(hub_environment: dict[str, str], tmp_path: Path) -> None:
    model = resolve_elsewhere("org/tiny", hub_environment)["model"]
    path = Path(model["path"])
    assert path.is_relative_to(tmp_path)
    found = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir())
    parts = ["1_Pooling/config.json", "2_Dense/model.safetensors"]  # modules of sentence-transformers
    assert found == [*parts, "config.json", "model.safetensors", "sparse_linear.pt"]
    assert model["vocab_size"] == 1000 and model["tokenizer"] == model["path"]
    assert "Bearer abc" in Hub.tokens
    assert resolve_elsewhere("org/tiny", hub_environment | {"HF_HUB_OFFLINE": "1"})["model"] == model


def test_offline_and_not_there(hub_environment: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="it is not in the local cache, and HF_HUB_OFFLINE is set"):
        resolve_elsewhere("org/other", hub_environment | {"HF_HUB_OFFLINE": "1"})


def test_not_on_the_hub(hub_environment: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="ModelError: model='org/other': "):
        resolve_elsewhere("org/other", hub_environment)


def test_a_misspelt_name_is_compared_with_what_was_fetched_before(hub_environment: dict[str, str]) -> None:
    resolve_elsewhere("org/tiny", hub_environment)
    with pytest.raises(AssertionError, match=r"model='org/tinny': .*Did you mean org/tiny\?"):
        resolve_elsewhere("org/tinny", hub_environment)


def test_triton_attention_needs_a_gpu(model: Path) -> None:
    with pytest.raises(ConfigError, match="attention_backend='triton' needs a GPU"):
        resolve(EngineArgs(str(model), attention_backend="triton", device="cpu"))


# ---------------------------------------------------------------- attention by packages

HEADS = {"hidden_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}  # of 128


def on_nvidia(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *titles: str) -> None:
    """A GPU of this kind, and of the packages these alone."""
    use(monkeypatch, "cuda", 40, capability)
    monkeypatch.setattr(attention_packages, "is_installed", lambda package: package.title in titles)


@pytest.mark.parametrize(
    ("capability", "titles", "taken", "block_size"),
    [
        ((8, 0), ("FlashAttention 2", "FlashAttention 3", "FlashAttention 4"), "FlashAttention 2", 256),
        ((9, 0), ("FlashAttention 2", "FlashAttention 3", "FlashAttention 4"), "FlashAttention 3", 64),
        ((9, 0), ("FlashAttention 2", "FlashAttention 4"), "FlashAttention 4", 64),
        ((9, 0), ("FlashAttention 2",), "FlashAttention 2", 256),
        ((10, 0), ("FlashAttention 2", "FlashAttention 3", "FlashAttention 4"), "FlashAttention 4", 64),
        ((12, 0), ("FlashAttention 2", "FlashAttention 4"), "FlashAttention 2", 256),
    ],
)
def test_the_best_flash_attention_for_the_device(
    capability: tuple[int, int],
    titles: tuple[str, ...],
    taken: str,
    block_size: int,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    log_lines: list[str],
) -> None:
    on_nvidia(monkeypatch, capability, *titles)
    config = settle(model, HEADS, attention_backend="FLASH_ATTN")
    assert (config.device.attention_backend, config.cache.block_size) == ("flash_attn", block_size)
    assert f"INFO Attention is computed by {taken}" in log_lines


def test_a_package_is_never_the_default(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_nvidia(monkeypatch, (9, 0), "FlashAttention 3", "FlashInfer")
    config = settle(model, HEADS)
    assert (config.device.attention_backend, config.cache.block_size) == ("torch", 64)  # the fake platform's own


@pytest.mark.parametrize("backend", ["flash_attn", "flashinfer"])
def test_what_packages_cannot_do_is_refused(backend: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str, hf: dict[str, Any] = HEADS, **settings: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            settle(model, hf, attention_backend=backend, **settings)

    refused(f"attention_backend='{backend}' runs on NVIDIA GPUs, and the device is cpu; leave it at auto")
    on_nvidia(monkeypatch, (7, 5))
    refused("does not run on cuda, whose compute capability is 7.5; leave it at auto")
    on_nvidia(monkeypatch, (8, 6))
    install = {"flash_attn": "pip install flash-attn", "flashinfer": "pip install flashinfer-python"}[backend]
    refused(rf"needs a package that is not installed: .*\({install}\)")
    on_nvidia(monkeypatch, (8, 6), "FlashAttention 2", "FlashInfer")
    refused("supports only 16-bit types, but dtype is float32. Set dtype to float16 or bfloat16", dtype="float32")
    refused("the model's head size is 100, but .* supports", HEADS | {"head_dim": 100})
    refused("the model's head size is 512", HEADS | {"head_dim": 512})
    refused(
        f"attention_backend='{backend}' does not support an 8-bit cache. Set attention_backend", kv_cache_dtype="fp8"
    )
    refused("kv_cache_dtype='int8' needs a CPU", kv_cache_dtype="int8")
    assert settle(model, HEADS, attention_backend=backend, dtype="float16").model.dtype == "float16"


def test_head_sizes_by_package(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles = ("FlashAttention 4", "FlashInfer")
    for backend, capability, size, is_taken in (
        ("flash_attn", (9, 0), 192, True),
        ("flash_attn", (10, 0), 192, False),
        ("flash_attn", (10, 0), 256, True),
        ("flashinfer", (9, 0), 96, False),
        ("flashinfer", (9, 0), 64, True),
    ):
        on_nvidia(monkeypatch, capability, *titles)
        hf = HEADS | {"head_dim": size}
        if is_taken:
            settle(model, hf, attention_backend=backend)
            continue
        with pytest.raises(ConfigError, match=f"head size is {size}"):
            settle(model, hf, attention_backend=backend)


def test_heads_that_only_the_models_code_knows_are_not_judged(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_nvidia(monkeypatch, (9, 0), "FlashInfer")
    options = {"attention_backend": "flashinfer", "model_impl": "transformers"}
    assert settle(model, {"n_head": 3}, **options).model.model_impl == "transformers"
    with pytest.raises(ConfigError, match="head size is 80"):
        settle(model, {"head_dim": 80}, **options)


def test_flash_attention_2_takes_large_blocks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_nvidia(monkeypatch, (8, 0), "FlashAttention 2")
    assert settle(model, HEADS, attention_backend="flash_attn", block_size=256).cache.block_size == 256
    with pytest.raises(ConfigError, match="block_size=64 .*FlashAttention 2 here, which needs blocks of 256 tokens"):
        settle(model, HEADS, attention_backend="flash_attn", block_size=64)
    on_nvidia(monkeypatch, (9, 0), "FlashAttention 3")
    assert settle(model, HEADS, attention_backend="flash_attn", block_size=16).cache.block_size == 16


def with_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library", object)
    monkeypatch.setattr(platforms, "select", lambda device: CpuPlatform("cpu"))


def test_the_cpu_library_is_chosen_for_bfloat16(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_library(monkeypatch)
    assert settle(model, device="cpu", dtype="bfloat16").device.attention_backend == "cpu"
    assert settle(model, device="cpu", dtype="float32").device.attention_backend == "torch"
    with monkeypatch.context() as without:
        without.setattr(library, "library", lambda: None)
        assert settle(model, device="cpu", dtype="bfloat16").device.attention_backend == "torch"
    assert settle(model, device="cpu", dtype="bfloat16", quantization="none").model.quantization is None


def test_quantizing_computes_in_bfloat16(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_library(monkeypatch)
    for quantization in ("int8", "int4"):
        config = settle(model, device="cpu", quantization=quantization)
        assert (config.model.dtype, config.model.quantization) == ("bfloat16", quantization)
    with pytest.raises(ConfigError, match=r"quantization='int8' needs a CPU, bfloat16"):
        settle(model, device="cpu", quantization="int8", dtype="float32")
    with pytest.raises(ConfigError, match="quantization='gguf' is for GGUF files"):
        settle(model, device="cpu", dtype="bfloat16", quantization="gguf")


def test_what_needs_the_library_is_refused_without_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library", lambda: None)
    for wish in ({"quantization": "int4"}, {"kv_cache_dtype": "int8"}, {"attention_backend": "cpu"}):
        with pytest.raises(ConfigError, match=next(iter(wish))):
            settle(model, device="cpu", dtype="bfloat16", **wish)


@pytest.mark.parametrize(
    "wish",
    [
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"quantization": "gguf"},
        {"packed_weights_dir": "packed"},
        {"kv_cache_dtype": "int8"},
    ],
    ids=str,
)
def test_what_transformers_would_ignore_is_refused(
    wish: dict[str, str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_library(monkeypatch)
    ((name, value),) = wish.items()
    options = {"device": "cpu", "dtype": "bfloat16"}
    said = f"{name}='{value}' needs Kvasir's own implementation of the model, but "
    with pytest.raises(ConfigError) as error:
        settle(model, model_impl="transformers", **options, **wish)
    assert str(error.value) == said + "model_impl is 'transformers'. Leave one of the two unset."
    phi = {"architectures": ["PhiForCausalLM"]}
    with pytest.raises(ConfigError) as error:
        settle(model, phi, **options, **wish)
    assert str(error.value) == said + f"PhiForCausalLM has none and runs through transformers. Leave {name} unset."
    assert settle(model, phi, **options).model.model_impl == "transformers"
    assert settle(model, phi, quantization="none", **options).model.quantization is None


def test_threads_are_shared_by_workers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvasir.config.resolve.usable_cpus", lambda: 7)
    assert settle(model, device="cpu").device.cpu_threads == 7
    assert settle(model, device="cpu", tensor_parallel_size=2).device.cpu_threads == 3
    assert settle(model, device="cpu", cpu_threads=5).device.cpu_threads == 5
    with pytest.raises(ConfigError, match="cpu_threads=2 is more than the 1 CPUs of cpu_bind"):
        settle(model, device="cpu", cpu_threads=2, cpu_bind="0")
    use(monkeypatch, "cuda", 16)
    with pytest.raises(ConfigError, match="are for device='cpu'"):
        settle(model, cpu_threads=5)

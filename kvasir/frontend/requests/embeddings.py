"""Prompts that are embeddings instead of tokens: reads and checks the tensors. API process, without torch.

Clients send files as torch.save or safetensors write them. A file of torch is a pickle in a zip archive; a pickle may
run any code, so this reader knows the three names that a plain tensor needs, as data, and refuses every other.
"""

from __future__ import annotations

import binascii
import hashlib
import io
import json
import math
import pickle
import zipfile
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvasir.config.engine import ModelConfig
from kvasir.errors import RequestError
from kvasir.lora.host import Adapter
from kvasir.messages import EngineRequest, FloatArray
from kvasir.sampling_params import SamplingParams

PARAMETER = "prompt_embeds"
_STORAGES = {"FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16"}
_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER = 1 << 16  # bytes of a file that are no numbers
_NUM_DIMS = 2


def wrong(message: str) -> RequestError:
    return RequestError(f"{PARAMETER}: {message}", PARAMETER)


def read(given: Mapping[str, Any], truncate: int | None, config: ModelConfig) -> tuple[FloatArray, bytes]:
    """Return the vectors [tokens, hidden] of an EmbedsPrompt, and the beginning of its cache salt.

    The prompt's cached blocks are found by that beginning, a hash of the vectors, because its ids mean nothing.
    """
    if not config.enable_prompt_embeds:
        message = "prompt_embeds is off: start the engine with enable_prompt_embeds (--enable-prompt-embeds)."
        raise RequestError(message, PARAMETER)
    if others := given.keys() - {PARAMETER, "cache_salt"}:
        raise RequestError(f"A prompt of prompt_embeds has no {', '.join(sorted(map(str, others)))}.", "prompt")
    if truncate is not None:
        name = "truncate_prompt_tokens"
        raise RequestError(f"{name} is for tokens: shorten the tensor.", name)
    sizes = (config.hf[name] for name in ("hidden_size", "n_embd", "d_model") if isinstance(config.hf.get(name), int))
    rows = checked(given[PARAMETER], next(sizes, 0))
    return rows, b"\xfe" + hashlib.sha256(rows.tobytes()).digest()  # no user's salt begins so, as those are UTF-8


def with_embeddings(
    request: EngineRequest, rows: FloatArray, adapter: Adapter | None, params: SamplingParams
) -> EngineRequest:
    """Return the request with these vectors in place of its prompt's ids, which no rule counts."""
    if params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not possible: prompt_embeds has no tokens.", "prompt_logprobs")
    if adapter is not None and adapter.num_virtual_tokens:
        message = f"prompt_embeds is not possible with adapter {adapter.name!r}, which is a soft prompt itself."
        raise RequestError(message, PARAMETER)
    sampling, extras = request.sampling, request.sampling.extras
    if extras is not None:
        extras = replace(extras, num_virtual_tokens=len(rows))
    return replace(request, embeddings=rows, sampling=replace(sampling, extras=extras))


def checked(given: Any, hidden_size: int) -> FloatArray:
    """A caller's tensor (of torch or numpy), or a file's, as [tokens, hidden] float32."""
    if isinstance(given, bytes):
        found = _read_file(given)
    elif hasattr(given, "detach"):  # torch's, which this process may not have imported
        if not given.is_floating_point() or given.layout != type(given)().layout:
            raise wrong(f"a plain tensor of float32, float16 or bfloat16 is needed, not {given.dtype}.")
        found = given.detach().float().cpu().numpy()
    else:
        found = given
    if not isinstance(found, np.ndarray) or found.dtype.kind != "f":
        kind = found.dtype if isinstance(found, np.ndarray) else type(given).__name__
        raise wrong(f"a tensor of float32, float16 or bfloat16 is needed, not {kind}.")
    if found.ndim == _NUM_DIMS + 1 and len(found) == 1:  # a batch of one
        found = found[0]
    if found.ndim != _NUM_DIMS or found.shape[1] != hidden_size or not len(found):
        shape = list(found.shape)
        raise wrong(f"a tensor of the shape [tokens, {hidden_size}] is needed, with at least one token, not {shape}.")
    rows = np.ascontiguousarray(found, np.float32)
    if not np.isfinite(rows).all():
        raise wrong("all numbers must be finite, but there is NaN or infinity among them.")
    return rows


def decode_base64(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise wrong("base64 of a tensor is needed, as torch.save or safetensors writes it.") from None


# ---------------------------------------------------------------- files


def _read_file(data: bytes) -> NDArray[np.float32]:
    try:
        return _read_torch(data) if data.startswith(b"PK") else _read_safetensors(data)
    except RequestError:
        raise
    except Exception as error:  # a reader of files may fail in many ways on a broken one
        raise wrong("this is no tensor as torch.save or safetensors writes it.") from error


def _numbers(data: bytes, kind: str) -> NDArray[np.float32]:
    if kind == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[kind]).astype(np.float32)


def _read_safetensors(data: bytes) -> NDArray[np.float32]:
    size = int.from_bytes(data[:8], "little")
    if size > min(_MAX_HEADER, len(data)):
        raise wrong("this is no tensor as torch.save or safetensors writes it.")
    header = json.loads(data[8 : 8 + size])
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    if len(entries) != 1:
        raise wrong(f"a file with one tensor is needed, not with {len(entries)}.")
    kind, shape, (begin, end) = entries[0]["dtype"], entries[0]["shape"], entries[0]["data_offsets"]
    if kind not in _SIZES:
        raise wrong(f"a tensor of float32, float16 or bfloat16 is needed, not {str(kind)[:20]}.")
    return _numbers(data[8 + size :][begin:end], kind).reshape(shape)


class _Storage:
    """What a pickled tensor's numbers are: their type, and the name of their file."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name


class _Tensor:
    """The description of a pickled tensor."""

    def __init__(self, storage: Any, offset: Any, shape: Any, strides: Any, *others: Any) -> None:
        self.storage, self.offset, self.shape, self.strides = storage, offset, shape, strides


class _TensorUnpickler(pickle.Unpickler):
    """Unpickles descriptions of plain tensors; nothing is imported or called but what stands here."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Tensor
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name.endswith("Storage"):
            raise wrong(f"a tensor of float32, float16 or bfloat16 is needed, not {name[:40]}.")
        raise wrong("a plain tensor is needed: the file names other things, which are not loaded.")

    def persistent_load(self, pid: Any) -> _Storage:
        mark, kind, name, *_ = pid
        if mark != "storage" or kind not in _SIZES or not isinstance(name, str):
            raise wrong("a plain tensor of float32, float16 or bfloat16 is needed.")
        return _Storage(kind, name)


def _read_torch(data: bytes) -> NDArray[np.float32]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {info.filename: info for info in archive.infolist()}
        (described,) = [name for name in members if name.endswith("/data.pkl")]
        if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
            raise wrong("the file is compressed, which torch.save does not do.")
        if members[described].file_size > _MAX_HEADER:
            raise wrong("a plain tensor is needed: the description of this one is too long.")
        tensor = _TensorUnpickler(io.BytesIO(archive.read(described))).load()
        if not isinstance(tensor, _Tensor) or not isinstance(tensor.storage, _Storage):
            raise wrong("a file with one tensor is needed.")
        folder = described.removesuffix("data.pkl")
        order = archive.read(f"{folder}byteorder") if f"{folder}byteorder" in members else b"little"
        if order != b"little":
            raise wrong("the numbers must be little-endian.")
        flat = _numbers(archive.read(f"{folder}data/{tensor.storage.name}"), tensor.storage.kind)
    shape, strides = tuple(map(int, tensor.shape)), tuple(map(int, tensor.strides))
    plain = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    if strides != plain:  # of a view: a slice or a transposed tensor
        raise wrong("the tensor is a view of another one: save tensor.contiguous().clone().")
    begin = int(tensor.offset)
    if begin < 0:
        raise wrong("this is no tensor as torch.save or safetensors writes it.")
    return flat[begin : begin + math.prod(shape)].reshape(shape)

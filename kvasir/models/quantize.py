"""Writes a quantized copy of a checkpoint in the format compressed-tensors, which transformers and vLLM load, too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvasir.config.engine import ModelConfig
from kvasir.config.quantized import quantization_of
from kvasir.errors import ModelError
from kvasir.log import get_logger
from kvasir.models import architectures
from kvasir.models.checkpoint import Safetensors, some
from kvasir.models.spec import Names, TensorLayout
from kvasir.quantization.coded import GROUP, fp8, int4, int8

logger = get_logger(__name__)
_LINEAR = (".qkv", ".o", ".gate_up", ".up", ".down", ".experts")  # ends of the decoder's paths, parts cut off
_COMMON = {"dynamic": False, "symmetric": True, "observer": "minmax"}
_BY_TOKEN = {**_COMMON, "num_bits": 8, "strategy": "token", "dynamic": True}
# The parts of the config that say how matrices are stored. Of experts transformers and vLLM read integers only if they
# are packed and symmetric.
_PACKED = {**_COMMON, "type": "int"}
EXPERTS: dict[str, dict[str, Any]] = {
    "int4": {
        "format": "pack-quantized", "weights": {**_PACKED, "num_bits": 4, "strategy": "group", "group_size": GROUP},
    },
    "int8": {"format": "pack-quantized", "weights": {**_PACKED, "num_bits": 8, "strategy": "channel"}},
}  # fmt: skip
SCHEMES: dict[str, dict[str, Any]] = {
    "int4": {
        "format": "pack-quantized",
        "weights": {
            **_COMMON, "num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP,
        },
    },
    "int8": {
        "format": "int-quantized",
        "weights": {**_COMMON, "num_bits": 8, "type": "int", "strategy": "channel"},
        "input_activations": {**_BY_TOKEN, "type": "int"},
    },
    "fp8": {
        "format": "float-quantized",
        "weights": {**_COMMON, "num_bits": 8, "type": "float", "strategy": "channel"},
        "input_activations": {**_BY_TOKEN, "type": "float"},
    },
}  # fmt: skip


def quantize_checkpoint(model: ModelConfig, out: Path, to: str, device: str) -> tuple[int, int]:
    """Write the copy. Returns the bytes of the weights before and after."""
    source, hf = Path(model.path), model.hf
    if not source.is_dir():
        raise ModelError(f"{source} is no directory of safetensors; only such checkpoints can be quantized.")
    if quantization_of(hf, source) is not None:
        raise ModelError(f"The checkpoint in {source} is quantized already; name an unquantized one.")
    architecture = architectures.find(hf)
    checkpoint = Safetensors(source, architecture.prefix)
    known = architecture.names_for(hf)
    names = [name for name, entry in checkpoint.entries.items() if len(entry.shape) == 2 and _is_matrix(name, known)]
    if left := [name for name in checkpoint.entries if name not in names and _holds_experts(name, known)]:
        logger.warning(
            "%s stay as they are: a layer's experts are one tensor, which compressed-tensors has no form for.",
            some(left),
        )
    if not names:
        raise ModelError(f"No matrices of {source} are known to be a decoder's.")
    matrices = {name: checkpoint.entries[name].shape for name in names}
    if to == "int4" and (odd := [name for name, shape in matrices.items() if shape[1] % GROUP]):
        raise ModelError(
            f"{odd[0]} has {matrices[odd[0]][1]} inputs, which groups of {GROUP} do not divide; "
            f"quantize to int8 or fp8."
        )
    out.mkdir(parents=True)
    placed: dict[str, str] = {}
    before = after = 0
    for file in sorted({entry.file for entry in checkpoint.entries.values()}):
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in checkpoint.read([n for n, entry in checkpoint.entries.items() if entry.file == file]):
            before += tensor.nbytes
            if name in matrices:
                stored = _expert_stored if to in EXPERTS and _holds_experts(name, known) else _stored
                tensors |= stored(name.removesuffix(".weight"), tensor.to(device), to)
            else:
                tensors[name] = tensor.clone()
        after += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, out / file.name, {"format": "pt"})
        placed |= dict.fromkeys(tensors, file.name)
    groups = [{"targets": ["Linear"], "input_activations": None, **SCHEMES[to]}]
    if to in EXPERTS and any(_holds_experts(name, known) for name in matrices):
        groups.append({"targets": [r"re:.*\.experts\..*"], "input_activations": None, **EXPERTS[to]})
    _write_config(source, out, groups, placed, _plain_modules(checkpoint, matrices), after)
    return before, after


def _is_matrix(name: str, names: Names) -> bool:
    """Whether a tensor is a matrix of a linear layer or an expert. Routers are not quantized."""
    module = name.removesuffix(".weight")
    for pattern, ours in names.items():
        if module != name and fnmatchcase(module, pattern):
            layout = TensorLayout((ours,)) if isinstance(ours, str) else ours
            if all(target.split(":")[0].endswith(_LINEAR) for target in layout.targets):
                if layout.transposed:
                    raise ModelError(
                        f"{module} is stored with its inputs first, which compressed-tensors does not know."
                    )
                return True
    return False


def _holds_experts(name: str, names: Names) -> bool:
    """Whether a tensor has matrices of experts."""
    layouts = [ours for pattern, ours in names.items() if fnmatchcase(name.removesuffix(".weight"), pattern)]
    targets = [target for ours in layouts for target in ((ours,) if isinstance(ours, str) else ours.targets)]
    return any(".experts:" in target for target in targets)


def _stored(module: str, weight: torch.Tensor, to: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a matrix, as compressed-tensors names them."""
    if to == "int4":
        coded = int4(weight, zeros="own")
        assert coded.minimum is not None and coded.coding.group == GROUP, "groups were checked before"
        zeros = torch.round(-coded.minimum / coded.scale).to(torch.uint8)
        found = {
            "weight_packed": _words(coded.codes),
            "weight_scale": coded.scale.to(torch.bfloat16),
            "weight_zero_point": _words(zeros.T.contiguous()).T.contiguous(),
            "weight_shape": torch.tensor(weight.shape),
        }
    else:
        coded = {"int8": int8, "fp8": fp8}[to](weight, torch.bfloat16)  # what transformers computes with
        kind = torch.int8 if to == "int8" else torch.float8_e4m3fn
        found = {"weight": coded.codes.view(kind), "weight_scale": coded.scale}
    return {f"{module}.{name}": tensor.cpu().contiguous() for name, tensor in found.items()}


def _expert_stored(module: str, weight: torch.Tensor, to: str) -> dict[str, torch.Tensor]:
    """Return the tensors of an expert's matrix, packed and symmetric."""
    coded = int4(weight, zeros="8") if to == "int4" else int8(weight, torch.bfloat16)
    found = {
        "weight_packed": _words(coded.codes) if to == "int4" else _words(coded.codes ^ 128, 8),
        "weight_scale": coded.scale.to(torch.bfloat16),
        "weight_shape": torch.tensor(weight.shape),
    }
    return {f"{module}.{name}": tensor.cpu().contiguous() for name, tensor in found.items()}


def _words(numbers: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Pack numbers into words, lowest first."""
    each = 32 // bits
    rows = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % each)).view(len(numbers), -1, each).long()
    words = (rows << torch.arange(0, 32, bits, device=rows.device)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _plain_modules(checkpoint: Safetensors, matrices: Mapping[str, object]) -> list[str]:
    """Modules with a matrix that stays as it is, which readers would take for quantized ones: head and routers."""
    others = [name for name, entry in checkpoint.entries.items() if len(entry.shape) > 1 and name not in matrices]
    return sorted({"lm_head", *(name.removesuffix(".weight") for name in others if "embed" not in name)})


def _write_config(
    source: Path, out: Path, groups: list[dict[str, Any]], placed: dict[str, str], plain: list[str], size: int
) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    formats = {group["format"] for group in groups}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": plain,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if len(set(placed.values())) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": placed}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    weights = (".safetensors", ".bin", ".pth", ".gguf", ".index.json")
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(weights) and not (out / file.name).exists():
            shutil.copy(file, out / file.name)

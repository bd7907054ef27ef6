"""Quantized checkpoints read with numpy alone, straight from the formats' descriptions: what our readers must equal.

It shares nothing with the package, loops where that is clearer, and knows only what the checkpoints of the tests have.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

F32 = np.float32
Array = np.ndarray[Any, Any]
_PLAIN = {"F32": "<f4", "F16": "<f2", "I32": "<i4", "I64": "<i8", "I8": "i1", "U8": "u1"}


def floats_of_8_bits() -> Array:
    """e4m3 without infinities: sign, 4 bits of exponent with bias 7, 3 of fraction."""
    table = np.zeros(256, F32)
    for byte in range(256):
        sign, exponent, fraction = -1.0 if byte & 128 else 1.0, (byte >> 3) & 15, byte & 7
        size = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
        table[byte] = np.nan if byte & 127 == 127 else sign * size
    return table


E4M3 = floats_of_8_bits()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F32)


def read_tensors(file: Path) -> dict[str, tuple[str, Array]]:
    """Every tensor's type and content; bfloat16 as float32, 8-bit floats as bytes."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, body, found = json.loads(data[8 : 8 + size]), data[8 + size :], {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        raw, kind = body[begin:end], entry["dtype"]
        if kind == "BF16":
            values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(F32)
        else:
            values = np.frombuffer(raw, _PLAIN.get(kind, "u1"))
        found[name] = kind, values.reshape(entry["shape"])
    return found


def bits_of(words: Array, bits: int, axis: int) -> Array:
    """Numbers in words of 32 bits as one stream, lowest bit first, along an axis."""
    along = np.moveaxis(np.ascontiguousarray(words).view(np.uint32), axis, -1)
    stream = np.unpackbits(np.ascontiguousarray(along).view(np.uint8), axis=-1, bitorder="little")
    grouped = stream.reshape(*along.shape[:-1], -1, bits).astype(np.int64)
    return np.moveaxis((grouped << np.arange(bits)).sum(-1), -1, axis)


def gptq(t: dict[str, Array], config: dict[str, Any]) -> Array:
    bits, plus = config["bits"], 0 if config["checkpoint_format"] == "gptq_v2" else 1
    numbers, zeros = bits_of(t["qweight"], bits, 0), bits_of(t["qzeros"], bits, 1) + plus
    group = np.arange(len(numbers)) // config["group_size"] if "g_idx" not in t else t["g_idx"]
    scale = t["scales"].astype(F32)
    return ((numbers - zeros[group]).astype(F32) * scale[group]).T


def awq(t: dict[str, Array], config: dict[str, Any]) -> Array:
    def outputs(words: Array) -> Array:
        nibbles = bits_of(words, 4, 1).reshape(len(words), -1, 8)
        out = np.empty_like(nibbles)
        for place, output in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            out[:, :, output] = nibbles[:, :, place]
        return out.reshape(len(words), -1)

    numbers, zeros = outputs(t["qweight"]), outputs(t["qzeros"])
    group = np.arange(len(numbers)) // config["group_size"]
    return ((numbers - zeros[group]).astype(F32) * t["scales"].astype(F32)[group]).T


def spread(scale: Array, shape: tuple[int, ...]) -> Array:
    """A scale for each value of the matrix."""
    if scale.size == 1:
        return np.full(shape, scale.reshape(-1)[0], F32)
    rows, groups = scale.reshape(scale.shape[0], -1).shape
    down, across = -(-shape[0] // rows), shape[1] // groups
    return np.repeat(np.repeat(scale.reshape(rows, groups), down, 0), across, 1)[: shape[0]].astype(F32)


def low_nibble_first(packed: Array) -> Array:
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)


def compressed_tensors(t: dict[str, Array], config: dict[str, Any]) -> Array:
    (group,) = config["config_groups"].values()
    form, weights = group["format"], group["weights"]
    if form == "nvfp4-pack-quantized":
        scale = E4M3[t["weight_scale"]] / t["weight_global_scale"].astype(F32)
        values = E2M1[low_nibble_first(t["weight_packed"])]
        return values * spread(scale, values.shape)
    if form == "mxfp4-pack-quantized":
        scale = (2.0 ** (t["weight_scale"].astype(np.float64) - 127)).astype(F32)
        values = E2M1[low_nibble_first(t["weight_packed"])]
        return values * spread(scale, values.shape)
    if form == "float-quantized":
        values = E4M3[t["weight"]]
        return values * spread(t["weight_scale"], values.shape)
    if form == "int-quantized":
        return t["weight"].astype(F32) * spread(t["weight_scale"], t["weight"].shape)
    assert form == "pack-quantized", form
    outputs, inputs = t["weight_shape"].tolist()
    bits = weights["num_bits"]
    numbers = bits_of(t["weight_packed"], bits, 1)[:, :inputs] - (1 << (bits - 1))
    if not weights["symmetric"]:
        zeros = bits_of(t["weight_zero_point"], bits, 0)[:outputs] - (1 << (bits - 1))
        numbers = numbers - spread(zeros, numbers.shape).astype(np.int64)
    return numbers.astype(F32) * spread(t["weight_scale"], numbers.shape)


def modelopt(t: dict[str, Array], config: dict[str, Any]) -> Array:
    algorithm = config["quant_algo"]
    if algorithm == "FP8":
        return E4M3[t["weight"]] * F32(t["weight_scale"])
    if algorithm == "NVFP4":
        values = E2M1[low_nibble_first(t["weight"])]
        return values * spread(E4M3[t["weight_scale"]] * F32(t["weight_scale_2"]), values.shape)
    assert algorithm == "W4A16_AWQ", algorithm
    packed = t["weight"]
    numbers = np.empty((2 * len(packed), packed.shape[1]), np.int64)
    numbers[0::2], numbers[1::2] = packed & 15, packed >> 4
    numbers[numbers > 7] -= 16
    values = numbers.astype(F32) * spread(t["weight_scale"], numbers.shape)
    return values * t["pre_quant_scale"].astype(F32) if "pre_quant_scale" in t else values


def bitsandbytes(t: dict[str, Array], config: dict[str, Any]) -> Array:
    if config["load_in_8bit"]:
        return t["weight"].astype(F32) * (t["SCB"].astype(F32) / F32(127))[:, None]
    (state,) = [json.loads(value.tobytes()) for name, value in t.items() if "quant_state" in name]
    packed = t["weight"].reshape(-1)
    levels = t["weight.quant_map"][np.stack([packed >> 4, packed & 15], -1).reshape(-1)]
    nested = np.repeat(t["weight.nested_absmax"], state["nested_blocksize"])[: t["weight.absmax"].size]
    absmax = t["weight.nested_quant_map"][t["weight.absmax"]] * nested + F32(state["nested_offset"])
    return (levels.reshape(-1, state["blocksize"]) * absmax[:, None].astype(F32)).reshape(state["shape"])


READERS = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
    "bitsandbytes": bitsandbytes,
}


def read_checkpoint(directory: Path) -> dict[str, Array]:
    """Every weight of the checkpoint in float32, by the name that it has in a plain one."""
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    modules: dict[str, dict[str, Array]] = {}
    plain: dict[str, Array] = {}
    for name, (kind, values) in read_tensors(directory / "model.safetensors").items():
        place = name.find("_proj.")
        if place < 0:
            plain[name] = values
        else:
            module, tensor = name[: place + 5], name[place + 6 :]
            modules.setdefault(module, {})[tensor] = values
            if tensor == "weight" and kind == "BF16":
                plain[name] = values
    for module, tensors in modules.items():
        if f"{module}.weight" not in plain:
            plain[f"{module}.weight"] = READERS[config["quant_method"]](tensors, config)
    return plain

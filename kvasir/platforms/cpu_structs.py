"""The structures of csrc/cpu/kvasir_cpu.h and kernels.h, field by field. Their sizes are compared when it is loaded."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}


class Matrix(ctypes.Structure):
    _fields_ = (
        ("kind", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("padded_inputs", c_int32),
        ("group", c_int32),
        ("offset", c_int32),
        ("data", c_void_p),
        ("scale", c_void_p),
        ("min", c_void_p),
        ("bias", c_void_p),
    )


class Norm(ctypes.Structure):
    _fields_ = (("kind", c_int32), ("eps", c_float), ("gain", c_void_p), ("bias", c_void_p))


class Cache(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("block_stride", c_int64),
        ("value_offset", c_int64),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("block_size", c_int32),
        ("is_int8", c_int32),
    )


class Rotation(ctypes.Structure):
    _fields_ = (("table", c_void_p), ("size", c_int32), ("interleaved", c_int32))


class Group(ctypes.Structure):
    _fields_ = (("slots", c_void_p), ("tables", c_void_p), ("table_stride", c_int64))


class Step(ctypes.Structure):
    _fields_ = (
        ("tokens", c_int32),
        ("sequences", c_int32),
        ("causal", c_int32),
        ("num_groups", c_int32),
        ("only_last", c_int32),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("rows", c_void_p),
        ("query_start", c_void_p),
        ("lengths", c_void_p),
        ("groups", c_void_p),
    )


class Rows(ctypes.Structure):
    _fields_ = (
        ("num_computed", c_void_p),
        ("next_token", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("block_size", c_int32),
    )


class StepTokens(ctypes.Structure):
    _fields_ = (
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_start", c_void_p),
        ("lengths", c_void_p),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", Norm),
        ("attention_post_norm", Norm),
        ("mlp_norm", Norm),
        ("mlp_post_norm", Norm),
        ("q_norm", Norm),
        ("k_norm", Norm),
        ("qkv", Matrix),
        ("o", Matrix),
        ("up", Matrix),
        ("down", Matrix),
        ("rotation", Rotation),
        ("cache", Cache),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
        ("group", c_int32),
        ("whole_norm", c_int32),
        ("gated", c_int32),
        ("activation", c_int32),
        ("arrangement", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("residual_scale", c_float),
    )


class Decoder(ctypes.Structure):
    _fields_ = (
        ("hidden", c_int32),
        ("num_layers", c_int32),
        ("layers", c_void_p),
        ("embedding", Matrix),
        ("embedding_scale", c_float),
        ("positions", c_void_p),
        ("position_offset", c_int32),
        ("final_norm", Norm),
    )


class Routes(ctypes.Structure):
    _fields_ = (("tokens", c_int32), ("top_k", c_int32), ("chosen", c_void_p), ("weights", c_void_p))


class Sampling(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("temperature", c_void_p),
        ("min_p", c_void_p),
        ("top_p", c_void_p),
        ("top_k", c_void_p),
        ("seeds", c_void_p),
        ("next_token", c_void_p),
    )


def layout() -> int:
    """What kv_layout says if the library was built from the same structures."""
    size = ctypes.sizeof
    return size(Layer) << 40 | size(Decoder) << 20 | size(Step) << 10 | size(Matrix)

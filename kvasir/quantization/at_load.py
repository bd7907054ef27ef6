"""Quantizes plain matrices while they are loaded: 8-bit floats, 8-bit integers, 4-bit integers with searched scales.

Pure tensors, on any device. `kvasir quantize` writes what these functions make.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvasir.quantization.coded import Coded, Coding

MOST_FLOAT = 448.0  # of e4m3
GROUP = 128  # inputs that share a scale in int4
BLOCK = 128  # outputs and inputs that share one in fp8_block
_SHRINKS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76, 0.72)  # of a group's range, which are tried
_AT_ONCE = 1 << 25  # numbers that the search holds in float32 at a time


def fp8(weight: torch.Tensor, scale_type: torch.dtype = torch.float32) -> Coded:
    """A scale for each row; kernels may round inputs to 8-bit floats too."""
    wide = weight.float()
    scale = (wide.abs().amax(1, keepdim=True) / MOST_FLOAT).clamp_min(1e-12).to(scale_type)
    codes = (wide / scale.float()).clamp_(-MOST_FLOAT, MOST_FLOAT).to(torch.float8_e4m3fn).view(torch.uint8)
    return Coded(codes, scale, Coding("e4m3", weight.shape[1], inputs="e4m3"))


def fp8_block(weight: torch.Tensor) -> Coded:
    """A scale for each block of 128x128."""
    outputs, inputs = weight.shape
    if inputs % BLOCK:
        return fp8(weight)
    wide = weight.float()
    tall = torch.nn.functional.pad(wide.view(outputs, -1, BLOCK).abs().amax(2), (0, 0, 0, -outputs % BLOCK))
    most = tall.view(-1, BLOCK, inputs // BLOCK).amax(1).repeat_interleave(BLOCK, 0)[:outputs]
    scale = (most / MOST_FLOAT).clamp_min(1e-12)
    codes = (wide.view(outputs, -1, BLOCK) / scale[:, :, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return Coded(codes.view(outputs, inputs), scale, Coding("e4m3", BLOCK))


def int8(weight: torch.Tensor, scale_type: torch.dtype = torch.float32) -> Coded:
    """A scale for each row."""
    wide = weight.float()
    scale = (wide.abs().amax(1, keepdim=True) / 127).clamp_min(1e-12).to(scale_type)
    codes = torch.round(wide / scale.float()).clamp_(-127, 127).to(torch.int8).view(torch.uint8)
    return Coded(codes, scale, Coding("i8", weight.shape[1]))


def int4(weight: torch.Tensor, group: int = GROUP, *, whole_zeros: bool = False) -> Coded:
    """Groups of 128 inputs, or of the largest power of two below that divides them. Each has the scale and minimum of
    least squared error among those that were tried: ranges shrunk step by step, each fitted to the codes it gives.
    `whole_zeros`: the minimum is a whole number of steps, as checkpoints store it, and scales are bfloat16."""
    inputs = weight.shape[1]
    while inputs % group:
        group //= 2
    rows = max(1, _AT_ONCE // inputs)
    parts = [_search(part.float().reshape(-1, group), whole_zeros) for part in torch.split(weight, rows)]
    codes, scale, minimum = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    count = weight.shape[0]
    return Coded(codes.view(count, inputs), scale.view(count, -1), Coding("u4", group), minimum=minimum.view(count, -1))


def _search(groups: torch.Tensor, whole_zeros: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """groups [count, size] -> codes, scales and minima."""
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    if whole_zeros:
        low, high = low.clamp_max(0), high.clamp_min(0)
    best: tuple[torch.Tensor, ...] | None = None
    for shrink in _SHRINKS:
        middle = (low + high) / 2
        scale = ((high - low) * shrink / 15).clamp_min(1e-10)
        start = middle - scale * 7.5
        scale, start = _fitted(groups, scale, start, whole_zeros)
        codes = torch.round((groups - start) / scale).clamp_(0, 15)
        if not whole_zeros:
            scale, start = _least_squares(groups, codes, scale, start)
            codes = torch.round((groups - start) / scale).clamp_(0, 15)
        error = (codes * scale + start - groups).square().sum(1, keepdim=True)
        found = (error, codes, scale, start)
        if best is None:
            best = found
        else:
            better = error < best[0]
            best = tuple(torch.where(better, new, old) for new, old in zip(found, best, strict=True))
    assert best is not None, "some range was tried"
    return best[1].to(torch.uint8), best[2], best[3]


def _fitted(
    groups: torch.Tensor, scale: torch.Tensor, start: torch.Tensor, whole_zeros: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if not whole_zeros:
        return scale, start
    scale = scale.to(torch.bfloat16).float()
    zero = torch.round(-start / scale).clamp_(0, 15)
    return scale, -zero * scale


def _least_squares(
    groups: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, start: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and minimum of least squared error, given the codes; those of groups of one code stay."""
    size = groups.shape[1]
    mean, level = groups.mean(1, keepdim=True), codes.mean(1, keepdim=True)
    spread = codes.square().sum(1, keepdim=True) - size * level * level
    both = (codes * groups).sum(1, keepdim=True) - size * level * mean
    known = (spread > 0) & (both > 0)
    better = torch.where(known, both / spread.clamp_min(1e-12), scale)
    return better, torch.where(known, mean - better * level, start)


QUANTIZERS: dict[str, Callable[[torch.Tensor], Coded]] = {
    "fp8": fp8,
    "fp8_block": fp8_block,
    "int8": int8,
    "int4": int4,
}

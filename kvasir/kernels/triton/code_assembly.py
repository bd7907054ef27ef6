"""Assembly that makes pairs of bfloat16 of codes, on NVIDIA GPUs of compute capability 9.0 and newer.

Four bytes in a register -> registers with two bfloat16 each: two of them, or for 4-bit codes two of the low halves
and two of the high ones. A small whole number placed in the fraction of 128 is that much more than 128; floats are
shifted to where a bfloat16 has exponent and fraction, and multiplied by a power of two that makes up for the bias.
"""

from __future__ import annotations

from functools import cache


def _pairs(text: str) -> str:
    return "{ .reg .b32 a, b, s, t, f; " + " ".join(text.split()) + " }"


def _spread(source: str) -> str:
    """Bytes 0 and 1 into the halves of a, 2 and 3 into those of b."""
    return f"prmt.b32 a, {source}, 0, 0x4140; prmt.b32 b, {source}, 0, 0x4342;"


def _halves(offset: int) -> str:
    take = "lop3.b32 {}, {}, 0x000f000f, 0x43004300, 0xea;"  # (x & mask) | 128.0
    less = " ".join(f"sub.rn.bf16x2 ${i}, ${i}, f;" for i in range(4))
    return _pairs(f"""{_spread("$4")} mov.b32 f, {_twice(128 + offset)};
        {take.format("$0", "a")} {take.format("$1", "b")} shr.u32 a, a, 4; shr.u32 b, b, 4;
        {take.format("$2", "a")} {take.format("$3", "b")} {less}""")


def _small_floats() -> str:
    def place(target: str, source: str, value: int, sign: int) -> str:
        return f"""shl.b32 s, {source}, {value}; and.b32 s, s, 0x01c001c0; shl.b32 t, {source}, {sign};
            lop3.b32 s, t, 0x80008000, s, 0xea; mul.rn.bf16x2 {target}, s, f;"""

    low = place("$0", "a", 6, 12) + place("$1", "b", 6, 12)
    return _pairs(f"{_spread('$4')} mov.b32 f, 0x7e807e80; {low} {place('$2', 'a', 2, 8)} {place('$3', 'b', 2, 8)}")


def _floats() -> str:
    def place(target: str, order: str) -> str:  # bytes into the upper halves of two bfloat16
        return f"""prmt.b32 a, $2, 0, {order}; and.b32 s, a, 0x80008000; shr.u32 a, a, 4;
            lop3.b32 a, a, 0x07f007f0, s, 0xea; mul.rn.bf16x2 {target}, a, f;"""

    return _pairs(f"mov.b32 f, 0x7b807b80; {place('$0', '0x1404')} {place('$1', '0x3424')}")


def _bytes() -> str:
    def place(target: str, source: str) -> str:  # seven bits over 128, less 128 or, where the sign is set, 256
        return f"""lop3.b32 s, {source}, 0x007f007f, 0x43004300, 0xea; lop3.b32 t, {source}, 0x00800080, 0x43004300,
            0xea; sub.rn.bf16x2 {target}, s, t;"""

    return _pairs(f"{_spread('$2')} {place('$0', 'a')} {place('$1', 'b')}")


def _six_bits(offset: int) -> str:
    def place(target: str, source: str) -> str:
        return f"lop3.b32 s, {source}, 0x003f003f, 0x43004300, 0xea; sub.rn.bf16x2 {target}, s, f;"

    return _pairs(f"{_spread('$2')} mov.b32 f, {_twice(128 + offset)}; {place('$0', 'a')} {place('$1', 'b')}")


def _twice(number: int) -> str:
    """A number from 128 to 255 as two bfloat16."""
    return f"0x{0x4300 + number - 128:04x}{0x4300 + number - 128:04x}"


@cache
def assembly(kind: str, offset: int) -> str:
    """How codes of a kind become numbers; "": there is no such way."""
    if kind in ("u4", "u6") and not 0 <= offset < 128:
        return ""
    return {
        "u4": _halves(offset), "u6": _six_bits(offset), "i8": _bytes(), "e4m3": _floats(), "e2m1": _small_floats(),
    }.get(kind, "")  # fmt: skip

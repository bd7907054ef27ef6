"""The three workloads as token ids, the same for every engine. Plain Python.

W1: one request, 128 tokens in, 64 out.   W2: 16 such requests at once.   W3: 64 requests of 32-256 in and 16-128 out.
"""

from __future__ import annotations

import random

Request = tuple[list[int], int]  # the prompt, and how many tokens to write
_LOWEST, _HIGHEST = 300, 150_000


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(_LOWEST, _HIGHEST) for _ in range(length)]


def w1(salt: int, tokens: int = 64) -> list[Request]:
    """A new salt gives new ids, so that no engine finds the prompt in its cache."""
    return [(_prompt(random.Random(1000 + salt), 128), tokens)]


def w2(salt: int, tokens: int = 64) -> list[Request]:
    rng = random.Random(2000 + salt)
    return [(_prompt(rng, 128), tokens) for _ in range(16)]


def w3(salt: int) -> list[Request]:
    """Lengths are always the same, ids depend on the salt."""
    lengths = random.Random(0)
    sizes = [(lengths.randint(32, 256), lengths.randint(16, 128)) for _ in range(64)]
    rng = random.Random(3000 + salt)
    return [(_prompt(rng, taken), given) for taken, given in sizes]

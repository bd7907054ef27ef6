"""Checks of request parameters. Each returns the value in a plain type or raises a RequestError with the name.

Any process; knows nothing of models or tokenizers.
"""

from __future__ import annotations

import functools
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeVar

from kvasir.config.engine import did_you_mean
from kvasir.errors import RequestError
from kvasir.log import get_logger, warn_once

logger = get_logger(__name__)

T = TypeVar("T")

LARGEST = sys.float_info.max
BIAS_LIMIT = 100.0  # larger biases are cut to it, as in vLLM; it forces or bans a token already


@dataclass(slots=True)
class RepetitionDetectionParams:
    """End a request once its output ends with min_count repetitions of a pattern of min_pattern_size to
    max_pattern_size tokens."""

    max_pattern_size: int = 0  # 0: off
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        name = "repetition_detection"
        self.max_pattern_size = whole(f"{name}.max_pattern_size", self.max_pattern_size, 0)
        self.min_pattern_size = max(1, whole(f"{name}.min_pattern_size", self.min_pattern_size, 0))
        self.min_count = whole(f"{name}.min_count", self.min_count, 2)
        if self.max_pattern_size and self.min_pattern_size > self.max_pattern_size:
            raise RequestError(f"{name}: min_pattern_size must not be more than max_pattern_size.", name)


def repetition_detection(value: object) -> RepetitionDetectionParams | None:
    """Check repetition_detection, which may be given as a dict."""
    name = "repetition_detection"
    if isinstance(value, Mapping):
        known = [f.name for f in fields(RepetitionDetectionParams)]
        for key in value.keys() - set(known):
            raise RequestError(f"{name} has no {key!r}.{did_you_mean(key, known)}", name)
        try:
            return RepetitionDetectionParams(**value)
        except RequestError as error:
            raise RequestError(str(error), name) from error
    if value is None or isinstance(value, RepetitionDetectionParams):
        return value
    raise RequestError(f"{name} must be RepetitionDetectionParams or a dict, not {reprlib.repr(value)}.", name)


def number(name: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    """Check for a float within [low, high], or (low, high] if `above`. NaN is always refused."""
    # the exact type first: the check for an abstract one takes longer than all the rest
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise RequestError(f"{name} must be a number, not {reprlib.repr(value)}.", name)
    found = float(value)
    if not low <= found <= high or (above and found == low):
        where = f"{'above' if above else 'at least'} {low:g}"
        where += " and finite" if high == LARGEST else f" and at most {high:g}"
        raise RequestError(f"{name} must be {where}, not {found:g}.", name)
    return found


def whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """Check for an int within [low, high]."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise RequestError(f"{name} must be an integer, not {reprlib.repr(value)}.", name)
    found = int(value)
    if found < low or (high is not None and found > high):
        where = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} must be {where}, not {reprlib.repr(found)}.", name)
    return found


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, not {value!r}.", name)
    return value


def token_ids(name: str, value: object) -> list[int]:
    if not isinstance(value, list | tuple | set | frozenset):
        raise RequestError(f"{name} must be a list of token ids, not {value!r}.", name)
    return [whole(name, token, 0) for token in value]


def texts(name: str, value: object) -> list[str]:
    """Check for a list of strings that are not blank."""
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise RequestError(f"{name} must be a list of strings, not {reprlib.repr(value)}.", name)
    if not all(text.strip() for text in value):
        raise RequestError(f"{name} contains an empty string; remove it.", name)
    return list(value)


def logit_bias(value: object) -> dict[int, float]:
    """Check logit_bias. Token ids may be strings, because JSON has no other keys."""
    name = "logit_bias"
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be a dict of token ids and numbers, not {reprlib.repr(value)}.", name)
    found = {}
    for token, bias in value.items():
        key = int(token) if isinstance(token, str) and token.isdecimal() else token
        if isinstance(key, bool) or not isinstance(key, Integral) or key < 0:
            raise RequestError(f"{name} must have token ids as keys, not {reprlib.repr(token)}.", name)
        limited = number(name, bias, -LARGEST, LARGEST)
        found[int(key)] = min(BIAS_LIMIT, max(-BIAS_LIMIT, limited))
    return found


def callables(name: str, value: object) -> list[Any]:
    if not isinstance(value, list | tuple) or not all(callable(each) for each in value):
        raise RequestError(f"{name} must be a list of callables, not {reprlib.repr(value)}.", name)
    return list(value)


def accepts_older_names(older: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Let the constructor of a dataclass accept older names, with a warning, and suggest names for unknown ones."""
    return functools.partial(_with_older_names, older)


def _with_older_names(older: Mapping[str, str], cls: type[T]) -> type[T]:
    plain_init: Callable[..., None] = cls.__init__
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]  # only dataclasses are decorated

    @functools.wraps(plain_init)
    def init(self: T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() - set(known):
            newer = older.get(name)
            if newer is None:
                raise _unknown(name, known, older)
            if newer in kwargs:
                raise RequestError(f"{name} and {newer} were both given. Remove {name}, the older name.", newer)
            warn_once(logger, f"SamplingParams({name}=...) is deprecated; use {newer}.")
            kwargs[newer] = kwargs.pop(name)
        if len(args) > len(known):
            raise RequestError(f"SamplingParams takes at most {len(known)} values, but {len(args)} were given.")
        plain_init(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[assignment]
    return cls


def _unknown(name: str, known: Sequence[str], older: Mapping[str, str]) -> RequestError:
    hint = did_you_mean(name, [*known, *older]) or f" Known are: {', '.join(known)}."
    return RequestError(f"SamplingParams has no parameter {name!r}.{hint}", name)

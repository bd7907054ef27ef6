"""Which steps have graphs. The set is closed: it follows from the settings, every graph in it is captured before the
first request, and every step either fits one of them or is launched kernel by kernel. Worker process.

What differs from step to step (lengths, block tables, rows, prefix groups) is data on the device and in no key.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvasir import messages
from kvasir.attention.base import UNBOUNDED
from kvasir.kernels.layout import max_unshared_tokens
from kvasir.kernels.triton import paged_decode
from kvasir.messages import StepPlan
from kvasir.sampling.features import Uses

# Sizes of steps in which every row runs one token. Padding costs little: such a step's time is that of reading weights,
# and from 256 rows on products are computed in tiles of 64 rows or more anyway.
ROWS = (1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32), *range(320, 513, 64), 640, 768, 896, 1024)
# Tokens of steps in which rows may run several. Larger steps take so long that launching them costs nothing.
MIXED_TOKENS = (16, 32, 64, 128, 192, *range(256, 513, 64), 640, 768, 896, 1024)
MIN_SHARED_TOKENS = 128  # of mixed steps whose graphs read shared prefixes once; smaller ones read them for each row
FEW_ROWS = 64  # rows of mixed steps; the other graphs have as many as there can be


@dataclass(slots=True, frozen=True)
class ForwardGraphKey:
    """What a forward graph is captured for."""

    tokens: int  # padding included
    rows: int  # padding included
    bound: int  # upper bound of the unshared tokens of a sequence that runs one token
    shares: bool = False  # some sequences share a prefix that is read once
    drafts: int = 0  # of a mixed step: most drafts of a row, for each of which it may sample
    is_changed: bool = False  # a feature changes the forward pass: rows may use adapters
    longest: int = 0  # of an encoder: upper bound of the tokens of a prompt; 0: rows have a cache

    @property
    def is_mixed(self) -> bool:
        """Whether rows may run several tokens."""
        return self.tokens > self.rows

    @property
    def lines(self) -> int:
        """Lines that the graph leaves for a head."""
        return min(self.tokens, self.rows * (1 + self.drafts))

    @property
    def is_ordered(self) -> bool:
        """Whether the longest sequences are started first."""
        return not self.is_mixed and paged_decode.order_pays(self.rows)


@dataclass(slots=True, frozen=True)
class HeadGraphKey:
    """What a head graph is captured for. Every forward graph leaves hidden states, rows and lengths in the same place,
    so that one head serves all."""

    rows: int  # that sample, padding included
    uses: Uses = ()  # features that it runs


@dataclass(slots=True, frozen=True)
class DraftGraphKey:
    """What a pass of a drafter is captured for."""

    rows: int  # padding included
    number: int  # of the draft that it makes; the highest stands for all higher ones, too


# Tokens of an encoder's steps.
ENCODER_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288)
FEW_TOKENS = 1024  # steps up to here are bound by launches and may be padded at will, larger ones by a third at most
MOST_TOKENS = 32768  # launching a larger step takes no time beside computing it
SHARES = (128, 32, 4)  # tokens of a prompt, on average: attention starts as many rows as a graph has, used or not


class EncoderGraphKeys:
    """The keys of all graphs of an encoder. Its rows are whole prompts, and it samples nothing: there are no heads."""

    num_drafts = 0

    def __init__(self, max_rows: int, max_tokens: int, max_model_len: int) -> None:
        self.sizes: list[int] = []  # of steps in which every row runs one token
        self.head_sizes: list[int] = []
        self.mixed_rows: dict[int, tuple[int, ...]] = {}
        for tokens in (*(size for size in ENCODER_TOKENS if size < max_tokens), min(max_tokens, MOST_TOKENS)):
            self.mixed_rows[tokens] = tuple(sorted({min(max_rows, max(4, tokens // each), tokens) for each in SHARES}))
        self._max_model_len = max_model_len

    @property
    def max_size(self) -> int:
        return max(self.mixed_rows)

    def forwards(self) -> Iterator[ForwardGraphKey]:
        """All forward keys, the largest first."""
        for tokens in reversed(self.mixed_rows):
            for rows in reversed(self.mixed_rows[tokens]):
                yield self._key(tokens, rows)

    def fit(self, plan: StepPlan) -> ForwardGraphKey | None:
        """The smallest graph that this step fits; None if it would be padded too much, or is larger than all."""
        count, total = len(plan.rows), plan.total_tokens
        for tokens, rows in self.mixed_rows.items():
            if total <= tokens and count <= rows[-1]:
                if tokens > FEW_TOKENS and total * 4 < tokens * 3:
                    return None
                return self._key(tokens, next(size for size in rows if size >= count))
        return None

    def _key(self, tokens: int, rows: int) -> ForwardGraphKey:
        return ForwardGraphKey(tokens, rows, UNBOUNDED, longest=min(tokens, self._max_model_len))


class GraphKeys:
    """The keys of all graphs of an engine that runs at most `max_rows` requests and `max_tokens` tokens in a step, and
    verifies at most `num_drafts` drafts of a row."""

    def __init__(self, max_rows: int, max_tokens: int, num_drafts: int = 0, may_change: bool = False) -> None:
        """`may_change`: features may change the forward pass, so every graph exists in two versions."""
        self.num_drafts, self.may_change = num_drafts, may_change
        self.sizes = [size for size in ROWS if size < max_rows]
        if max_rows <= ROWS[-1]:
            self.sizes.append(max_rows)
        fitting = bisect_left(MIXED_TOKENS, max_tokens) + 1  # the last one has room for the largest step
        self.mixed_rows = {tokens: self._mixed_rows(tokens) for tokens in MIXED_TOKENS[:fitting]}
        self.mixed_tokens = list(self.mixed_rows)
        self.head_sizes = self._head_sizes()

    @property
    def max_size(self) -> int:
        """The largest number of rows or tokens of any key."""
        return max(self.head_sizes[-1], self.mixed_tokens[-1])

    def forwards(self) -> Iterator[ForwardGraphKey]:
        """All forward keys, the largest first."""
        for key in self._plain():
            yield key
            if self.may_change:
                yield replace(key, is_changed=True)

    def _plain(self) -> Iterator[ForwardGraphKey]:
        for tokens in reversed(self.mixed_tokens):
            for rows in reversed(self.mixed_rows[tokens]):
                yield from _variants(tokens, rows, (UNBOUNDED,), self.num_drafts)
        for size in reversed(self.sizes):
            yield from _variants(size, size, _bounds(size))

    def fit(self, plan: StepPlan) -> ForwardGraphKey | None:
        """The smallest graph that this step fits; None if it is larger than all."""
        count, shares = len(plan.rows), plan.shared is not None
        if plan.num_decodes == count:
            if count > self.sizes[-1]:
                return None
            size = self.sizes[bisect_left(self.sizes, count)]
            bounds = (UNBOUNDED,) if shares else _bounds(size)
            bound = bounds[bisect_left(bounds, max_unshared_tokens(plan))]
            return ForwardGraphKey(size, size, bound, shares)
        if plan.drafts is not None and int(plan.samples.sum() + plan.drafts.sum()) > self.head_sizes[-1]:
            return None
        for tokens in self.mixed_tokens[bisect_left(self.mixed_tokens, plan.total_tokens) :]:
            for rows in self.mixed_rows[tokens]:
                if count <= rows:
                    shares = shares and tokens >= MIN_SHARED_TOKENS
                    return ForwardGraphKey(tokens, rows, UNBOUNDED, shares, self.num_drafts)
        return None

    def head_rows(self, num_lines: int) -> int:
        """The size of the head for so many lines that sample; at most those that the graph of their step leaves."""
        return self.head_sizes[bisect_left(self.head_sizes, num_lines)]

    def _head_sizes(self) -> list[int]:
        """Lines of heads: as many as rows and, where rows verify drafts, as many as those make. A head with more lines
        than a forward graph leaves would sample those of an earlier step."""
        if not self.num_drafts:
            return self.sizes
        left = {
            min(tokens, rows * (1 + self.num_drafts))
            for tokens in self.mixed_tokens
            for rows in self.mixed_rows[tokens]
        }
        most = max(self.sizes[-1], *left)
        return sorted({*self.sizes, *(size for size in ROWS if size < most), *left})

    def _mixed_rows(self, tokens: int) -> tuple[int, ...]:
        """Numbers of rows for which there are graphs of so many tokens, as heads have them. Some row has two tokens."""
        most = max(size for size in self.sizes if size < tokens)
        return (FEW_ROWS, most) if most > FEW_ROWS else (most,)


def make_graph_keys(
    has_cache: bool, max_rows: int, max_tokens: int, max_model_len: int, num_drafts: int = 0, may_change: bool = False
) -> GraphKeys | EncoderGraphKeys:
    """The keys for a model. One without a cache is an encoder."""
    if has_cache:
        return GraphKeys(max_rows, max_tokens, num_drafts, may_change)
    return EncoderGraphKeys(max_rows, max_tokens, max_model_len)


def _bounds(rows: int) -> tuple[int, ...]:
    """Bounds of sequence lengths that are worth graphs of their own: below the first, paged_decode.choose_split cuts no
    sequence into parts, and nothing has to be merged."""
    if rows <= 2:
        return (UNBOUNDED,)
    return (512 if rows <= 64 else 2048, UNBOUNDED)


def _variants(tokens: int, rows: int, bounds: tuple[int, ...], drafts: int = 0) -> Iterator[ForwardGraphKey]:
    for bound in bounds:
        yield ForwardGraphKey(tokens, rows, bound, drafts=drafts)
    if rows >= messages.MIN_GROUP_ROWS and (tokens == rows or tokens >= MIN_SHARED_TOKENS):
        yield ForwardGraphKey(tokens, rows, UNBOUNDED, shares=True, drafts=drafts)

"""Names for block contents: a chain of hashes, equal across processes and restarts.

A block's hash covers its tokens and, through its parent, everything before them; the root covers what else
must match for two requests to share (salt; later adapter, image contents).

Private names stand for blocks that only the requests which had them can ask for: half-full ones, and all of them where
prefixes are not cached.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import count
from typing import TYPE_CHECKING

from kvasir.engine.cache.tier import SwappedBlocks
from kvasir.messages import Int32Array

if TYPE_CHECKING:
    from kvasir.engine.cache.manager import KVCacheManager


def root_hash(salt: bytes) -> bytes:
    return sha256(b"kvasir/1\0" + salt).digest()


def extend_chain(chain: list[bytes], salt: bytes, token_ids: Int32Array, num_blocks: int, block_size: int) -> None:
    """Append hashes until `chain` names the first `num_blocks` full blocks of `token_ids`."""
    if len(chain) >= num_blocks:
        return
    parent = chain[-1] if chain else root_hash(salt)
    tokens = token_ids[len(chain) * block_size : num_blocks * block_size].tobytes()
    stride = 4 * block_size  # bytes
    for start in range(0, len(tokens), stride):
        parent = sha256(parent + tokens[start : start + stride]).digest()
        chain.append(parent)


_numbers = count(1)
_PRIVATE_BYTES = 8


def private_name() -> bytes:
    """A name that no content has: shorter than a hash, and used once."""
    return next(_numbers).to_bytes(_PRIVATE_BYTES, "big")


def is_private(name: bytes) -> bool:
    return len(name) <= _PRIVATE_BYTES + 1


def in_group(group: int, name: bytes) -> bytes:
    """A block's name in the pool: groups hold different layers of the same text."""
    return name + bytes([group]) if group else name


def of_all_groups(group: int, name: bytes) -> bytes:
    return name[:-1] if group else name


# ----------------------------------------------------------------
# Names for all blocks of a preempted row, under which it finds them again wherever they are by then. Core process.
#
# Full blocks of cached text have a name already. The half-full last one, and all of them where prefixes are not cached,
# get a private one; rows that share a block share the name.


def keep_for_return(cache: KVCacheManager, row: int, hashes: list[bytes], num_tokens: int) -> SwappedBlocks:
    """Have the tier keep the row's blocks, if it will. `hashes` name the full ones if prefixes are cached."""
    columns = num_tokens // cache.block_size
    chain = hashes[:columns] if cache.caching else [_shared_name(cache, row, column) for column in range(columns)]
    if num_tokens % cache.block_size and _is_own(cache, row, columns):
        chain.append(private_name())
    held = _held(cache, row, len(chain))
    swapped = SwappedBlocks(num_tokens, min(num_tokens, len(chain) * cache.block_size), chain)
    swapped.names = [in_group(group, chain[column]) for group, column, _ in held]
    own = [column for _, column, block in held if cache.pool.ref_counts[block] == 1]
    at_stake = set(own) if cache.caching else range(len(chain))  # what others hold is found again, if it has a name
    if not at_stake or not cache.tier.keep(swapped, len(own), len(at_stake) * cache.block_size):
        return SwappedBlocks(num_tokens)
    for (_, column, block), name in zip(held, swapped.names, strict=True):
        if column == columns:  # it may be full by now, and cached as such; the row will write in it again
            cache.pool.forget(block)
        if cache.pool.name_of(block) is None:
            cache.pool.register([block], [name])
    return swapped


def _held(cache: KVCacheManager, row: int, columns: int) -> list[tuple[int, int, int]]:
    """Group, column and block of all that the row has of its first columns."""
    lines = [group * cache.max_rows + row for group in range(cache.num_groups)]
    return [
        (group, column, int(cache.tables[line, column]))
        for group, line in enumerate(lines)
        for column in range(int(cache.num_freed[line]), columns)
    ]


def _shared_name(cache: KVCacheManager, row: int, column: int) -> bytes:
    """Of a full block: what it is known by to a swapped row that shares it, or a new one."""
    for group in range(cache.num_groups):
        name = cache.pool.name_of(int(cache.tables[group * cache.max_rows + row, column]))
        if name is not None:
            return of_all_groups(group, name)
    return private_name()


def _is_own(cache: KVCacheManager, row: int, column: int) -> bool:
    """Whether nobody else holds the row's blocks in this column, or waits for them."""
    blocks = cache.tables[row :: cache.max_rows, column].tolist()
    names = [cache.pool.name_of(block) for block in blocks]
    return bool((cache.pool.ref_counts[blocks] == 1).all()) and not any(map(is_private, filter(None, names)))

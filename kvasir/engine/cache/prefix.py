"""Names of block contents. Core process.

The name of a full block is a hash of its tokens and of its parent's hash, so it covers all tokens before them. The
root covers everything else that must match for two requests to share blocks (the salt; later adapters and images).
Names are equal across processes and restarts.

Private names are for blocks that only preempted requests look up: partly filled blocks and, without prefix caching,
all blocks.
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


_private_numbers = count(1)
_PRIVATE_BYTES = 8


def private_name() -> bytes:
    """Return a new name that is shorter than any hash."""
    return next(_private_numbers).to_bytes(_PRIVATE_BYTES, "big")


def is_private(name: bytes) -> bool:
    return len(name) <= _PRIVATE_BYTES + 1


def with_group(group: int, name: bytes) -> bytes:
    """Return a block's name in the pool: blocks of different groups hold different layers of the same tokens."""
    return name + bytes([group]) if group else name


def without_group(group: int, name: bytes) -> bytes:
    """Undo `with_group`."""
    return name[:-1] if group else name


# ----------------------------------------------------------------
# Names for all blocks of a preempted row, so that it finds them on the device or in the tier when it resumes.
#
# With prefix caching, full blocks have names already. A partly filled last block and, without prefix caching, every
# block gets a private name; rows that share a block share its name.


def keep_swapped_blocks(cache: KVCacheManager, row: int, hashes: list[bytes], num_tokens: int) -> SwappedBlocks:
    """Ask the tier to keep the row's blocks, and name those that have no name. With prefix caching, `hashes` are the
    names of the full blocks. If the tier declines, the result has no names."""
    columns = num_tokens // cache.block_size
    chain = hashes[:columns] if cache.caching else [_shared_name(cache, row, column) for column in range(columns)]
    if num_tokens % cache.block_size and _is_exclusive(cache, row, columns):
        chain.append(private_name())
    held = _row_blocks(cache, row, len(chain))
    swapped = SwappedBlocks(num_tokens, min(num_tokens, len(chain) * cache.block_size), chain)
    swapped.names = [with_group(group, chain[column]) for group, column, _ in held]
    own = [column for _, column, block in held if cache.pool.ref_counts[block] == 1]
    # With prefix caching, blocks that other rows hold are found by their hash; the rest would be recomputed.
    to_recompute = set(own) if cache.caching else range(len(chain))
    if not to_recompute or not cache.tier.keep(swapped, len(own), len(to_recompute) * cache.block_size):
        return SwappedBlocks(num_tokens)
    for (_, column, block), name in zip(held, swapped.names, strict=True):
        if column == columns:  # a step in flight may have filled and named it, but the row will write to it again
            cache.pool.forget(block)
        if cache.pool.name_of(block) is None:
            cache.pool.register([block], [name])
    return swapped


def _row_blocks(cache: KVCacheManager, row: int, columns: int) -> list[tuple[int, int, int]]:
    """Return group, column and block of each block that the row holds in its first `columns` columns."""
    lines = [group * cache.max_rows + row for group in range(cache.num_groups)]
    return [
        (group, column, int(cache.tables[line, column]))
        for group, line in enumerate(lines)
        for column in range(int(cache.num_freed[line]), columns)
    ]


def _shared_name(cache: KVCacheManager, row: int, column: int) -> bytes:
    """Return the name by which a swapped row already knows this full block, or a new private name."""
    for group in range(cache.num_groups):
        name = cache.pool.name_of(int(cache.tables[group * cache.max_rows + row, column]))
        if name is not None:
            return without_group(group, name)
    return private_name()


def _is_exclusive(cache: KVCacheManager, row: int, column: int) -> bool:
    """Whether no other row holds the row's blocks in this column, and no swapped row needs them."""
    blocks = cache.tables[row :: cache.max_rows, column].tolist()
    names = [cache.pool.name_of(block) for block in blocks]
    return bool((cache.pool.ref_counts[blocks] == 1).all()) and not any(map(is_private, filter(None, names)))

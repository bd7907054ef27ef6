"""Names for block contents: a chain of hashes, equal across processes and restarts.

A block's hash covers its tokens and, through its parent, everything before them; the root covers what else
must match for two requests to share (salt; later adapter, image contents).

Private names stand for blocks that only the requests which had them can ask for: half-full ones, and all of them where
prefixes are not cached.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import count

from kvasir.messages import Int32Array


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

"""Names for block contents: a chain of hashes, equal across processes and restarts.

A block's hash covers its tokens and, through its parent, everything before them; the root covers what else
must match for two requests to share (salt; later adapter, image contents).
"""

from __future__ import annotations

from hashlib import sha256

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

"""Which layers share block tables. No torch.

Layers that see equally far back make a group; since all groups take their blocks from one pool of equal blocks, a kind
with many layers is cut into several groups of about as many as the smallest kind has.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_GROUPS = 8  # each has its own tables, which take time to build


def group_layers(windows: Sequence[int | None]) -> list[tuple[int | None, list[int]]]:
    """The groups' windows and layers; layers without a window come first."""
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    ordered = sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[1][0]))
    size = max(min(len(layers) for layers in kinds.values()), -(-len(windows) // MOST_GROUPS))
    return [(window, layers[at : at + size]) for window, layers in ordered for at in range(0, len(layers), size)]

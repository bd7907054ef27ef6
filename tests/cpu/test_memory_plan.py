"""How a device's memory is shared out, in numbers."""

from __future__ import annotations

import pytest

from kvasir.errors import ConfigError
from kvasir.worker.memory import GIB, LARGEST_GRAPH, Profile, expected_graphs, kv_share, refuse_more_than_is_free

PROFILE = Profile(peak=20 * GIB, largest_step=5 * GIB, outside=2 * GIB)


def test_the_cache_gets_what_weights_and_the_largest_step_leave() -> None:
    assert kv_share(100 * GIB, 0.9, PROFILE, graphs=0) == 68 * GIB


def test_graphs_go_beside_the_engines_share_and_the_rest_is_set_aside() -> None:
    assert kv_share(100 * GIB, 0.9, PROFILE, graphs=10 * GIB) == 68 * GIB
    assert kv_share(100 * GIB, 0.9, PROFILE, graphs=11 * GIB) == 67 * GIB
    assert kv_share(100 * GIB, 1.0, PROFILE, graphs=GIB) == 77 * GIB


def test_graphs_share_the_memory_of_small_steps() -> None:
    assert expected_graphs(256, 0, 0, 16 * GIB, 16384) == 2 * GIB
    assert expected_graphs(0, 0, 0, GIB, 512) == GIB
    assert expected_graphs(0, LARGEST_GRAPH, 1 << 17, 0, 512) == GIB


def test_a_cache_that_leaves_no_room_for_steps() -> None:
    refuse_more_than_is_free(7 * GIB, "kv_cache_memory_bytes", 7 * GIB, free=10 * GIB, steps=3 * GIB)
    with pytest.raises(ConfigError) as raised:
        refuse_more_than_is_free(8 * GIB, "kv_cache_memory_bytes", 8 * GIB, free=10 * GIB, steps=3 * GIB)
    assert str(raised.value) == (
        f"kv_cache_memory_bytes={8 * GIB} (8.0 GiB) and what the largest step takes (3.0 GiB) are more than the "
        f"10.0 GiB of memory that are free beside the weights; lower kv_cache_memory_bytes to {7 * GIB}, "
        f"or max_num_batched_tokens."
    )


def test_a_number_of_blocks_is_lowered_in_blocks() -> None:
    with pytest.raises(ConfigError, match=r"lower num_gpu_blocks_override to 700, or max_num_batched_tokens\.$"):
        refuse_more_than_is_free(8 * GIB, "num_gpu_blocks_override", 800, free=10 * GIB, steps=3 * GIB)
    with pytest.raises(ConfigError, match=r"weights; lower max_num_batched_tokens\.$"):
        refuse_more_than_is_free(GIB, "num_gpu_blocks_override", 100, free=3 * GIB, steps=3 * GIB)


def test_where_nothing_was_measured() -> None:
    refuse_more_than_is_free(8 * GIB, "kv_cache_memory_bytes", 8 * GIB, free=None, steps=0)
    with pytest.raises(
        ConfigError, match=r"^kv_cache_memory_bytes=\d+ \(8.0 GiB\) is more than the 7.0 GiB .* lower it\.$"
    ):
        refuse_more_than_is_free(8 * GIB, "kv_cache_memory_bytes", 8 * GIB, free=7 * GIB, steps=0)


def test_the_largest_graph_is_the_one_that_is_captured() -> None:
    graph_shapes = pytest.importorskip("kvasir.worker.graph_keys")
    assert graph_shapes.MIXED_TOKENS[-1] == graph_shapes.ROWS[-1] == LARGEST_GRAPH

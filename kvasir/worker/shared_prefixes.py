"""What a step's rows share, laid out for kernels."""

from __future__ import annotations

import numpy as np

from kvasir.messages import Int32Array, PrefixGroups, StepPlan, max_prefix_groups

NOTHING: Int32Array = np.zeros(0, np.int32)


def lay_out(groups: PrefixGroups | None, size: int) -> tuple[Int32Array, Int32Array, Int32Array]:
    """The fields of kernels.SharedPrefixes, for so many sequences; empty where nothing is shared."""
    if groups is None:
        return NOTHING, NOTHING, NOTHING
    tokens, members = np.zeros((2, size), np.int32)
    tokens[groups.members] = np.repeat(groups.tokens, np.diff(groups.starts))
    members[: len(groups.members)] = groups.members
    starts = np.full(max_prefix_groups(size) + 1, groups.starts[-1], np.int32)  # groups that are not there are empty
    starts[: len(groups.starts)] = groups.starts
    return tokens, members, starts


def longest_own(plan: StepPlan) -> int:
    """No row that runs one token has more tokens that it shares with nobody."""
    lengths = plan.bounds[: plan.num_decodes]
    if plan.shared is not None:
        lengths = lengths - lay_out(plan.shared, plan.num_decodes)[0]
    return int(lengths.max(initial=0))

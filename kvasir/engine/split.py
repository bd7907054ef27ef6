"""A step's output, told apart by client. Core process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvasir.messages import EngineOutput
from kvasir.transport.address import KEYS_PER_CLIENT


def is_empty(output: EngineOutput) -> bool:
    return not (len(output.keys) or output.finished or output.beams or output.prompt_logprobs or output.started)


def split(output: EngineOutput) -> Iterator[tuple[int, EngineOutput]]:
    """Each client's part of it. Work is per client, not per request, save for what ended."""
    of_line = output.keys >> KEYS_PER_CLIENT
    others = [part.of for part in output.prompt_logprobs]
    others += [one.key for group in (output.finished, output.beams, output.started) for one in group]
    clients = {*np.unique(of_line).tolist(), *(key >> KEYS_PER_CLIENT for key in others)}
    for client in sorted(clients):
        lines = np.flatnonzero(of_line == client)
        yield (
            client,
            EngineOutput(
                output.keys[lines],
                output.token_ids[lines],
                output.counts[lines],
                None if output.logprobs is None else output.logprobs.select(lines, len(output.keys)),
                [end for end in output.finished if end.key >> KEYS_PER_CLIENT == client],
                [part for part in output.prompt_logprobs if part.of >> KEYS_PER_CLIENT == client],
                [beam for beam in output.beams if beam.key >> KEYS_PER_CLIENT == client],
                [start for start in output.started if start.key >> KEYS_PER_CLIENT == client],
            ),
        )

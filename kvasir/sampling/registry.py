"""The features that rows can ask for. A new one is added here and nowhere else; see sampling/features.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kvasir.sampling.features import RowFeature
from kvasir.sampling.logit_rules import BadWords, Bans, Bias, Penalties, Processors, TopEma
from kvasir.sampling.logprobs import PromptScores, TokenScores
from kvasir.sampling.overrides import SampleOverrides
from kvasir.sampling.pooling import PooledRows, PoolingHead
from kvasir.sampling.sampler import Sampler, SamplingParameters
from kvasir.sampling.stages import Stages


@dataclass(slots=True, frozen=True)
class FeatureSettings:
    """What features are made for."""

    max_rows: int  # the padding row included
    vocab_size: int
    device: torch.device
    logprobs_mode: str = "raw_logprobs"
    num_drafts: int = 0  # that a row may verify in a step
    poolers: Mapping[str, PoolingHead] = field(default_factory=dict)  # by task; empty: the model generates text
    further: Sequence[RowFeature] = ()  # those of the model


def make_features(settings: FeatureSettings, parameters: SamplingParameters) -> list[RowFeature]:
    rows, vocab, device = settings.max_rows, settings.vocab_size, settings.device
    if settings.poolers:  # nothing is sampled, so nothing has to be known of how
        return [*(PooledRows(pooler, rows, device) for pooler in settings.poolers.values()), *settings.further]
    return [
        parameters,
        SampleOverrides(rows, vocab, device, rows * (1 + settings.num_drafts)),
        TokenScores(settings.logprobs_mode, rows, device),
        PromptScores(rows - 1, settings.logprobs_mode.endswith("logits"), device),
        *settings.further,
    ]


def make_stages(
    max_rows: int, vocab_size: int, parameters: SamplingParameters, device: torch.device, num_drafts: int = 0
) -> Stages:
    """In vLLM's order where it matters: the callers' own processors, bias, penalties, then what is forbidden."""
    return Stages(
        [
            Processors(max_rows, device),
            Bias(max_rows, device),
            Penalties(max_rows, vocab_size, device),
            Bans(max_rows, vocab_size, device),
            BadWords(max_rows, device),
            TopEma(max_rows, parameters.temperature, device, num_drafts),
        ]
    )


def make_sampler(settings: FeatureSettings, next_token: torch.Tensor) -> Sampler:
    """A sampler with all features. `next_token` [rows] int32 is where the next step finds its inputs."""
    parameters = SamplingParameters(settings.max_rows, settings.device)
    parameters.stages = make_stages(
        settings.max_rows, settings.vocab_size, parameters, settings.device, settings.num_drafts
    )
    return Sampler(parameters, next_token, make_features(settings, parameters))

"""Models that Kvasir does not know: transformers' own code, with our paged cache behind its attention interface.

Worker process. transformers computes everything of a layer but attention, for which it calls `_attend`: that stores the
step's keys and values and calls our backend. Scheduling, caching and sampling are the same as for other models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn

from kvasir import kernels
from kvasir.attention.base import AttentionBackend, AttentionBatch, LastTokens
from kvasir.config.engine import EngineConfig
from kvasir.errors import ModelError
from kvasir.layers.base import Build, weight_bytes
from kvasir.layers.pooler import Poolers
from kvasir.messages import KVSpec
from kvasir.models.checkpoint import is_finite

NAME = "kvasir"  # of our function among transformers' attention implementations
# Arguments of attention functions for features that our attention does not have.
_EXTRAS = ("position_bias", "head_mask", "alibi")
# What some decoders return besides their states, and heads pass on: here always None.
_RETURNED_BESIDES = ("router_logits", "cross_attentions", "shared_kv_states")


@dataclass(slots=True)
class CachedLayer:
    """One attention layer: its index in the cache, the shape of a token's keys, and the window."""

    index: int
    kv_heads: int
    head_dim: int
    window: int | None


@dataclass
class StepContext:
    """What `_attend` needs to know of the running step. Every module of the model holds it."""

    backend: AttentionBackend
    layers: dict[nn.Module, CachedLayer] = field(default_factory=dict)
    caches: Sequence[torch.Tensor] = ()
    batch: AttentionBatch | None = None  # None: the model is being inspected
    found_all: bool = False  # whether all layers are known


class TransformersModel(nn.Module):
    """A model of transformers with the interface of models.transformer.Transformer."""

    capturable = False  # its code may not be fit for CUDA graphs
    runs_in_cpu_library = False

    def __init__(self, causal: Any, backend: AttentionBackend) -> None:
        super().__init__()
        prefix = causal.base_model_prefix
        self.base, self.causal = getattr(causal, prefix), causal
        self.step = StepContext(backend)
        for module in causal.modules():
            object.__setattr__(module, "kvasir_step", self.step)
        # The head runs by itself, later and for some tokens only, so the decoder in front of it is replaced.
        self.given = GivenStates()
        setattr(causal, prefix, self.given)
        self.vocab_size = int(causal.config.get_text_config().vocab_size)
        self.poolers = Poolers(Build(torch.float32), ())

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch | None,
        last: LastTokens | None = None,
    ) -> torch.Tensor:
        self.step.batch = batch
        output = self.base(input_ids=input_ids[None], position_ids=positions[None].long(), use_cache=False)
        hidden: torch.Tensor = output[0][0]
        return hidden if last is None else last.of(hidden)

    recorded: torch.Tensor | None = None

    def record(self, layers: Sequence[int]) -> None:
        raise ModelError(
            "speculative_config: the method reads the model's hidden states, which a model that runs through "
            "transformers does not hand out. Use method='suffix', or a draft model."
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.given.hidden = hidden[None]
        logits: torch.Tensor = self.causal(input_ids=None, use_cache=False).logits[0]
        return logits

    def inspect(self) -> None:
        """Run one token without a cache, to find the attention layers and the shape of their keys."""
        device = next(self.base.parameters()).device
        one = torch.zeros(1, dtype=torch.int64, device=device)
        with torch.inference_mode(), _shown_masks():
            try:
                self.logits(self.forward(one, one, None))
            except ModelError:
                raise
            except Exception as error:  # its code may raise anything
                raise ModelError(f"its code does not do with a mask that only attention reads ({error})") from error
        if len({(layer.kv_heads, layer.head_dim) for layer in self.step.layers.values()}) != 1:
            raise ModelError("its layers do not all attend, with keys of one shape, through transformers' interface")
        self.step.found_all = True
        self._check_tokens_apart(device)

    def _check_tokens_apart(self, device: torch.device) -> None:
        """Raise if tokens depend on each other otherwise than by attention, which is left out here: a convolution or a
        recurrence would take what stands beside them in a step for their own past."""
        random = torch.Generator().manual_seed(0)
        positions = torch.arange(32, device=device)
        tokens = torch.randint(self.vocab_size, (32,), generator=random).to(device)
        others = tokens.clone()
        others[::2] = (tokens[::2] + 1) % self.vocab_size
        with torch.inference_mode(), _shown_masks():
            one, two = (self.forward(each, positions, None)[1::2] for each in (tokens, others))
        most = max(1e-4, 2 * torch.finfo(one.dtype).eps)
        # The median, because other neighbours may round an expert's weight to the other side.
        difference = (one - two).float().norm(dim=-1) / one.float().norm(dim=-1).clamp(min=1e-9)
        if float(difference.median()) > most:
            raise ModelError("its layers carry a state from token to token, besides keys and values")

    def compile_key(self) -> str:
        return ""  # nothing is compiled

    def compile_copy(self) -> None:
        """None: which kernels transformers' code launches is unknown."""
        return None

    def weight_bytes(self) -> int:
        return weight_bytes(self)

    # ------------------------------------------------------------ the KV cache

    def page_shape(self, block_size: int, dtype: torch.dtype | None = None) -> tuple[int, ...]:
        layer = next(iter(self.step.layers.values()))
        return 2, block_size, layer.kv_heads, layer.head_dim

    def kv_spec(self, block_size: int, dtype: torch.dtype) -> KVSpec:
        page_bytes = prod(self.page_shape(block_size)) * dtype.itemsize
        return KVSpec(num_layers=len(self.step.layers), block_size=block_size, page_bytes=page_bytes)

    def bind_kv(self, caches: Sequence[torch.Tensor]) -> None:
        self.step.caches = caches


class GivenStates(nn.Module):
    """Takes the place of the decoder and returns hidden states that were computed before."""

    hidden: torch.Tensor

    def forward(self, *_: Any, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        class Output(BaseModelOutputWithPast):  # type: ignore[misc]
            def __getattr__(self, name: str) -> None:
                if name not in _RETURNED_BESIDES:
                    raise AttributeError(f"a decoder's output has no {name}", name=name, obj=self)

        return Output(last_hidden_state=self.hidden)


def _attend(
    module: Any,
    query: torch.Tensor,  # [1, heads, tokens, head_dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # sinks
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers. Returns [1, tokens, heads, head_dim]."""
    step: StepContext = module.kvasir_step
    if step.batch is None:
        if not step.found_all:
            _inspect_layer(module, step, key, value, others)
            step.layers[module].window = _window(attention_mask, sliding_window)
        if key.shape[2] != query.shape[2]:
            raise ModelError("its attention has other keys than one for each token")
        return query.transpose(1, 2).contiguous(), None
    layer = step.layers[module]
    cache = step.caches[layer.index]
    kernels.store_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), cache, step.batch.slots)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = query[0].transpose(0, 1).contiguous()
    sinks = None if s_aux is None else s_aux.float()
    seen = step.backend.forward(rows, cache, step.batch, scale=scale, window=layer.window, softcap=softcap, sinks=sinks)
    return seen[None], None


def _inspect_layer(
    module: Any, step: StepContext, key: torch.Tensor, value: torch.Tensor, others: dict[str, Any]
) -> None:
    if extra := [name for name in _EXTRAS if others.get(name) is not None]:
        raise ModelError(f"its attention needs {extra[0]}, which Kvasir's attention does not have")
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise ModelError("its attention is not causal")
    if key.shape != value.shape:
        raise ModelError("its keys and values differ in size")
    if module in step.layers:
        raise ModelError("a layer attends more than once")
    step.layers[module] = CachedLayer(len(step.layers), key.shape[1], key.shape[3], None)


@contextmanager
def _shown_masks() -> Iterator[None]:
    """Within it, transformers makes masks for our attention. Some models have a window in their masks only."""
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register(NAME, _show_mask)
    try:
        yield
    finally:
        del AttentionMaskInterface._global_mapping[NAME]  # no step needs one


def _show_mask(*, mask_function: Any, device: torch.device, local_size: int | None = None, **_: Any) -> torch.Tensor:
    """A mask function of transformers: whether the query at `far` sees the keys up to `last`; then `far`, and the
    size of its window or chunk, or else a zero."""
    far = local_size or 64
    keys = torch.arange(far + 2, device=device)
    seen = mask_function(0, 0, torch.tensor(far, device=device), keys)
    return torch.cat([seen.long(), torch.tensor([far, local_size or 0], device=device)])


def _window(mask: torch.Tensor | None, argument: int | None) -> int | None:
    """The window of a layer, by its mask if it has one."""
    if mask is None:
        return argument
    if mask.dim() != 1:
        raise ModelError("its attention has a mask of its own")
    far, size = mask[-2:].tolist()
    keys = torch.arange(far + 2, device=mask.device)
    if not torch.equal(mask[:-2].bool(), (keys <= far) & (keys > far - (size or far + 1))):
        raise ModelError("its attention is neither causal nor has a sliding window")
    return size or None


def _settle_rotary(causal: Any, longest: int) -> None:
    """Fix the angles of rotations that depend on the text's length. transformers takes the longest text of a step, so
    that keys in the cache would not fit to later ones; here the engine's longest decides, as in our own models."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in causal.modules():
        kind = getattr(module, "rope_type", None)
        kinds = list(kind.values()) if isinstance(kind, dict) else [kind]
        if "dynamic" in kinds and longest > module.config.max_position_embeddings:
            raise ModelError(
                f"its RoPE scaling is 'dynamic', which changes keys that are cached; set max_model_len to "
                f"{module.config.max_position_embeddings} or less"
            )
        if "longrope" not in kinds:
            continue
        if kind != "longrope":
            raise ModelError("its RoPE scaling is 'longrope' for some of the layers")
        frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, module.inv_freq.device, seq_len=longest)
        module.register_buffer("inv_freq", frequencies, persistent=False)
        module.rope_type = "default"


def load_fallback(config: EngineConfig, device: torch.device, backend: AttentionBackend) -> TransformersModel:
    """The model as transformers implements it, ready to run, or a ModelError that says why it cannot run."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    AttentionInterface.register(NAME, _attend)
    asked, dtype = config.model, getattr(torch, config.model.dtype)
    named = ", ".join(asked.hf.get("architectures") or ["this model"])
    try:
        hf = AutoConfig.from_pretrained(asked.path, trust_remote_code=False, **asked.hf_overrides)
        if config.load.load_format == "dummy":
            torch.manual_seed(asked.seed)
            causal = AutoModelForCausalLM.from_config(
                hf, attn_implementation=NAME, dtype=dtype, trust_remote_code=False
            )
        else:
            options = {
                "attn_implementation": NAME,
                "dtype": dtype,
                "local_files_only": True,
                "trust_remote_code": False,
            }
            causal = AutoModelForCausalLM.from_pretrained(asked.path, config=hf, **options)
        if not getattr(causal, "_supports_attention_backend", False):
            raise ModelError("its code does not use transformers' attention interface")
        _settle_rotary(causal, asked.max_model_len)
        for name, value in causal.named_parameters():
            if not is_finite(value.data):
                raise ModelError(f"{name} has values that are not finite (NaN or infinity)")
        model = TransformersModel(causal.eval().requires_grad_(False).to(device), backend)
        model.inspect()
    except Exception as error:  # transformers' modelling code may raise anything
        raise ModelError(
            f"{named} is no architecture of Kvasir's own, and cannot run through transformers: {error}."
        ) from error
    return model

"""Adapters on the device: finds the modules that they change, loads them beside running steps, and tells the layers
which adapter each token of a step uses. Worker process; knows rows and slots, no names and no requests.

A load runs on a thread of its own: it reads the file, cuts this rank's share, keeps it in host memory and copies it to
its slot. The core gives a slot to rows only after the load has been reported, and gives it to a load only when no row
has it, so that steps and loads never wait for each other.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn

from kvasir.config.engine import EngineConfig
from kvasir.kernels.layout import TokenSlots, upload
from kvasir.layers.adapters import (
    ExpertsChange,
    SoftPrompts,
    StepAdapters,
    VocabularyChange,
    VocabularySlots,
    WholeMatrix,
)
from kvasir.layers.attention import Attention
from kvasir.layers.embedding import Embedding, TiedHead
from kvasir.layers.linear import Linear
from kvasir.layers.mesh import Role
from kvasir.layers.mlp import Experts
from kvasir.layers.spec import AttentionSpec
from kvasir.lora.expert_factors import ExpertPieces
from kvasir.lora.host import AdapterPlan, Factors, read_weights
from kvasir.messages import AdapterTarget, AdapterTargets, Int32Array, NewRow, Resource, StepPlan
from kvasir.models import architectures
from kvasir.models.loader import Place, find_places
from kvasir.models.spec import Architecture, halves
from kvasir.models.transformer import Transformer
from kvasir.sampling.features import ForwardUse, RowFeature

NO_SLOT = -1
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Tensors = Mapping[str, torch.Tensor]  # of an adapter's file, by name


# ---------------------------------------------------------------- the modules of a model


@dataclass(frozen=True)
class Module:
    """A module of the checkpoint and the layers that it fills."""

    place: Place
    kind: str  # see AdapterTarget
    owner: nn.Module  # the embedding, head or experts; of a linear module the first layer

    @property
    def target(self) -> AdapterTarget:
        if self.kind == "experts":
            assert isinstance(self.owner, Experts), "see find_modules"
            sizes = self.owner.shape
            return AdapterTarget("experts", sizes.inner_size, sizes.hidden_size, num_experts=sizes.num_experts)
        shape = self.place.shape[::-1] if self.place.layout.transposed else self.place.shape
        return AdapterTarget(self.kind, shape[0], shape[1], self.place.layout.transposed)


def find_modules(model: Transformer, architecture: Architecture, hf: Mapping[str, Any]) -> dict[str, Module]:
    """The modules that adapters can change, by their names in the model's checkpoints."""
    found: dict[str, Module] = {}
    names = architecture.names_for(hf)
    paths = {layer: path for path, layer in model.named_modules() if isinstance(layer, Experts)}
    for tensor, place in find_places(model, names, model.spec).items():
        name, _, last = tensor.rpartition(".")
        layers = [entries[0].layer for entries in place.targets.values()]
        if isinstance(layers[0], Experts) and not tensor.endswith("bias"):
            if place.layout.stacked == "no":
                found[name] = Module(place, "expert", layers[0])
            if len(place.targets) == 2 or place.layout.stacked == "no":  # says how gate and up are fused, or nothing
                found[architecture.prefix + paths[layers[0]]] = Module(place, "experts", layers[0])
            continue
        if last != "weight" or place.layout.stacked != "no" or len(place.targets) != len(place.layout.targets):
            continue
        if all(isinstance(layer, Linear) for layer in layers):
            found[name] = Module(place, "linear", layers[0])
        elif isinstance(layers[0], Embedding):
            found[name] = Module(place, "head" if layers[0] is model.head else "embedding", layers[0])
    if isinstance(model.head, TiedHead):
        embedding = next(module for module in found.values() if module.kind == "embedding")
        for name, ours in names.items():
            if ours == "head":
                found[name] = Module(embedding.place, "head", model.head)
    return found


def adapter_targets(
    model: Transformer, modules: Mapping[str, Module], architecture: Architecture, num_ranks: int
) -> AdapterTargets:
    assert model.adapters is not None, "the model takes adapters"
    attentions = [layer.attention for layer in model.spec.layers]
    known = [attention for attention in attentions if isinstance(attention, AttentionSpec)]
    sizes = {attention.kv_heads * attention.head_dim for attention in known} or {0}
    plain = isinstance(model.project_in, nn.Identity) and len(sizes) == 1 and len(known) == len(attentions)
    return AdapterTargets(
        {name: module.target for name, module in modules.items()},
        architecture.prefix,
        model.spec.hidden_size,
        len(attentions),
        max(sizes),
        plain and all(isinstance(layer, Attention) for layer in model.attentions()),
        model.adapters.max_rank,
        num_ranks,
    )


# ---------------------------------------------------------------- an adapter in host memory


@dataclass(slots=True)
class LinearImage:
    """What a slot of one linear layer will hold, in host memory."""

    shrink: torch.Tensor
    expand: torch.Tensor
    gain: torch.Tensor
    shift: torch.Tensor
    uses: torch.Tensor


IMAGE = ("shrink", "expand", "gain", "shift", "uses")  # its fields, and those of a layer's slots


@dataclass(slots=True)
class HostAdapter:
    """This rank's share of an adapter."""

    linears: dict[Linear, LinearImage] = field(default_factory=dict)
    whole: dict[Linear, list[WholeMatrix]] = field(default_factory=dict)
    vocabulary: dict[nn.Module, VocabularyChange] = field(default_factory=dict)
    experts: dict[Experts, ExpertsChange] = field(default_factory=dict)
    num_virtual_tokens: int = 0
    embeddings: torch.Tensor | None = None  # [virtual tokens, hidden]
    keys: list[torch.Tensor] = field(default_factory=list)  # for each layer [virtual tokens, kv_heads, head_dim]
    values: list[torch.Tensor] = field(default_factory=list)

    @property
    def is_wide(self) -> bool:
        return bool(self.whole or self.vocabulary or self.experts)


def tensors_of(content: bytearray) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file that has been checked; they lie in its content. The library's own
    function copies them and holds Python's lock meanwhile, so that no step could be launched."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        values = torch.frombuffer(content, dtype=dtype, count=prod(shape), offset=start + entry["data_offsets"][0])
        found[name] = values.view(shape)
    return found


class AdapterReader:
    """Reads adapters for one model."""

    def __init__(self, model: Transformer, modules: Mapping[str, Module], swaps_halves: bool) -> None:
        """`swaps_halves`: queries and keys of the model stand in another order than in checkpoints (GGUF of Llama)."""
        self.model, self.modules, self.swaps_halves = model, modules, swaps_halves
        self.dtype = next(m.owner for m in modules.values() if isinstance(m.owner, Linear)).slots.shrink.dtype  # type: ignore[union-attr]

    def read(self, resource: Resource) -> HostAdapter:
        plan = AdapterPlan.from_text(resource.source)
        tensors = tensors_of(read_weights(plan, resource.digest))
        if plan.prompt_type:
            return self._prompt(plan, tensors)
        adapter = HostAdapter()
        pieces = ExpertPieces()
        for name, factors in plan.modules.items():
            owner, _, last = name.rpartition(".")  # all experts of a layer are one module of two stacks
            module = self.modules.get(name) or self.modules[owner]
            if module.kind == "expert":
                self._expert(pieces, module, factors, tensors)
            elif module.kind == "experts":
                self._all_experts(pieces, module, last, factors, tensors)
            elif module.kind == "linear":
                self._linear(adapter, module, factors, tensors)
            else:
                adapter.vocabulary[module.owner] = self._vocabulary(module, factors, tensors)
        adapter.experts = pieces.changes(self.dtype)
        return adapter

    # ------------------------------------------------------------ linear layers

    def _linear(self, adapter: HostAdapter, module: Module, factors: Factors, tensors: Tensors) -> None:
        """Add a module's factors to the images of its layers. Matrices fused in the checkpoint share lora_A."""
        up = self._parts(module, tensors[factors.up].float()) if factors.up else None
        up_bias = self._parts(module, tensors[factors.up_bias].float()) if factors.up_bias else None
        bias = self._parts(module, tensors[factors.bias].float()) if factors.bias else None
        magnitude = self._parts(module, tensors[factors.magnitude].float()) if factors.magnitude else None
        weight = None
        if factors.weight:
            matrix = tensors[factors.weight].float()
            weight = self._parts(module, matrix.T if module.place.layout.transposed else matrix)
        for index, pattern in enumerate(module.place.layout.targets):
            (target,) = module.place.targets[pattern]
            layer, part_name = target.layer, target.key[1]
            assert isinstance(layer, Linear) and layer.slots is not None, "linear modules have slots"
            image = adapter.linears.setdefault(layer, self._image(layer))
            part, rows = layer.shape.place(part_name)
            number = [each.name for each in layer.shape.parts].index(part_name)
            rank, size = factors.rank, layer.slots.step.max_rank
            own_bias = torch.zeros(part.num_own) if layer.bias is None else layer.bias.data[rows].float().cpu()
            gain = torch.ones(part.num_own)
            shift = torch.zeros(part.num_own)
            adds_bias = layer.role is not Role.ROW or layer.mesh.rank == 0
            if up is not None:
                down = tensors[factors.down].float()[:, layer.shape.own_inputs]
                expand = factors.scale * up[index][part.own]
                if magnitude is not None:
                    base = layer.method.dense(layer)[rows].float().cpu()
                    gain = magnitude[index][part.own] / torch.linalg.vector_norm(base + expand @ down, dim=1)
                    expand = gain[:, None] * expand
                image.shrink[number * size : number * size + rank] = down.to(self.dtype)
                image.expand[:rank, rows] = expand.T.to(self.dtype)
                image.uses[0] = max(int(image.uses[0]), rank)
                if up_bias is not None and adds_bias:
                    shift += factors.scale * gain * up_bias[index][part.own]
            if weight is not None:
                own = weight[index][part.own, layer.shape.own_inputs].to(self.dtype)
                kept = bias[index][part.own] if bias is not None else own_bias
                keeps_bias = layer.bias is not None or bias is not None
                whole = WholeMatrix(NO_SLOT, rows, own, kept.to(self.dtype) if keeps_bias and adds_bias else None)
                adapter.whole.setdefault(layer, []).append(whole)
                continue
            if magnitude is not None or bias is not None or up_bias is not None:
                if adds_bias:
                    shift += (own_bias if bias is None else bias[index][part.own]) - gain * own_bias
                image.gain[rows], image.shift[rows], image.uses[1] = gain, shift, 1

    def _image(self, layer: Linear) -> LinearImage:
        slots = layer.slots
        assert slots is not None, "linear layers have slots"
        parts = (getattr(slots, name) for name in IMAGE)
        image = LinearImage(*(torch.zeros(each.shape[1:], dtype=each.dtype) for each in parts))
        image.gain.fill_(1.0)
        return image

    def _parts(self, module: Module, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Cut a tensor with one line for each output into the parts of the model's layers."""
        parts = list(module.place.layout.split(tensor, module.place.layer))
        if self.swaps_halves:
            for index, pattern in enumerate(module.place.layout.targets):
                if pattern.endswith((".attention.qkv:q", ".attention.qkv:k")):
                    assert module.place.layer is not None, "queries and keys belong to a layer"
                    parts[index] = self._reordered(parts[index], module.place.layer.attention.head_dim)
        return parts

    @staticmethod
    def _reordered(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
        """Interleave the two halves of each head, as the file of the model does."""
        heads = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
        return heads.transpose(1, 2).reshape(tensor.shape)

    # ------------------------------------------------------------ experts

    def _expert(self, pieces: ExpertPieces, module: Module, factors: Factors, tensors: Tensors) -> None:
        """Collect the factors of one matrix of one expert."""
        (target,) = next(iter(module.place.targets.values()))
        assert isinstance(module.owner, Experts), "see find_modules"
        down, up = tensors[factors.down].float(), factors.scale * tensors[factors.up].float()
        pieces.add(module.owner, target.key, down, up)

    def _all_experts(
        self, pieces: ExpertPieces, module: Module, stack: str, factors: Factors, tensors: Tensors
    ) -> None:
        """Collect the factors of all experts of a layer, as PEFT keeps those of a stack of matrices
        (target_parameters): the rows of lora_A belong to one expert after the other, the columns of lora_B to the
        experts in turn."""
        experts, layout = module.owner, module.place.layout
        assert isinstance(experts, Experts), "see find_modules"
        count = experts.shape.num_experts
        first = tensors[factors.down].float().view(count, factors.rank, -1)
        last = tensors[factors.up].float()
        second = last.view(len(last), factors.rank, count).permute(2, 0, 1)  # [experts, outputs, rank]
        if factors.is_turned:
            first, second = second.transpose(1, 2), first.transpose(1, 2)
        split = layout.split if layout.stacked != "no" else halves
        for expert, (down, up) in enumerate(zip(first, factors.scale * second, strict=True)):
            parts = {"down": up} if stack == "down" else dict(zip(("gate", "up"), split(up, None), strict=True))
            for part, own in parts.items():
                pieces.add(experts, ("weight", f"{part}.{expert}"), down, own)

    # ------------------------------------------------------------ embedding and head

    def _vocabulary(self, module: Module, factors: Factors, tensors: Tensors) -> VocabularyChange:
        change = VocabularyChange()
        if factors.weight:
            change.weight = tensors[factors.weight].to(self.dtype)
        own = getattr(module.owner, "bias", None)
        if factors.bias:
            bias = tensors[factors.bias].float()
            change.bias = bias.to(self.dtype)
            change.shift = bias if own is None else bias - own.data.float().cpu()
        elif own is not None:
            change.bias = own.data.cpu()
        if factors.up:
            down = tensors[factors.down].float()
            change.down = (down.T if module.kind == "embedding" else down).contiguous().to(self.dtype)
            change.up = (factors.scale * tensors[factors.up].float()).to(self.dtype)
            if factors.up_bias:
                more = factors.scale * tensors[factors.up_bias].float()
                change.shift = more if change.shift is None else change.shift + more
                change.bias = more.to(self.dtype) if change.bias is None else change.bias + more.to(self.dtype)
        return change

    # ------------------------------------------------------------ soft prompts

    def _prompt(self, plan: AdapterPlan, tensors: Tensors) -> HostAdapter:
        table = tensors["prompt_embeddings"].float()
        if plan.prompt_type == "MULTITASK_PROMPT_TUNING":
            columns, rows = (tensors[f"prefix_task_{each}"].float()[plan.task] for each in ("cols", "rows"))
            table = table * (columns @ rows)
        adapter = HostAdapter(num_virtual_tokens=plan.num_virtual_tokens)
        if plan.prompt_type != "PREFIX_TUNING":
            adapter.embeddings = table.to(self.dtype)
            return adapter
        attentions = [layer for layer in self.model.attentions() if isinstance(layer, Attention)]
        both = table.view(len(table), len(attentions), 2, -1)
        for index, attention in enumerate(attentions):
            _, key_part, value_part = attention.qkv.shape.parts
            key, value = both[:, index, 0, key_part.own], both[:, index, 1, value_part.own]
            if self.swaps_halves:
                key = self._reordered(key.T, attention.head_dim).T
            heads = (len(table), attention.kv_heads, attention.head_dim)
            adapter.keys.append(key.reshape(heads).to(self.dtype))
            adapter.values.append(value.reshape(heads).to(self.dtype))
        return adapter


# ---------------------------------------------------------------- loading


class Staging:
    """Pinned memory through which images of linear layers go to the device. To pin each image's own memory would keep
    other threads from launching."""

    def __init__(self, size: int) -> None:
        self._halves = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent: list[Any] = [None, None]
        self._turn = 0

    def send(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each second tensor, which is on the host, to the first. Waits while both halves are on their way."""
        half, self._turn, at = self._turn, 1 - self._turn, 0
        if self._sent[half] is not None:
            _await(self._sent[half])
        for target, source in pairs:
            part = self._halves[half][at : at + source.nbytes].view(source.dtype).view(source.shape)
            part.copy_(source)
            target.copy_(part, non_blocking=True)
            at += _aligned(source.nbytes)
        self._sent[half] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._sent[half].record()


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def _await(event: Any) -> None:
    """`synchronize` would keep other threads from launching."""
    while not event.query():
        time.sleep(0.0005)


class AdapterStore:
    """The adapters in host memory and in the slots of the device."""

    def __init__(self, reader: AdapterReader, num_host: int, device: torch.device) -> None:
        self.reader, self.num_host, self.device = reader, num_host, device
        self.resident: dict[int, HostAdapter] = {}  # by slot; changed by loads only
        self.num_read = 0  # adapters read from disk
        self._host: OrderedDict[bytes, HostAdapter] = OrderedDict()  # least recently used first
        self._jobs: queue.SimpleQueue[tuple[int, Resource, Any] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._staging = Staging(self._largest_image()) if device.type == "cuda" else None

    def load(self, slot: int, resource: Resource) -> None:
        """Begin to bring an adapter to a slot that no row of a later step has until the load is reported."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="adapters", daemon=True)
            self._thread.start()
        launched = None
        if self._stream is not None:
            launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
            launched.record(torch.cuda.current_stream(self.device))  # steps up to here may still read the slot
        self._jobs.put((slot, resource, launched))

    def finished(self, seconds: float) -> list[tuple[int, str | None]]:
        """Return the slots whose loads are done, each with an error or None, after waiting up to `seconds` for the
        first."""
        found = []
        try:
            found.append(self._done.get(timeout=seconds) if seconds > 0 else self._done.get_nowait())
            while True:
                found.append(self._done.get_nowait())
        except queue.Empty:
            return found

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            slot, resource, launched = job
            try:
                self._load(slot, resource, launched)
            except Exception as error:  # whatever is wrong with it is this adapter's fault alone
                self._done.put((slot, f"the adapter could not be loaded: {type(error).__name__}: {error}"))
            else:
                self._done.put((slot, None))

    @torch.inference_mode()
    def _load(self, slot: int, resource: Resource, launched: Any) -> None:
        adapter = self._host.pop(resource.digest, None)
        if adapter is None:
            adapter = self.reader.read(resource)
            self.num_read += 1
        self._host[resource.digest] = adapter
        while len(self._host) > self.num_host:
            self._host.popitem(last=False)
        if self._stream is None:
            self._install(slot, adapter)
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(launched)
            self._install(slot, adapter)
            done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        _await(done)

    def _install(self, slot: int, adapter: HostAdapter) -> None:
        model = self.reader.model
        for module in model.modules():
            if isinstance(module, Experts) and module.slots is not None:
                module.slots.changes.pop(slot, None)
                if (found := adapter.experts.get(module)) is not None:
                    module.slots.changes[slot] = ExpertsChange(self._both(found.gate_up), self._both(found.down))
            if isinstance(module, Linear) and module.slots is not None:
                self._install_linear(module, slot, adapter)
                time.sleep(0)  # lets the thread that launches steps go first
        for owner in (model.embedding, model.head):
            slots = getattr(owner, "slots", None)
            if owner is not None and isinstance(slots, VocabularySlots):
                slots.changes.pop(slot, None)
                if (change := adapter.vocabulary.get(owner)) is not None:
                    slots.changes[slot] = VocabularyChange(*(self._here(getattr(change, f)) for f in _FIELDS))
        self.resident[slot] = HostAdapter(
            whole=adapter.whole,
            vocabulary=adapter.vocabulary,
            experts=adapter.experts,
            num_virtual_tokens=adapter.num_virtual_tokens,
            embeddings=self._here(adapter.embeddings),
            keys=[each.to(self.device) for each in adapter.keys],
            values=[each.to(self.device) for each in adapter.values],
        )

    def _largest_image(self) -> int:
        linears = [module for module in self.reader.model.modules() if isinstance(module, Linear)]
        sizes = [
            sum(_aligned(getattr(layer.slots, name)[0].nbytes) for name in IMAGE)
            for layer in linears
            if layer.slots is not None
        ]
        return max(sizes, default=0)

    def _install_linear(self, layer: Linear, slot: int, adapter: HostAdapter) -> None:
        slots = layer.slots
        assert slots is not None, "linear layers have slots"
        slots.whole.pop(slot, None)
        image = adapter.linears.get(layer)
        if image is None:
            slots.uses[slot].zero_()  # the rest is not read then
            return
        pairs = [(getattr(slots, name)[slot], getattr(image, name)) for name in IMAGE]
        if self._staging is not None:
            self._staging.send(pairs)
        else:
            for target, source in pairs:
                target.copy_(source)
        if layer in adapter.whole:
            slots.whole[slot] = [
                WholeMatrix(slot, each.outputs, each.weight.to(self.device), self._here(each.bias))
                for each in adapter.whole[layer]
            ]

    def _both(self, factors: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if factors is None else (factors[0].to(self.device), factors[1].to(self.device))

    def _here(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(self.device)


_FIELDS = ("weight", "bias", "down", "up", "shift")


# ---------------------------------------------------------------- the feature of rows


class AdapterFeature(RowFeature):
    """Each row's slot, on the device and on the host, and what it means for a step."""

    changes_forward = True

    def __init__(self, store: AdapterStore, step: StepAdapters, max_rows: int, device: torch.device) -> None:
        """`max_rows`: the padding row included."""
        self.store, self.step, self.device = store, step, device
        self.column = torch.full((max_rows,), NO_SLOT, dtype=torch.int32, device=device)
        self._host = np.full(max_rows, NO_SLOT, np.int32)

    def pack(self, new_rows: list[NewRow]) -> Int32Array:
        slots = np.array([[new.resource_slot] for new in new_rows], np.int32)
        self._host[[new.row for new in new_rows]] = slots[:, 0]
        return slots

    def open(self, new_rows: list[NewRow], rows: torch.Tensor, packed: torch.Tensor) -> None:
        self.column[rows] = packed[:, 0]

    # ------------------------------------------------------------ the forward pass

    def forward_use(self, plan: StepPlan) -> ForwardUse:
        slots = self._host[plan.rows]
        found = set(np.unique(slots).tolist()) - {NO_SLOT}
        if not found:
            return ForwardUse.PLAIN
        resident = self.store.resident
        if any(resident[slot].is_wide for slot in found) or self._virtual(plan, slots):
            return ForwardUse.EAGER
        if all(resident[slot].num_virtual_tokens for slot in found):
            return ForwardUse.PLAIN  # soft prompts are in the cache and change nothing else
        return ForwardUse.GRAPH

    def _virtual(self, plan: StepPlan, slots: Int32Array) -> list[tuple[int, int, int]]:
        """Lines whose tokens of this step stand for a soft prompt: the line, its first position and their number."""
        found = []
        for line in np.flatnonzero(slots >= 0).tolist():
            first = int(plan.bounds[line] - plan.num_tokens[line])
            count = self.store.resident[int(slots[line])].num_virtual_tokens - first
            if count > 0:
                found.append((line, first, min(count, int(plan.num_tokens[line]))))
        return found

    def begin_forward(
        self,
        use: ForwardUse,
        token_rows: torch.Tensor | None,
        rows: torch.Tensor,
        has_last: bool,
        plan: StepPlan | None,
    ) -> None:
        step = self.step
        step.clear()
        if use is ForwardUse.PLAIN:
            return
        assert token_rows is not None, "a changed step knows the row of each token"
        step.tokens = TokenSlots(self.column[token_rows], step.num_slots)
        if has_last:
            step.last = TokenSlots(self.column[rows], step.num_slots)
        if use is ForwardUse.EAGER and plan is not None:
            slots = self._host[plan.rows]
            resident = self.store.resident
            step.wide = frozenset(s for s in np.unique(slots).tolist() if s >= 0 and resident[s].is_wide)
            if virtual := self._virtual(plan, slots):
                step.prompts = self._prompts(plan, slots, virtual)
        step.num_adapted += 1

    def _prompts(self, plan: StepPlan, slots: Int32Array, virtual: list[tuple[int, int, int]]) -> SoftPrompts:
        starts = np.cumsum(plan.num_tokens) - plan.num_tokens
        tokens: list[Int32Array] = []
        kept: list[Int32Array] = []
        embeddings: list[torch.Tensor] = []
        chosen: list[tuple[HostAdapter, slice]] = []
        for line, first, count in virtual:
            adapter = self.store.resident[int(slots[line])]
            places = np.arange(starts[line], starts[line] + count, dtype=np.int32)
            which = slice(first, first + count)
            if adapter.embeddings is not None:
                tokens.append(places)
                embeddings.append(adapter.embeddings[which])
            else:
                kept.append(places)
                chosen.append((adapter, which))
        empty = np.zeros(0, np.int32)
        both = upload([np.concatenate(tokens or [empty]), np.concatenate(kept or [empty])], self.device)
        prompts = SoftPrompts(both[0].long())
        if embeddings:
            prompts.embeddings = torch.cat(embeddings)
        if chosen:
            prompts.kept = both[1].long()
            for layer in range(len(chosen[0][0].keys)):
                prompts.keys.append(torch.cat([adapter.keys[layer][which] for adapter, which in chosen]))
                prompts.values.append(torch.cat([adapter.values[layer][which] for adapter, which in chosen]))
        return prompts

    def begin_head(self, rows: torch.Tensor) -> None:
        if self.step.wide:
            self.step.lines = TokenSlots(self.column[rows], self.step.num_slots)


class Adapters:
    """Everything that a worker needs for adapters of its model."""

    def __init__(self, model: Transformer, config: EngineConfig, device: torch.device, num_ranks: int) -> None:
        hf, is_gguf = config.model.hf, config.load.load_format == "gguf"
        architecture = architectures.find(hf)
        modules = find_modules(model, architecture, hf)
        swaps = is_gguf and any(
            layer.attention.rope is not None and layer.attention.rope.interleaved for layer in model.spec.layers
        )
        assert model.adapters is not None, "the model was built for adapters"
        self.step = model.adapters
        self.targets = adapter_targets(model, modules, architecture, num_ranks)
        self.store = AdapterStore(AdapterReader(model, modules, swaps), config.adapters.max_cpu_loras, device)

    def feature(self, max_rows: int) -> AdapterFeature:
        """The feature of a runner's rows; `max_rows` includes the padding row."""
        return AdapterFeature(self.store, self.step, max_rows, self.store.device)

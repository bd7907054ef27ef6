"""Masks, forced tokens and dropped lines that the host hands over before a step samples, against a brute-force loop:
with every stage, filters and log-probabilities, kernel by kernel and as graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvasir import kernels
from kvasir.kernels import reference
from kvasir.messages import LOGPROBS, Extras, KVSpec, NewRow, RowSampling, SampleInputs, StepPlan
from kvasir.sampling.registry import FeatureSettings, make_features
from kvasir.sampling.sampler import SamplingParameters
from kvasir.worker.memory import KVMemory
from kvasir.worker.model_runner import ModelRunner
from tests.cpu import test_stages
from tests.cpu.test_stages import WISHES, brute_force

CPU = torch.device("cpu")
VOCAB, STATES = 70, 97  # masks are of three words, the last of which is not full
NOTHING = np.zeros(0, np.int32)


class TableModel:
    """Logits depend on a token and its position, so that a wrong input of the next step shows."""

    vocab_size = VOCAB
    capturable = True
    poolers: dict[str, object] = {}  # noqa: RUF012

    def __init__(self, device: torch.device) -> None:
        self.table = torch.randn(STATES, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
        self._on_device = self.table.to(device)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any, last: Any = None) -> torch.Tensor:
        hidden = ((input_ids * 13 + positions * 7) % STATES).float()[:, None]
        return hidden if last is None else last.of(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._on_device[hidden[:, 0].long()]

    def compile_key(self) -> str:
        return ""

    def compile_copy(self) -> None:
        return None


class Bench:
    """Steps of a few rows, and what each line should say."""

    def __init__(self, use_graphs: bool, mode: str = "raw_logprobs", device: torch.device = CPU) -> None:
        self.model = TableModel(device)
        model: Any = self.model
        memory = KVMemory(KVSpec(1, 16, 16), 4, device)
        self.runner = ModelRunner(model, memory, 8, 128, device, use_graphs, logprobs_mode=mode, max_tokens=64)
        if self.runner.graphs is not None:
            self.runner.graphs.capture()
        self.mode = mode
        self.rows: dict[int, tuple[RowSampling, list[int], list[int]]] = {}  # sampling, prompt, output
        self.computed: dict[int, int] = {}

    def step(self, inputs: SampleInputs | None, new: dict[int, tuple[RowSampling, list[int]]], chunk: int = 99) -> Any:
        """Every row runs one step: its next token, or so many of its prompt."""
        for row, (sampling, prompt) in new.items():
            self.rows[row], self.computed[row] = (sampling, prompt, []), 0
        texts = {row: prompt + said for row, (_, prompt, said) in self.rows.items()}
        counts = {row: min(chunk, len(text) - self.computed[row]) for row, text in texts.items()}
        order = sorted(self.rows, key=lambda row: (counts[row] > 1, row))
        # sampled tokens are on the device
        ids = [
            [-1] if (at := self.computed[row]) >= len(self.rows[row][1]) else texts[row][at : at + counts[row]]
            for row in order
        ]
        ends = [self.computed[row] + counts[row] for row in order]
        plan = StepPlan(
            rows=np.array(order, np.int32),
            num_tokens=np.array([counts[row] for row in order], np.int32),
            samples=np.array([end == len(texts[row]) for row, end in zip(order, ends, strict=True)]),
            token_ids=np.concatenate(ids).astype(np.int32),
            bounds=np.array(ends, np.int32),
            num_decodes=sum(count == 1 for count in counts.values()),
            new_rows=[NewRow(row, 0, s, np.array(prompt, np.int32)) for row, (s, prompt) in new.items()],
            table_index=NOTHING,
            table_block=NOTHING,
            copies=NOTHING.reshape(0, 2),
            wants_logprobs=any(s.logprobs is not None for s, _, _ in self.rows.values()),
            waits_for_host=inputs is not None,
        )
        self.runner.execute(plan)
        result = self.runner.sample(inputs).result()
        self.check(plan, inputs or SampleInputs(), result)
        return result

    def check(self, plan: StepPlan, inputs: SampleInputs, result: Any) -> None:
        scored = {}
        for line, row in enumerate(plan.rows.tolist()):
            s, prompt, said = self.rows[row]
            self.computed[row] += int(plan.num_tokens[line])
            if not plan.samples[line]:
                assert result.counts[line] == 0
                continue
            text = prompt + said
            logits = self.model.table[(text[-1] * 13 + (len(text) - 1) * 7) % STATES]
            x = torch.tensor(brute_force(logits.numpy(), s, prompt, said), dtype=torch.float32)
            if line in inputs.mask_lines:
                words = inputs.masks[list(inputs.mask_lines).index(line)]
                may = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
                x[torch.from_numpy(~np.pad(may, (0, VOCAB - len(may))))] = -torch.inf
            token, final = drawn(x, s, len(text))
            if line in inputs.forced_lines:
                token = int(inputs.forced_tokens[list(inputs.forced_lines).index(line)])
            dropped = line in inputs.dropped_lines
            assert result.counts[line] == (not dropped)
            if not dropped:
                assert result.token_ids[line, 0] == token, f"row {row} after {said}"
            said.append(int(result.token_ids[line, 0]))  # of a dropped line too: the device goes on with it
            if s.logprobs is not None and not dropped:
                scored[line] = logits if self.mode.startswith("raw") else final
        self.check_scores(scored, result)

    def check_scores(self, scored: dict[int, torch.Tensor], result: Any) -> None:
        part = result.parts.get(LOGPROBS)
        assert ([] if part is None else part.index.tolist()) == list(scored)
        for entry, (line, logits) in enumerate(scored.items()):
            assert part is not None
            ids, wanted = part.ints["token_ids"][entry], torch.log_softmax(logits, -1)
            assert ids[0] == result.token_ids[line, 0]
            np.testing.assert_allclose(part.floats["values"][entry], wanted[ids].numpy(), atol=1e-4)
            assert part.ints["ranks"][entry] == int((wanted > wanted[ids[0]]).sum()) + 1


def drawn(x: torch.Tensor, s: RowSampling, position: int) -> tuple[int, torch.Tensor]:
    """The token, and the logits after filters and temperature."""
    row, heat = torch.zeros(1, dtype=torch.int64), torch.tensor([s.temperature])
    columns = [torch.tensor([value], dtype=kind) for value, kind in ((s.min_p, None), (s.top_k, torch.int32))]
    top_p = torch.tensor([s.top_p])
    threshold = reference.filter_threshold(x[None], row, heat, columns[0], columns[1], top_p)
    seed, nowhere = torch.tensor([s.seed], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    token = reference.draw(x[None], row, torch.tensor([position]), heat, seed, nowhere, threshold)
    kept = x.masked_fill(x < threshold, -torch.inf)
    return int(token), kept / (s.temperature or 1.0)


def random_inputs(rng: np.random.Generator, lines: np.ndarray) -> SampleInputs | None:
    """Some lines of each kind, or of none; a mask may be shorter than the vocabulary."""
    kinds = rng.integers(0, 4, len(lines))
    masked, forced, dropped = (lines[kinds == kind].astype(np.int32) for kind in (1, 2, 3))
    dropped = dropped[:1]
    bits = rng.random((len(masked), 96)) < 0.3
    bits[:, 5] = True  # some token may always be drawn
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    masks = masks[:, : int(rng.integers(1, 4))]
    if not len(lines) or rng.random() < 0.2:
        return None
    return SampleInputs(masked, masks, forced, rng.integers(0, VOCAB, len(forced)).astype(np.int32), dropped)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.2, "top_k": 9},
    {"temperature": 0.8, "top_p": 0.8, "logprobs": 2},
    {"temperature": 0.0, "logprobs": 0},
]


def samplings(names: list[str], num_prompt: int, kinds: list[dict[str, Any]] = KINDS) -> list[RowSampling]:
    found = []
    for i, name in enumerate(names):
        extras = Extras(num_prompt, **WISHES[name]) if WISHES[name] else None
        found.append(RowSampling(seed=i, extras=extras, **kinds[i % len(kinds)]))
    return found


def run_random_steps(bench: Bench, names: list[str], kinds: list[dict[str, Any]] = KINDS) -> None:
    """Rows that ask for these things, six at a time, with random inputs of the host in every step."""
    rng = np.random.default_rng(4)
    for start in range(0, len(names), 6):
        some = names[start : start + 6]
        prompts = [rng.integers(0, VOCAB, 3).tolist() for _ in some]
        new = {row: (s, prompts[row]) for row, s in enumerate(samplings(some, 3, kinds))}
        bench.rows, bench.computed = {}, {}
        bench.step(None, new)
        for _ in range(8):
            bench.step(random_inputs(rng, np.arange(len(some))), {})


@pytest.fixture(autouse=True)
def larger_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_stages, "VOCAB", VOCAB)


@pytest.fixture(params=["eager", "graphs"])
def use_graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "eager":
        return False
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton's kernels are run by its interpreter here")
    from kvasir.kernels import triton
    from kvasir.worker import step_graphs
    from tests.graph_fakes import Repeats

    monkeypatch.setattr(step_graphs, "GraphPool", Repeats)
    monkeypatch.setattr(kernels, "mask_logits", triton.mask_logits)
    return True


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_inputs_of_the_host_beside_everything_that_rows_ask_for(use_graphs: bool, mode: str) -> None:
    names = [name for name in WISHES if not (use_graphs and "processors" in WISHES[name])]
    bench = Bench(use_graphs, mode)
    run_random_steps(bench, names)
    if use_graphs:
        heads = bench.runner.graphs.stats.heads  # type: ignore[union-attr]
        assert min(heads["masks"], heads["forced"], heads["stages"], heads["scores"], heads["filters"]) > 3


def test_lines_of_prompts_that_go_on_beside_masked_ones(use_graphs: bool) -> None:
    """Steps of single tokens in which not every line samples, and mixed steps: lines are not where rows are."""
    bench = Bench(use_graphs)
    first = {row: (s, [row + 1]) for row, s in enumerate(samplings(["nothing", "presence", "bad words"], 1))}
    bench.step(None, first)
    bench.step(None, {1: (samplings(["frequency"], 7)[0], [4, 5, 6, 7, 8, 9, 1])}, chunk=1)
    only = np.array([[1 << 7, 0, 0]], np.int32)
    for chunk in (1, 2, 99):
        # row 1 computes its prompt, last in a mixed step; the others sample: row 0 may say 7 only, row 2 must say 9
        lines = [0, 2] if chunk == 1 else [0, 1]
        forced, token = np.array(lines[1:], np.int32), np.array([9], np.int32)
        bench.step(SampleInputs(np.array([0], np.int32), only, forced, token), {}, chunk)
        assert bench.rows[0][2][-1] == 7 and bench.rows[2][2][-1] == 9


def test_a_dropped_line_yields_nothing_and_the_others_go_on(use_graphs: bool) -> None:
    bench = Bench(use_graphs)
    new = {row: (RowSampling(logprobs=1), [row + 3]) for row in range(3)}
    bench.step(None, new)
    result = bench.step(SampleInputs(dropped_lines=np.array([1], np.int32)), {})
    assert result.counts.tolist() == [1, 0, 1] and result.parts[LOGPROBS].index.tolist() == [0, 2]
    bench.step(None, {})


def test_steps_without_inputs_send_nothing_for_their_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from kvasir.worker import step_graphs
    from tests.graph_fakes import Repeats

    monkeypatch.setattr(step_graphs, "GraphPool", Repeats)
    bench = Bench(use_graphs=True)
    bench.step(None, {row: (RowSampling(), [row + 3]) for row in range(3)})
    sent: list[int] = []
    real = step_graphs.upload
    monkeypatch.setattr(
        step_graphs, "upload", lambda arrays, device: (sent.append(len(arrays)), real(arrays, device))[1]
    )
    bench.step(None, {})
    assert not sent
    bench.step(SampleInputs(forced_lines=np.array([1], np.int32), forced_tokens=np.array([4], np.int32)), {})
    assert len(sent) == 1, "one upload"


def test_a_mask_of_a_line_that_does_not_sample_is_refused() -> None:
    bench = Bench(use_graphs=False)
    with pytest.raises(AssertionError, match="for lines that sample"):
        bench.step(SampleInputs(forced_lines=np.array([1], np.int32), forced_tokens=np.array([4], np.int32)),
                   {0: (RowSampling(), [1, 2, 3]), 1: (RowSampling(), [4])}, chunk=2)  # fmt: skip


def test_buffers_have_room_for_the_lines_that_drafts_add() -> None:
    """Heads of rows that verify drafts have more lines than there are rows."""
    device = torch.device("cpu")
    parameters = SamplingParameters(3, device)
    features = make_features(FeatureSettings(3, 100, device, num_drafts=3), parameters)
    for size in (3, 8, 12):
        overrides, scores = features[1], features[2]
        (key,) = overrides.graph_keys(size)
        assert [len(each) for each in overrides.buffers(key, size)] == [size, size * 4, size]
        for scored in scores.graph_keys(size):
            assert [len(each) for each in scores.buffers(scored, size)] == [scored.lines]

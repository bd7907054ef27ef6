"""Continuous batching over llama-cpp-python's own batch functions. Runs in that package's Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

SLOTS, CONTEXT, BATCH = 64, 512, 2048
Request = tuple[list[int], int]


def make_generate(model: str, threads: int) -> Callable[[list[Request]], int]:
    import llama_cpp as lib
    import numpy as np

    silent = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    lib.llama_backend_init()
    loaded = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = CONTEXT * SLOTS, BATCH, 512, SLOTS
    settings.n_threads = settings.n_threads_batch = threads
    settings.kv_unified = True
    context = lib.llama_init_from_model(loaded, settings)
    vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(loaded))
    memory, batch = lib.llama_get_memory(context), lib.llama_batch_init(BATCH, 0, 1)

    def put(token: int, position: int, sequence: int, wanted: bool) -> int:
        at = batch.n_tokens
        batch.token[at], batch.pos[at], batch.logits[at] = token, position, wanted
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        batch.n_tokens = at + 1
        return at

    def generate(requests: list[Request]) -> int:
        _ = silent  # the library holds it, so somebody must
        waiting, free, running, count = list(requests), list(range(SLOTS)), {}, 0
        while waiting or running:
            batch.n_tokens, lines = 0, []
            for slot, state in running.items():
                lines.append((slot, put(state["last"], state["position"], slot, True)))
                state["position"] += 1
            while waiting and free and batch.n_tokens + len(waiting[0][0]) <= BATCH:
                prompt, tokens = waiting.pop(0)
                slot = free.pop()
                for position, token in enumerate(prompt):
                    last = put(token, position, slot, position == len(prompt) - 1)
                running[slot] = {"position": len(prompt), "left": tokens}
                lines.append((slot, last))
            assert lib.llama_decode(context, batch) == 0
            for slot, line in lines:
                logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, line), shape=(vocabulary,))
                state: dict[str, Any] = running[slot]
                state["last"], state["left"], count = int(logits.argmax()), state["left"] - 1, count + 1
                if not state["left"]:
                    lib.llama_memory_seq_rm(memory, slot, -1, -1)
                    free.append(slot)
                    del running[slot]
        return count

    return generate


def quantize(source: str, target: str, kind: str) -> None:
    """A GGUF file of bfloat16 to Q8_0 or Q4_0."""
    import llama_cpp as lib

    params = lib.llama_model_quantize_default_params()
    params.ftype = {"q8_0": lib.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": lib.LLAMA_FTYPE_MOSTLY_Q4_0}[kind]
    assert lib.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)) == 0


if __name__ == "__main__":
    import sys

    quantize(*sys.argv[1:4])

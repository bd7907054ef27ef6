"""Methods that vLLM's engines have and ours have not: asked for, they say so, and what does the job. Any process.

They are missing all the same: `hasattr` is False, and code that asks first goes its other way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

_POOLING = "models that embed, classify or score are not run"
_LORA = "merge the adapter into the checkpoint"
_ASLEEP = "close the engine to free its memory; weights stay where they are"
_PROFILE = "profile the process from outside, with py-spy or nsys"
_QUEUE = "LLM.generate takes all prompts at once, AsyncLLM.generate one whenever it comes"
_WEIGHTS = "make a new engine to run other weights"
_IMAGES = "models take text only, so there is nothing to forget"
_WORKERS = "workers take no calls from outside"

# name -> what to do instead, or why not
METHODS = {
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), _POOLING),
    **dict.fromkeys(("sleep", "wake_up"), _ASLEEP),
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion"), _QUEUE),
    **dict.fromkeys(("start_profile", "stop_profile"), _PROFILE),
    **dict.fromkeys(("reset_mm_cache", "reset_encoder_cache"), _IMAGES),
    **dict.fromkeys(("add_lora", "remove_lora", "pin_lora"), _LORA),
    **dict.fromkeys(("init_weight_transfer_engine", "start_weight_update", "update_weights"), _WEIGHTS),
    **dict.fromkeys(("finish_weight_update", "get_weight_version", "reload_weights"), _WEIGHTS),
    **dict.fromkeys(("collective_rpc", "apply_model"), _WORKERS),
    "preprocess_chat": "get_tokenizer().apply_chat_template makes the prompt",
    "set_tokenizer": "name the tokenizer with tokenizer=... when the engine is made",
    "is_tracing_enabled": "kvasir serve --otlp-traces-endpoint traces",
    "wait_for_requests_to_drain": "pause_generation(mode='wait') does it",
    "scale_elastic_ep": "the number of engines is settled when they start",
    "handle_fault": "an engine that fails ends, and says why",
}


class NotYet:
    """A base class."""

    if not TYPE_CHECKING:  # a type checker is to see that they are missing, and so is every misspelt name

        def __getattr__(self, name: str) -> NoReturn:
            """Only what is not there is looked for here."""
            kind = type(self).__name__
            if name in METHODS:
                message = f"{kind}.{name} is a method of vLLM that Kvasir does not have yet: {METHODS[name]}."
            else:
                message = f"{kind!r} object has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=self)

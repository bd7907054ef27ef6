"""LLM, LLMEngine, AsyncLLM and the command line; here are the methods of vLLM's engines that Kvasir's do not have.

The methods stay missing: `hasattr` is False for them. Using one raises an AttributeError that names an alternative.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

_LORA = "give requests a lora_request; adapters are loaded when they are needed"
_SLEEP = "close the engine to free its memory"
_PROFILE = "profile the process from outside, with py-spy or nsys"
_QUEUE = "LLM.generate takes all prompts at once, AsyncLLM.generate takes one at any time"
_WEIGHTS = "make a new engine to run other weights"
_IMAGES = "models take text only, so there is no such cache"
_WORKERS = "workers cannot be called from outside the engine"

# method -> what to use instead, or why it is missing
MISSING_METHODS = {
    **dict.fromkeys(("sleep", "wake_up"), _SLEEP),
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion"), _QUEUE),
    **dict.fromkeys(("start_profile", "stop_profile"), _PROFILE),
    **dict.fromkeys(("reset_mm_cache", "reset_encoder_cache"), _IMAGES),
    **dict.fromkeys(("add_lora", "remove_lora", "pin_lora"), _LORA),
    **dict.fromkeys(("init_weight_transfer_engine", "start_weight_update", "update_weights"), _WEIGHTS),
    **dict.fromkeys(("finish_weight_update", "get_weight_version", "reload_weights"), _WEIGHTS),
    **dict.fromkeys(("collective_rpc", "apply_model"), _WORKERS),
    "preprocess_chat": "get_tokenizer().apply_chat_template makes the prompt",
    "set_tokenizer": "pass tokenizer=... when you make the engine",
    "is_tracing_enabled": "kvasir serve --otlp-traces-endpoint turns tracing on",
    "wait_for_requests_to_drain": "use pause_generation(mode='wait')",
    "scale_elastic_ep": "the number of engines is fixed when they start",
    "handle_fault": "an engine that fails ends, and its error gives the reason",
}


class MissingVllmMethods:
    """Base class of LLM, LLMEngine and AsyncLLM."""

    if not TYPE_CHECKING:  # so that a type checker reports missing and misspelt names

        def __getattr__(self, name: str) -> NoReturn:
            """Python calls this only for attributes that do not exist."""
            kind = type(self).__name__
            if name in MISSING_METHODS:
                message = f"{kind}.{name} is a method of vLLM that Kvasir does not have yet: {MISSING_METHODS[name]}."
            else:
                message = f"{kind!r} object has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=self)

"""vLLM's names that are no settings here: whether a value of them asks for anything, and what an error says.

A value that is vLLM's default asks for nothing and is accepted; any other is refused by name. Any process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from kvasir.errors import did_you_mean

# Switches, which are off in vLLM unless _DEFAULTS says otherwise; flags --NAME and --no-NAME.
_VLLM_SWITCHES = """
    disable_cascade_attn disable_sliding_window enable_return_routed_experts enable_sleep_mode

    data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb disable_custom_all_reduce
    disable_nccl_for_dp_synchronization enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb headless
    numa_bind ray_workers_use_nsight

    calculate_kv_scales kv_cache_metrics kv_sharing_fast_prefill

    disable_chunked_mm_input disable_hybrid_kv_cache_manager scheduler_reserve_full_isl

    enable_flashinfer_autotune enable_layerwise_nvtx_tracing

    enable_tower_connector_lora fully_sharded_loras specialize_active_lora

    enable_mm_embeds interleave_mm_strings language_model_only mm_encoder_only skip_mm_profiling

    aggregate_engine_logging cudagraph_metrics disable_frontend_multiprocessing enable_logging_iteration_details
    enable_mfu_metrics enable_per_request_metrics fail_on_environ_validation

    cohere_is_reasoning_model disable_uvicorn_access_log enable_flash_late_interaction enable_log_deltas
    enable_log_outputs enable_offline_docs enable_server_load_tracking enable_ssl_refresh grpc log_error_stack
    tokens_only
"""
_VLLM_VALUES = """
    allowed_local_media_path allowed_media_domains attention_config code_revision config_format hf_config_path
    io_processor_plugin mm_tensor_ipc renderer_num_workers tokenizer_mode

    ignore_patterns model_loader_extra_config pt_load_map_location safetensors_load_strategy weight_transfer_config

    logits_processor_pattern reasoning_config reasoning_parser_plugin

    all2all_backend cp_kv_cache_interleave_size data_parallel_address data_parallel_backend data_parallel_rank
    data_parallel_rpc_port data_parallel_size_local data_parallel_start_rank data_parallel_supervisor_port
    dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend decode_context_parallel_size
    distributed_timeout_seconds eplb_config expert_placement_strategy master_addr master_port
    max_parallel_loading_workers nnodes node_rank numa_bind_cpus numa_bind_nodes prefill_context_parallel_size
    ubatch_size worker_cls worker_extension_cls

    cpu_offload_params ec_transfer_config kv_cache_dtype_skip_layers kv_cache_metrics_sample kv_events_config
    kv_offloading_backend kv_transfer_config mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode
    mamba_ssm_cache_dtype offload_backend offload_group_size offload_num_in_group offload_params offload_prefetch_step
    prefix_caching_hash_algo

    max_long_partial_prefills max_num_partial_prefills scheduler_cls

    additional_config compilation_config cudagraph_capture_sizes kernel_config linear_backend
    max_cudagraph_capture_size moe_backend optimization_level performance_mode profiler_config quantization_config
    spec_method spec_model spec_tokens

    default_mm_loras lora_dtype lora_target_modules

    limit_mm_per_prompt media_io_kwargs mm_encoder_attn_backend mm_encoder_tp_mode mm_processor_cache_gb
    mm_processor_cache_type mm_processor_kwargs mm_shm_cache_max_object_size_mb video_pruning_rate

    collect_detailed_traces show_hidden_metrics_for_version

    chat_template_content_format cohere_format disable_access_log_for_endpoints fingerprint_mode fingerprint_value
    h11_max_header_count h11_max_incomplete_event_size log_config_file middleware tool_parser_plugin tool_server
"""
_SWITCHES = frozenset(_VLLM_SWITCHES.split())
VLLM_NAMES = _SWITCHES | frozenset(_VLLM_VALUES.split())
_VLLM_SHORT_FLAGS = "-O -ac -cc -dcp -dpa -dpb -dph -dpl -dpn -dpp -dpr -ep -n -pcp -r -sc"
VLLM_SHORT_FLAGS = frozenset(_VLLM_SHORT_FLAGS.split())

# vLLM's defaults where they are not None, False, "auto" or empty; several where its versions differ.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "all2all_backend": ("allgather_reducescatter",),
    "cp_kv_cache_interleave_size": (1,),
    "data_parallel_backend": ("mp",),
    "data_parallel_rpc_port": (29550,),
    "dbo_decode_token_threshold": (32,),
    "dbo_prefill_token_threshold": (512,),
    "decode_context_parallel_size": (1,),
    "disable_cascade_attn": (False, True),
    "enable_log_deltas": (True,),
    "expert_placement_strategy": ("linear",),
    "kv_offloading_backend": ("native",),
    "mamba_cache_mode": ("none",),
    "master_addr": ("127.0.0.1",),
    "master_port": (29501,),
    "max_long_partial_prefills": (1,),
    "max_num_partial_prefills": (1,),
    "mm_encoder_tp_mode": ("weights",),
    "mm_processor_cache_gb": (4, 4.0),
    "mm_processor_cache_type": ("lru",),
    "mm_shm_cache_max_object_size_mb": (128,),
    "nnodes": (1,),
    "node_rank": (0,),
    "prefill_context_parallel_size": (1,),
    "prefix_caching_hash_algo": ("builtin", "sha256"),
    "pt_load_map_location": ("cpu",),
    "safetensors_load_strategy": ("lazy",),
    "scheduler_reserve_full_isl": (True,),
    "ubatch_size": (0,),
}
_NOTHING_TEXTS = ("auto", "none", "null", "false", "{}", "[]", "")

_SPECULATIVE = "set its entry of speculative_config"
# Settings that vLLM has removed or renamed -> what to do.
REMOVED = {
    "block_manager_version": "leave it out, as there is one block manager",
    "cuda_graph_sizes": "leave it out: all graphs that steps need are captured",
    "disable_async_output_proc": "leave it out, or set async_scheduling=False to end each step before the next",
    "disable_log_requests": "leave it out: a server logs prompts only with enable_log_requests",
    "enable_lora_bias": "leave it out: biases of adapters are loaded if they are there",
    "enable_prompt_adapter": "use enable_lora, which serves soft prompts too",
    "enable_reasoning": "leave it out: reasoning_parser alone decides",
    "engine_use_ray": "leave it out",
    "long_lora_scaling_factors": "leave it out",
    "lora_extra_vocab_size": "leave it out",
    "max_context_len_to_capture": "leave it out: graphs are captured for every length",
    "max_seq_len_to_capture": "leave it out: graphs are captured for every length",
    "multi_step_stream_outputs": "use stream_interval",
    "ngram_prompt_lookup_max": _SPECULATIVE,
    "ngram_prompt_lookup_min": _SPECULATIVE,
    "num_lookahead_slots": "leave it out: slots for drafts are found by themselves",
    "num_scheduler_steps": "leave it out: async_scheduling plans the next step while one runs",
    "override_neuron_config": "leave it out",
    "override_pooler_config": "use pooler_config",
    "scheduler_delay_factor": "leave it out",
    "speculative_draft_tensor_parallel_size": _SPECULATIVE,
    "speculative_max_model_len": _SPECULATIVE,
    "task": "use runner='pooling' for a model that embeds, classifies or scores (with convert='embed' or 'classify' if "
    "it generates text), and leave it out otherwise",
    "tokenizer_pool_extra_config": "leave it out",
    "tokenizer_pool_size": "leave it out",
    "tokenizer_pool_type": "leave it out",
    "use_v2_block_manager": "leave it out, as there is one block manager",
    "worker_use_ray": "leave it out, or set distributed_executor_backend to uni or mp",
}

# Flags of `kvasir serve` alone that vLLM also takes as keywords in Python.
_SERVER_FLAGS = """
    api_key api_server_count disable_log_stats enable_auto_tool_choice enable_log_requests host max_log_len
    otlp_traces_endpoint port reasoning_parser served_model_name tool_call_parser uvicorn_log_level
"""
SERVER_NAMES = frozenset(_SERVER_FLAGS.split())


def asks_for_nothing(name: str, value: Any, beside: Iterable[str] = ()) -> bool:
    """Whether a setting that Kvasir does not have is given with vLLM's default, so that nothing is lost. `beside`: what
    settings are given with it."""
    name = name.replace("-", "_")
    if name == "disable_log_stats" and value is True:
        return True  # only a server logs statistics
    if name == "disable_log_requests" and value is True:
        return "enable_log_requests" not in {each.replace("-", "_") for each in beside}
    if name not in VLLM_NAMES and name not in REMOVED and name not in SERVER_NAMES:
        return False
    if value is None:
        return True
    if name in _DEFAULTS:
        return any(type(value) is type(default) and value == default for default in _DEFAULTS[name])
    return value is False or (isinstance(value, (str, dict, list, tuple, set)) and (not value or value == "auto"))


def without_empty_flags(given: Iterable[str]) -> Iterator[str]:
    """Arguments of a command line without those flags of vLLM that ask for nothing, such as --tokenizer-mode auto."""
    left = list(given)
    while left:
        argument = left.pop(0)
        if argument == "--":
            yield from (argument, *left)
            return
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""
        positive = name.removeprefix("no_")
        if positive in _SWITCHES and not equals and asks_for_nothing(positive, positive == name):
            continue
        if name in VLLM_NAMES - _SWITCHES:
            if equals and _is_nothing(name, value):
                continue
            if not equals and left and _is_nothing(name, left[0]):
                left.pop(0)
                continue
        yield argument


def _is_nothing(name: str, text: str) -> bool:
    return text in map(str, _DEFAULTS[name]) if name in _DEFAULTS else text.lower() in _NOTHING_TEXTS


def unknown_setting(name: str, known: Iterable[str]) -> str:
    """An error message for a name that is none of the `known` settings."""
    if name.replace("-", "_") in SERVER_NAMES:
        return f"{name} is a flag of `kvasir serve`; leave it out here."
    return vllm_only(name, "setting") or f"{name} is not a setting.{did_you_mean(name, known, by_words=True)}"


def vllm_only(name: str, noun: str) -> str | None:
    """An error message for a setting or flag that only vLLM has, or had; None for an unknown name."""
    plain = name.removeprefix("--").replace("-", "_").partition(".")[0]  # vLLM: --compilation-config.mode 3
    positive = plain.removeprefix("no_")
    if plain in REMOVED or positive in REMOVED:
        return f"{name} was vLLM's; {REMOVED.get(plain) or REMOVED[positive]}."
    short = re.sub(r"^-O\d$", "-O", name)
    if plain in VLLM_NAMES or positive in VLLM_NAMES or short in VLLM_SHORT_FLAGS:
        return f"{name} is a {noun} of vLLM that Kvasir does not have yet."
    return None

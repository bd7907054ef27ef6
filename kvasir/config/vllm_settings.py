"""Names of vLLM's settings that Kvasir lacks, so that they are not reported as misspelt. Any process."""

from __future__ import annotations

import re

_NAMES = """
    allowed_local_media_path allowed_media_domains attention_config code_revision config_format disable_cascade_attn
    disable_sliding_window enable_prompt_embeds enable_return_routed_experts enable_sleep_mode hf_config_path
    io_processor_plugin mm_tensor_ipc pooler_config renderer_num_workers tokenizer_mode

    ignore_patterns model_loader_extra_config pt_load_map_location safetensors_load_strategy weight_transfer_config

    logits_processor_pattern reasoning_config reasoning_parser reasoning_parser_plugin structured_outputs_config

    all2all_backend cp_kv_cache_interleave_size data_parallel_address data_parallel_backend
    data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank
    data_parallel_rpc_port data_parallel_size_local data_parallel_start_rank data_parallel_supervisor_port
    dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend decode_context_parallel_size
    disable_custom_all_reduce disable_nccl_for_dp_synchronization distributed_timeout_seconds enable_dbo
    enable_elastic_ep enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy headless master_addr
    master_port max_parallel_loading_workers nnodes node_rank numa_bind numa_bind_cpus numa_bind_nodes
    prefill_context_parallel_size ray_workers_use_nsight ubatch_size worker_cls worker_extension_cls

    calculate_kv_scales cpu_offload_params ec_transfer_config kv_cache_dtype_skip_layers kv_cache_metrics
    kv_cache_metrics_sample kv_events_config kv_offloading_backend kv_sharing_fast_prefill kv_transfer_config
    mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype offload_backend
    offload_group_size offload_num_in_group offload_params offload_prefetch_step prefix_caching_hash_algo

    disable_chunked_mm_input disable_hybrid_kv_cache_manager max_long_partial_prefills max_num_partial_prefills
    scheduler_cls scheduler_reserve_full_isl

    additional_config compilation_config cudagraph_capture_sizes enable_flashinfer_autotune
    enable_layerwise_nvtx_tracing kernel_config linear_backend max_cudagraph_capture_size moe_backend
    optimization_level performance_mode profiler_config quantization_config spec_method spec_model spec_tokens

    default_mm_loras enable_tower_connector_lora fully_sharded_loras lora_dtype lora_modules lora_target_modules
    max_cpu_loras max_lora_rank max_loras specialize_active_lora

    enable_mm_embeds interleave_mm_strings language_model_only limit_mm_per_prompt media_io_kwargs
    mm_encoder_attn_backend mm_encoder_only mm_encoder_tp_mode mm_processor_cache_gb mm_processor_cache_type
    mm_processor_kwargs mm_shm_cache_max_object_size_mb skip_mm_profiling video_pruning_rate

    aggregate_engine_logging collect_detailed_traces cudagraph_metrics disable_frontend_multiprocessing
    enable_logging_iteration_details enable_mfu_metrics enable_per_request_metrics fail_on_environ_validation
    show_hidden_metrics_for_version

    chat_template_content_format cohere_format cohere_is_reasoning_model default_chat_template_kwargs
    disable_access_log_for_endpoints disable_uvicorn_access_log enable_auto_tool_choice
    enable_flash_late_interaction enable_log_deltas enable_log_outputs enable_offline_docs
    enable_server_load_tracking enable_ssl_refresh enable_tokenizer_info_endpoint fingerprint_mode fingerprint_value
    grpc h11_max_header_count h11_max_incomplete_event_size log_config_file log_error_stack middleware
    return_tokens_as_token_ids tokens_only tool_call_parser tool_parser_plugin tool_server
"""
NAMES = frozenset(_NAMES.split())
_SHORT = "-O -ac -cc -dcp -dpa -dpb -dph -dpl -dpn -dpp -dpr -ep -n -pcp -r -sc"
SHORT_FLAGS = frozenset(_SHORT.split())


def vllm_only(name: str, noun: str) -> str | None:
    """An error message for a setting or flag that only vLLM has; None for an unknown name."""
    plain = name.removeprefix("--").replace("-", "_").partition(".")[0]  # vLLM: --compilation-config.mode 3
    short = re.sub(r"^-O\d$", "-O", name)
    if plain in NAMES or plain.removeprefix("no_") in NAMES or short in SHORT_FLAGS:
        return f"{name} is a {noun} of vLLM that Kvasir does not have yet."
    return None

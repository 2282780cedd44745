"""A verdict on each argument of SGLang 0.5.23 that ``lead.settings`` does not refuse.

``WORKS`` is keyed by the test that runs the parts with it, ``CANNOT_MATTER`` by the reason.
"""

from __future__ import annotations

WORKS = {
    "test_local_turns.py, test_admission.py, test_resume.py and test_prefill_exit.py": """
        model_path max_running_requests max_total_tokens chunked_prefill_size page_size
        disable_overlap_schedule skip_server_warmup random_seed device dtype sampling_backend
        disaggregation_mode disaggregation_bootstrap_port num_reserved_decode_tokens
        disaggregation_decode_extra_slots
    """,
    "test_speculation.py and test_lead_with_a_draft_model": """
        speculative_draft_model_path speculative_num_steps speculative_num_draft_tokens
        speculative_eagle_topk
        speculative_use_rejection_sampling speculative_draft_window_size speculative_draft_sink_size
        speculative_adaptive speculative_adaptive_config speculative_token_map
    """,
    "test_adapters.py": """
        enable_lora lora_paths lora_backend max_loras_per_batch
    """,
    "e2e/test_pairs.py": "tp_size host port log_level",
    "test_settings.py": """
        enable_priority_scheduling schedule_low_priority_values_first default_priority_value
        retraction_policy radix_eviction_policy disaggregation_decode_polling_interval
        enable_mixed_chunk enable_single_batch_overlap enable_custom_logit_processor
        enable_return_aux_hidden_states
    """,
    "test_prefill_exit.py": "optimistic_prefill_attempts",
    "test_data_parallel.py": "dp_size",
    "e2e/test_families.py": "attn_dp_size enable_dp_attention ep_size",
    "test_windows.py": "swa_full_tokens_ratio moe_runner_backend",
    "test_local_turns.py, states": "max_mamba_cache_size",
    "test_local_turns.py, sessions": "enable_session_radix_cache",
}

CANNOT_MATTER = {
    "Read before a request reaches a scheduler, or after its tokens have left the scheduler.": """
        tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num
        detokenizer_worker_num skip_tokenizer_init fastapi_root_path smg_grpc_mode grpc_mode
        grpc_port grpc_worker_threads grpc_response_timeout_secs sidecar sidecar_args warmups
        enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size
        enable_http_worker_reuseport ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password
        enable_ssl_refresh api_key admin_api_key served_model_name weight_version chat_template
        trust_request_chat_template hf_chat_template_name completion_template file_storage_path
        enable_cache_report return_input_ids return_output_ids reasoning_parser
        default_chat_template_kwargs tool_call_parser tool_server sampling_defaults
        asr_max_buffer_seconds asr_max_concurrent_sessions preferred_sampling_params
        allow_auto_truncate batch_notify_size stream_response_default_include_usage
        enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
        dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode
        disable_tokenizer_batch_decode enable_response_store abort_on_priority_when_disabled
        max_queued_requests load_balance_method
    """,
    "Determines how tokens are streamed, for batches of either kind.": """
        stream_interval incremental_streaming_output
    """,
    "Loads adapters, or computes with them within a batch; SGLang's check counts them.": """
        max_loaded_loras max_lora_rank lora_target_modules lora_eviction_policy max_lora_chunk_size
        experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading
    """,
    "Read for prefill batches alone, which a decode server has none of.": (
        "lora_drain_wait_threshold"
    ),
    "Logs, measures or watches.": """
        log_level_http log_requests log_requests_level log_requests_format log_requests_target
        uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics
        smg_http_sidecar_port enable_mfu_metrics enable_metrics_for_all_schedulers
        load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
        tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
        bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
        generation_tokens_buckets gc_warning_threshold_secs decode_log_interval
        enable_request_time_stats_logging kv_events_config load_publish_endpoint
        enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name
        enable_trace trace_modules otlp_traces_endpoint otlp_service_name export_metrics_to_file
        export_metrics_to_file_dir stat_loggers debug_tensor_dump_output_folder
        debug_tensor_dump_layers debug_tensor_dump_input_file forward_hooks msprobe_dump_config
        watchdog_timeout soft_watchdog_timeout spec_trace_dir enable_layerwise_nvtx_marker
        expert_distribution_recorder_mode expert_distribution_recorder_buffer_size
        expert_balancedness_report_mode
    """,
    "Places processes, or determines how they start and sleep.": """
        nnodes node_rank dist_init_addr nccl_port dist_timeout gated_launch_port base_gpu_id
        gpu_id_step sleep_on_idle
        custom_sigquit_handler numa_node gc_threshold enable_p2p_check
        disaggregation_ib_device scheduler_recv_interval
    """,
    "Loads the weights, or determines where their memory is.": """
        load_format model_loader_extra_config trust_remote_code context_length revision model_impl
        model_config_parser json_model_override_args quantization quantization_param_path
        modelopt_quant modelopt_checkpoint_restore_path modelopt_checkpoint_save_path
        modelopt_export_path quantize_and_serve rl_quant_profile startup_weight_load_mode
        custom_weight_loader weight_loader_disable_mmap weight_loader_prefetch_checkpoints
        weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
        remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports
        remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port
        modelexpress_config download_dir model_checksum delete_ckpt_after_loading
        decrypted_config_file decrypted_draft_config_file
        checkpoint_engine_wait_weights_before_ready weight_cache_mode weight_cache_socket
        weight_cache_timeout mem_fraction_static enable_memory_saver enable_weights_cpu_backup
        enable_draft_weights_cpu_backup cpu_offload_gb offload_group_size offload_num_in_group
        offload_prefetch_step offload_mode ple_offload_embedding ple_offload_backend
        ple_offload_dir kt_weight_path kt_method kt_cpuinfer kt_threadpool_count kt_num_gpu_experts
        kt_max_deferred_experts_per_token enable_paged_experts paged_experts_num_resident
        speculative_draft_model_revision speculative_draft_load_format
        speculative_draft_model_quantization _speculative_draft_quantization_explicitly_set
        mooncake_ib_device
    """,
    "Chooses kernels, graphs or layouts within a batch of SGLang, such as a chunk.": """
        enable_fp32_lm_head enable_tf32_matmul decode_attention_backend enable_lean_attention
        grammar_backend constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
        constrained_json_max_whitespace_cnt disable_outlines_disk_cache fp8_gemm_runner_backend
        fp4_gemm_runner_backend bf16_gemm_backend disable_flashinfer_autotune
        flashinfer_autotune_skip_ops triton_attention_reduce_in_fp32
        triton_attention_num_kv_splits triton_attention_split_tile_size
        flashinfer_mla_disable_ragged enable_fused_qk_norm_rope
        enable_precise_embedding_interpolation prefill_kv_cache_dequant_dtype enable_amd_monokernel
        enable_nvidia_megakernel cuda_graph_config cuda_graph_backend_decode
        cuda_graph_backend_prefill cuda_graph_max_bs_decode cuda_graph_max_bs_prefill
        cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context
        cuda_graph_max_seq_len_prefill disable_prefill_cuda_graph disable_decode_cuda_graph
        disable_cuda_graph disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc
        debug_cuda_graph enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs
        enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp
        enable_torch_symm_mem enable_scattered_sconv pre_warm_nccl boundary_reduction
        enable_quant_communications enable_flashinfer_allreduce_fusion
        enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend
        enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill
        disable_aiter_allreduce_fusion_in_decode enable_attn_tp_input_scattered
        enable_layernorm_sp enable_megamoe_for_layernorm_sp disable_attn_tp_gather
        mlx_enable_sampling sampling_mask_max_tokens enable_deterministic_inference
        rl_on_policy_target dsa_prefill_backend dsa_decode_backend
        dsa_paged_mqa_logits_backend dsa_topk_backend dsa_triton_union enable_dsa_fused_indexer
        mamba_backend linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend
        linear_attn_verify_backend speculative_dsa_topk_backend
    """,
    "Determines how experts are computed, without an all-to-all backend between ranks.": """
        flashinfer_mxfp4_moe_precision
        enable_fused_moe_sum_all_reduce enable_w4a4_mxfp4_megamoe ep_num_redundant_experts
        ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm
        eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
        eplb_min_rebalancing_utilization_threshold disable_shared_experts_fusion
        enforce_shared_experts_fusion disable_flashinfer_cutlass_moe_fp4_allgather
        speculative_moe_runner_backend speculative_enable_w4a4_mxfp4_megamoe
        enable_elastic_expert_backup
    """,
    "Affects only prefill's own batches, which never include a local turn.": """
        prefill_decode_interval prefill_decode_interval_min_bs enable_dynamic_chunking
        max_prefill_tokens prefill_max_requests schedule_policy min_free_slots_delay
        enable_prefill_delayer prefill_delayer_max_delay_passes
        prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
        prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio
        prefill_delayer_max_delay_ms
    """,
    "Determines which running requests a full decode server retracts first.": (
        "schedule_conservativeness"
    ),
    "Determines what enters the tree when a request ends; the parts match what the tree holds.": (
        "strip_thinking_cache"
    ),
    "Requests with media or with this kind of output are left to prefill.": """
        enable_multimodal mm_attention_backend enable_broadcast_mm_inputs_process
        enable_prefix_mm_cache mm_enable_dp_encoder mm_process_config mm_processor_worker_num
        mm_io_worker_num language_only allowed_media_domains media_url_max_file_size_mb
        mm_preprocess_cache_size_mb trust_mm_content_hashes limit_mm_data_per_request
        enable_mm_global_cache image_processor_backend mm_global_cache_backend
        disable_fast_image_processor mm_feature_transport language_model_only
        enable_return_hidden_states return_hidden_states_mode enable_return_routed_experts
        enable_return_indexer_topk
    """,
    "HiCache on prefill: a released request ends its prefetch (test_prefill_exit.py).": """
        hicache_host_memory_mode hicache_ratio hicache_size hicache_write_policy hicache_io_backend
        hicache_mem_layout hicache_storage_backend hicache_storage_prefetch_policy
        hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval
        hicache_storage_prefetch_retry_max_attempts hicache_host_memory_fraction
    """,
    "Determines how SGLang verifies drafts; a request joins the batch like one from prefill.": """
        speculative_accept_threshold_single speculative_accept_threshold_acc
        speculative_use_block_verification
        speculative_attention_mode
        speculative_draft_kv_cache_dtype speculative_boundary_reduction
    """,
    "Read only by models that are refused, or with states that are.": """
        c128_page_size dsv4_prefill_backend enable_deepseek_v4_fp4_indexer dsv4_attn_backend
        enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay qsa_indexer_dtype
        mamba_track_interval int8_mamba_ckpt_size linear_replayssm_cache_len
    """,
    "Sizes a pool, or determines the form of a state and how many of them the tree holds.": """
        _swa_full_tokens_ratio_explicitly_set swa_prefix_tails disable_hybrid_swa_memory
        mamba_ssm_dtype mamba_max_states_per_path enable_mamba_cache_stochastic_rounding
        mamba_cache_philox_rounds uses_mamba_radix_cache mamba_full_memory_ratio
    """,
    "SGLang reads it nowhere.": """
        num_continuous_decode_steps decoupled_spec_role decoupled_spec_bind_endpoint
        decoupled_spec_connect_endpoints decoupled_spec_rank
    """,
    "SGLang itself refuses it on decode (test_sglang_itself_refuses).": """
        dwdp_size ep_join_mode enable_hisparse enable_kv_cache_sharding enable_lmcache
        enable_page_major_kv_layout enable_watermark moe_dp_size enable_pdmux
        disaggregation_decode_allocation_policy
    """,
    "SGLang itself leaves disaggregation with it.": "dllm_algorithm",
    "A decode server ends at its first handshake; prefill's ranks agree on released rooms.": """
        attn_cp_size enable_prefill_cp
    """,
    "Requests without a token to generate are left to prefill.": "is_embedding",
    "SGLang turns the tree off with it, which is refused.": "enable_mis",
    "SGLang refuses it, or requires a refused setting with it (test_parallel_settings.py).": (
        "disaggregation_decode_host_receive_threshold"
    ),
    "Read with a refused setting, or on prefill, which builds its batches as stock does.": """
        enable_dsa_cache_layer_split enable_cp_tp_group_sharing
        disable_priority_preemption
        priority_scheduling_preemption_threshold prefill_only_disable_kv_cache
        radix_eviction_policy_config
        _radix_eviction_policy_explicitly_set unified_cache_external_linker_backend
        unified_cache_external_linker_config enable_linker_mla_dedup hisparse_config
        lmcache_config_file flexkv_config_file pp_max_micro_batch_size pp_async_batch_depth
        dcp_comm_backend dcp_replicate_q_proj cp_strategy enable_cp_decode_attn_tp
        enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_tp_lm_head_all_to_all
        enable_dense_mlp_attn_tp moe_dense_tp_size enable_shared_experts_attn_tp
        shared_experts_tp_size ep_join_rank_offset elastic_ep_initial_size max_ep_size
        elastic_ep_scale_timeout kv_canary_real_data kv_canary_sweep_interval deepep_v2_mode
        fuseep_mode deepep_dispatcher_output_dtype deepep_config enable_waterfill
        flashinfer_a2a_dispatch_type tbo_token_distribution_threshold uno_lora_path
        dllm_algorithm_config dllm_fdfo
        encoder_only encoder_transfer_backend
        encoder_urls encoder_bootstrap_port encoder_register_urls
        enable_adaptive_dispatch_to_encoder pdmux_config_path sm_group_num watermark_config
        watermark_key watermark_key_b watermark_context_window watermark_mixing_probability
        watermark_max_probability watermark_default_enabled watermark_enforce_all
        aux_hidden_state_capture return_aux_hidden_state_layer_ids
        speculative_dflash_block_size speculative_dspark_block_size
        speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
        speculative_dspark_align_verify_tokens_to_graph_tier speculative_ngram_min_bfs_breadth
        speculative_ngram_max_bfs_breadth speculative_ngram_match_type
        speculative_ngram_max_trie_depth speculative_ngram_capacity
        speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
        speculative_ngram_external_corpus_max_tokens speculative_domino_candidate_pool_size
    """,
}
#: Named in ``lead.settings`` beside a kind of model.
WITH_A_MODEL = """
    attention_backend prefill_attention_backend speculative_draft_attention_backend
    disable_chunked_prefix_cache mamba_radix_cache_strategy enable_int8_mamba_checkpoint
    enable_linear_replayssm enable_linear_replayssm_spec
"""

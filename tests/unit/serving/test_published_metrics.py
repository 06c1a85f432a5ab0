"""The contract of ``/metrics``: the names, types and labels that dashboards and alerts of users rely on."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.unit.serving.exposition import everything

CONTRACT = """
counter vllm:prompt_tokens model_name
counter vllm:generation_tokens model_name
counter vllm:spec_decode_num_drafts model_name
counter vllm:spec_decode_num_draft_tokens model_name
counter vllm:spec_decode_num_accepted_tokens model_name
counter vllm:num_preemptions model_name
counter vllm:prefix_cache_queries model_name
counter vllm:prefix_cache_hits model_name
counter vllm:spec_decode_num_accepted_tokens_per_pos model_name,position
counter vllm:request_success finished_reason,model_name
histogram vllm:time_to_first_token_seconds model_name
histogram vllm:inter_token_latency_seconds model_name
histogram vllm:request_time_per_output_token_seconds model_name
histogram vllm:request_queue_time_seconds model_name
histogram vllm:request_prefill_time_seconds model_name
histogram vllm:request_decode_time_seconds model_name
histogram vllm:request_inference_time_seconds model_name
histogram vllm:e2e_request_latency_seconds model_name
histogram vllm:request_prompt_tokens model_name
histogram vllm:request_generation_tokens model_name
histogram vllm:request_params_max_tokens model_name
histogram osd_round_accepted_tokens domain
counter osd_requests domain
counter osd_failed_requests domain
counter osd_cancelled_requests domain
counter osd_prompt_tokens domain
counter osd_completion_tokens domain
counter osd_skipped_layers domain
counter osd_busy_seconds domain
counter osd_swaps domain
counter osd_rejected_versions domain
counter osd_traces_written domain
counter osd_traces_dropped domain
counter osd_traces_bytes domain
counter osd_source_draft_tokens domain,source
counter osd_source_accepted_tokens domain,source
counter osd_recall_draft_tokens domain,order,source
counter osd_recall_accepted_tokens domain,order,source
counter osd_traces_lost domain,reason
counter osd_http_responses path,status
counter osd_version_rounds domain,version
counter osd_version_draft_tokens domain,version
counter osd_version_accepted_tokens domain,version
counter osd_version_tokens domain,version
counter osd_version_plain_seconds domain,version
counter osd_version_decode_seconds domain,version
counter osd_training_steps domain
counter osd_training_skipped_steps domain
counter osd_training_positions domain
counter osd_training_records domain
counter osd_training_trained_records domain
counter osd_training_held_out_records domain
counter osd_training_refused_records domain
counter osd_training_drifts domain
counter osd_training_cpu_seconds domain
counter osd_training_slowed_seconds domain
counter osd_gate_verdicts domain,verdict
gauge osd_training_loss domain
gauge osd_training_lag domain
gauge osd_training_lag_seconds domain
gauge osd_replay_records domain
gauge osd_replay_tokens domain
gauge osd_replay_bytes domain
gauge osd_investment_pays domain
gauge osd_investment_saving_rate domain
gauge osd_investment_earnings_seconds domain
gauge osd_investment_cost_seconds domain
gauge osd_investment_horizon_seconds domain
counter osd_version_training_cpu_seconds domain,version
gauge osd_version_saving_rate domain,version
gauge osd_version_payback_seconds domain,version
gauge osd_payback_seconds domain
gauge vllm:num_requests_running model_name
gauge vllm:num_requests_waiting model_name
gauge vllm:kv_cache_usage_perc model_name
gauge osd_recall_entries domain
gauge osd_recall_bytes domain
gauge osd_stream_records domain
gauge osd_stream_bytes domain
gauge osd_canary_seconds domain
gauge osd_replicas domain,version
gauge osd_running_requests domain,replica
gauge osd_waiting_requests domain,replica
gauge osd_drafter_version domain,replica
gauge osd_swap_stall_seconds_max domain,replica
"""
"""Type, name without the ending of a counter, and labels except the bound of a bucket."""


def test_published_metrics_keep_their_names_types_and_labels():
    published = set()
    for family in text_string_to_metric_families(everything()):
        labels = {label for sample in family.samples for label in sample.labels if label != "le"}
        assert all(labels - {"le"} == sample.labels.keys() - {"le"} for sample in family.samples), family.name
        published.add(f"{family.type} {family.name} {','.join(sorted(labels))}")
    assert published >= set(CONTRACT.strip().splitlines())

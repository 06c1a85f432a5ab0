"""``/metrics`` of vLLM 0.32, limited to the lines on drafts and those of the version follower."""

from __future__ import annotations

from collections.abc import Sequence


def vllm_metrics(version: int, rounds: int, accepted: Sequence[int], depth: int = 3, domain: str = "general") -> str:
    """Return the metrics after ``rounds`` decoding steps of ``depth`` draft tokens each.

    ``accepted`` counts the accepted tokens by position.
    """
    label = 'engine="0",model_name="target"'
    counters = {
        "prompt_tokens": 5 * rounds,
        "generation_tokens": rounds + sum(accepted),
        "spec_decode_num_drafts": rounds,
        "spec_decode_num_draft_tokens": depth * rounds,
        "spec_decode_num_accepted_tokens": sum(accepted),
    }
    lines = [f"vllm:num_requests_running{{{label}}} 2.0", f"vllm:num_requests_waiting{{{label}}} 1.0"]
    for name, value in counters.items():
        lines += [f"# TYPE vllm:{name} counter", f"vllm:{name}_total{{{label}}} {value}.0"]
    lines += ["# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter"]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines += [f'{name}{{{label},position="{place}"}} {count}.0' for place, count in enumerate(accepted)]
    lines += ["# TYPE osd_draft_version gauge", f'osd_draft_version{{domain="{domain}"}} {version}.0']
    return "\n".join([*lines, ""])

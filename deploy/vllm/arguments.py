"""Arguments of ``vllm serve`` that a replica cannot take, with the setting to use instead."""

from __future__ import annotations

from osd.config import ConfigError, Settings

_LISTENS = "Ray Serve listens for all replicas: use serving.host and serving.port"
_REPLICAS = "each replica is one vLLM: use serving.replicas"
_DRAFTS = "the drafter and its tokens follow from drafter and growth"
_NO_TRACES = "traces cannot be captured with it"
_NO_DRAFTS = "a model without generation has no drafts"

_REFUSED = {
    "--model": "use target.source",
    "--revision": "use target.revision",
    "--dtype": "use target.dtype",
    "--served-model-name": "use serving.model_name",
    "--api-key": "use serving.api_key_file or serving.keys_file",
    "--tensor-parallel-size": "use target.tensor_parallel",
    "-tp": "use target.tensor_parallel",
    "--worker-extension-cls": "osd has a worker extension of its own",
    "--hf-token": "other users could read it: set HF_TOKEN in the environment",
    "--config": "write its arguments into engine.vllm.args",
    "--disable-log-stats": "osd reads vLLM's counters",
    **dict.fromkeys(("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens"), _DRAFTS),
    **dict.fromkeys(("--runner", "--convert"), _NO_DRAFTS),
    **dict.fromkeys(("--host", "--port", "--uds", "--grpc", "--grpc-port", "--root-path", "--headless"), _LISTENS),
    **dict.fromkeys(("--api-server-count", "-asc", "--enable-ssl-refresh"), _LISTENS),
    **dict.fromkeys(("--nnodes", "--node-rank", "--master-addr", "--master-port"), _REPLICAS),
    **dict.fromkeys(("--pipeline-parallel-size", "-pp"), "use target.tensor_parallel"),
    "--kv-sharing-fast-prefill": "vLLM cannot draft with EAGLE and share keys and values between layers",
    **dict.fromkeys(("--enable-batch-sharded-sampling", "--prefill-context-parallel-size", "-pcp"), _NO_TRACES),
    "--enable-dbo": "vLLM cannot draft and overlap two batches",
}
"""Names of arguments, and the reason of their refusal."""

_FAMILIES = {
    "--ssl-": _LISTENS,
    **dict.fromkeys(("--data-parallel-", "--dp-supervisor-", "-dp", "-n", "-r"), _REPLICAS),
}
"""Beginnings of names, and the reason of their refusal."""


def check_arguments(settings: Settings) -> None:
    """Refuse arguments of ``engine.vllm.args`` that osd sets itself, that Ray Serve replaces, or that exclude drafts.

    vLLM itself checks all others.

    Raises:
        ConfigError: an argument is refused.
    """
    arguments = settings.engine.vllm.arguments
    if arguments and not arguments[0].startswith("-"):
        raise ConfigError(
            f"engine.vllm.args must begin with an option, not {arguments[0]}: use target.source for a model"
        )
    for argument in arguments:
        if argument.startswith("-") and (reason := _reason(_name(argument))):
            raise ConfigError(f"engine.vllm.args must not have {_name(argument)}: {reason}")


def _name(argument: str) -> str:
    """Return the name of an option, as vLLM reads ``--an_option.field=value``."""
    name = argument.partition("=")[0]
    return name.partition(".")[0].replace("_", "-") if name.startswith("--") else name


def _reason(name: str) -> str | None:
    if reason := _REFUSED.get(name) or next((why for start, why in _FAMILIES.items() if name.startswith(start)), None):
        return reason
    # Python's parser accepts any unambiguous beginning of an option, such as --mod.
    is_short = name.startswith("--") and len(name) > 2
    return next((why for option, why in _REFUSED.items() if is_short and option.startswith(name)), None)

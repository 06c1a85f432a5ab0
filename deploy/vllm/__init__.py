"""Environment with vLLM for replicas with ``engine.kind=vllm``: installation, and checks before a start."""

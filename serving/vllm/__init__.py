"""Replicas whose engine is vLLM: its own OpenAI application, with our keys, metrics, dashboard, capture and drain.

The modules run in the environment with vLLM. ``application`` alone is imported elsewhere.
"""

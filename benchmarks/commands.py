"""Table of the benchmark commands, which ``osd`` reads from the entry point."""

from __future__ import annotations

from osd.cli.offered import Command

_BENCH = {
    "The engine": {
        "engine.forward:forward": "Time forwards of 1 to 64 tokens against the memory's bandwidth.",
        "engine.decode:decode": "Compare speculative with plain decoding on one engine.",
        "engine.economy:economy": "Compare the speed-up that an engine measures with passes of the same prompts.",
        "engine.rules:rules": "Compare verification rules and growth policies on one text.",
        "engine.weights:weights": "Compare int8 weights of the target with full ones.",
        "engine.context:context": "Measure token selection on long contexts.",
        "engine.host:host": "Measure the host's time between two forwards, without a GPU.",
    },
    "The service": {
        "service.serve:serve": "Measure the latencies of a service under an open load.",
        "service.start:start": "Measure a service's time to the first token, and its memory.",
        "service.http:http": "Measure the tokens per second and first-token delay that HTTP, Ray and JSON cost.",
        "net.net:net": "Measure whether training pays in the whole service.",
    },
    "Drafters and their training": {
        "engine.recall:recall": "Measure the speed of recall from an empty table on.",
        "engine.prediction:prediction": "Measure the speed-up by a prediction of the answer.",
        "learning.drafters:drafters": "Compare all kinds of drafters on one stream.",
        "learning.scaling:scaling": "Measure drafters of several sizes along a stream.",
        "completion.completion:completion": "Compare thresholds of completions that stop or leave early.",
    },
    "Other engines": {
        "peers.measure:peers": "Compare with other engines, each in its own environment.",
        "vllm.command:vllm": "Compare vLLM with our drafters to vLLM alone.",
    },
}
"""Function and help sentence of each command, by heading."""

COMMANDS = (
    *(
        Command(f"bench {function.partition(':')[2]}", f"benchmarks.{function}", sentence, heading)
        for heading, functions in _BENCH.items()
        for function, sentence in functions.items()
    ),
    Command("analyze drafts", "benchmarks.engine.drafts:drafts", "Compare verification rules on captured traces."),
)

"""Self-test: a tiny random model, decoded like a target."""

from __future__ import annotations

import queue
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as progress

from osd.config import BestFirstSettings, EngineSettings, Settings, TargetSettings
from osd.drafting.recall.drafter import Recall
from osd.engine.build import InitialDrafter, make_engine
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams, Update
from osd.runtime.device import pick_device

_VOCABULARY, _TOKENS, _TIMES = 64, 48, 3
_PROMPT = (1, 2, 3, 4, 5, 6)
_SECONDS = 60.0
"""Limit of an answer's time, even on a slow machine."""


class SelfTestError(RuntimeError):
    """Error of a wrong or missing answer of the tiny model, with a message of one line."""


def self_test(settings: Settings, directory: Path) -> str:
    """Decode a tiny model greedily in float32, without and with recall's drafts; return a summary.

    Both answers must equal those of ``transformers``, token by token. The model is written to ``directory``.

    Raises:
        SelfTestError: an answer differs or is missing.
    """
    progress.disable_progress_bar()
    begun = time.perf_counter()
    expected = by_transformers(directory, pick_device(settings.target.device))
    tiny = Settings(
        target=TargetSettings(source=str(directory), dtype="float32", device=settings.target.device),
        engine=EngineSettings(slots=1, context=128, threads=settings.engine.threads),
        growth=BestFirstSettings(governed=False),  # draft even on a busy machine
    )
    engine = make_engine(tiny, directory, _tokenizer(), InitialDrafter(Recall(), 1), None)
    drafted = kept = 0
    engine.start()
    try:
        for number in range(_TIMES):
            for speculate in (False, True):
                answer, counts = _answer(engine, f"{number}-{speculate}", speculate)
                drafted, kept = drafted + counts[0], kept + counts[1]
                if answer != expected:
                    drafts = "with drafts" if speculate else "without drafts"
                    equal = sum(
                        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(answer, expected, strict=False))
                    )
                    raise SelfTestError(f"an answer {drafts} differs from transformers after {equal} tokens")
    finally:
        engine.stop()
    if not kept:
        raise SelfTestError(f"none of {drafted} drafted tokens was accepted, in answers that were given before")
    took = time.perf_counter() - begun
    return f"{2 * _TIMES} answers are those of transformers, {kept} of {drafted} drafted tokens accepted, {took:.1f} s"


def by_transformers(directory: Path, device: torch.device) -> list[int]:
    """Write the model and return the answer of transformers to the prompt."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    model.save_pretrained(directory)
    _tokenizer().save_pretrained(directory)
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    loaded.to(device)
    prompt = torch.tensor([_PROMPT], device=device)
    answer = loaded.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=_TOKENS, pad_token_id=0
    )
    return answer[0, len(_PROMPT) :].tolist()


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {str(number): number for number in range(_VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "0")))


def _answer(engine: Engine, name: str, speculate: bool) -> tuple[list[int], tuple[int, int]]:
    """Return the tokens of a greedy answer, and its numbers of drafted and accepted tokens."""
    updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
    request = Request(
        name, _PROMPT, _TOKENS, SamplingParams(temperature=0.0), ignore_eos=True, capture=True, speculate=speculate,
        domain=engine.settings.domain,
    )  # fmt: skip
    engine.submit(request, updates.put)
    tokens: list[int] = []
    while True:
        try:
            update = updates.get(timeout=_SECONDS)
        except queue.Empty:
            raise SelfTestError(f"an answer of {_TOKENS} tokens did not end within {_SECONDS:.0f} seconds") from None
        tokens += update.token_ids
        if update.error is not None:
            raise SelfTestError(update.error)
        if update.finish_reason is not None:
            counts = update.counts
            return tokens, (counts.drafted, counts.accepted) if counts is not None else (0, 0)

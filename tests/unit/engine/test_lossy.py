"""Lossy answers, which leave the target early, and their isolation from exact requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from osd.capture.trace import Trace
from osd.config import BestFirstSettings, ChainSettings
from osd.drafting.early_exit import EarlyExit
from osd.drafting.mixed import Mixed
from osd.engine.completion import ControllerOptions, SkippedLayers
from osd.engine.request import SamplingParams
from osd.runtime.exit_controller import CONTINUE, EXIT, STOP
from tests.tiny import make_tiny
from tests.unit.engine.harness import Client, Oracle, prompts, running, tokens_of
from tests.unit.engine.test_completion import judging_drafter

TOKENS, LENGTHS, LAYERS = 16, (17, 5, 9, 30), 8
GROWTHS = {"chain": ChainSettings(depth=3, governed=False), "mixed": BestFirstSettings(budget=8, governed=False)}


SURE = 0.2
"""Threshold of certainty for a random target, which is less sure than a trained one."""


@pytest.fixture(autouse=True)
def low_certainty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osd.drafting.early_exit.SURE", SURE)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target of eight layers, with exits behind the third and the sixth."""
    return make_tiny(tmp_path_factory.mktemp("deep"), layers=LAYERS)


@pytest.fixture(scope="module")
def deep_oracle(deep: Path) -> Oracle:
    return Oracle(deep)


class ReferenceDecoder:
    """Reference: decodes token by token through the layers of transformers, with keys and values in lists."""

    def __init__(self, directory: Path, drafter: EarlyExit) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory)
        self._known: dict[tuple[tuple[int, ...], float, int], tuple[list[int], int]] = {}
        self._drafter, config = drafter, self._model.config
        self._heads, self._kv, self._dim = config.num_attention_heads, config.num_key_value_heads, 64 // 4
        assert self._model.model.layers[0].self_attn.q_proj.out_features == self._heads * self._dim

    def _turned(self, x: Tensor, place: int) -> Tensor:
        cos, sin = self._model.model.rotary_emb(torch.empty(1), torch.tensor([[place]]))
        first, second = x.chunk(2, -1)
        return x * cos[0, 0] + torch.cat([-second, first], -1) * sin[0, 0]

    def _keep(self, layer: int, x: Tensor, place: int) -> Tensor:
        part = self._model.model.layers[layer]
        normed = part.input_layernorm(x)
        key = part.self_attn.k_proj(normed).view(self._kv, self._dim)
        self._keys[layer].append(self._turned(key, place))
        self._values[layer].append(part.self_attn.v_proj(normed).view(self._kv, self._dim))
        return normed

    def _layer(self, layer: int, x: Tensor, place: int) -> Tensor:
        part = self._model.model.layers[layer]
        normed = self._keep(layer, x, place)
        query = self._turned(part.self_attn.q_proj(normed).view(self._heads, self._dim), place)
        keys, values = torch.stack(self._keys[layer], 1), torch.stack(self._values[layer], 1)  # [kv, n, dim]
        group = self._heads // self._kv
        weights = torch.einsum("hd,hnd->hn", query, keys.repeat_interleave(group, 0)) / self._dim**0.5
        mixed = torch.einsum("hn,hnd->hd", weights.softmax(-1), values.repeat_interleave(group, 0))
        x = x + part.self_attn.o_proj(mixed.flatten())
        return x + part.mlp(part.post_attention_layernorm(x))

    def answer(self, prompt: Sequence[int], above: float, count: int = TOKENS) -> tuple[list[int], int]:
        """Return the tokens, and the number of layers that did not run for them."""
        key = tuple(prompt), above, count
        if key not in self._known:
            self._known[key] = self._answer(prompt, above, count)
        return self._known[key]

    @torch.inference_mode()
    def _answer(self, prompt: Sequence[int], above: float, count: int) -> tuple[list[int], int]:
        self._keys: list[list[Tensor]] = [[] for _ in range(LAYERS)]
        self._values: list[list[Tensor]] = [[] for _ in range(LAYERS)]
        drafter, model, tokens, skipped = self._drafter, self._model.model, list(prompt), 0
        head, head_logits = drafter.target_head[drafter.draft_ids].float(), torch.empty(0)
        for place in range(len(prompt) + count - 1):
            x, left = model.embed_tokens.weight[tokens[place]], None
            for layer in range(LAYERS):
                x = self._layer(layer, x, place)
                if place < len(prompt) or layer + 1 not in drafter.exits:
                    continue
                unit = x / x.pow(2).mean().sqrt()
                p = (drafter.controller @ unit).softmax(0)
                if p[EXIT] <= max(p[STOP], p[CONTINUE]) or p[EXIT] <= above:
                    continue
                at = drafter.exits.index(layer + 1)
                head_logits = head @ model.norm(x + drafter.up[at] @ (drafter.down[at] @ unit))
                if head_logits.softmax(0).max() > SURE:
                    left = layer + 1
                    break
            if left is not None:
                skipped += LAYERS - left
                for layer in range(left, LAYERS):
                    self._keep(layer, x, place)
            if place < len(prompt) - 1:
                continue
            if left is None:
                tokens.append(int(self._model.lm_head(model.norm(x)).argmax()))
            else:
                tokens.append(int(drafter.draft_ids[head_logits.argmax()]))
        return tokens[len(prompt) :], skipped


@pytest.fixture(scope="module")
def reference(deep: Path) -> ReferenceDecoder:
    return ReferenceDecoder(deep, judging_drafter(deep, 0.05))


def lossy(above: float = 0.0, stop: float | None = None) -> ControllerOptions:
    return ControllerOptions(stop, above, lossy=True)


def ask(client: Client, name: str, texts: Sequence[list[int]], **more: Any) -> list[Any]:
    """Submit the texts and return the last update of each."""
    return [result.last for result in client.ask(texts, TOKENS, name + " {}", **more)]


@pytest.mark.parametrize(("growth", "bucketed"), [("chain", False), ("mixed", False), ("chain", True)])
def test_lossy_answer_matches_the_reference(
    deep: Path, deep_oracle: Oracle, reference: ReferenceDecoder, growth: str, bucketed: bool
) -> None:
    drafter, texts = judging_drafter(deep, 0.05), prompts(LENGTHS)
    made = Mixed(drafter) if growth == "mixed" else drafter
    skips = []
    with running(deep, drafter=made, growth=GROWTHS[growth], bucketed=bucketed, int8=False) as client:
        for above in (0.0, 0.45, 0.5, 1.0):
            last = ask(client, f"{above}", texts, controller=lossy(above))
            for index, prompt in enumerate(texts):
                tokens, skipped = reference.answer(prompt, above)
                name = f"{above} {index}"
                assert client.results[name].tokens == tokens
                assert last[index].skipped == SkippedLayers(skipped, LAYERS * (TOKENS - 1))
                assert client.results[name].counts.drafted == 0
            skips.append(sum(update.skipped.layers for update in last if update.skipped))
        counters = client.engine.counters()
    assert len(set(skips)) == 4
    assert max(skips) == skips[0]
    assert skips[-1] == 0
    assert counters.skipped_layers == sum(skips)
    answers = [client.results[f"0.0 {index}"].tokens for index in range(len(texts))]
    goals = deep_oracle.all(texts, TOKENS)
    assert answers != goals
    assert [client.results[f"1.0 {index}"].tokens for index in range(len(texts))] == goals


@pytest.mark.parametrize("growth", GROWTHS)
def test_lossy_requests_keep_other_requests_exact(
    deep: Path, deep_oracle: Oracle, reference: ReferenceDecoder, growth: str
) -> None:
    drafter, texts = judging_drafter(deep, 0.05), prompts(LENGTHS)
    made = Mixed(drafter) if growth == "mixed" else drafter
    with running(deep, drafter=made, growth=GROWTHS[growth], int8=False) as client:
        for index, prompt in enumerate(texts):
            asked_for = lossy() if index % 2 else None
            client.submit(f"{index}", prompt, TOKENS, ignore_eos=True, capture=True, controller=asked_for)
        client.wait()
        drafted = [client.results[f"{index}"].counts.drafted for index in range(4)]
    for index, prompt in enumerate(texts):
        goal = reference.answer(prompt, 0.0)[0] if index % 2 else deep_oracle.greedy(prompt, TOKENS)
        assert client.results[f"{index}"].tokens == goal
    assert min(drafted[0], drafted[2]) > 0
    assert drafted[1] == drafted[3] == 0


def test_prefix_cache_shares_only_the_prompt_of_lossy_answers(
    deep: Path, deep_oracle: Oracle, reference: ReferenceDecoder
) -> None:
    """Neither exact nor lossy requests may depend on an earlier lossy answer."""
    (prompt,) = prompts([20], seed=4)
    with running(deep, drafter=judging_drafter(deep, 0.05), int8=False) as client:
        ask(client, "lossy", [prompt], controller=lossy())
        more = [*prompt, *client.results["lossy 0"].tokens, 1, 2]
        ask(client, "exact", [more])
        ask(client, "again", [[*more, 3]], controller=lossy())
        ask(client, "then", [[*more, 3, 4]])
    results = client.results
    assert results["lossy 0"].tokens == reference.answer(prompt, 0.0)[0]
    assert results["exact 0"].tokens == deep_oracle.greedy(more, TOKENS)
    assert results["exact 0"].cached == len(prompt)
    assert results["again 0"].tokens == reference.answer([*more, 3], 0.0)[0]
    assert results["again 0"].cached == len(more)
    assert results["then 0"].tokens == deep_oracle.greedy([*more, 3, 4], TOKENS)
    assert results["then 0"].cached == len(more) + 1


def test_lossy_answer_is_neither_captured_nor_recalled(deep: Path) -> None:
    traces: list[Trace] = []
    made = Mixed(judging_drafter(deep, 0.05))
    with running(deep, drafter=made, growth=GROWTHS["mixed"], traces=traces) as client:
        pool: Any = client.engine.pool
        ask(client, "exact", prompts(LENGTHS), capture=True)
        assert len(traces) == len(LENGTHS)
        (table,) = pool.memories(pool.domain).tables
        assert table.used() > 0
        before = table.contents()
        ask(client, "lossy", prompts(LENGTHS, seed=7), capture=True, controller=lossy())
        after = table.contents()
    assert len(traces) == len(LENGTHS)
    for name in ("places", "entries", "weights"):
        assert torch.equal(getattr(before, name), getattr(after, name))


def test_preempted_lossy_answer_keeps_its_text(deep: Path, reference: ReferenceDecoder) -> None:
    texts = prompts((17, 9), seed=2)
    with running(deep, drafter=judging_drafter(deep, 0.05), slots=1, int8=False) as client:
        client.submit("low", texts[0], 40, ignore_eos=True, controller=lossy(), priority=5)
        while len(client.results["low"].tokens) < 20:
            client.next()
        client.submit("high", texts[1], TOKENS, ignore_eos=True)
        client.wait()
        preempted = client.engine.counters().preemptions
    assert preempted == 1
    assert client.results["low"].tokens == reference.answer(texts[0], 0.0, 40)[0]


def test_seeded_lossy_text_does_not_depend_on_the_batch(deep: Path) -> None:
    drawn = SamplingParams(temperature=1.0, seed=3, repeatable=True)
    texts = []
    for neighbours in (0, 3):
        with running(deep, drafter=judging_drafter(deep, 0.05)) as client:
            for index, prompt in enumerate(prompts(LENGTHS)[:neighbours]):
                client.submit(f"{index}", prompt, TOKENS, ignore_eos=True)
            client.submit("drawn", prompts(LENGTHS)[3], TOKENS, drawn, ignore_eos=True, controller=lossy(), logprobs=3)
            result = client.wait()["drawn"]
        texts.append(result.tokens)
        for place in result.logprobs:
            assert place.logprob > -30
            assert len(place.top) == 3
            assert all(-30 < logprob <= 0 for _, logprob in place.top)
    assert texts[0] == texts[1]


def test_lossy_rows_are_judged_by_the_layers_they_ran(deep: Path) -> None:
    """A row is judged only by the layers before its exit."""
    drafter = judging_drafter(deep, 0.05)
    with running(deep, drafter=drafter) as client:
        ask(client, "free", prompts(LENGTHS), controller=lossy())
        last = ask(client, "judged", prompts(LENGTHS), controller=lossy(0.0, stop=0.0))
    stopped = 0
    for index in range(len(LENGTHS)):
        free, tokens = client.results[f"free {index}"].tokens, client.results[f"judged {index}"].tokens
        judged = last[index].judged
        assert tokens == free[: len(tokens)]
        assert (judged.stopped is not None) is (len(tokens) < TOKENS)
        stopped += judged.stopped is not None
    assert stopped > 0


def test_lossy_answer_with_a_grammar_never_exits(deep: Path) -> None:
    """The vocabulary of an early head may lack the allowed tokens."""
    (prompt,) = prompts([20], seed=4)
    with running(deep, drafter=judging_drafter(deep, 0.05), int8=False) as client:
        grammar = client.engine.grammars.compile("regex", "[a-f]{12}")
        ask(client, "exact", [prompt], grammar=grammar)
        last = ask(client, "lossy", [prompt], grammar=grammar, controller=lossy())
    assert client.results["lossy 0"].tokens == client.results["exact 0"].tokens
    assert last[0].skipped == SkippedLayers()


@pytest.mark.parametrize("kind", ["eagle", "none"])
def test_lossy_request_without_a_controller_never_exits(deep: Path, deep_oracle: Oracle, kind: str) -> None:
    with running(deep, kind) as client:
        last = ask(client, "lossy", prompts(LENGTHS), controller=lossy())
    assert tokens_of(client.results.values()) == deep_oracle.all(prompts(LENGTHS), TOKENS)
    assert {update.skipped for update in last} == {SkippedLayers()}


def test_steps_with_early_exits_do_not_update_costs(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(deep, drafter=judging_drafter(deep, 0.05)) as client:
        costs, learnt = client.engine.loop.planner.costs, []
        observe = costs.observe_forward
        monkeypatch.setattr(costs, "observe_forward", lambda *seen: (learnt.append(seen), observe(*seen)))
        ask(client, "lossy", prompts(LENGTHS[:1]), controller=lossy())
        lossy_rounds = len(learnt)
        ask(client, "exact", prompts(LENGTHS[:1], seed=9))
    assert lossy_rounds <= 2, "steps that read the prompt"
    assert len(learnt) > lossy_rounds + 2

"""Answers under a grammar, with and without drafts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLParserLimits
from tokenizers import AddedToken

from osd.capture.trace import ACCEPTED, Trace
from osd.config import (
    BestFirstSettings,
    ChainSettings,
    DSparkSettings,
    DynamicTreeSettings,
    FalconSettings,
    PromptTokensSettings,
)
from osd.drafting import Drafter, initial
from osd.drafting.mixed import Mixed
from osd.drafting.recall.drafter import Recall
from osd.drafting.session import Tree
from osd.engine.constraint import GrammarConstraint, pruned
from osd.engine.grammar import SPACE_TOKENS, Grammar, GrammarCompiler, GrammarError, wrapped
from osd.engine.grammar_check import BYTES_PER_CHARACTER, STATES_BYTES
from osd.engine.health import MAX_FAILED_REQUESTS
from osd.engine.planner import Planner
from osd.engine.request import SamplingParams
from osd.engine.step import StepOutcome
from osd.verification.tree import ROOT
from serving.api.structured import MOST_CHOICES
from tests.tiny import VOCABULARY, tokenizer
from tests.unit.engine.harness import GREEDY, Client, Oracle, make_drafter, prompts, running

END = 257
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog", "catfish"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarCompiler]:
    with closing(GrammarCompiler(tokenizer(), VOCABULARY, [END])) as made:
        yield made


def ids(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def masked_reference(oracle: Oracle, prompt: list[int], constraint: GrammarConstraint, most: int) -> list[int]:
    """Return the greedy answer by masked logits, one token at a time."""
    output: list[int] = []
    while len(output) < most and not constraint.complete:
        with torch.no_grad():
            logits = oracle.model(input_ids=torch.tensor([prompt + output])).logits[0, -1]
        mask = constraint.allowed(())
        output.append(int(logits.masked_fill(~torch.from_numpy(mask), -torch.inf).argmax()))
        if output[-1] == END:
            break
        constraint.advance(output[-1])
    return output


def drafter_of(kind: str, directory: Path) -> Drafter | None:
    settings = {
        "dspark": DSparkSettings(vocabulary=200),
        "falcon": FalconSettings(vocabulary=200, block=2),
        "prompt_tokens": PromptTokensSettings(tokens=2),
    }
    if kind == "recall":
        return Recall()
    if kind.startswith("mixed"):
        made = drafter_of(kind.partition(" ")[2], directory)
        return Mixed(made)
    if kind in settings:
        return initial(settings[kind], directory, directory)
    return make_drafter(kind, directory)


GROWTHS = {
    "chain": ChainSettings(governed=False),
    "tree": DynamicTreeSettings(governed=False),
    "worth": BestFirstSettings(),
}
QUICK = {"chain": ["none", "eagle"], "tree": ["prompt_tokens"], "worth": ["recall", "mixed eagle"]}
ASKED = prompts([12, 1, 30], seed=3)
MIXED = ["mixed eagle", "mixed prompt_tokens"]
ALL = ["none", "recall", "dspark", "eagle", "medusa", "kangaroo", "falcon", "prompt_tokens", *MIXED]


@pytest.fixture(scope="module")
def goals(oracle: Oracle, grammars: GrammarCompiler) -> list[list[int]]:
    grammar = grammars.compile("json", json.dumps(PERSON))
    return [masked_reference(oracle, prompt, GrammarConstraint(grammar), 70) for prompt in ASKED]


@pytest.mark.parametrize(
    ("growth", "kind"),
    [
        pytest.param(growth, kind, marks=() if kind in QUICK[growth] else pytest.mark.soak)
        for growth in GROWTHS
        for kind in ALL
    ],
)
def test_greedy_answers_match_plain_masked_decoding(
    target_dir: Path, oracle: Oracle, grammars: GrammarCompiler, goals: list[list[int]], kind: str, growth: str
) -> None:
    grammar = grammars.compile("json", json.dumps(PERSON))
    with running(
        target_dir, drafter=drafter_of(kind, target_dir), growth=GROWTHS[growth], riders=32, embeddings=4
    ) as client:
        for turn in range(2):
            for index, prompt in enumerate(ASKED):
                client.submit(f"{index}", prompt, 70, grammar=grammar, capture=True)
            client.submit("free", ASKED[0], 24, ignore_eos=True)
            client.submit("plain", ASKED[0], 70, grammar=grammar, speculate=False)
            results = client.wait()
            assert [results[str(index)].tokens for index in range(3)] == goals, turn
            assert results["plain"].tokens == goals[0]
            assert results["free"].tokens == oracle.greedy(ASKED[0], 24)
        counts = client.engine.counters().speculation()
    assert counts.by_source["grammar"].accepted == counts.by_source["grammar"].drafted >= 50
    plain = results["plain"].counts
    assert plain.drafted == 0
    for index in range(3):
        assert results[str(index)].finish == ("stop" if len(goals[index]) < 70 else "length")


@pytest.mark.parametrize("kind", ["recall", "mixed eagle"])
def test_drafts_continue_after_forced_tokens(
    target_dir: Path, oracle: Oracle, grammars: GrammarCompiler, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts: list[tuple[Sequence[str], list[str]]] = []
    observe = Planner.observe

    def recorded(planner: Planner, outcome: StepOutcome, seconds: float) -> None:
        drafts.extend((result.tree.sources, result.accepted) for result in outcome.sequences)
        observe(planner, outcome, seconds)

    monkeypatch.setattr(Planner, "observe", recorded)
    grammar = grammars.compile("regex", r"([^=]{3}==={3}){8}")
    goal = masked_reference(oracle, ASKED[0], GrammarConstraint(grammar), 60)
    with running(target_dir, drafter=drafter_of(kind, target_dir), growth=BestFirstSettings(governed=False)) as client:
        for turn in range(3):
            client.submit(str(turn), ASKED[0], 60, grammar=grammar, capture=True)
            assert client.wait()[str(turn)].tokens == goal
    forced_sources = {"grammar", "forced"}  # forced after the text, and forced within a draft
    assert (
        sum(bool(forced_sources & set(accepted)) and not forced_sources >= set(accepted) for _, accepted in drafts) >= 3
    )
    assert any("forced" in accepted for _, accepted in drafts)
    assert any("grammar" in sources and set(sources) - forced_sources for sources, _ in drafts), (
        "drafted tokens after forced ones"
    )
    for sources, accepted in drafts:  # forced tokens are first, and all are accepted up to the end
        forced = list(sources).count("grammar")
        assert list(sources[:forced]) == ["grammar"] * forced
        assert accepted[:forced] == ["grammar"] * min(forced, len(accepted))


def schema(chance: random.Random, depth: int = 2) -> dict[str, Any]:
    """Return a random schema with short values."""
    low = chance.randrange(-50, 50)
    leaves: list[dict[str, Any]] = [
        {"type": "string", "minLength": 1, "maxLength": chance.randrange(1, 6)},
        {"type": "string", "pattern": chance.choice(["^[a-c]{2,4}$", "^(yes|no)$", "^x[0-9]?$"])},
        {"type": "string", "format": "date"},
        {"enum": chance.sample(["red", "green", 3, None, True, 'gr\u00fcn "x"'], 3)},
        {"type": "integer", "minimum": low, "maximum": low + chance.randrange(80)},
        {"type": ["boolean", "null"]},
        {"const": chance.choice([1, "one", [1, {"a": None}]])},
    ]
    if not depth:
        return chance.choice(leaves)
    names = chance.sample(["a", "b", "name", "x y", "\u00e4"], chance.randrange(1, 4))
    inner = {name: schema(chance, depth - 1) for name in names}
    return chance.choice(
        [
            chance.choice(leaves),
            {"type": "array", "items": schema(chance, depth - 1), "minItems": 1, "maxItems": 2},
            {"anyOf": [schema(chance, depth - 1), schema(chance, 0)]},
            {"type": "object", "properties": inner, "required": names[:1], "additionalProperties": False},
            {"type": "object", "properties": inner, "required": names, "additionalProperties": False},
        ]
    )


def test_finished_answers_satisfy_their_schema(target_dir: Path, grammars: GrammarCompiler) -> None:
    chance = random.Random(3)  # noqa: S311 - repeatable, not secret
    schemas = [schema(chance) for _ in range(40)]
    schemas[0] = {"type": "object"}  # the schema of a request for JSON
    schemas[1] = {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}}, "b": schemas[2]},
    }
    with running(target_dir, drafter=Recall(), growth=BestFirstSettings(governed=False)) as client:
        for number, schema_of_request in enumerate(schemas):
            grammar = grammars.compile("json", json.dumps(schema_of_request))
            for seed in range(2):
                sampling = SamplingParams(0.7, top_p=0.95, presence_penalty=0.5, seed=seed)
                client.submit(f"{number} {seed}", prompts([9], seed)[0], 100, sampling, grammar=grammar, capture=True)
        results = client.wait()
    ended = 0
    for name, result in results.items():
        assert result.finish in ("stop", "length"), result.error
        if result.finish == "stop":
            ended += 1
            Draft202012Validator(schemas[int(name.split()[0])]).validate(json.loads(result.text))
    assert ended > 60


def answer(client: Client, grammars: GrammarCompiler, kind: str, text: str, tokens: int = 40, **more: Any) -> Any:
    """Return the answer to a request under a grammar."""
    client.submit(
        "r", prompts([12], seed=3)[0], tokens, grammar=grammars.compile(kind, text), **{"sampling": GREEDY, **more}
    )
    return client.wait()["r"]


def test_answers_match_regexes_choices_and_grammars(target_dir: Path, grammars: GrammarCompiler) -> None:
    with running(target_dir, "eagle") as client:
        assert re.fullmatch("[a-f]{3}-[0-9]+x", answer(client, grammars, "regex", "[a-f]{3}-[0-9]{1,3}x").text)
        assert answer(client, grammars, "choice", json.dumps(["red wine", "red", 'a "quote"\n'])).text in (
            "red wine", "red", 'a "quote"\n',
        )  # fmt: skip
        for grammar in ('start: "(" (start | "x") ")"', 'root ::= "(" (root | "x") ")"'):
            result = answer(client, grammars, "grammar", grammar)
            assert re.fullmatch(r"\(+x\)+", result.text) or result.finish == "length"
            assert result.text.count("(") >= result.text.count(")")


@pytest.mark.parametrize("kind", ["none", "eagle"])
def test_answer_ends_when_complete_or_at_max_tokens(target_dir: Path, grammars: GrammarCompiler, kind: str) -> None:
    with running(target_dir, kind) as client:
        whole = answer(client, grammars, "regex", "abc[de]f")
        assert (whole.finish, len(whole.tokens), whole.text[:3]) == ("stop", 5, "abc")
        cut = answer(client, grammars, "regex", "abc[de]f", tokens=3)
        assert (cut.finish, cut.text) == ("length", "abc")
        assert answer(client, grammars, "regex", "abcdef", tokens=6).finish == "stop"
        # min_tokens delays the end only if the grammar allows another token.
        assert answer(client, grammars, "regex", "ab", min_tokens=5).text == "ab"
        assert answer(client, grammars, "regex", "(ab)+", tokens=9, min_tokens=8).text.startswith("abababab")
        assert answer(client, grammars, "regex", "abcdef", stop=("cd",)).text == "ab"
        assert answer(client, grammars, "regex", "abcdef", ignore_eos=True).finish == "stop"
        assert answer(client, grammars, "choice", '[""]').text == ""


def test_trace_and_logprobs_are_the_targets_without_the_grammar(
    target_dir: Path, oracle: Oracle, grammars: GrammarCompiler
) -> None:
    traces: list[Trace] = []
    with running(target_dir, "eagle", traces=traces) as client:
        result = answer(client, grammars, "json", json.dumps(PERSON), 70, capture=True, logprobs=2)
    (trace,) = traces
    assert trace.completion_ids.numpy().tolist() == result.tokens
    forced = result.counts.by_source["grammar"]
    assert forced.accepted > 20
    assert set(trace.sources) <= {"eagle"}, "no drafter is credited for forced tokens"
    accepted = int((trace.verdict.numpy() == ACCEPTED).sum())
    assert accepted == result.counts.accepted - forced.accepted
    with torch.no_grad():
        logits = oracle.model(input_ids=torch.tensor([prompts([12], seed=3)[0] + result.tokens])).logits[0, 11:-1]
    assert trace.target_ids.numpy()[:, 0].tolist() == logits.argmax(-1).tolist()
    assert len(result.logprobs) == len(result.tokens)
    for place, row in zip(result.logprobs, logits.log_softmax(-1), strict=True):
        assert place.logprob == pytest.approx(float(row[place.token]), abs=1e-3)
        assert [token for token, _ in place.top] == row.topk(2).indices.tolist()


def test_seeded_answer_is_the_same_with_and_without_drafts(target_dir: Path, grammars: GrammarCompiler) -> None:
    sampling = SamplingParams(0.9, seed=5, repeatable=True)
    text = json.dumps(PERSON)
    answers = {}
    for kind in ("none", "eagle"):
        with running(target_dir, kind) as client:
            answers[kind] = answer(client, grammars, "json", text, 70, sampling=sampling).tokens
            assert (
                answer(client, grammars, "json", text, 70, sampling=sampling, speculate=False).tokens == answers[kind]
            )
    assert answers["none"] == answers["eagle"]


def test_recall_learns_unmasked_target_distributions(
    target_dir: Path, oracle: Oracle, grammars: GrammarCompiler
) -> None:
    prompt = prompts([12], seed=3)[0]
    goal = oracle.greedy(prompt, 12)
    kept = []
    with running(target_dir, drafter=Recall(), growth=BestFirstSettings(governed=False)) as client:
        session = client.engine.pool.default.session
        remember = session.remember

        def spy(slot, got, other_rows=None):
            if got.rows is not None:
                kept.append(got.rows.top.ids[0].tolist())
            remember(slot, got, other_rows)

        session.remember = spy
        first = answer(client, grammars, "regex", "a[0-9]{4}", capture=True)
        client.submit("free", prompt, 12, ignore_eos=True)
        assert client.wait()["free"].tokens == goal
    assert first.tokens[0] != goal[0]
    assert kept[0][0] == goal[0], "the target's most probable token, which the grammar forbids"


WALKS = {
    "json": json.dumps(PERSON),
    "regex": "(ab|abc|b{2,5})*x?",
    "choice": json.dumps(["red", "red wine", "rose", ""]),
    "grammar": 'start: "(" start ")" | NAME ("," start)?\nNAME: /[a-c]+/',
}


@pytest.mark.parametrize("kind", WALKS)
def test_masks_depend_only_on_the_tokens(grammars: GrammarCompiler, kind: str) -> None:
    grammar, chance = grammars.compile(kind, WALKS[kind]), random.Random(1)  # noqa: S311 - the same

    def walk(constraint: GrammarConstraint, busy: bool) -> list[Any]:
        results: list[Any] = []
        for token in path:
            if busy:
                for _ in range(4):
                    constraint.allowed(tuple(chance.randrange(VOCABULARY) for _ in range(chance.randrange(4))))
                    constraint.allowed(tuple(path[len(results) : len(results) + chance.randrange(5)]))
                    constraint.forced(chance.randrange(9))
            results.append((constraint.allowed(()).tolist(), constraint.forced(9), constraint.complete))
            constraint.advance(token)
        return results

    for _ in range(5):
        path: list[int] = []
        here = GrammarConstraint(grammar)
        while len(path) < 25 and not here.complete:
            mask = here.allowed(())
            path.append(chance.choice([token for token in np.flatnonzero(mask).tolist() if token != END]))
            here.advance(path[-1])
        assert walk(GrammarConstraint(grammar), busy=True) == walk(GrammarConstraint(grammar), busy=False)


def test_pruned_tree_has_only_allowed_nodes(grammars: GrammarCompiler) -> None:
    a, b, c, x = ids("abcx")
    constraint = GrammarConstraint(grammars.compile("regex", "ab(c|a)x"))
    tree = Tree(
        [a, x, b, b, c, x], [ROOT, ROOT, 0, 1, 2, 4], ["s0", "s1", "s2", "s3", "s4", "s5"],
        [-1, -2, -3, -4], [1, 2, 7, 6], [0.9, 0.8, 0.7, 0.6, 0.5, 0.4],
    )  # fmt: skip
    result = pruned(tree, constraint)
    assert result == Tree(
        [a, b, c, x], [ROOT, 0, 1, 2], ["s0", "s2", "s4", "s5"], [-2, -3], [1, 4], [0.9, 0.7, 0.5, 0.4]
    )
    assert pruned(result, constraint) is result
    assert pruned(tree, None) is tree
    assert pruned(Tree([b], [ROOT], ["s"]), constraint).tokens == []


LETTERS = "abcdefghijklmnopqrst"
REFUSED = {
    "no regex": ("regex", "(a", "no regular expression"),
    "look-ahead": ("regex", "a(?=b)", "no regular expression"),
    "nothing matches": ("regex", r"[^\x00-\x{10FFFF}]", "satisfied by no text"),
    "explodes": ("grammar", "start: " + " & ".join(f"/(.*{letter}.*){{9}}/" for letter in LETTERS), "is "),
    "no type": ("json", '{"type": "strin"}', "no JSON Schema"),
    "keyword": (
        "json",
        '{"type": "array", "uniqueItems": true, "contains": {}}',
        "not supported: contains, uniqueItems",
    ),
    "hidden keyword": ("json", '{"x-guidance": {"lenient": true}, "not": {}}', "not supported: not"),
    "one of": ("json", '{"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}', "anyOf is"),
    "unsatisfiable": ("json", '{"type": "integer", "minimum": 3, "maximum": 1}', "satisfied by no text"),
    "patterns": (
        "json",
        json.dumps({"allOf": [{"type": "string", "pattern": f"a.*{c}"} for c in LETTERS]}),
        "more than the 100 ms",
    ),
    "division": ("json", '{"type": "integer", "multipleOf": 1234567}', "more than the 100 ms"),
    "deep": ("json", '{"type":"array","items":' * 400 + "{}" + "}" * 400, "is "),
    "ref": ("json", '{"$ref": "http://127.0.0.1/x"}', "no JSON Schema"),
    "quoted message": ("json", '{"type": "string", "format": "Unimplemented keys: [x]"}', "no JSON Schema"),
    "rule": ("grammar", 'start: "a" nothing', "no grammar"),
    "circle": ("grammar", "start: x\nx: y\ny: x", "satisfied by no text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_grammar_is_refused_by_the_checking_process(
    grammars: GrammarCompiler, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, text, why = REFUSED[name]
    grammars.compile("regex", "a")  # starts the checking process
    monkeypatch.setattr("osd.engine.grammar.LLMatcher", lambda *_, **__: pytest.fail("it is compiled in this process"))
    with pytest.raises(GrammarError, match=re.escape(why)) as caught:
        grammars.compile(kind, text)
    assert len(str(caught.value)) < 120
    assert grammars.compile("regex", "a") is grammars.compile("regex", "a")


def test_full_grammar_space_is_renewed_for_later_answers() -> None:
    compiled = LLMatcher.grammar_from_regex("(a[a-c]{0,500}|b[a-c]{0,600}|c[a-c]{0,700})!")
    tokens, made = wrapped(tokenizer(), VOCABULARY, frozenset({END})), []
    limits = LLParserLimits(max_lexer_states=150, verbose_errors=False)

    def make() -> LLMatcher:
        made.append(LLMatcher(tokens, compiled, log_level=0, limits=limits))
        return made[-1]

    grammar = Grammar(VOCABULARY, frozenset({END}), make)
    for letter in ids("abcabc"):
        constraint = GrammarConstraint(grammar)
        for _ in range(100):
            constraint.advance(letter)
            mask = constraint.allowed((letter,))
            assert set(np.flatnonzero(mask).tolist()) == set(ids("abc!"))
    assert 4 < len(made) < 8
    longest = GrammarConstraint(grammar)

    def go_on() -> None:
        for _ in range(500):
            longest.advance(letter)

    with pytest.raises(GrammarError):  # an answer that uses up too much space ends
        go_on()
    assert len(made) < 20


def test_used_grammar_space_is_replaced_for_later_answers(grammars: GrammarCompiler) -> None:
    grammar, (letter,) = grammars.compile("regex", "[a-c]*!"), ids("b")
    running = GrammarConstraint(grammar)
    for _ in range(SPACE_TOKENS - 1):
        running.advance(letter)
    assert grammars.compile("regex", "[a-c]*!").numbered()[0] == 0
    GrammarConstraint(grammar).advance(letter)
    assert [grammars.compile("regex", "[a-c]*!").numbered()[0] for _ in range(2)] == [1, 1]
    for constraint in (running, GrammarConstraint(grammar)):
        constraint.advance(letter)
        mask = constraint.allowed(())
        assert set(np.flatnonzero(mask).tolist()) == set(ids("abc!"))


def test_checking_process_restarts_after_it_was_killed() -> None:
    before = set(psutil.Process().children())
    with closing(GrammarCompiler(tokenizer(), VOCABULARY, [END])) as compiler:
        compiler.compile("regex", "before")
        (process,) = set(psutil.Process().children()) - before
        process.kill()
        process.wait()
        assert compiler.compile("regex", "after")


def test_text_tokens_in_angle_brackets_are_text(target_dir: Path) -> None:
    extended = tokenizer()
    extended.add_tokens([AddedToken("<call>", special=False, normalized=False)])
    with closing(GrammarCompiler(extended, VOCABULARY + 1, [END])) as grammars:
        constraint = GrammarConstraint(grammars.compile("regex", "a<call></s>[bc]"))
        path: list[int] = []
        while not constraint.complete:
            mask = constraint.allowed(())
            path.append(int(np.flatnonzero(mask)[-1]))
            constraint.advance(path[-1])
        assert extended.decode(path) == "a<call></s>c"
        assert VOCABULARY in path
        assert END not in path


def limited(text: str, states: int) -> Grammar:
    """Return the grammar of a regular expression that computes at most ``states`` states."""
    tokens, compiled = wrapped(tokenizer(), VOCABULARY, frozenset({END})), LLMatcher.grammar_from_regex(text)
    limits = LLParserLimits(max_lexer_states=states, verbose_errors=False)
    return Grammar(VOCABULARY, frozenset({END}), lambda: LLMatcher(tokens, compiled, log_level=0, limits=limits))


@pytest.mark.parametrize("kind", ["none", "eagle", "recall"])
def test_too_complex_grammars_leave_the_engine_healthy(target_dir: Path, oracle: Oracle, kind: str) -> None:
    grammar, prompt = limited("[a-c]{0,500}!", 16), prompts([12], seed=3)[0]
    with running(target_dir, drafter=drafter_of(kind, target_dir), slots=8) as client:
        client.submit("free", prompt, 100, ignore_eos=True)
        for number in range(6):
            client.submit(f"{number}", prompt, 100, grammar=grammar)
        client.wait()
        for number in range(6, MAX_FAILED_REQUESTS + 6):
            client.submit(f"{number}", prompt, 100, grammar=grammar)
        results = client.wait()
        client.settled()
        client.engine.check_health()
        counters = client.engine.counters()
    assert results["free"].tokens == oracle.greedy(prompt, 100)
    assert (counters.grammar_failed, counters.failed) == (MAX_FAILED_REQUESTS + 6, 0)
    del results["free"]
    why = re.compile(r"became too complex after \d+ tokens of the answer: simplify it")
    assert all(why.fullmatch(result.last.refusal) for result in results.values())


AMBIGUOUS = 'start: "a" | start start'


def test_grammar_that_takes_too_much_work_ends_its_answer(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = GrammarConstraint(grammars.compile("grammar", AMBIGUOUS))
    monkeypatch.setattr("osd.engine.constraint.FIRST_SECONDS", 0.05)
    monkeypatch.setattr("osd.engine.constraint.TOKEN_SECONDS", 0.0)

    def go_on() -> None:
        for _ in range(600):
            constraint.advance(*ids("a"))

    with pytest.raises(GrammarError, match=r"takes more than the 50 ms of work .* for \d+ tokens: simplify it"):
        go_on()


def test_grammar_with_too_many_alternatives_ends_its_answer(grammars: GrammarCompiler) -> None:
    names = [f"name{number}" for number in range(300)]
    properties: dict[str, Any] = {"type": "object", "properties": {name: {"type": "null"} for name in names}}
    GrammarConstraint(grammars.compile("json", json.dumps({**properties, "required": names}))).advance(*ids("{"))
    with pytest.raises(GrammarError, match="too complex after 1 tokens"):  # any of 300 properties may come next
        GrammarConstraint(grammars.compile("json", json.dumps(properties))).advance(*ids("{"))


def test_choice_may_have_the_largest_number_of_entries(grammars: GrammarCompiler) -> None:
    choices = [f"choice {number:04}" for number in range(MOST_CHOICES)]
    constraint = GrammarConstraint(grammars.compile("choice", json.dumps(choices)))
    for token in ids(choices[-1]):
        assert constraint.allowed(())[token]
        constraint.advance(token)
    assert constraint.complete


def test_work_for_drafts_is_limited_and_ends_no_answer(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("osd.engine.constraint.FIRST_SECONDS", 0.05)
    monkeypatch.setattr("osd.engine.constraint.TOKEN_SECONDS", 0.0)
    constraint, letters = GrammarConstraint(grammars.compile("grammar", AMBIGUOUS)), ids("a") * 300
    chain = Tree.chain(letters, "s")
    kept = len(pruned(chain, constraint).tokens)
    assert 0 < kept < 300
    assert not constraint.may_draft
    assert constraint.forced(4) == []
    assert pruned(chain, constraint).tokens == []
    constraint.advance(letters[0])
    assert constraint.allowed(()) is not None


def test_draft_keeps_no_node_after_which_the_grammar_fails() -> None:
    constraint, letters = GrammarConstraint(limited("[a-c]{0,500}!", 60)), ids("a") * 200
    kept = pruned(Tree.chain(letters, "s"), constraint).tokens
    assert 0 < len(kept) < 200
    for letter in kept:
        constraint.advance(letter)
    assert not constraint.may_draft


@pytest.mark.parametrize("method", ["try_consume_tokens", "compute_ff_tokens"])
def test_error_in_the_grammar_library_ends_one_request(
    target_dir: Path, oracle: Oracle, grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    class FailingMatcher:
        """Matcher with a method that fails from the tenth call on."""

        def __init__(self, matcher: LLMatcher) -> None:
            self._matcher, self._calls = matcher, 0

        def __getattr__(self, name: str) -> Any:
            self._calls += name == method
            if name == method and self._calls > 9:
                raise RuntimeError("the library fails")
            return getattr(self._matcher, name)

    grammar, prompt = grammars.compile("regex", "[a-z]{0,60}!"), prompts([12], seed=3)[0]
    whole = None
    with running(target_dir, "eagle") as client:
        client.submit("whole", prompt, 40, grammar=grammar)
        whole = client.wait()["whole"].tokens
        numbered = Grammar.numbered
        monkeypatch.setattr(Grammar, "numbered", lambda self: (0, FailingMatcher(numbered(self)[1])))
        client.submit("fails", prompt, 40, grammar=grammar)
        client.submit("free", prompt, 40, ignore_eos=True)
        results = client.wait()
        client.engine.check_health()
        assert client.engine.counters().failed == 0
    assert results["free"].tokens == oracle.greedy(prompt, 40)
    if method == "compute_ff_tokens":  # it computes drafts only
        assert results["fails"].tokens == whole
    else:
        assert results["fails"].finish == "error"
        assert results["fails"].tokens == whole[: len(results["fails"].tokens)]


def test_mask_after_an_interrupted_draft_is_never_wrong(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        """Matcher that does not roll back the tokens of the first draft."""

        def __init__(self, matcher: LLMatcher) -> None:
            self._matcher, self._failed = matcher, False

        def __getattr__(self, name: str) -> Any:
            if name == "rollback" and not self._failed:
                self._failed = True
                raise RuntimeError("interrupted")
            return getattr(self._matcher, name)

    a, b = ids("ab")
    numbered = Grammar.numbered
    monkeypatch.setattr(Grammar, "numbered", lambda self: (0, Interrupted(numbered(self)[1])))
    constraint = GrammarConstraint(grammars.compile("regex", "[ab]b?c"))
    assert constraint.allowed((a,)) is None
    with pytest.raises(GrammarError):  # its matcher is after "ab", where only "c" is allowed
        constraint.advance(b)


def test_answer_has_no_drafts_while_its_grammar_refuses_them(
    target_dir: Path, grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(1.0, seed=3)
    with running(target_dir, "eagle") as client:
        drafted = answer(client, grammars, "regex", "[a-z]{30}", sampling=sampling).counts.drafted
        monkeypatch.setattr(GrammarConstraint, "may_draft", property(lambda _: False))
        result = answer(client, grammars, "regex", "[a-z]{30}", sampling=sampling)
    assert drafted > 0
    assert (result.counts.drafted, len(result.tokens)) == (0, 30)


def test_cached_grammars_are_limited_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osd.engine.grammar.MAX_CACHED_BYTES", 3 * STATES_BYTES)
    with closing(GrammarCompiler(tokenizer(), VOCABULARY, [END])) as compiler:
        first, second = compiler.compile("regex", "a"), compiler.compile("regex", "b")
        assert compiler.compile("regex", "a") is first
        compiler.compile("regex", "c" * (STATES_BYTES // BYTES_PER_CHARACTER // 4))  # with two others it is too large
        assert compiler.compile("regex", "a") is first
        assert compiler.compile("regex", "b") is not second

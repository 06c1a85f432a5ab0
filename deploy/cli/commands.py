"""Commands of ``osd`` that start a service, a trainer or a check on this machine. Imports are deferred to the run."""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from osd.cli.common import (
    ADDRESS_SETTINGS,
    AsJson,
    ConfigFile,
    Domain,
    Host,
    Overrides,
    Port,
    fail,
    named_settings,
    setting_option,
    settings_of,
)
from osd.cli.exit_codes import FAILURE
from osd.cli.offered import Command
from osd.cli.signals import stop_signals

if TYPE_CHECKING:
    from rich.console import Console

    from deploy.assembly import Assembly
    from deploy.deployment import Head
    from deploy.doctor.findings import Finding
    from deploy.embedded import Embedded
    from deploy.learning import Learning
    from osd.config import Settings

    _Assembly = TypeVar("_Assembly", bound=Assembly)

logger = logging.getLogger(__name__)

_TELL_SECONDS, _DEPLOY_SECONDS = 60.0, 1800.0


_SETTINGS_OF_OPTIONS = {
    "MODEL": "target.source",
    **ADDRESS_SETTINGS,
    "--max-model-len": "engine.context",
    "--max-num-seqs": "engine.slots",
    "--dtype": "target.dtype",
    "--tensor-parallel-size": "target.tensor_parallel",
    "--served-model-name": "serving.model_name",
    "--api-key-file": "serving.api_key_file",
}
"""Settings that ``osd up`` also takes by the names of vLLM's options."""


def _option(name: str) -> Any:
    return setting_option(name, _SETTINGS_OF_OPTIONS[name])


def up(
    model: Annotated[
        str | None, typer.Argument(help="Hub id, directory or .gguf file of the target: target.source.")
    ] = None,
    host: Host = None,
    port: Port = None,
    max_model_len: Annotated[str | None, _option("--max-model-len")] = None,
    max_num_seqs: Annotated[str | None, _option("--max-num-seqs")] = None,
    dtype: Annotated[str | None, _option("--dtype")] = None,
    tensor_parallel_size: Annotated[str | None, _option("--tensor-parallel-size")] = None,
    served_model_name: Annotated[str | None, _option("--served-model-name")] = None,
    api_key_file: Annotated[str | None, _option("--api-key-file")] = None,
    domain: Domain = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Serve, learn and swap on this machine until Ctrl-C.

    MODEL and the options that vLLM has too are short forms of settings.
    """
    values = (
        model, host, port, max_model_len, max_num_seqs, dtype, tensor_parallel_size, served_model_name, api_key_file,
    )  # fmt: skip
    settings = settings_of(config, overrides, named_settings(_SETTINGS_OF_OPTIONS, values), domain)
    from deploy.cli.starts import start_errors

    with stop_signals(), start_errors():
        console = _console(settings, "up")
        from deploy.embedded import Embedded

        notice = (
            f"starting a service of {settings.target.source}; this can take half a minute, and longer if the model "
            "is downloaded first"
        )
        service = _start(Embedded, settings, console, notice)
        try:
            logger.info(
                "the service answers at %s", service.url, extra={"event": "started", "fields": {"url": service.url}}
            )
            console.print(f"OpenAI API  {service.url}/v1\nDashboard   {service.url}/dashboard")
            console.print(f"Metrics     {service.url}/metrics\nModel       {settings.model_id}", soft_wrap=True)
            if settings.engine.kind == "osd":
                from osd.target.context import describe_context

                _say(console, "Context", describe_context(settings, service.directory))
            _say_learning(console, settings)
            console.print("Ctrl-C stops everything.")
            _tell(console, f"started: {service.about()}")
            with _warm_start(service) as news:
                _follow(service, console, news)
        finally:
            service.stop(lambda step: _tell(console, step))


def learn(
    capture: Annotated[
        bool, typer.Option("--capture", help="Learn from traces of vLLM, and run no second copy of the target.")
    ] = False,
    domain: Domain = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Train drafters on traffic that osd tap or vLLM captures, without serving, until Ctrl-C."""
    settings = settings_of(config, overrides, domain=domain)
    from deploy.cli.starts import start_errors

    with stop_signals(), start_errors():
        console = _console(settings, "learn")
        from deploy.learning import Learning

        notice = f"starting a trainer for {settings.target.source}"
        learning = _start(partial(Learning, capture=capture), settings, console, notice)
        try:
            source = "a vLLM with OSD_VLLM_CAPTURE=1" if capture else "osd tap"
            console.print(f"Dashboard   {learning.dashboard}")
            _say(console, "Learning", f"from the traffic that {source} captures")
            console.print("Ctrl-C stops the trainer.")
            _follow(learning, console, _training(learning))
        finally:
            learning.stop()


def demo(
    minutes: Annotated[
        float, typer.Option(min=0.1, max=60, help="Minutes of live traffic before the measurement.")
    ] = 3.5,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Write the figures to this JSON file, and a plot to the same name with .svg.", metavar="FILE"
        ),
    ] = None,
    source: Annotated[str, typer.Option(help="Prompts: unittest, stdlib, pydoc or a JSON lines file.")] = "unittest",
    rate: Annotated[float, typer.Option(min=0.01, help="Requests a second.")] = 0.5,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Watch a fresh drafter learn from live traffic, and measure its speed-up on unseen prompts."""
    settings = settings_of(config, overrides)
    if report is not None and not report.absolute().parent.is_dir():
        fail(f"--report {report}: there is no directory {report.absolute().parent}")
    if report is not None and report.suffix == ".svg":
        fail(f"--report {report}: the plot of the report has this name: use a name with .json")
    if not (settings.trains and settings.capture.enabled):
        fail("the demo needs a trainable drafter.kind, trainer.enabled and capture.enabled")
    if settings.engine.kind != "osd":
        fail("the demo measures our own engine: leave engine.kind unset")
    if settings.serving.keys_file is not None:
        fail("the demo sends requests and has no key of serving.keys_file: use serving.api_key")
    from deploy.cli.starts import start_errors
    from deploy.demo.run import DemoPlan, run
    from osd.traffic.prompt import TrafficError

    with stop_signals(), start_errors(TrafficError):
        run(settings, DemoPlan(source, minutes, rate), report)


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="hub id, directory or .gguf file to check instead of this machine")
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="Check the Ray cluster of this node for a deployment file instead.", metavar="FILE"),
    ] = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Check packages, settings, CPU, GPU, memory, disk, Redis and port, and decode a tiny model.

    With MODEL, check its files, architecture and tokenizer, and compare its logits with those of transformers; this
    may load the model twice. With --cluster, check the token, Ray, Redis, home, secrets and GPUs of all nodes. No
    started process remains. The exit code is 1 if osd up, or osd deploy, would fail.
    """
    settings = settings_of(config, overrides)
    if cluster is not None and (model is not None or config is not None or overrides):
        fail("--cluster takes its settings from FILE: leave out MODEL, --config and --set")
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    colours = {"ok": "green", "warning": "yellow", "failure": "red"}
    failed = False
    with Console(stderr=True).status("importing ...") as status:
        checks = _checks(settings, model, cluster)
        status.update("checking ...")
        for finding in checks:
            failed |= finding.state == "failure"
            if as_json:
                typer.echo(json.dumps(asdict(finding)))
                continue
            row = Table.grid(padding=(0, 2, 0, 0))
            row.add_column(width=9)
            row.add_column(width=7)
            row.add_column(overflow="fold")
            row.add_row(finding.check, f"[{colours[finding.state]}]{finding.state}[/]", escape(finding.says))
            console.print(row)
    if failed:
        raise typer.Exit(FAILURE)


def deploy(
    file: Annotated[Path, typer.Argument(help="deployment file, such as deploy/serve.yaml", metavar="FILE")],
    as_json: AsJson = False,
) -> None:
    """Deploy the service to the Ray cluster of this node, or change the running service.

    The file and the cluster are checked first, as by osd doctor --cluster FILE; a failure leaves the running service
    as it is. The command ends when all replicas run.
    """
    from rich.console import Console

    from deploy.cluster import checked_settings
    from deploy.deployment import ClusterError, Head, read_deployment, read_token
    from osd.config import ConfigError

    try:
        deployment = read_deployment(file)
        with Console(stderr=True, highlight=False).status("checking the cluster ...") as status:
            from deploy.doctor.cluster import cluster_findings

            for finding in cluster_findings(file):
                if finding.state == "failure":
                    fail(finding.says)
            head = Head(read_token())
            head.deploy(deployment.config)
            status.update("starting the replicas ...")
            running = _await_deployment(head, deployment.config["applications"][0].get("name", "default"))
    except (ConfigError, ClusterError) as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps({"replicas": running}))
        return
    typer.echo(f"{running} replica{'s' * (running != 1)} run")
    _say_learning(Console(highlight=False), checked_settings(deployment.args))


def warm_up(
    prompts: Annotated[
        str | None,
        typer.Option(help="JSON lines of prompts, or unittest, stdlib or pydoc; else all of these.", metavar="FILE"),
    ] = None,
    minutes: Annotated[float, typer.Option(min=1.0, help="For everything.")] = 8.0,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Train a drafter and fill recall from answers of the target before the first request.

    Every service of this home with the same target and drafter starts from the result in domains without a version.
    The target writes half of the prompts. Prompts are never deleted, unlike traffic: do not pass users' text.
    """
    settings = settings_of(config, overrides)
    if not settings.drafts:
        fail("drafter.kind none learns nothing")
    from rich.console import Console
    from transformers.utils import logging as progress

    from deploy.cli.starts import start_errors
    from deploy.seeding import load_prompts
    from deploy.warm_up import WarmUpError
    from deploy.warm_up import warm_up as run
    from osd.traffic.prompt import TrafficError

    progress.disable_progress_bar()
    with (
        stop_signals(),
        start_errors(TrafficError, WarmUpError, OSError),
        Console(stderr=True, highlight=False).status("starting ...") as status,
    ):
        warmed = run(settings, load_prompts(prompts), minutes, lambda step: status.update(f"{step} ..."))
    if as_json:
        typer.echo(json.dumps(asdict(warmed)))
        return
    drafter = f"the drafter's version {1 + warmed.versions}" if warmed.drafter else "no drafter better than the first"
    recalled = " and recall's table" if warmed.recalled else ""
    typer.echo(f"{warmed.requests} answers of {warmed.tokens} tokens; kept {drafter}{recalled}")


def install_vllm(
    directory: Annotated[Path, typer.Argument(help="New directory for the environment.", metavar="DIR")],
    device: Annotated[
        Literal["auto", "cuda", "cpu"], typer.Option(help="Device of vLLM's build; auto looks for a GPU from NVIDIA.")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Make an environment with vLLM for replicas with engine.kind=vllm.

    It gets vLLM, or its build for CPUs, and the packages that a replica needs, in fixed versions. Python and Ray are
    those of this environment.
    """
    from deploy.vllm.environment import PythonError
    from deploy.vllm.install import InstallError, install

    try:
        has_gpu = None if device == "auto" else device == "cuda"
        python = install(directory, has_gpu, lambda step: typer.echo(step, err=True))
    except (InstallError, PythonError) as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps({"python": str(python)}))
        return
    typer.echo(f"osd up --set engine.kind=vllm --set engine.vllm.python={shlex.quote(str(python))}")


COMMANDS = tuple(
    Command(words, f"{__name__}:{function.__name__}", (function.__doc__ or "").partition("\n")[0])
    for words, function in {
        "up": up,
        "demo": demo,
        "learn": learn,
        "doctor": doctor,
        "deploy": deploy,
        "drafters warm-up": warm_up,
        "vllm install": install_vllm,
    }.items()
)
"""Table of the commands, read by ``osd`` from the entry point."""


def learned_traffic(settings: Settings) -> str:
    """Return a line about the requests that a service captures and learns from, and the setting that decides it."""
    if not settings.capture.enabled or not (settings.drafts or settings.engine.kind == "osd"):
        return "from no request"
    requests = 'requests with "store": true, because serving.capture_default is false'
    if settings.serving.capture_default:
        requests = 'all that do not set "store": false; serving.capture_default=false requires "store": true'
    if settings.trains or _recalls(settings):
        return f"from captured requests: {requests}"
    return f"from no request; capture.enabled=true captures {requests}"


def shared_learning(settings: Settings) -> str:
    """Return a line about the clients that share drafters, and the settings that separate them.

    The line is empty for a service without keys, or that learns from no request.
    """
    serving, recalls = settings.serving, _recalls(settings)
    if (
        not (settings.capture.enabled and (settings.trains or recalls))
        or (serving.keys_file or serving.api_key) is None
    ):
        return ""
    trained = ["the trained drafter"] * settings.trains
    both = " and ".join(["recall"] * recalls + trained)
    if serving.keys_file is None:
        return f"all clients share {both}; tenants in serving.keys_file separate them"
    separated = "a tenant in serving.keys_file separates a key"
    if settings.engine.kind == "vllm":
        return f"all keys share the trained drafter, which learns from keys without a tenant; {separated}"
    tenants = "data of a tenant serves this tenant only"
    if not recalls:
        return f"{tenants}; other keys share {both}; {separated}"
    if settings.recall.shared:
        return f"{tenants}; other keys share {both}; drafter.recall.shared=false separates recall, {separated}"
    others = "".join(f", and share {name}" for name in trained)
    return (
        f"{tenants}; other keys have a recall of their own, because drafter.recall.shared is false{others}; {separated}"
    )


def _recalls(settings: Settings) -> bool:
    return settings.recalls and settings.engine.kind == "osd"


def _checks(settings: Settings, model: str | None, cluster: Path | None) -> Iterator[Finding]:
    """Return the checks of a cluster, of a model, or of this machine."""
    if cluster is not None:
        from deploy.doctor.cluster import cluster_findings

        return cluster_findings(cluster)
    if model is not None:
        from deploy.doctor.model import model_findings

        return model_findings(settings, model)
    from deploy.doctor.findings import findings

    return findings(settings)


def _await_deployment(head: Head, name: str) -> int:
    """Wait until an application runs, and return the number of its replicas; exit if it fails."""
    from deploy.local_serve import error_line

    deadline = time.monotonic() + _DEPLOY_SECONDS
    while True:
        status, message, running = head.state(name)
        if status == "RUNNING":
            return running
        if status == "DEPLOY_FAILED":
            fail(error_line(message) or " ".join(message.split())[:300], FAILURE)
        if time.monotonic() > deadline:
            fail(f"the replicas do not run after {_DEPLOY_SECONDS:.0f} seconds: {status}; {message[:300]}", FAILURE)
        time.sleep(1)


def _console(settings: Settings, command: str) -> Console:
    """Set up the log of a command and return its console, which is quiet if the log is lines of JSON."""
    from rich.console import Console

    from osd import logs

    in_lines = logs.set_up(settings.log, command) is not None
    return Console(stderr=True, highlight=False, quiet=in_lines)


def _start(kind: Callable[..., _Assembly], settings: Settings, console: Console, notice: str) -> _Assembly:
    """Start an assembly; a terminal shows each slow step, and other outputs show ``notice`` at the first step."""
    is_shown = console.is_terminal and not console.quiet
    notices = iter([] if is_shown else [notice])  # steps come from two threads, and each line of a list from one

    with console.status("starting ...") as status:

        def report(step: str) -> None:
            for line in notices:
                _tell(console, line)
            status.update(f"{step} ...")

        running = kind(settings, report)
        running.start()
    return running


def _follow(running: Embedded | Learning, console: Console, news: Callable[[], Iterable[str]]) -> None:
    """Print version events and ``news`` until the process receives a stop signal."""
    from redis.exceptions import RedisError

    from osd.registry.events import Events

    seen: list[dict[str, Any]] | None = None
    with Events(running.redis_url) as events:
        while True:
            running.check()
            for line in news():
                _tell(console, line)
            with suppress(RedisError):
                recent = events.recent(20, steps=False)
                for event in () if seen is None else (event for event in recent if event not in seen):
                    _tell(console, event_line(event, running.settings.domain), event["time"])
                seen = recent
            time.sleep(1)


def event_line(event: Mapping[str, Any], domain: str) -> str:
    """Return a line about an event of a version; it names the domain unless it is ``domain``."""
    reason = f": {event['reason']}" if event.get("reason") else ""
    owner = "" if event["domain"] == domain else f" of {event['domain']}"
    if event["kind"] == "rolled_back":
        return f"rolled back from version {event['previous']} to {event['version']}{owner}{reason}"
    subject = "candidate" if event["version"] is None else f"version {event['version']}"
    return f"{subject}{owner} {event['kind'].replace('_', ' ')}{reason}"


def _say(console: Console, name: str, text: str) -> None:
    """Log and print a line about the service."""
    logger.info("%s: %s", name, text)
    console.print(f"{name:<12}{text}", soft_wrap=True)


def _say_learning(console: Console, settings: Settings) -> None:
    """Log and print which requests a service learns from, and what clients share."""
    _say(console, "Learning", learned_traffic(settings))
    if shared := shared_learning(settings):
        _say(console, "Sharing", shared)


def _tell(console: Console, line: str, at: float | None = None) -> None:
    """Log an event, and print it with its time ``at`` (seconds since 1970), by default now."""
    logger.info("%s", line)
    console.print(f"{time.strftime('%H:%M:%S', time.localtime(at))}  {line}", soft_wrap=True)


@contextmanager
def _warm_start(service: Embedded) -> Generator[Callable[[], Iterable[str]]]:
    """Run the warm start if ``trainer.warm_start`` is set; yield a function that yields its new states."""
    if not service.settings.trainer.warm_start:
        yield list
        return
    from deploy.warm_start import WarmStart

    warm, shown = WarmStart(service), ""

    def news() -> Iterator[str]:
        nonlocal shown
        if (state := warm.state) != shown:
            shown = state
            yield state

    try:
        yield news
    finally:
        warm.close()


def _training(learning: Learning) -> Callable[[], Iterable[str]]:
    """Return a function that yields new failures of the trainer and, once a minute, its record counts."""
    shown_at, shown, failure = 0.0, "", ""

    def news() -> Iterator[str]:
        nonlocal shown_at, shown, failure
        status = learning.trainer.status()
        if status["failure"] != failure:
            failure = status["failure"]
            yield f"training failed: {failure}"
        if learning.teacher is None:
            source = f"{status['records']} traces read, {status['refused']} refused"
        else:
            counts = learning.teacher.counts
            source = f"{counts.read} exchanges read, {counts.refused} refused"
        now = f"{source}; {status['trained']} records trained on"
        if now != shown and time.monotonic() - shown_at > _TELL_SECONDS:
            shown_at, shown = time.monotonic(), now
            yield now

    return news

"""Command ``osd top``: live view of a running service in the terminal."""

from __future__ import annotations

import json
import time
from collections import deque
from typing import TYPE_CHECKING, Annotated, Any

import typer

from osd.addresses import uses_proxies
from osd.cli.common import (
    AsJson,
    ConfigFile,
    Host,
    OnlyDomain,
    Overrides,
    Port,
    Url,
    address_of,
    key_of,
    settings_of_client,
    unreachable,
)
from osd.cli.signals import stop_signals

if TYPE_CHECKING:
    import httpx2
    from rich.table import Table

    from osd.config import Settings
    from osd.scrape import Scrape, Span

_WINDOW = 10.0
"""Seconds over which rates and shares are computed."""

_LATENCIES = {
    "first token": "vllm:time_to_first_token_seconds",
    "between tokens": "vllm:inter_token_latency_seconds",
    "whole": "vllm:e2e_request_latency_seconds",
}
"""Histogram of each latency."""

_FEW = 100
"""Number of draft tokens below which no acceptance rate is shown, because it would be noise."""


def top(
    interval: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print a single view and exit.")] = False,
    domain: OnlyDomain = None,
    as_json: AsJson = False,
    host: Host = None,
    port: Port = None,
    url: Url = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Watch requests, speed, latency, drafts and training of a running service or osd learn; Ctrl-C ends it.

    Rates, shares and percentiles cover the last ten seconds; versions and totals cover the time since the start. With
    --domain the view has drafts, versions and training only: the other figures exist for the whole service only.
    """
    settings, url = settings_of_client(config, overrides, url, host, port, domain)
    import httpx2
    from rich.console import Console
    from rich.live import Live

    address = _address(settings, url)
    headers = {"Authorization": f"Bearer {key}"} if (key := key_of(settings)) else {}
    trusts = uses_proxies(address)
    with stop_signals(), httpx2.Client(base_url=address, headers=headers, timeout=10, trust_env=trusts) as http:
        scrapes = deque([_scrape(http, address, settings)])
        while once or as_json:
            time.sleep(interval)
            span = _span(scrapes, _scrape(http, address, settings))
            if as_json:
                typer.echo(json.dumps(figures(span) if domain is None else figures_of_domain(span, domain)))
            else:
                Console(highlight=False).print(_view(address, span, domain))
            if once:
                return
        with Live(refresh_per_second=4, screen=True) as live:
            while True:
                time.sleep(interval)
                live.update(_view(address, _span(scrapes, _scrape(http, address, settings)), domain))


def _address(settings: Settings, url: str | None) -> str:
    """Return the address of the metrics: those of the service, or of ``osd learn`` if it runs in the home directory."""
    from osd.running import find

    running = find(settings.home_dir) if url is None else None
    if running is not None and not running.url:
        return f"http://{settings.tap.host}:{settings.tap.dashboard_port}"
    return address_of(settings, url)


def _scrape(http: httpx2.Client, address: str, settings: Settings) -> Scrape:
    import httpx2

    from osd.scrape import Scrape

    try:
        answer = http.get("/metrics")
        answer.raise_for_status()
        return Scrape.of(answer.text, time.monotonic())
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        unreachable(settings, f"{address}/metrics", error)


def _span(scrapes: deque[Scrape], now: Scrape) -> Span:
    """Append ``now`` to ``scrapes`` and return the span of the last window, or a shorter span after the start."""
    from osd.scrape import Span

    while len(scrapes) > 1 and now.at - scrapes[1].at >= _WINDOW:
        scrapes.popleft()
    scrapes.append(now)
    return Span(scrapes[0], now)


def figures(span: Span) -> dict[str, Any]:
    """Return the figures of the view; times are in seconds, and what has no value is None."""
    now, shares = span.now, (0.5, 0.99)
    drafted = span.added_by("osd_source_draft_tokens_total", "source")
    accepted = span.added_by("osd_source_accepted_tokens_total", "source")
    return {
        "seconds": span.seconds,
        "running": now.sum("vllm:num_requests_running"),
        "waiting": now.sum("vllm:num_requests_waiting"),
        "ended": sum(span.added_by("vllm:request_success_total", "finished_reason").values()),
        "failed": span.added("osd_failed_requests_total"),
        "tokens_per_second": span.rate("osd_completion_tokens_total"),
        "kv_usage": now.sum("vllm:kv_cache_usage_perc"),
        "speedup": {bound: value for (bound,), value in now.by("osd_speedup", "bound").items()} or None,
        "latency": {
            label.replace(" ", "_"): dict(zip(("p50", "p99"), span.percentiles(name, shares), strict=True))
            for label, name in _LATENCIES.items()
        },
        "steps": span.added("vllm:spec_decode_num_drafts_total"),
        "sources": {
            source: {"drafted": count, "accepted": accepted.get((source,), 0.0)} for (source,), count in drafted.items()
        },
        "versions": _serving(now),
        "training": _training_figures(now),
    }


def figures_of_domain(span: Span, domain: str) -> dict[str, Any]:
    """Return the figures of the view of a domain: its drafts by version, its versions and its training."""
    span = span.with_labels(domain=domain)
    return {
        "seconds": span.seconds,
        "domain": domain,
        "steps": span.added("osd_version_rounds_total"),
        "drafts": _drafts_by_version(span),
        "versions": _serving(span.now),
        "training": _training_figures(span.now),
    }


def _serving(now: Scrape) -> dict[str, list[int]]:
    """Return the versions in service by domain."""
    versions: dict[str, list[int]] = {}
    for (domain, _), version in now.by("osd_drafter_version", "domain", "replica").items():
        versions[domain] = sorted({*versions.get(domain, ()), int(version)})
    return versions


def _training_figures(now: Scrape) -> dict[str, dict[str, float | None]]:
    losses = now.by("osd_training_loss", "domain")
    return {
        domain: {
            "steps": now.sum("osd_training_steps_total", domain=domain),
            "loss": losses.get((domain,)),
            "lag": lag,
        }
        for (domain,), lag in now.by("osd_training_lag", "domain").items()
    }


def _drafts_by_version(span: Span) -> dict[str, dict[str, float]]:
    """Return the drafted and the accepted tokens of the versions that drafted."""
    accepted = span.added_by("osd_version_accepted_tokens_total", "version")
    return {
        version: {"drafted": drafted, "accepted": accepted.get((version,), 0.0)}
        for (version,), drafted in span.added_by("osd_version_draft_tokens_total", "version").items()
        if drafted
    }


def _view(address: str, span: Span, domain: str | None) -> Table:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=9, style="bold")
    grid.add_column(overflow="fold")
    grid.add_row("osd", f"{address}, {time.strftime('%H:%M:%S')}, last {span.seconds:.0f} s")
    for name, text in _service_rows(span) if domain is None else _domain_rows(span.with_labels(domain=domain), domain):
        grid.add_row(name, text)
    return grid


def _service_rows(span: Span) -> list[tuple[str, str]]:
    return [
        ("requests", _requests(span)),
        ("speed", _speed(span)),
        ("speed-up", _speedup(span)),
        ("latency", _latency(span)),
        ("drafts", _drafts(span)),
        *(("", line) for line in _sources(span)),
        *(("versions", line) for line in _versions(span, swaps=True)),
        *_learning_rows(span),
    ]


def _domain_rows(span: Span, domain: str) -> list[tuple[str, str]]:
    drafted, kept = span.added("osd_version_draft_tokens_total"), span.added("osd_version_accepted_tokens_total")
    return [
        ("domain", f"{domain}; the other figures exist for the whole service only: leave out --domain"),
        ("drafts", _acceptance(kept, drafted, span.added("osd_version_rounds_total"))),
        *(
            ("", f"{_version_name(version)}: {_share(counts['accepted'], counts['drafted'])}")
            for version, counts in _drafts_by_version(span).items()
        ),
        # The number of swaps is that of all domains.
        *(("versions", line) for line in _versions(span, swaps=False)),
        *_learning_rows(span),
    ]


def _version_name(version: str) -> str:
    """Return the name of a drafter version; recall alone and initial weights draft without one."""
    return "no version" if version == "0" else f"version {version}"


def _learning_rows(span: Span) -> list[tuple[str, str]]:
    return [
        *(("traced", line) for line in _traced(span)),
        *(("training", line) for line in _training(span)),
    ]


def _requests(span: Span) -> str:
    now, failed = span.now, span.added("osd_failed_requests_total")
    ended = sum(span.added_by("vllm:request_success_total", "finished_reason").values()) / span.seconds
    refused = sum(
        count for (status,), count in span.added_by("osd_http_responses_total", "status").items() if status >= "400"
    )
    return (
        f"{now.sum('vllm:num_requests_running'):.0f} running, {now.sum('vllm:num_requests_waiting'):.0f} waiting, "
        f"{ended:.1f} ended per second, {failed:.0f} failed, {refused:.0f} responses with status 400 or above"
    )


def _speed(span: Span) -> str:
    replicas = len(span.now.by("osd_running_requests", "replica"))
    busy = span.rate("osd_busy_seconds_total") / max(replicas, 1)
    queries, hits = span.added("vllm:prefix_cache_queries_total"), span.added("vllm:prefix_cache_hits_total")
    cached = f", {hits / queries:.0%} of prompts cached" if queries else ""
    return (
        f"{span.rate('osd_completion_tokens_total'):,.0f} tokens/s, engine{'s' * (replicas > 1)} busy {busy:.0%}, "
        f"{span.now.sum('vllm:kv_cache_usage_perc'):.0%} of KV memory{cached}"
    )


def _speedup(span: Span) -> str:
    now = span.now
    bounds = {bound: value for (bound,), value in now.by("osd_speedup", "bound").items()}
    if "estimate" not in bounds:
        return "not measured yet"
    range_ = f" ({bounds['low']:.2f} to {bounds['high']:.2f})" if "low" in bounds else " (interval not known yet)"
    busy = now.sum("osd_busy_seconds_total")
    price = now.sum("osd_measuring_seconds_total") / busy if busy else 0.0
    off = f", drafting is off in {guarded:.0f} replicas" if (guarded := now.sum("osd_guarded_replicas")) else ""
    return f"{bounds['estimate']:.2f}{range_} over plain decoding at the same load, cost of measuring {price:.1%}{off}"


def _latency(span: Span) -> str:
    latencies: list[str] = []
    for label, name in _LATENCIES.items():
        middle, late = span.percentiles(name, (0.5, 0.99))
        if middle is not None and late is not None:
            latencies.append(f"{label} {_time(middle)}, p99 {_time(late)}")
    return "; ".join(latencies) or "no request ended"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _drafts(span: Span) -> str:
    drafted = span.added("vllm:spec_decode_num_draft_tokens_total")
    kept = span.added("vllm:spec_decode_num_accepted_tokens_total")
    return _acceptance(kept, drafted, span.added("vllm:spec_decode_num_drafts_total"))


def _acceptance(kept: float, drafted: float, steps: float) -> str:
    return f"{_share(kept, drafted)}, {1 + kept / steps:.2f} tokens per step" if steps else "none"


def _sources(span: Span) -> list[str]:
    kept = span.added_by("osd_source_accepted_tokens_total", "source")
    drafted = span.added_by("osd_source_draft_tokens_total", "source")
    return [f"{source}: {_share(kept.get((source,), 0), count)}" for (source,), count in drafted.items() if count]


def _share(kept: float, drafted: float) -> str:
    share = f"{kept / drafted:.0%}" if drafted >= _FEW else f"{kept:,.0f}"
    return f"{share} of {drafted:,.0f} tokens accepted"


def _versions(span: Span, swaps: bool) -> list[str]:
    """Return a line for each domain with the versions in service and, with ``swaps``, the number of swaps."""
    lines: list[str] = []
    swapped = span.now.by("osd_swaps_total", "domain") if swaps else {}
    for domain, versions in _serving(span.now).items():
        line = f"{domain}: {', '.join(map(str, versions))} in service"
        if (domain,) in swapped:
            line += f", {swapped[domain,]:.0f} swaps"
        lines.append(line)
    return lines


def _traced(span: Span) -> list[str]:
    """Return a line for each domain and drafter version in the traces of a vLLM."""
    labels = ("domain", "version", "position")
    accepted = span.now.by("osd_traced_accepted_tokens_total", *labels)
    lines: dict[tuple[str, ...], list[tuple[int, float, float]]] = {}
    for (*drafted_by, position), tested in span.now.by("osd_traced_tested_tokens_total", *labels).items():
        kept = accepted.get((*drafted_by, position), 0)
        lines.setdefault(tuple(drafted_by), []).append((int(position), kept, tested))
    return [
        f"{domain}: version {version}, {_share(sum(kept for _, kept, _ in row), sum(tested for *_, tested in row))}, "
        f"by position {', '.join(f'{kept / tested:.0%}' for _, kept, tested in sorted(row) if tested)}"
        for (domain, version), row in lines.items()
    ]


def _training(span: Span) -> list[str]:
    now = span.now
    lines: list[str] = []
    for (domain,), lag in now.by("osd_training_lag", "domain").items():
        line = f"{domain}: {now.sum('osd_training_steps_total', domain=domain):,.0f} steps"
        if domain in {known for (known,) in now.by("osd_training_loss", "domain")}:
            line += f", loss {now.sum('osd_training_loss', domain=domain):.3f}"
        verdicts = now.by("osd_gate_verdicts_total", "domain", "verdict")
        line += f", gate passed {verdicts.get((domain, 'passed'), 0):.0f}"
        line += f" and rejected {verdicts.get((domain, 'rejected'), 0):.0f}"
        lines += [f"{line}, {lag:,.0f} records waiting", *_training_lines(now, domain)]
    return lines


def _training_lines(now: Scrape, domain: str) -> list[str]:
    """Return lines with the cost of a domain's training and its measured gain."""
    computed = now.sum("osd_training_cpu_seconds_total", domain=domain)
    beside = now.sum("osd_training_beside_seconds_total", domain=domain)
    lost = now.sum("osd_training_slowed_seconds_total", domain=domain)
    line = f"{domain}: cost {computed + lost:,.0f} core seconds, {beside + lost:,.0f} of them while requests ran"
    gains = {
        bound: value for (of, bound), value in now.by("osd_training_speedup", "domain", "bound").items() if of == domain
    }
    resting = now.by("osd_resting_replicas", "domain").get((domain,), 0)
    rests = f"; the trained drafter rests in {resting:.0f} replicas" if resting else ""
    if "estimate" not in gains:
        return [f"{line}; no version is measured yet{rests}"]
    gain = f"gain {gains['estimate'] - 1:+.1%} ({gains['low'] - 1:+.1%} to {gains['high'] - 1:+.1%})"
    paid = now.by("osd_training_paid_back_timestamp_seconds", "domain").get((domain,))
    when = "not paid back yet" if paid is None else f"paid back {time.strftime('%b %d, %H:%M', time.localtime(paid))}"
    return [line, f"{domain}: {gain}, {when}{rests}", *_trial_lines(now, domain)]


def _trial_lines(now: Scrape, domain: str) -> list[str]:
    """Return a line for the latest version while its gain is not certain."""
    speedups = now.by("osd_version_speedup", "domain", "version", "bound")
    versions = {int(version): {b: value for (d, v, b), value in speedups.items() if (d, v) == (domain, version)}
                for of, version, _ in speedups if of == domain}  # fmt: skip
    if not versions:
        return []
    number = max(versions)
    estimate, low, high = (versions[number][bound] - 1 for bound in ("estimate", "low", "high"))
    return (
        []
        if low > 0 or high < 0
        else [f"{domain}: on trial, version {number}: {estimate:+.1%} ({low:+.1%} to {high:+.1%})"]
    )

"""Table of the commands, read by ``osd`` from the entry point."""

from __future__ import annotations

from osd.cli.offered import Command

COMMANDS = (
    Command("up", "deploy.cli.up:up", "Serve, learn and swap on this machine until Ctrl-C."),
    Command(
        "demo",
        "deploy.cli.demo:demo",
        "Watch a fresh drafter learn from live traffic, and measure what it gained on prompts it never saw.",
    ),
    Command(
        "learn",
        "deploy.cli.learn:learn",
        "Train drafters on what osd tap captures, without serving, until Ctrl-C.",
    ),
    Command(
        "doctor",
        "deploy.cli.doctor:doctor",
        "Look at packages, settings, CPU, GPU, memory, disk, Redis and port, and decode a tiny model.",
    ),
    Command(
        "drafters warm-up",
        "deploy.cli.warm_up:warm_up",
        "Let the target answer prompts before anybody asks, and keep what a drafter and recall learn from its answers.",
    ),
)

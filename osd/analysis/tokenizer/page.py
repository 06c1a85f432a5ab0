"""The findings as one page that needs nothing else."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from osd.analysis.tokenizer import charts
from osd.analysis.tokenizer.findings import Findings, Setting, conclusions, tables

_TEMPLATE = "page.html"


def page(found: Findings, setting: Setting | None) -> str:
    """HTML with the tables, and pictures in it."""
    pictures = [charts.categories(found.structures)]
    if found.fertility:
        pictures.append(charts.fertility(found.fertility))
    if found.coverage is not None:
        pictures.append(charts.coverage(found.coverage))
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    return environment.get_template(_TEMPLATE).render(
        labels=[one.label for one in found.structures],
        traffic=found.traffic,
        conclusions=conclusions(found, setting),
        pictures=pictures,
        tables=tables(found),
    )

"""Reading of settings from all sources.

Later sources override earlier ones: defaults, YAML file, environment (``OSD_...``), options of the command such as
``--port``, ``--set``, arguments of a deployment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from osd.config.base import ConfigError, Section
from osd.config.scenario import Scenario
from osd.config.secrets import with_keys, with_redis_address
from osd.config.settings import DEFAULT_CACHE, DEFAULT_HOME, Settings
from osd.suggestions import nearest

_VLLM_PREFIX = "OSD_VLLM_"  # of variables that ``osd.vllm`` reads in other processes
_EXAMPLES = {"--set": "engine.slots=8", "--assume": "domains.count=20"}
_STANDARD = {"OTEL_EXPORTER_OTLP_ENDPOINT": ("serving", "otlp_endpoint")}
"""Environment variables with standard names; the ``OSD_...`` variables override them."""


_SERVICE_LINK = re.compile(
    r"OSD_(?:\w+?_)??(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|(?P<port>PORT)|PORT_\d+_(?:TCP|UDP|SCTP)(?:_PROTO|_PORT|_ADDR)?)"
)
"""Pattern of the variables that Kubernetes sets in each pod for a service whose name begins with osd."""


def load_settings(
    file: Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    options: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    arguments: Mapping[str, Any] | None = None,
) -> Settings:
    """Read the settings of this process from all sources.

    Args:
        file: the YAML file, if any.
        overrides: values of ``--set``, as ``key=value``.
        environ: the environment.
        options: keys and values of settings that have an option of their own, by option; ``overrides`` precede them.
        arguments: arguments of a deployment, nested or by dotted keys.

    Raises:
        ConfigError: a source or a secret file cannot be read, or a key or value is invalid.
    """
    named = ((tuple(key.split(".")), _scalar(value), option) for option, (key, value) in options.items())
    given = ((tuple(key.split(".")), value, "args") for key, value in dotted(arguments or {}).items())
    entries = (*_from_file(file), *_from_environment(environ), *named, *_from_overrides(overrides, "--set"), *given)
    if not any(path == ("home",) for path, *_ in entries):
        entries = (*_from_xdg(environ), *entries)
    return with_redis_address(with_keys(_read(Settings, entries)))


def load_scenario(file: Path | None = None, overrides: Sequence[str] = ()) -> Scenario:
    """Read the assumptions of a simulation.

    Args:
        file: the YAML file, if any.
        overrides: values of ``--assume``, as ``key=value``.

    Raises:
        ConfigError: the file cannot be read, or a key or value is invalid.
    """
    return _read(Scenario, (*_from_file(file), *_from_overrides(overrides, "--assume")))


def dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values by their dotted keys."""
    return {".".join(path): value for path, value, _ in _leaves((), dict(values), "")}


_Entry = tuple[tuple[str, ...], Any, str]  # path of the key, value, and name of the source
_Tree = TypeVar("_Tree", bound=Section)


def _read(tree: type[_Tree], entries: Iterable[_Entry]) -> _Tree:
    values: dict[str, Any] = {}
    sources: dict[tuple[str, ...], str] = {}
    for path, value, source in entries:
        branch = values
        for key in path[:-1]:
            if not isinstance(branch.get(key), dict):
                branch[key] = {}
            branch = branch[key]
        branch[path[-1]] = value
        sources[path] = source
    try:
        return tree.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error, sources, tree)) from None


def _from_file(file: Path | None) -> Iterator[_Entry]:
    if file is None:
        return
    content = read_yaml(file)
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{file} must contain keys and values, as in 'domain: general'")
    yield from _leaves((), content or {}, str(file))


def read_yaml(file: Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        ConfigError: the file cannot be read, or is not YAML.
    """
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}") from None


def _leaves(path: tuple[str, ...], value: Any, source: str) -> Iterator[_Entry]:
    if isinstance(value, dict) and (value or not path):
        for key, child in value.items():
            yield from _leaves((*path, str(key)), child, source)
    else:
        yield path, value, source


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Entry]:
    for name, path in _STANDARD.items():
        if environ.get(name):
            yield path, environ[name], f"the environment variable {name}"
    for name in sorted(environ):
        path = tuple(name.removeprefix("OSD_").lower().split("__"))
        if name.startswith("OSD_") and not name.startswith(_VLLM_PREFIX) and _is_meant(name, path, environ[name]):
            yield path, _scalar(environ[name]), f"the environment variable {name}"


def default_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the absolute path of ``home`` where no setting names it."""
    home = _xdg_folder(environ, "XDG_DATA_HOME") or DEFAULT_HOME
    return home.expanduser().absolute()


def _from_xdg(environ: Mapping[str, str]) -> Iterator[_Entry]:
    """Yield ``home`` and ``cache`` in the folders of the XDG variables; nothing without these variables."""
    home, cache = (_xdg_folder(environ, name) for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME"))
    if home is not None:
        yield ("home",), home, "the environment variable XDG_DATA_HOME"
    if home is not None or cache is not None:
        yield ("cache",), cache or DEFAULT_CACHE, "the environment variable XDG_CACHE_HOME"


def _xdg_folder(environ: Mapping[str, str], name: str) -> Path | None:
    base = Path(environ.get(name, ""))
    return base / "osd" if base.is_absolute() else None  # the XDG specification ignores relative paths


def _is_meant(name: str, path: tuple[str, ...], value: str) -> bool:
    """Return whether an ``OSD_...`` variable is meant as a setting, perhaps misspelt.

    Other programs use such names too: Kubernetes sets service links, for example.
    """
    if path[0] in Settings.model_fields:
        return True
    link = _SERVICE_LINK.fullmatch(name)
    if link is not None and (not link["port"] or "://" in value):
        return False
    return nearest(".".join(path), _keys(Settings), cutoff=0.75) is not None


def _from_overrides(overrides: Sequence[str], option: str) -> Iterator[_Entry]:
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"{option} needs key=value, as in {_EXAMPLES[option]}, and got {override!r}")
        yield tuple(key.strip().split(".")), _scalar(value.strip()), option


def _scalar(text: str) -> str | None:
    """Return the text, or None for ``null``; the field of the setting parses numbers and booleans."""
    return None if text == "null" else text


def _explain(error: ValidationError, sources: dict[tuple[str, ...], str], tree: type[Section]) -> str:
    """Return a line about the first invalid key: its name, its source, and the rule that it breaks."""
    first = error.errors()[0]
    path = tuple(str(part) for part in first["loc"])
    key = ".".join(path)
    source = next((name for known, name in sources.items() if known[: len(path)] == path), "the defaults")
    if first["type"] == "extra_forbidden":
        key = next((".".join(known) for known in sources if known[: len(path)] == path), key)
        near = nearest(key, _keys(tree))
        return f"{key} ({source}) is not a setting" + (f"; did you mean {near}?" if near else "")
    if first["type"] == "model_type":
        first_key = next(name for name in _keys(tree) if name.startswith(f"{key}."))
        return f"{key} ({source}) is a section: set one of its keys, as in {first_key}"
    limits = first.get("ctx", {})
    reason = {
        "greater_than_equal": "must be at least {ge}",
        "greater_than": "must be greater than {gt}",
        "less_than_equal": "must be at most {le}",
        "less_than": "must be less than {lt}",
        "literal_error": "must be {expected}",
        "string_pattern_mismatch": "must match {pattern}",
        "int_parsing": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_parsing": "must be a number",
        "bool_parsing": "must be true or false",
    }.get(first["type"], first["msg"].replace("{", "{{").replace("}", "}}"))
    secret = path[-1] in ("api_key", "admin_key", "otlp_endpoint") or path == ("redis_url",)
    silent = secret or first["type"] == "not_of_kind" or isinstance(first["input"], dict)
    refused = "" if silent else f", not {first['input']}"
    return f"{key} ({source}) {reason.format(**limits)}{refused}"


def _keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return all dotted keys of a tree; a section with several kinds gives the keys of all kinds."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        kinds = get_args(info.annotation) or (info.annotation,)
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        keys += [f"{prefix}{name}.kind"] if len(sections) > 1 else []
        for section in sections:
            keys += _keys(section, f"{prefix}{name}.")
        keys += [] if sections else [prefix + name]
    return list(dict.fromkeys(keys))

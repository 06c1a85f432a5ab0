"""Reading the settings: ``--set`` on the command line > environment (``OSD_...``) > YAML file > default."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from osd.config.base import ConfigError, Section
from osd.config.scenario import Scenario
from osd.config.secrets import with_keys, with_redis_address
from osd.config.settings import Settings

_OTHERS = "OSD_VLLM_"  # read by ``osd.vllm`` in other processes
_EXAMPLES = {"--set": "engine.slots=8", "--assume": "domains.count=20"}
_STANDARD = {"OTEL_EXPORTER_OTLP_ENDPOINT": ("serving", "otlp_endpoint")}
"""Variables with names of their own, which OSD_... comes before."""


_SERVICE_LINK = re.compile(
    r"OSD_(?:\w+?_)??(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|(?P<port>PORT)|PORT_\d+_(?:TCP|UDP|SCTP)(?:_PROTO|_PORT|_ADDR)?)"
)
"""Variables that Kubernetes sets in each pod for a service whose name begins with osd."""


def load_settings(
    file: Path | None = None, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> Settings:
    """Read the settings of this process from every source; ``overrides`` are ``key=value``, as given to ``--set``.

    Raises:
        ConfigError: a source or a file with a secret cannot be read, or a key or value is refused.
    """
    given = (*_from_file(file), *_from_environment(environ), *_from_overrides(overrides, "--set"))
    return with_redis_address(with_keys(_read(Settings, given)))


def load_scenario(file: Path | None = None, overrides: Sequence[str] = ()) -> Scenario:
    """Read what a deployment is simulated on; ``overrides`` are ``key=value``, as given to ``--assume``.

    Raises:
        ConfigError: the file cannot be read, or a key or value is refused.
    """
    return _read(Scenario, (*_from_file(file), *_from_overrides(overrides, "--assume")))


_Given = tuple[tuple[str, ...], Any, str]  # path of the key, its value, and where it was given
_Tree = TypeVar("_Tree", bound=Section)


def _read(tree: type[_Tree], given: Iterable[_Given]) -> _Tree:
    values: dict[str, Any] = {}
    origin: dict[tuple[str, ...], str] = {}
    for path, value, source in given:
        branch = values
        for key in path[:-1]:
            if not isinstance(branch.get(key), dict):
                branch[key] = {}
            branch = branch[key]
        branch[path[-1]] = value
        origin[path] = source
    try:
        return tree.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error, origin, tree)) from None


def _from_file(file: Path | None) -> Iterator[_Given]:
    if file is None:
        return
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{file} must hold keys and values, as in 'domain: general'")
    yield from _leaves((), content or {}, str(file))


def _leaves(path: tuple[str, ...], value: Any, source: str) -> Iterator[_Given]:
    if isinstance(value, dict) and (value or not path):
        for key, child in value.items():
            yield from _leaves((*path, str(key)), child, source)
    else:
        yield path, value, source


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Given]:
    for name, path in _STANDARD.items():
        if environ.get(name):
            yield path, environ[name], f"the environment variable {name}"
    for name in sorted(environ):
        path = tuple(name.removeprefix("OSD_").lower().split("__"))
        if name.startswith("OSD_") and not name.startswith(_OTHERS) and _is_meant(name, path, environ[name]):
            yield path, _scalar(environ[name]), f"the environment variable {name}"


def _is_meant(name: str, path: tuple[str, ...], value: str) -> bool:
    """Return whether a variable is a setting or a misspelt one; all others belong to other programs."""
    if path[0] in Settings.model_fields:
        return True
    link = _SERVICE_LINK.fullmatch(name)
    if link is not None and (not link["port"] or "://" in value):
        return False
    return bool(difflib.get_close_matches(".".join(path), _keys(Settings), n=1, cutoff=0.75))


def _from_overrides(overrides: Sequence[str], option: str) -> Iterator[_Given]:
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"{option} needs key=value, as in {_EXAMPLES[option]}, and got {override!r}")
        yield tuple(key.strip().split(".")), _scalar(value.strip()), option


def _scalar(text: str) -> str | None:
    """Numbers and truth values are read by the field they are for; ``null`` empties an optional one."""
    return None if text == "null" else text


def _explain(error: ValidationError, origin: dict[tuple[str, ...], str], tree: type[Section]) -> str:
    """One line for the first refused key: what it is, which limit it breaks, and where it was given."""
    first = error.errors()[0]
    path = tuple(str(part) for part in first["loc"])
    key = ".".join(path)
    source = next((where for given, where in origin.items() if given[: len(path)] == path), "the defaults")
    if first["type"] == "extra_forbidden":
        key = next((".".join(given) for given in origin if given[: len(path)] == path), key)
        near = difflib.get_close_matches(key, _keys(tree), n=1)
        return f"{key} ({source}) is not a setting" + (f"; did you mean {near[0]}?" if near else "")
    if first["type"] == "model_type":
        first_key = next(one for one in _keys(tree) if one.startswith(f"{key}."))
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
    given = "" if silent else f", not {first['input']}"
    return f"{key} ({source}) {reason.format(**limits)}{given}"


def _keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every key of the tree, dotted; where a section has several kinds, those of all of them."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        kinds = get_args(info.annotation) or (info.annotation,)
        sections = [one for one in kinds if isinstance(one, type) and issubclass(one, Section)]
        keys += [f"{prefix}{name}.kind"] if len(sections) > 1 else []
        for section in sections:
            keys += _keys(section, f"{prefix}{name}.")
        keys += [] if sections else [prefix + name]
    return list(dict.fromkeys(keys))

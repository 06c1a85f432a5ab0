"""Check that the model of an upstream server is the target, by its tokenizer or else by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import httpx2

from osd.config import Settings
from osd.config.secrets import secret
from osd.nesting import parse_json
from osd.tap.upstream import Upstream
from osd.target.load import load_gguf_tokenizer, load_tokenizer, resolve_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SECONDS = 30.0
_PROBE = (
    "The 3 quick brown foxes, 1024.50 of them:\n\tdef f(x):\n        return x**2  # naïve façade\r\n"
    "Größe, Ελλάδα, Привет мир, 你好世界, こんにちは, 안녕하세요, שלום, مرحبا, हिन्दी, 🙂🚀 "
    "¿qué? x\u0301 \u200b ---- ''' ===="
)
"""Text with many scripts; tokenizers that encode it to equal ids are considered equal."""
_CHAT = [
    {"role": "user", "content": "Is it?"},
    {"role": "assistant", "content": "It is."},
    {"role": "user", "content": "So."},
]


class AgreementError(ValueError):
    """Error of an upstream whose model is not known to be the target; the message is one line."""


@dataclass(frozen=True)
class ServedTarget:
    """Names under which an upstream serves the target; ``warning`` describes a different chat template, else ""."""

    names: frozenset[str]
    warning: str = ""


def agree(upstream: Upstream, settings: Settings, model: str | None, same_tokenizer: bool) -> ServedTarget:
    """Check that an upstream serves the target.

    Args:
        upstream: the server.
        settings: settings with the target and the key of the upstream.
        model: name of the model, needed if the upstream has several models.
        same_tokenizer: whether the operator confirms that the tokenizers are equal; used if the upstream does not
            offer its tokenizer.

    Raises:
        AgreementError: the upstream does not answer, lacks the model, or uses another tokenizer than the target.
        osd.config.ConfigError: the file with the upstream's key cannot be read.
        osd.target.load.TargetError: the target's tokenizer is not available.
    """
    headers: dict[str, str] = {}
    if (file := settings.tap.upstream_key_file) is not None:
        headers = {"Authorization": f"Bearer {secret('tap.upstream_key_file', file)}"}
    with httpx2.Client(base_url=upstream.url, headers=headers, timeout=_SECONDS, trust_env=False) as client:
        cards = _choose(_cards(client, upstream.url), model)
        name, target = str(cards[0].get("root") or cards[0]["id"]), settings.target.source
        names = frozenset(str(card["id"]) for card in cards)
        upstream_ids = _text_ids(client, str(cards[0]["id"]))
        if upstream_ids is None:
            if not same_tokenizer and _short_name(target) not in {_short_name(served) for served in (name, *names)}:
                raise AgreementError(
                    f"the upstream does not offer its tokenizer, and its model {name} is not named like the target "
                    f"{target}: set target.source, or confirm equal tokenizers with --same-tokenizer"
                )
            return ServedTarget(names)
        tokenizer = _tokenizer(settings)
        if upstream_ids != _ids(tokenizer, _PROBE):
            raise AgreementError(
                f"the upstream's model {name} has another tokenizer than the target {target}: set target.source"
            )
        chat = _tokenize(client, {"model": cards[0]["id"], "messages": _CHAT})
        if chat is None or chat == _chat_ids(tokenizer):
            return ServedTarget(names)
        return ServedTarget(names, f"the upstream's chat template for {name} differs from the target's chat template")


def _cards(client: httpx2.Client, url: str) -> list[dict[str, Any]]:
    try:
        answer = client.get("/v1/models")
        cards = parse_json(answer.content)["data"] if answer.status_code == 200 else None
    except httpx2.HTTPError as error:
        raise AgreementError(f"the upstream {url} does not answer: {error or type(error).__name__}") from None
    except (ValueError, KeyError, TypeError):
        raise AgreementError(f"the upstream {url} does not list its models in OpenAI's format") from None
    if answer.status_code in (401, 403):
        raise AgreementError(f"the upstream {url} needs a key: set tap.upstream_key_file")
    valid = [card for card in cards or () if isinstance(card, dict) and isinstance(card.get("id"), str)]
    if not valid:
        raise AgreementError(f"the upstream {url} lists no model: it answers /v1/models with {answer.status_code}")
    return valid


def _choose(cards: Sequence[dict[str, Any]], model: str | None) -> list[dict[str, Any]]:
    """Return the cards of ``model``, or without a name the cards of the only model that is not an adapter."""
    listed = ", ".join(card["id"] for card in cards)
    if model is not None:
        chosen = [card for card in cards if card["id"] == model]
        if not chosen:
            raise AgreementError(f"--model: the upstream has no model {model}, it has {listed}")
        return chosen
    chosen = [card for card in cards if not card.get("parent")]
    if len({card.get("root") or card["id"] for card in chosen}) != 1:
        raise AgreementError(f"the upstream serves {listed}: name the target with --model")
    return chosen


def _text_ids(client: httpx2.Client, model: str) -> list[int] | None:
    """Return the upstream's token ids of the probe, by the API of vLLM or llama.cpp; None without either API."""
    body = {"model": model, "prompt": _PROBE, "add_special_tokens": False}
    return _tokenize(client, body) or _tokenize(client, {"content": _PROBE, "add_special": False})


def _tokenize(client: httpx2.Client, body: dict[str, Any]) -> list[int] | None:
    try:
        answer = client.post("/tokenize", json=body)
        ids = parse_json(answer.content)["tokens"] if answer.status_code == 200 else None
    except (httpx2.HTTPError, ValueError, KeyError, TypeError):
        return None
    return ids if isinstance(ids, list) and all(isinstance(token, int) for token in ids) else None


def _tokenizer(settings: Settings) -> PreTrainedTokenizerBase:
    path = resolve_tokenizer(settings.target.source, settings.cache_dir, revision=settings.target.revision)
    return load_gguf_tokenizer(path) if path.suffix == ".gguf" else load_tokenizer(path)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _chat_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text = tokenizer.apply_chat_template(_CHAT, add_generation_prompt=True, tokenize=False)
    return _ids(tokenizer, str(text))


def _short_name(name: str) -> str:
    """Return the last part of a model's name, in lower case and without .gguf."""
    return PurePath(name).name.lower().removesuffix(".gguf")

"""Whether an upstream's model is the target: by its tokenizer where it tells that, else by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import httpx2

from osd.config import Settings
from osd.config.secrets import secret
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
"""Two tokenizers that write this with the same ids are the same, or as good as that."""
_CHAT = [
    {"role": "user", "content": "Is it?"},
    {"role": "assistant", "content": "It is."},
    {"role": "user", "content": "So."},
]


class AgreementError(ValueError):
    """The upstream's model cannot be told to be the target; the message is one line."""


@dataclass(frozen=True)
class Served:
    """The ``names`` under which an upstream serves the target, and what does not fit though the tokenizer does."""

    names: frozenset[str]
    warning: str = ""


def agree(upstream: Upstream, settings: Settings, model: str | None, same_tokenizer: bool) -> Served:
    """Ask an upstream for its model and tokenizer; ``model`` says which one, where it has several.

    An operator who knows better than the names vouches for the ``same_tokenizer``.

    Raises:
        AgreementError: it does not answer, has no such model, or another tokenizer than the target.
        osd.config.ConfigError: the file with its key cannot be read.
        osd.target.load.TargetError: the target's tokenizer cannot be had.
    """
    headers: dict[str, str] = {}
    if (file := settings.tap.upstream_key_file) is not None:
        headers = {"Authorization": f"Bearer {secret('tap.upstream_key_file', file)}"}
    with httpx2.Client(base_url=upstream.url, headers=headers, timeout=_SECONDS, trust_env=False) as client:
        cards = _chosen(_cards(client, upstream.url), model)
        name, target = str(cards[0].get("root") or cards[0]["id"]), settings.target.source
        names = frozenset(str(card["id"]) for card in cards)
        theirs = _text_ids(client, str(cards[0]["id"]))
        if theirs is None:
            if not same_tokenizer and _plain(target) not in {_plain(one) for one in (name, *names)}:
                raise AgreementError(
                    f"the upstream says nothing of its tokenizer, and its model {name} is not called as the target "
                    f"{target}: set target.source, or vouch for it with --same-tokenizer"
                )
            return Served(names)
        tokenizer = _tokenizer(settings)
        if theirs != _ids(tokenizer, _PROBE):
            raise AgreementError(
                f"the upstream's model {name} has another tokenizer than the target {target}: set target.source"
            )
        chat = _asked(client, {"model": cards[0]["id"], "messages": _CHAT})
        if chat is None or chat == _rendered(tokenizer):
            return Served(names)
        return Served(names, f"the upstream writes chats for {name} in another way than the target's chat template")


def _cards(client: httpx2.Client, url: str) -> list[dict[str, Any]]:
    try:
        answer = client.get("/v1/models")
        cards = answer.json()["data"] if answer.status_code == 200 else None
    except httpx2.HTTPError as error:
        raise AgreementError(f"the upstream {url} does not answer: {error or type(error).__name__}") from None
    except (ValueError, KeyError, TypeError):
        raise AgreementError(f"the upstream {url} does not list its models as OpenAI does") from None
    if answer.status_code in (401, 403):
        raise AgreementError(f"the upstream {url} asks for a key: set tap.upstream_key_file")
    found = [card for card in cards or () if isinstance(card, dict) and isinstance(card.get("id"), str)]
    if not found:
        raise AgreementError(f"the upstream {url} lists no model: it answers /v1/models with {answer.status_code}")
    return found


def _chosen(cards: Sequence[dict[str, Any]], model: str | None) -> list[dict[str, Any]]:
    """The cards of one model: that which is asked for, or the only one beside adapters."""
    listed = ", ".join(card["id"] for card in cards)
    if model is not None:
        found = [card for card in cards if card["id"] == model]
        if not found:
            raise AgreementError(f"--model: the upstream has no model {model}, it has {listed}")
        return found
    found = [card for card in cards if not card.get("parent")]
    if len({card.get("root") or card["id"] for card in found}) != 1:
        raise AgreementError(f"the upstream serves {listed}: say with --model which is the target")
    return found


def _text_ids(client: httpx2.Client, model: str) -> list[int] | None:
    """How it writes the probe as token ids, as vLLM or as llama.cpp is asked; None where it does not say."""
    asked = {"model": model, "prompt": _PROBE, "add_special_tokens": False}
    return _asked(client, asked) or _asked(client, {"content": _PROBE, "add_special": False})


def _asked(client: httpx2.Client, body: dict[str, Any]) -> list[int] | None:
    try:
        answer = client.post("/tokenize", json=body)
        ids = answer.json()["tokens"] if answer.status_code == 200 else None
    except (httpx2.HTTPError, ValueError, KeyError, TypeError):
        return None
    return ids if isinstance(ids, list) and all(isinstance(one, int) for one in ids) else None


def _tokenizer(settings: Settings) -> PreTrainedTokenizerBase:
    path = resolve_tokenizer(settings.target.source, settings.home_dir)
    return load_gguf_tokenizer(path) if path.suffix == ".gguf" else load_tokenizer(path)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _rendered(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text = tokenizer.apply_chat_template(_CHAT, add_generation_prompt=True, tokenize=False)
    return _ids(tokenizer, str(text))


def _plain(name: str) -> str:
    """The last part of a model's name."""
    return PurePath(name).name.lower().removesuffix(".gguf")

"""Types of responses for the API reference."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class Problem(TypedDict):
    """Error message, the kind of the error, and the field that caused it."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """Response to a request that was refused or failed."""

    error: Problem


class CachedTokens(TypedDict):
    """Tokens of the prompt that were taken from the prefix cache."""

    cached_tokens: int


class CompletionTokens(TypedDict):
    """Parts of the completion tokens, and draft tokens that the answer does not have.

    ``reasoning_tokens`` is present if the model thinks, with the marks around its thinking. The others are present with
    a ``prediction``: draft tokens of recall, which were copied from the prediction or from earlier text of the request.
    """

    reasoning_tokens: NotRequired[int]
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]


class Usage(TypedDict):
    """Token counts of a request; a prompt counts once for all its choices.

    ``completion_tokens_details`` is present if the model thinks, and with a ``prediction``.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[CompletionTokens]


class SourceDrafts(TypedDict):
    """Draft tokens of a source, and the accepted tokens among them."""

    num_draft_tokens: int
    num_accepted_draft_tokens: int


class SpeculativeDecoding(TypedDict):
    """Counts of speculative decoding over all choices; ``sources`` is present if the request sets ``osd.sources``."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    sources: NotRequired[dict[str, SourceDrafts]]


class StoppedChoice(TypedDict):
    """Choice that ended before a token that is wrong with this probability, as the controller judged."""

    index: int
    reason: Literal["judged_wrong"]
    probability: float


class JudgedCompletion(TypedDict):
    """Decisions of the controller over all choices; empty if the drafter has no controller.

    ``judged_tokens`` and ``stopped`` are present with ``osd.completion.stop``. ``layers`` and ``skipped_layers`` are
    present with ``osd.completion.lossy``: the layers that full decoding runs for all tokens after the first token of
    each choice, and the layers that were skipped.
    """

    judged_tokens: NotRequired[int]
    stopped: NotRequired[list[StoppedChoice]]
    layers: NotRequired[int]
    skipped_layers: NotRequired[int]


class Metrics(TypedDict):
    """Metrics of a request; ``completion`` is present if ``osd.completion`` sets ``stop`` or ``lossy``."""

    completion: NotRequired[JudgedCompletion]
    speculative_decoding: SpeculativeDecoding


class TokenLogprob(TypedDict):
    """Token, its log-probability under the model, and its UTF-8 bytes; null if it is part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class PlaceLogprobs(TokenLogprob):
    """Chosen token, and the most probable tokens at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of the tokens of a chat choice."""

    content: list[PlaceLogprobs]
    refusal: None


class TokenSource(TypedDict):
    """Token and its source: the drafter that proposed it, or ``target`` for a token sampled from the target."""

    token: str
    source: str


class CompletionLogprobs(TypedDict):
    """Log-probabilities of the tokens of a text choice, as lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


Finish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]


class CalledFunction(TypedDict):
    """Function that the model calls, and the arguments as a JSON text."""

    name: str
    arguments: str


class AnswerToolCall(TypedDict):
    """Function call in an answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(TypedDict):
    """Message of the model; ``content`` is null if it only thinks or calls functions."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[AnswerToolCall]]


class ChatChoice(TypedDict):
    """Answer of a chat; there are ``n`` of them."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    token_sources: NotRequired[list[TokenSource]]


class _Root(TypedDict):
    id: str
    created: int
    model: str


class ChatCompletion(_Root):
    """Response to a chat request."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics


class FunctionDelta(TypedDict):
    """Next part of the arguments of a call; the first part has the name of the function."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """Next part of the call number ``index`` of a choice; the first part has the id."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(TypedDict):
    """Next part of the message of a choice; the first part has the role."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    """Part of a choice in an event."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    token_sources: NotRequired[list[TokenSource]]


class ChatChunk(_Root):
    """Event of a streamed chat response; the last event, with the usage, has no choice."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    metrics: NotRequired[Metrics]


class CompletionChoice(TypedDict):
    """Continuation of a prompt, or its part in an event; each prompt has ``n`` continuations."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    token_sources: NotRequired[list[TokenSource]]


class TextCompletion(_Root):
    """Response to a text completion request."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    metrics: Metrics


class CompletionChunk(_Root):
    """Event of a streamed text completion; the last event, with the usage, has no choice."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    metrics: NotRequired[Metrics]


class ModelCard(TypedDict):
    """Model, or model with the drafter of a domain."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(TypedDict):
    """Allowed values of the field ``model``."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(TypedDict):
    """Token ids, their number, and the size of the context."""

    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(TypedDict):
    """Text of token ids."""

    prompt: str


class HealthStatus(TypedDict):
    """Status of a replica that can decode."""

    status: Literal["ok"]


class ServerLoad(TypedDict):
    """Number of running and waiting requests of all replicas."""

    server_load: int


class ServerVersion(TypedDict):
    """Version of osd."""

    version: str


class DrafterVersion(TypedDict):
    """Version of a drafter.

    ``removed`` is the time of removal in seconds since 1970; ``problem`` is the reason why it cannot be used.
    """

    number: int
    problem: str | None
    removed: float | None
    manifest: dict[str, Any]


class DrafterDomain(TypedDict):
    """Drafter versions of a domain, and the versions in service."""

    domain: str
    stable: int | None
    canary: int | None
    share: float
    pinned: bool
    versions: list[DrafterVersion]


class DrafterDomains(TypedDict):
    """Drafter versions of all domains."""

    domains: list[DrafterDomain]


class Purged(TypedDict):
    """Counts of removed data, the drafter versions that learned from the request, and members without an answer."""

    request: str
    streamed: int
    remembered: int
    entries: int
    learning: list[str]
    versions: dict[str, list[int]]
    absent: list[str]

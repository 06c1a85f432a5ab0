"""The shapes of answers, as the reference tells them."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class Problem(TypedDict):
    """What is wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """A request that was refused or failed."""

    error: Problem


class CachedTokens(TypedDict):
    """Tokens of the prompt that were not read again."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens; a prompt counts once for all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class SourceDrafts(TypedDict):
    """Draft tokens that one source proposed, and how many of them are in the answer."""

    num_draft_tokens: int
    num_accepted_draft_tokens: int


class SpeculativeDecoding(TypedDict):
    """How drafts did, all choices together; ``sources`` where ``osd.sources`` asks for them."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    sources: NotRequired[dict[str, SourceDrafts]]


class StoppedChoice(TypedDict):
    """A choice that was ended before a token which is judged to be wrong with this probability."""

    index: int
    reason: Literal["judged_wrong"]
    probability: float


class JudgedCompletion(TypedDict):
    """What a controller did, all choices together; nothing where the drafter that answered has none.

    ``judged_tokens`` and ``stopped`` are there where ``osd.completion.stop`` asks for them. With
    ``osd.completion.lossy`` so many ``layers`` would have run for the tokens behind the first of each choice, and
    ``skipped_layers`` of them did not.
    """

    judged_tokens: NotRequired[int]
    stopped: NotRequired[list[StoppedChoice]]
    layers: NotRequired[int]
    skipped_layers: NotRequired[int]


class Metrics(TypedDict):
    """Figures of one request; ``completion`` is there where it asks for ``stop`` or ``lossy`` there."""

    completion: NotRequired[JudgedCompletion]
    speculative_decoding: SpeculativeDecoding


class TokenLogprob(TypedDict):
    """A token, the model's own log-probability of it, and its UTF-8 bytes where it is whole characters."""

    token: str
    logprob: float
    bytes: list[int] | None


class PlaceLogprobs(TokenLogprob):
    """The chosen token, and the most probable ones."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Of each token of a choice."""

    content: list[PlaceLogprobs]
    refusal: None


class TokenSource(TypedDict):
    """A token and who it comes from: what drafted it, ``target`` where the target drew it itself."""

    token: str
    source: str


class CompletionLogprobs(TypedDict):
    """Of each token of a choice, side by side."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


Finish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]


class CalledFunction(TypedDict):
    """A function that the model calls, and the arguments as it writes them, which are JSON."""

    name: str
    arguments: str


class AnswerToolCall(TypedDict):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(TypedDict):
    """What the model said; ``content`` is null where it only calls functions."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: NotRequired[list[AnswerToolCall]]


class ChatChoice(TypedDict):
    """One of ``n`` answers."""

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
    """An answer to a chat."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics


class FunctionDelta(TypedDict):
    """More of the arguments of a call; its first event has the name."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """More of a call, the ``index``-th of the choice; its first event has the id."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(TypedDict):
    """What a choice says further; its first event has the role."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    """A choice's part of an event."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    token_sources: NotRequired[list[TokenSource]]


class ChatChunk(_Root):
    """An event of a streamed answer to a chat; the last one, with usage, has no choice."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    metrics: NotRequired[Metrics]


class CompletionChoice(TypedDict):
    """One of ``n`` continuations of a prompt, or its part of an event."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    token_sources: NotRequired[list[TokenSource]]


class Completion(_Root):
    """Continuations of prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    metrics: Metrics


class CompletionChunk(_Root):
    """An event of streamed continuations; the last one, with usage, has no choice."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    metrics: NotRequired[Metrics]


class ModelCard(TypedDict):
    """The model, or the model with a domain's drafter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(TypedDict):
    """What may be asked for as ``model``."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(TypedDict):
    """Token ids, how many, and how many fit."""

    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(TypedDict):
    """The text of token ids."""

    prompt: str


class Health(TypedDict):
    """The replica decodes."""

    status: Literal["ok"]


class ServerLoad(TypedDict):
    """Requests that run or wait, in all replicas."""

    server_load: int


class ServerVersion(TypedDict):
    """Which osd it is."""

    version: str


class DrafterVersion(TypedDict):
    """A version of a drafter; ``removed`` at that time, ``problem`` where it cannot be used."""

    number: int
    problem: str | None
    removed: float | None
    manifest: dict[str, Any]


class DrafterDomain(TypedDict):
    """The versions of a domain's drafter, and which of them serve."""

    domain: str
    stable: int | None
    canary: int | None
    share: float
    pinned: bool
    versions: list[DrafterVersion]


class DrafterDomains(TypedDict):
    """All domains."""

    domains: list[DrafterDomain]


class Purged(TypedDict):
    """What a purge removed, and the versions that learnt from the request and stay."""

    request: str
    streamed: int
    remembered: int
    entries: int
    learning: list[str]
    versions: dict[str, list[int]]

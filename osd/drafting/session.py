"""Contract of drafting sessions: the request of a decoding step, the proposal, and the committed tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from osd.drafting.growth import Growth, Reach
from osd.drafting.recall.memories import Memories
from osd.economy.plan import StepBudget
from osd.runtime.device import to_lists
from osd.runtime.exit_controller import odds
from osd.runtime.model import SlotModel
from osd.runtime.native import kernels
from osd.runtime.top import Top
from osd.verification.draws import DrawnChildren
from osd.verification.noise import Noise
from osd.verification.penalties import Penalties
from osd.verification.sampling import SamplingBatch, SamplingParams
from osd.verification.tree import ROOT, DraftBatch

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Runtime:
    """Resources of a session.

    Attributes:
        slots: number of sequences.
        context: tokens of a sequence.
        scratch: places after each sequence, one more than the most nodes of a draft.
        device: of the weights and caches.
        bucketed: compute over static buffers of a few sizes, as on a GPU; None for doing so on a GPU only.
        int8: hold weights in 8 bits where our kernels multiply them; a drafter's precision changes no output.
        target: for drafters that run its layers.
        memories: the domain's recall tables.
    """

    slots: int
    context: int
    scratch: int
    device: torch.device = _CPU
    bucketed: bool | None = None
    int8: bool = False
    target: SlotModel | None = None
    memories: Memories | None = None

    @classmethod
    def serving(
        cls, slots: int, context: int, scratch: int, device: torch.device = _CPU, target: SlotModel | None = None
    ) -> Runtime:
        """Return the resources of an engine's session, with weights in 8 bits if the kernels support it."""
        return cls(slots, context, scratch, device, int8=device.type == "cpu" and kernels() is not None, target=target)


@dataclass(frozen=True)
class Origin:
    """Request that a sequence belongs to: its id, client and tenant.

    Recall learns from it if it is ``remembered``. A controller ends its rows at an exit of the target if the
    probability of EXIT is above ``exit_above``. The client expects the tokens ``prediction`` in the answer.
    """

    request: str = ""
    client: str = ""
    remembered: bool = False
    tenant: str = ""
    exit_above: float = 0.0
    prediction: tuple[int, ...] = ()


ANONYMOUS = Origin()
"""Origin without an id, which recall does not remember."""


@dataclass(frozen=True)
class DraftPrices:
    """Budget of a decoding ``step``, and the sequences' remaining and unread tokens.

    ``left`` [B] are the most tokens that each sequence may still receive. ``missed`` [B] is the approximate number of
    tokens that a drafter has to read before it drafts.
    """

    step: StepBudget
    left: Sequence[int] = ()
    missed: Sequence[int] = ()


@dataclass(frozen=True)
class DraftRequest:
    """B sequences to draft for, either all greedy or all sampled.

    Attributes:
        slots: slot of each sequence.
        limits: most nodes of each sequence.
        settings: sampling settings of each sequence, which determine the target's p.
        penalties: changes of the logits along every path, and the constraints of grammars.
        device: device of the target's logits.
        prices: if given, only nodes whose expected value exceeds their price are drafted.
        keys: seed and step of each sequence, if the session may draw candidates that the engine verifies; else empty.
    """

    slots: Sequence[int]
    limits: Sequence[int]
    settings: Sequence[SamplingParams]
    penalties: Penalties | None = None
    device: torch.device = _CPU
    prices: DraftPrices | None = None
    keys: Sequence[tuple[int, int]] = ()

    @property
    def greedy(self) -> bool:
        """Whether the sequences are greedy; they never mix with sampled sequences."""
        return self.settings[0].temperature == 0

    @cached_property
    def sampling(self) -> SamplingBatch:
        """Settings as tensors, made on first use because greedy drafts rarely need them."""
        return SamplingBatch.of(self.settings, self.device)


@dataclass(frozen=True)
class Tree:
    """Draft tree of one sequence on the host.

    Riders are further rows of the target's forward. No rule verifies them; their logits go back to the drafter.

    Attributes:
        tokens: ids of the nodes.
        parents: ROOT or an earlier node.
        sources: names of the nodes' sources, for counts and traces.
        rider_tokens: ids of the riders, or -1 - i for row i of ``Proposal.embedded``.
        rider_parents: a node or an earlier rider; riders are numbered after the nodes.
        estimates: the drafter's estimates by which the growth policy placed the nodes.
        orders: number of context tokens by which each node was recalled, 0 without a lookup.
        chances: calibrated probabilities that the nodes are accepted, if known.
    """

    tokens: list[int]
    parents: list[int]
    sources: Sequence[str]
    rider_tokens: Sequence[int] = ()
    rider_parents: Sequence[int] = ()
    estimates: Sequence[float] = ()
    orders: Sequence[int] = ()
    chances: Sequence[float] = ()

    @classmethod
    def chain(cls, tokens: list[int], source: str) -> Tree:
        """Return a chain of ``tokens`` that all have the same ``source``."""
        return cls(tokens, list(range(ROOT, len(tokens) - 1)), [source] * len(tokens))

    def followed_by(self, tree: Tree) -> Tree:
        """Return this chain, whose tokens are certain, followed by a tree without riders."""
        count = len(self.tokens)
        return Tree(
            [*self.tokens, *tree.tokens],
            [*self.parents, *(count + parent for parent in tree.parents)],
            [*self.sources, *tree.sources],
            orders=[0] * count + [*tree.orders] if tree.orders else (),
            chances=[*self.chances, *tree.chances],
        )

    def with_tokens(self, tokens: list[int]) -> Tree:
        """Return this chain with other ``tokens``, at most as many as before."""
        return replace(self, tokens=tokens, parents=self.parents[: len(tokens)], sources=self.sources[: len(tokens)])


@dataclass(frozen=True)
class Exits:
    """Rows that a drafter ran through the target's layers before ``layer``; verification continues from there.

    For each of B sequences, ``paths`` maps the tokens of a draft path to its row; () is the last committed token. The
    keys of row i are ``offsets[i]`` places after those of that token. See ``osd.runtime.decoder.Forward`` for
    ``states`` [n, hidden] and ``hidden`` [n, taps * hidden].
    """

    layer: int
    paths: Sequence[Mapping[tuple[int, ...], int]]
    offsets: Sequence[int]
    states: Tensor
    hidden: Tensor | None

    def spread(self, members: Sequence[int], sequences: int) -> Exits:
        """Return the same rows for a batch of ``sequences``, whose ``members`` are the current sequences."""
        paths: list[Mapping[tuple[int, ...], int]] = [{}] * sequences
        for number, known in zip(members, self.paths, strict=True):
            paths[number] = known
        return replace(self, paths=paths)


@dataclass(frozen=True)
class Proposal:
    """Draft trees of B sequences.

    Attributes:
        trees: while ``pending``, chains of unknown tokens with their greatest possible length.
        draft: the same trees on the device, with the q that they were drawn from. None for candidates that the host
            chose without randomness; the rule ``naive`` verifies them if the policy's rule does not accept such draws.
        drawn: distributions of last children among chosen candidates, if ``DraftRequest.keys`` allow draws.
        logits: [B, 1 + N, Vd] of the drafter, entry 1 + i after node i, for traces.
        pending: whether the device may still be computing the draft.
        exits: rows of the target that the drafter ran, one entry per exit layer.
        embedded: [K, hidden] embeddings of riders without a token; the same tensor until the weights change.
    """

    trees: Sequence[Tree]
    draft: DraftBatch | None = None
    drawn: DrawnChildren | None = None
    logits: Tensor | None = None
    pending: bool = False
    exits: Sequence[Exits] = ()
    embedded: Tensor | None = None

    @classmethod
    def of(cls, draft: DraftBatch, source: str, logits: Tensor | None = None, exits: Sequence[Exits] = ()) -> Proposal:
        """Return the proposal of a draft that is read from its device; ``source`` names its first source."""
        names = (source, *draft.sources[1:])
        parts = to_lists([draft.tokens, draft.parents, draft.source, draft.sizes])
        estimates = [()] * len(draft.sizes) if draft.estimates is None else draft.estimates.tolist()
        trees = [
            Tree(tokens[:size], parents[:size], [names[number] for number in numbers[:size]], estimates=placed[:size])
            for tokens, parents, numbers, size, placed in zip(*parts, estimates, strict=True)
        ]
        return cls(trees, draft, logits=logits, exits=exits)

    @property
    def support(self) -> Tensor | None:
        """[Vd] target ids of ``logits``, None for the whole vocabulary."""
        return None if self.draft is None else self.draft.support

    def drafted(self) -> list[list[int]]:
        """Return the tokens of each tree; waits for the device while the draft is pending."""
        if self.draft is None or not self.pending:
            return [tree.tokens for tree in self.trees]
        return self.draft.token_lists()

    def check(self, request: DraftRequest, riders: int) -> None:
        """Raise ValueError unless each tree has at most its limit of nodes, and at most ``riders`` riders."""
        for tree, limit in zip(self.trees, request.limits, strict=True):
            if len(tree.tokens) > limit or len(tree.rider_tokens) > riders:
                size = f"{len(tree.tokens)} nodes and {len(tree.rider_tokens)} riders"
                raise ValueError(f"a drafter proposed {size}, but at most {limit} and {riders} are allowed")


@dataclass(frozen=True)
class TargetRows:
    """The target's rows of one decoding step: after the root, after each node of ``tree``, and after each rider.

    ``path`` are the accepted nodes. ``logits`` [1 + N + riders, vocabulary], before any sampling setting, are for
    drafters with riders. ``top`` are the most probable tokens, for drafters that read target rows.
    """

    tree: Tree
    path: Sequence[int]
    logits: Tensor | None
    top: Top | None


@dataclass(frozen=True)
class CommittedTokens:
    """Committed ``tokens`` of a sequence, with results of the target's forward.

    ``hidden`` [len(tokens), taps * hidden] are the states of the token before each, for drafters with taps. ``rows``
    are the target's rows of the step, for drafters that read target rows or have riders.
    """

    tokens: list[int]
    hidden: Tensor | None = None
    rows: TargetRows | None = None


class Riders(Protocol):
    """Capability: rows of the drafter in the target's forward, whose logits give its next draft."""

    def reach(self, slots: Sequence[int]) -> Reach:
        """Return the number of tokens that the riders of the last step predict, for each of ``slots``."""
        ...

    def ride(
        self, request: DraftRequest, growth: Growth, proposal: Proposal, added: Sequence[float] | None = None
    ) -> Proposal:
        """Return a proposal of any drafter with riders.

        ``added`` are the expected accepted tokens per step that a draft of 0, 1, 2, ... tokens of this drafter adds to
        those of another drafter; None if no other drafter takes part.
        """
        ...


class Continuation(Protocol):
    """Capability: drafts behind tokens that a grammar forces, for which no target states exist yet."""

    def propose_after(self, request: DraftRequest, chains: Sequence[Sequence[int]], growth: Growth) -> Proposal:
        """Return chosen candidates behind ``chains`` of forced tokens, one chain per sequence."""
        ...


@dataclass(frozen=True)
class EarlyHeads:
    """Capability: heads behind some layers of the target, and a controller that decides on exits.

    Attributes:
        layers: numbers of layers behind which the heads stand.
        controller: [3, hidden] float32, see ``osd.runtime.exit_rule.ExitRule``.
        read: function of states [n, hidden] and their layer. It returns logits [n, target vocabulary], minus infinity
            for tokens outside the draft vocabulary, and whether the head is sure [n].
    """

    layers: tuple[int, ...]
    controller: Tensor
    read: Callable[[Tensor, int], tuple[Tensor, Tensor]]

    def judge(self, states: Tensor) -> Tensor:
        """Return the controller's logits [n, points, 3] for tapped ``states`` [n, taps * hidden].

        The points are the exits and the last layer; the choices are STOP, EXIT and CONTINUE of
        ``osd.runtime.exit_controller``.
        """
        return odds(states.float().unflatten(-1, (len(self.layers) + 1, -1)), self.controller)


@dataclass(frozen=True)
class Capabilities:
    """Optional abilities of a session, None for each that it lacks."""

    riders: Riders | None = None
    continuation: Continuation | None = None
    early_heads: EarlyHeads | None = None


_NONE = Capabilities()


class Session(Protocol):
    """Drafting state of an engine's sequences.

    ``commit`` receives every committed token of a slot; ``propose`` continues from there and commits nothing.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Optional abilities of the session, such as riders; none by default."""
        return _NONE

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        """Assign a slot to a sequence that starts with ``token``."""
        ...

    def propose(self, request: DraftRequest, growth: Growth, noise: Noise) -> Proposal:
        """Return drafts for the sequences of ``request``; some may be empty.

        If the drafter has next-token distributions, ``growth`` places the nodes and ``noise`` determines the draws. If
        it has candidates only, it proposes these within the limits.
        """
        ...

    def commit(self, slot: int, kept: CommittedTokens) -> None:
        """Append committed tokens to the slot; the next draft continues them."""
        ...

    def close(self, slot: int) -> None:
        """Free the slot for another sequence."""
        ...

    def stage(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return checked weights of a version in this session's layout; runs off the decode thread.

        Raises:
            DrafterError: a name, shape or number is wrong.
        """
        return {}

    def load(self, staged: dict[str, Tensor]) -> None:
        """Switch to staged weights; called between two decoding steps, so it must be fast."""

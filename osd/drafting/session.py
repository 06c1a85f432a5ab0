"""Contract of a drafter's session: the request of a decoding step, the proposal, and what the session learns of it."""

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
    """Resources of a session: ``slots`` sequences of ``context`` tokens, and ``scratch`` places behind each.

    ``scratch`` is one more than the most nodes of a draft. ``bucketed`` computes as on a GPU, over static buffers of a
    few sizes; None does so on a GPU only. ``int8`` holds weights in 8 bits where our kernels multiply them: a drafter's
    precision changes no output. ``target`` is for drafters that run its layers, and ``memories`` are the domain's.
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
        """Return the resources of an engine's session: weights are in 8 bits where the kernels can."""
        return cls(slots, context, scratch, device, int8=device.type == "cpu" and kernels() is not None, target=target)


@dataclass(frozen=True)
class Origin:
    """Request of a sequence: its id, client and tenant, and whether recall may learn from it.

    ``exit_above`` is the probability of EXIT above which a controller lets its drafts leave the target's layers. The
    ``prediction`` are tokens that the client expects in the answer.
    """

    request: str = ""
    client: str = ""
    remembered: bool = False
    tenant: str = ""
    exit_above: float = 0.0
    prediction: tuple[int, ...] = ()


ANONYMOUS = Origin()
"""A request that leaves no trace."""


@dataclass(frozen=True)
class Prices:
    """Prices of draft tokens, in the budget of the ``step``.

    ``left`` are the tokens that each sequence may still get, and ``missed`` about how many tokens a drafter would first
    have to read.
    """

    step: StepBudget
    left: Sequence[int] = ()
    missed: Sequence[int] = ()


@dataclass(frozen=True)
class DraftRequest:
    """B sequences that a session may draft for, either all greedy or all sampled.

    ``limits`` are the most nodes of each, and ``settings`` make their p. ``penalties`` change the logits along every
    path, and hold the constraints of grammars. With ``prices`` nodes have to pay. ``keys`` are the seed and step of
    each, where candidates may be drawn that the engine itself verifies; else empty.
    """

    slots: Sequence[int]
    limits: Sequence[int]
    settings: Sequence[SamplingParams]
    penalties: Penalties | None = None
    device: torch.device = _CPU
    prices: Prices | None = None
    keys: Sequence[tuple[int, int]] = ()

    @property
    def greedy(self) -> bool:
        """Whether the most probable tokens are requested."""
        return self.settings[0].temperature == 0

    @cached_property
    def sampling(self) -> SamplingBatch:
        """The settings as tensors, made on first use: greedy drafts seldom need them."""
        return SamplingBatch.of(self.settings, self.device)


@dataclass(frozen=True)
class Tree:
    """Draft tree of one sequence on the host: token ids, parents (ROOT or an earlier node) and sources of its nodes.

    Riders are further rows of the target's forward. No rule verifies them; their logits go back to the drafter. Each is
    a token, or -1 - i for the i-th of ``Proposal.embedded``. Its parent is a node or an earlier rider, as if riders
    were numbered behind the nodes.

    ``estimates`` are those by which the growth policy placed the nodes. ``orders`` are the tokens of context by which
    nodes were recalled, 0 without a lookup. ``chances`` are calibrated probabilities that nodes are kept, if known.
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
        """Make a chain of ``tokens``."""
        return cls(tokens, list(range(ROOT, len(tokens) - 1)), [source] * len(tokens))

    def followed_by(self, tree: Tree) -> Tree:
        """Append a tree without riders to the last token of this chain, which is certain."""
        count = len(self.tokens)
        return Tree(
            [*self.tokens, *tree.tokens],
            [*self.parents, *(count + parent for parent in tree.parents)],
            [*self.sources, *tree.sources],
            orders=[0] * count + [*tree.orders] if tree.orders else (),
            chances=[*self.chances, *tree.chances],
        )

    def with_tokens(self, tokens: list[int]) -> Tree:
        """Return the same chain with its ``tokens``, which may be fewer than it had room for."""
        return replace(self, tokens=tokens, parents=self.parents[: len(tokens)], sources=self.sources[: len(tokens)])


@dataclass(frozen=True)
class Exits:
    """Rows that a drafter ran through the target's layers before ``layer``; verification continues from there.

    ``paths`` map, for each of B sequences, the tokens of a draft path to its row; the empty path is the last committed
    token. The keys of row i are ``offsets[i]`` places behind that token's. ``states`` [n, hidden] and ``hidden``
    [n, taps * hidden] are as in ``osd.runtime.decoder.Forward``.
    """

    layer: int
    paths: Sequence[Mapping[tuple[int, ...], int]]
    offsets: Sequence[int]
    states: Tensor
    hidden: Tensor | None

    def spread(self, members: Sequence[int], sequences: int) -> Exits:
        """Return the same rows for a batch of which the sequences are ``members``."""
        paths: list[Mapping[tuple[int, ...], int]] = [{}] * sequences
        for number, known in zip(members, self.paths, strict=True):
            paths[number] = known
        return replace(self, paths=paths)


@dataclass(frozen=True)
class Proposal:
    """Draft trees of B sequences.

    Attributes:
        trees: while ``pending``, chains of unknown tokens, as long as they may become.
        draft: the same trees on the device, with the q that they were drawn from. None where candidates were chosen on
            the host, without chance; the rule ``naive`` verifies them if the policy's rule takes no such draw.
        drawn: distributions of last children among chosen candidates, where ``DraftRequest.keys`` allow that.
        logits: [B, 1 + N, Vd] of the drafter, entry 1 + i after node i, for traces.
        pending: the device may still be at work on the draft.
        exits: rows of the target that the drafter ran, one entry for each layer that rows left behind.
        embedded: [K, hidden] embeddings of riders that are no tokens; the same tensor while the weights stay.
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
        """Read a draft from its device; ``source`` is the name of its first source."""
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
        """Check that each tree keeps to its limit and has at most so many ``riders``.

        Raises:
            ValueError: a tree has more rows than there is room for.
        """
        for tree, limit in zip(self.trees, request.limits, strict=True):
            if len(tree.tokens) > limit or len(tree.rider_tokens) > riders:
                found = f"{len(tree.tokens)} nodes and {len(tree.rider_tokens)} riders"
                raise ValueError(f"a drafter proposed {found} where {limit} and {riders} are allowed")


@dataclass(frozen=True)
class TargetRows:
    """The target's rows of one decoding step: after the root, after each node of ``tree``, and after each rider.

    ``path`` are the kept nodes. ``logits`` [1 + N + riders, vocabulary], before any sampling setting, are for drafters
    with riders, and ``top``, the most probable tokens, for those that read target rows.
    """

    tree: Tree
    path: Sequence[int]
    logits: Tensor | None
    top: Top | None


@dataclass(frozen=True)
class Kept:
    """Committed ``tokens`` of a sequence, and what the target computed for them.

    ``hidden`` [len(tokens), taps * hidden] are the states of the token before each, for drafters with taps. ``rows``
    are the target's logits of the step, for drafters that read target rows or have riders.
    """

    tokens: list[int]
    hidden: Tensor | None = None
    rows: TargetRows | None = None


class Riders(Protocol):
    """Capability: rows of the drafter in the target's forward, whose answers are its next draft."""

    def reach(self, slots: Sequence[int]) -> Reach:
        """Return how many tokens ahead the last answers tell in each of ``slots``."""
        ...

    def ride(
        self, request: DraftRequest, growth: Growth, proposal: Proposal, added: Sequence[float] | None = None
    ) -> Proposal:
        """Append riders to a proposal of any drafter.

        ``added`` are the tokens that a draft of 0, 1, 2, ... of this drafter's tokens adds to another drafter's; None
        where it drafts alone.
        """
        ...


class Continuation(Protocol):
    """Capability: drafts behind tokens that a grammar forces, for which no target states exist yet."""

    def behind(self, request: DraftRequest, chains: Sequence[Sequence[int]], growth: Growth) -> Proposal:
        """Draft behind ``chains`` of forced tokens, one for each sequence; candidates are chosen."""
        ...


@dataclass(frozen=True)
class EarlyHeads:
    """Capability: heads behind some ``layers`` of the target, and a ``controller`` [3, hidden] in float32.

    Both are as in ``osd.runtime.exit_rule.ExitRule``. ``read`` takes states [n, hidden] and their layer. It returns
    logits [n, target vocabulary], minus infinity for tokens outside the draft vocabulary, and whether the head is sure
    [n].
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
    """Optional abilities of a session, None where it has none."""

    riders: Riders | None = None
    continuation: Continuation | None = None
    early_heads: EarlyHeads | None = None


_NONE = Capabilities()


class Session(Protocol):
    """Drafts for the sequences of an engine.

    ``commit`` passes every committed token of a slot; ``propose`` continues from there and commits nothing.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Optional abilities."""
        return _NONE

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        """Give a slot to a sequence that starts with ``token``."""
        ...

    def propose(self, request: DraftRequest, growth: Growth, noise: Noise) -> Proposal:
        """Draft for the sequences of ``request``, or for some of them.

        A drafter that gives next-token distributions lets ``growth`` place the nodes, and draws by ``noise``. A drafter
        that only has candidates proposes them within the limits.
        """
        ...

    def commit(self, slot: int, kept: Kept) -> None:
        """Append committed tokens."""
        ...

    def close(self, slot: int) -> None:
        """Take the slot back."""
        ...

    def stage(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Check a version's weights and lay them out for this session, off the decode thread.

        Raises:
            DrafterError: a name, shape or number is wrong.
        """
        return {}

    def load(self, staged: dict[str, Tensor]) -> None:
        """Draft with staged weights from now on; called between two decoding steps, so it must be fast."""

"""A drafter's session: what it is asked for in a round, what it proposes, and what it gets of the outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from osd.drafting.growth import Growth, Reach
from osd.drafting.recall.memories import Memories
from osd.drafting.worth import Worth
from osd.runtime.device import lists
from osd.runtime.model import SlotModel
from osd.runtime.native import kernels
from osd.runtime.top import Top
from osd.verification.draws import LastDrawn
from osd.verification.noise import Noise
from osd.verification.penalties import Constraint, Penalties
from osd.verification.sampling import SamplingBatch, SamplingParams
from osd.verification.tree import ROOT, DraftBatch

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Runtime:
    """Where a session runs.

    ``slots`` sequences at the same time, ``context`` tokens of each, and ``scratch`` places behind them, one more than
    a draft has nodes at most. ``device`` is the target's. ``bucketed`` computes as on a GPU, over static buffers of a
    few sizes; None does so on a GPU alone. With ``int8`` weights are held in 8 bits where our kernels multiply them: a
    drafter's precision changes no output. ``target`` is for drafters that run through layers of it, over as many slots,
    and ``memories`` are the domain's, which all of its drafters share, for those that recall.
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
        """As an engine has it: with weights in 8 bits where the kernels can."""
        return cls(slots, context, scratch, device, int8=device.type == "cpu" and kernels() is not None, target=target)


@dataclass(frozen=True)
class Origin:
    """Whose request a sequence is: its id, ``client`` and ``tenant``, and whether it may be ``remembered``."""

    request: str = ""
    client: str = ""
    remembered: bool = False
    tenant: str = ""


NOBODY = Origin()
"""A request that leaves no trace."""


@dataclass(frozen=True)
class Asked:
    """B sequences that a session may draft for, all of them greedy or none.

    ``slots`` are theirs and ``limits`` the nodes that each may have at most, 0 for none. ``settings`` make p of each;
    ``penalties`` change the logits along every path, None where no sequence has any. ``worth`` says what nodes have to
    bring, None where the limits alone decide; of each sequence, ``left`` are then the tokens that it may
    still get, and ``missed`` about how many tokens a drafter would first have to read. ``keys`` are the seed and the
    round of each, where candidates may be drawn that the group verifies itself; empty where they may not.
    ``exits`` say for each above which probability a controller may let its draft leave the target's layers, 0 where
    its first choice is enough; empty where that is so for all. ``constraints`` say what each may go on with; empty
    where none has any.
    """

    slots: Sequence[int]
    limits: Sequence[int]
    settings: Sequence[SamplingParams]
    penalties: Penalties | None = None
    device: torch.device = _CPU
    worth: Worth | None = None
    left: Sequence[int] = ()
    missed: Sequence[int] = ()
    keys: Sequence[tuple[int, int]] = ()
    exits: Sequence[float] = ()
    constraints: Sequence[Constraint | None] = ()

    @property
    def greedy(self) -> bool:
        """Whether the most probable tokens are asked for."""
        return self.settings[0].temperature == 0

    @cached_property
    def sampling(self) -> SamplingBatch:
        """The settings as tensors, made on first use: greedy drafts seldom need them."""
        return SamplingBatch.of(self.settings, self.device)


@dataclass(frozen=True)
class Chains:
    """Drafts of B sequences on their device, chains of most probable or of drawn tokens.

    ``drafted`` [B, levels] int64 target ids, of which each has the first of its ``sizes`` [B], and ``logits``
    [B, levels, draft vocabulary] behind them; further entries mean nothing. Unless ``settled``, the device may still be
    at work: reading them waits for it. Those that were drawn have ``q`` [B, levels, draft vocabulary] that they were
    drawn from, and their ``columns`` [B, levels] there.
    """

    drafted: Tensor
    sizes: Tensor
    logits: Tensor
    settled: bool = True
    columns: Tensor | None = None
    q: Tensor | None = None

    @property
    def tokens(self) -> list[list[int]]:
        """The token ids of each draft."""
        return [ids[:size] for ids, size in zip(self.drafted.tolist(), self.sizes.tolist(), strict=True)]


@dataclass(frozen=True)
class GrownTrees:
    """Trees of B sequences that were grown in one call, of up to N nodes each; see ``PayingTrees``.

    ``tokens`` [B, N] target ids, -1 for padding, ``parents`` [B, N] nodes or ROOT, ``sizes`` [B]; ``estimates`` [B, N]
    are the drafter's, and ``logits`` [B, 1 + N, draft vocabulary] those behind the root and each node that was asked
    about. Of each level ``asked`` says about how many, and ``seconds`` how long that took.
    """

    tokens: Tensor
    parents: Tensor
    sizes: Tensor
    estimates: Tensor
    logits: Tensor
    asked: Sequence[int]
    seconds: Sequence[float]


@dataclass(frozen=True)
class Tree:
    """One sequence's draft on the host: token ids and parents of its nodes, ROOT or an earlier node.

    ``riders`` are further rows of the target's forward, whose logits go back to the drafter and which nobody verifies:
    tokens that hang on nodes, or on riders as if these were numbered behind the nodes. One that is no token but the
    i-th of ``Proposal.embedded`` is -1 - i. ``sources`` name who proposed each node; ``estimates`` are what the growth
    policy placed it by. Where some were recalled, ``orders`` say after how many tokens, 0 for what was not looked up.
    """

    tokens: list[int]
    parents: list[int]
    sources: Sequence[str]
    rider_tokens: Sequence[int] = ()
    rider_parents: Sequence[int] = ()
    estimates: Sequence[float] = ()
    orders: Sequence[int] = ()

    @classmethod
    def chain(cls, tokens: list[int], source: str) -> Tree:
        """A chain of ``tokens``."""
        return cls(tokens, list(range(ROOT, len(tokens) - 1)), [source] * len(tokens))

    def followed_by(self, tree: Tree) -> Tree:
        """This chain, and behind its last token another tree without riders."""
        count = len(self.tokens)
        return Tree(
            [*self.tokens, *tree.tokens],
            [*self.parents, *(count + parent for parent in tree.parents)],
            [*self.sources, *tree.sources],
            orders=[0] * count + [*tree.orders] if tree.orders else (),
        )

    def with_tokens(self, tokens: list[int]) -> Tree:
        """The same chain with its ``tokens``, which may be fewer than it had room for."""
        return replace(self, tokens=tokens, parents=self.parents[: len(tokens)], sources=self.sources[: len(tokens)])


@dataclass(frozen=True)
class Exits:
    """Rows that a drafter ran through the target's layers before ``layer``, where it left: verification goes on there.

    ``paths`` say for each of B sequences which row stands after which tokens of its draft, none for the last committed
    one. Of each row the keys in these layers are at the place ``offsets`` behind that token's; ``states`` [n, hidden]
    and ``hidden`` [n, taps * hidden] are as in ``osd.runtime.decoder.Forward``.
    """

    layer: int
    paths: Sequence[Mapping[tuple[int, ...], int]]
    offsets: Sequence[int]
    states: Tensor
    hidden: Tensor | None

    def spread(self, members: Sequence[int], sequences: int) -> Exits:
        """The same where the sequences are ``members`` of more: of the others nothing was run."""
        paths: list[Mapping[tuple[int, ...], int]] = [{}] * sequences
        for number, mine in zip(members, self.paths, strict=True):
            paths[number] = mine
        return replace(self, paths=paths)


@dataclass(frozen=True)
class EarlyHeads:
    """Where tokens of an answer may leave the target: behind ``layers``, by ``controller`` [3, hidden] in float32.

    Both are as in ``osd.runtime.leaving.Leaving``. ``read`` makes logits [n, vocabulary of the target] of states
    [n, hidden] behind so many layers, and says [n] of which the head there is sure enough to be believed; tokens that
    a drafter cannot say have minus infinity.
    """

    layers: tuple[int, ...]
    controller: Tensor
    read: Callable[[Tensor, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Proposal:
    """Draft trees of B sequences, and the distributions that their tokens came from.

    Attributes:
        trees: of each sequence; empty where nothing is proposed. While ``pending`` they have as many nodes as there
            may be, of unknown tokens.
        draft: the same trees for the rules, with the q that they were drawn from; None where candidates were chosen,
            and for greedy sequences, whose drafts are only compared with the most probable tokens.
        chosen: candidates were chosen deterministically: ``naive`` verifies them where a rule takes no such draw.
        drawn: of chosen candidates, what last children were drawn from, where ``Asked.keys`` allow that.
        logits: [B, 1 + N, Vd] of the drafter, entry 1 + i after node i, for traces; None where it has none.
        support: [Vd] their target ids, None for the whole vocabulary.
        pending: chains that the host has not read.
        expected: tokens of it that are expected to be kept, where that is known.
        exits: what the drafter ran of the target itself, an entry for each layer that it left behind; the rows before
            one that it ran are there too.
        chances: of candidates that were chosen, that each node of each tree is kept; empty where nobody knows.
        embedded: [K, hidden] what riders that are no tokens are read as, the same tensor while the weights stay; None
            where all are tokens.
    """

    trees: Sequence[Tree]
    draft: DraftBatch | None = None
    chosen: bool = False
    drawn: LastDrawn | None = None
    logits: Tensor | None = None
    support: Tensor | None = None
    pending: Chains | None = None
    expected: float = 0.0
    exits: Sequence[Exits] = ()
    chances: Sequence[Sequence[float]] = ()
    embedded: Tensor | None = None

    @classmethod
    def of(cls, draft: DraftBatch, source: str, logits: Tensor | None = None) -> Proposal:
        """The trees that a growth policy grew; the first of their sources is called ``source``."""
        names = (source, *draft.sources[1:])
        parts = lists([draft.tokens, draft.parents, draft.source, draft.sizes])
        estimates = [()] * len(draft.sizes) if draft.estimates is None else draft.estimates.tolist()
        trees = [
            Tree(tokens[:size], parents[:size], [names[number] for number in numbers[:size]], estimates=mine[:size])
            for tokens, parents, numbers, size, mine in zip(*parts, estimates, strict=True)
        ]
        return cls(trees, draft, logits=logits, support=draft.support)

    @classmethod
    def of_chains(cls, chains: Chains, limits: Sequence[int], source: str, support: Tensor | None) -> Proposal:
        """Chains; as long as they are not settled, each is taken to be as long as its limit."""
        drafted = chains.tokens if chains.settled else [[0] * limit for limit in limits]
        trees, draft = [Tree.chain(tokens, source) for tokens in drafted], None
        if chains.q is not None and chains.columns is not None:
            parts = chains.drafted, chains.columns, chains.sizes, chains.q
            draft = DraftBatch.drawn_chains(*parts, support, source)
        return cls(trees, draft, logits=chains.logits, support=support, pending=None if chains.settled else chains)

    def check(self, asked: Asked, riders: int) -> None:
        """Check that each tree keeps to its limit and has at most so many ``riders``: there is room for no more rows.

        Raises:
            ValueError: one does not.
        """
        for tree, limit in zip(self.trees, asked.limits, strict=True):
            if len(tree.tokens) > limit or len(tree.rider_tokens) > riders:
                found = f"{len(tree.tokens)} nodes and {len(tree.rider_tokens)} riders"
                raise ValueError(f"a drafter proposed {found} where {limit} and {riders} are allowed")


@dataclass(frozen=True)
class TargetRows:
    """The target's ``logits`` [1 + N + riders, vocabulary] of one round, before any sampling setting.

    Entry 0 is after the last committed token, entry 1 + i after node i of ``tree``, kept or not; the riders' follow.
    They are for drafters that have riders, None for others. ``path`` are the nodes that were kept. ``top`` has the most
    probable tokens of the same entries, for drafters that read target rows.
    """

    tree: Tree
    path: Sequence[int]
    logits: Tensor | None
    top: Top | None


@dataclass(frozen=True)
class Kept:
    """The ``tokens`` that a sequence goes on with, and what its drafter needs of what the target computed.

    ``hidden`` [len(tokens), taps * hidden] are the states of the token before each, for drafters that read taps, and
    ``rows`` the target's logits of the round, for those that read them or have rows of their own.
    """

    tokens: list[int]
    hidden: Tensor | None = None
    rows: TargetRows | None = None


class Session(Protocol):
    """Drafts for the sequences of an engine; ``load`` swaps its weights.

    Every committed token of a slot comes by ``commit``; ``propose`` continues from there, and commits nothing.
    """

    def open(self, slot: int, token: int, origin: Origin = NOBODY) -> None:
        """Give a slot to a sequence that starts with ``token``."""
        ...

    def propose(self, asked: Asked, growth: Growth, noise: Noise) -> Proposal:
        """Draft for any of the sequences, or for none.

        A drafter that gives next-token distributions lets ``growth`` decide where to go on and when to stop, and draws
        by ``noise``; one that only has candidates proposes these within the limits.
        """
        ...

    def ride(self, asked: Asked, growth: Growth, proposal: Proposal, added: Sequence[float] | None = None) -> Proposal:
        """The same proposal, whoever made it, with this drafter's own rows behind the nodes; most have none.

        ``added`` are the tokens that a draft of 0, 1, 2, ... of its tokens adds to what others draft, None where
        nobody else does.
        """
        return proposal

    def reach(self, slots: Sequence[int]) -> Reach | None:
        """How far it sees in each of ``slots``; None where that is as far in all of them, as with most."""
        return None

    def behind(self, asked: Asked, chains: Sequence[Sequence[int]], growth: Growth) -> Proposal | None:
        """Draft behind ``chains`` of tokens, one of each sequence, of which it is certain that they come first.

        Who needs the target's states there cannot, and returns None, as most do; others choose candidates.
        """
        return None

    def judge(self, states: Tensor) -> Tensor | None:
        """What a controller says of tokens whose ``states`` [n, taps * hidden] it reads: logits [n, points, 3].

        At each point, from the first layer to the last, of ``osd.runtime.exit_controller``'s STOP, EXIT and
        CONTINUE. None where there is no controller, as in most.
        """
        return None

    def early_heads(self) -> EarlyHeads | None:
        """Where an answer may leave the target; None where there is no controller, as in most."""
        return None

    def commit(self, slot: int, kept: Kept) -> None:
        """Append committed tokens."""
        ...

    def close(self, slot: int) -> None:
        """Take the slot back."""
        ...

    def stage(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Check a version's weights and lay them out for this session, off the decode thread; some kinds have none.

        Raises:
            DrafterError: a name, shape or number is wrong.
        """
        return {}

    def load(self, staged: dict[str, Tensor]) -> None:
        """Draft with staged weights from now on; called between two rounds, so it must not take long."""

"""A frozen language model over KV slots: what the target and a language-model drafter run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from osd.runtime import eight_bits
from osd.runtime.attention.selection import SelectionSizes, TokenSelection
from osd.runtime.batch import PackedRows, padded
from osd.runtime.causal_lm import check_table, decoder_layers, ends_of, inverse_frequencies, text_config
from osd.runtime.cuda_graph import BucketedForward
from osd.runtime.decoder import Decoder, Forward, llama_shaped, recordable
from osd.runtime.device import copied
from osd.runtime.fused import FusedDecoder, fusable
from osd.runtime.kv_cache import KVCache, heads_of
from osd.runtime.lean import LeanDecoder
from osd.runtime.leaving import Leaving, Passed, to_next_exit
from osd.runtime.linear import OneDnnLinear, PackedLinear, PlainLinear, accelerate, quantise


class TargetLostError(RuntimeError):
    """A process of a target is gone, and the target with it; the message is one sentence that says which and why."""


UntilLeft = Callable[[PackedRows, Tensor, range, Tensor | None, Leaving], Passed]


class SlotModel:
    """Any decoder-only model of transformers with its KV cache in slots.

    ``context`` tokens fit a sequence; ``scratch`` more places hold a draft that is being verified.
    ``taps`` are the decoder layers whose outputs ``forward`` returns side by side, -1 the last. ``weights`` are
    those of the linear layers: "full" as they come, "int8", or where it is bucketed "fp8". With a ``selection`` all
    rows read selected tokens of long contexts, which changes what the model says. A forward may bring up to
    ``embeddings`` rows that are no tokens, see ``PackedRows.embedded``. ``label`` tells it from other targets, where
    somebody learns from it. ``cache`` makes its ``KVCache``. One thread calls everything but ``check``.

    On a GPU forwards are ``bucketed``: padded to a few sizes, over static buffers, and recorded as CUDA graphs, see
    ``BucketedForward``. A CPU can do the same without graphs, more slowly than it does otherwise.

    Raises:
        ValueError: there is a ``selection``, and the model has no rotary positions that it could move; or its device
            has no such ``weights``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        slots: int,
        context: int,
        scratch: int,
        taps: tuple[int, ...] = (),
        weights: str = "full",
        bucketed: bool | None = None,
        embeddings: int = 0,
        label: str = "",
        selection: SelectionSizes | None = None,
        cache: Callable[..., KVCache] = KVCache,
    ) -> None:
        self.label = label
        self.model = model.eval().requires_grad_(False)
        self.config = config = text_config(model)
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.context = context
        self.eos_ids = eos_ids(model)
        embedding, _ = ends_of(model)
        self.device, self.dtype = embedding.weight.device, embedding.weight.dtype
        self.vocabulary, self.embeddings = len(embedding.weight), embeddings
        if embeddings:
            _lengthen_table(model, embeddings)
        self.layers = decoder_layers(model)
        self.taps = tuple(range(len(self.layers))[tap] for tap in taps)
        heads, dim = heads_of(config)
        bucketed = bool(self.device.type == "cuda" if bucketed is None else bucketed)
        places = padded(context + scratch) if bucketed else context + scratch
        self.cache = cache(len(self.layers), slots, heads, places, dim, self.dtype, self.device)
        self._selection: TokenSelection | None = None
        if selection is not None:
            asked = self.config.num_attention_heads
            self._selection = TokenSelection(selection, inverse_frequencies(model), asked, self.cache)
        fused, lean = _fused(model, bucketed), _lean(model, bucketed)
        if weights != "full":
            eight_bits.check(weights, bucketed)
        if weights != "full" and not bucketed:
            quantise(model)
        elif weights != "full" and not lean:
            eight_bits.narrow(list(model.modules()), weights)
        elif self.device.type == "cpu" and not bucketed:
            accelerate(model, "native" if fused else None)
        self.decoder: Decoder
        self._until_left: UntilLeft = partial(to_next_exit, self.forward)
        if fused:
            _let_go_of_file(model)
            self.decoder = native = FusedDecoder(model, self.cache, self.taps)
            self._until_left = native.until_left
        elif lean:
            self.decoder = LeanDecoder(model, self.cache, self.taps, weights)
        else:
            from osd.runtime.generic import GenericDecoder  # and with it seconds and 100 MB of transformers

            self.decoder = GenericDecoder(model, self.cache, self.taps)
        self._further = embedding.weight.data[self.vocabulary :]
        self.bucketed: BucketedForward | None = None
        if bucketed:
            self.bucketed = BucketedForward(self.decoder, self.cache, scratch, recordable(config))

    @property
    def embedding(self) -> Tensor:
        """[vocabulary, hidden], the table that tokens are looked up in."""
        return ends_of(self.model)[0].weight.data[: self.vocabulary]

    @torch.inference_mode()
    def forward(
        self, rows: PackedRows, wanted: Tensor, layers: range | None = None, states: Tensor | None = None
    ) -> Forward:
        """Run the new tokens ``rows``, store their keys, and return the logits of rows ``wanted`` [n] int64.

        Both are on the host; what comes back is on the device, and nothing waits for it. Only ``layers``, which are
        neighbours, run and store keys: logits come where the last one is among them, and where the first is not the
        ``states`` [R, hidden] before them must be given, as ``Forward.states`` of the layers before.

        Raises:
            ValueError: there are no such layers, or states where token ids are read, or none where they are not, or too
            many embeddings.
        """
        layers = self.checked(layers, states)
        if layers.stop < len(self.layers):
            wanted = wanted[:0]
        rows = self._completed(rows, states)
        if self.bucketed is not None:
            return self.bucketed.forward(rows, wanted, layers, states)
        return self.decoder.forward(rows.settled(), wanted, layers, states)

    def checked(self, layers: range | None, states: Tensor | None) -> range:
        """The layers that a forward asks for, None for all of them.

        Raises:
            ValueError: see ``forward``.
        """
        every = range(len(self.layers))
        layers = every if layers is None else layers
        if not layers or layers.step != 1 or layers.start not in every or layers.stop > len(every):
            raise ValueError(f"{layers} are no layers of a model that has {len(every)}")
        if (states is None) is not (layers.start == 0):
            raise ValueError(f"a forward from layer {layers.start} reads {'states' if layers.start else 'token ids'}")
        return layers

    @torch.inference_mode()
    def until_left(
        self, rows: PackedRows, wanted: Tensor, layers: range, states: Tensor | None, leaving: Leaving
    ) -> Passed:
        """``forward`` that ends at the first exit where a row leaves; it may end at one where none does."""
        rows = self._completed(rows, states)
        return self._until_left(rows if self.bucketed is not None else rows.settled(), wanted, layers, states, leaving)

    @torch.inference_mode()
    def fill(self, rows: PackedRows, states: Tensor, layers: range) -> None:
        """Store the keys and values of ``rows`` in ``layers`` as each would make them of ``states`` [R, hidden]."""
        if self.bucketed is not None:
            self.bucketed.fill(rows, states, layers)
        else:
            self.decoder.fill(rows.settled(), states, layers)

    def _completed(self, rows: PackedRows, states: Tensor | None) -> PackedRows:
        """The rows with what the model has for all of them."""
        if rows.embedded is not None and states is None:
            self.embed(rows.embedded)
        if self._selection is not None and rows.selection is None:
            rows = replace(rows, selection=self._selection)
        return rows

    def begin(self, slot: int) -> None:
        """Have another sequence in ``slot``."""
        if self._selection is not None:
            self._selection.forget(slot)

    def check(self) -> None:
        """Raise TargetLostError where it cannot compute any more; any thread may ask, and nothing waits."""

    def close(self) -> None:
        """Let go of other processes, of which there may be some; it computes no more."""

    def embed(self, embedded: Tensor) -> None:
        """Have the ids behind the vocabulary mean ``embedded`` [K, hidden] from now on.

        Raises:
            ValueError: there is no room for so many.
        """
        if len(embedded) > self.embeddings:
            raise ValueError(f"a forward brings {len(embedded)} embeddings, and there is room for {self.embeddings}")
        self._further[: len(embedded)].copy_(embedded)

    def compute(self, rows: PackedRows, wanted: Tensor) -> Forward:
        """``forward`` of all layers, where rows are laid out on the device already and a caller records it."""
        return self.decoder.forward(rows, wanted, range(len(self.layers)), None)

    def stage(self, name: str, value: Tensor) -> Tensor:
        """Lay out a weight called ``name`` for ``load``, off the thread that runs forwards."""
        path, _, attribute = name.rpartition(".")
        owner = self.model.get_submodule(path)
        value = value.to(self.device, self.dtype if value.is_floating_point() else None)
        stage = getattr(owner, "stage", None) if attribute == "weight" else None
        return value if stage is None else stage(value)

    def load(self, staged: dict[str, Tensor]) -> None:
        """Copy staged weights in place, by their names."""
        places: dict[str, Tensor] = {}
        for name, value in staged.items():
            path, _, attribute = name.rpartition(".")
            owner = self.model.get_submodule(path)
            if attribute == "weight" and isinstance(owner, OneDnnLinear):
                owner.load(value)
            elif attribute == "weight" and isinstance(owner, PackedLinear | PlainLinear):
                places[name] = owner.place
            else:
                places[name] = getattr(owner, attribute).data[: len(value)]  # what is embedded beside tokens stays
        copied(places.values(), [staged[name] for name in places])


def runs_own_code(model: nn.Module) -> bool:
    """Whether a ``SlotModel`` runs the code of ``model``, and not only a decoder of ours."""
    bucketed = next(model.parameters()).device.type == "cuda"
    return not _fused(model, bucketed) and not _lean(model, bucketed)


def _fused(model: nn.Module, bucketed: bool) -> bool:
    return fusable(model) and not bucketed


def _lean(model: nn.Module, bucketed: bool) -> bool:
    return bucketed and llama_shaped(model)


def _lengthen_table(model: nn.Module, further: int) -> None:
    """Give the input embedding of ``model`` so many rows more, which are no part of a head that shares it.

    Raises:
        ValueError: the embedding is more than a table, so that a row of its own would not be read as it is.
    """
    embedding, head = ends_of(model)
    check_table(model)
    old = embedding.weight
    table = torch.cat([old.detach(), old.new_zeros(further, old.shape[1])])
    embedding.weight = nn.Parameter(table, requires_grad=False)
    if head is not None and head.weight is old:
        head.weight = nn.Parameter(table[: len(old)], requires_grad=False)


def _let_go_of_file(model: nn.Module) -> None:
    """Copy what is left of the model's file, which else stays in memory as a whole: its linear layers are packed."""
    for tensor in model.parameters():
        tensor.data = tensor.data.clone()


def eos_ids(model: nn.Module) -> frozenset[int]:
    """The ids that end a text."""
    every = (getattr(config, "eos_token_id", None) for config in (model.generation_config, model.config))
    eos: Any = next((found for found in every if found), None)
    return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])

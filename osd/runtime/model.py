"""Frozen language model over KV slots, used for the target and for language-model drafters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from osd.runtime import eight_bits
from osd.runtime.attention.selection import SelectionSizes, TokenSelection
from osd.runtime.batch import PackedRows, padded_places
from osd.runtime.causal_lm import check_table, decoder_layers, ends_of, inverse_frequencies, text_config
from osd.runtime.cuda_graph import BucketedForward
from osd.runtime.decoder import Decoder, Forward, llama_shaped, recordable
from osd.runtime.device import copy_all
from osd.runtime.exit_rule import ExitRule, PartialForward, to_next_exit
from osd.runtime.fused import FusedDecoder, fusable
from osd.runtime.kv_cache import KVCache, heads_of
from osd.runtime.lean import LeanDecoder
from osd.runtime.linear import OneDnnLinear, PackedLinear, PlainLinear, accelerate, quantise


class TargetLostError(RuntimeError):
    """Error of a target whose process ended; its message is one sentence with the process and the reason."""


RunToExit = Callable[[PackedRows, Tensor, range, Tensor | None, ExitRule], PartialForward]


class SlotModel:
    """Decoder-only model of transformers with its KV cache in slots.

    All methods but ``check`` are called by one thread. On a GPU forwards are ``bucketed``: padded to a few sizes, over
    fixed buffers, and recorded as CUDA graphs, see ``BucketedForward``. A CPU can run the same path without graphs, but
    more slowly than its own.

    Args:
        model: the model; it becomes frozen.
        slots: number of sequences.
        context: most tokens of a sequence.
        scratch: additional places of a slot for a draft that is being verified.
        taps: decoder layers whose outputs ``forward`` returns concatenated; -1 is the last.
        weights: of the linear layers: "full" as they are, "int8", or with ``bucketed`` also "fp8".
        bucketed: None for the default of the device.
        embeddings: most rows of a forward that are not tokens, see ``PackedRows.embedded``.
        label: identity of the target in trace records and drafter versions, see ``Identity.label``.
        selection: sizes of a selection of context tokens, which changes the model's outputs; None to read all.
        cache: constructor of its ``KVCache``.

    Raises:
        ValueError: there is a ``selection`` and the model's positions cannot be moved, or the device does not support
            ``weights``.
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
        places = padded_places(context + scratch) if bucketed else context + scratch
        self.cache = cache(len(self.layers), slots, heads, places, dim, self.dtype, self.device)
        self._selection: TokenSelection | None = None
        if selection is not None:
            queries = self.config.num_attention_heads
            self._selection = TokenSelection(selection, inverse_frequencies(model), queries, self.cache)
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
        self._run_to_exit: RunToExit = partial(to_next_exit, self.forward)
        if fused:
            _detach_from_file(model)
            self.decoder = native = FusedDecoder(model, self.cache, self.taps)
            self._run_to_exit = native.run_to_exit
        elif lean:
            self.decoder = LeanDecoder(model, self.cache, self.taps, weights)
        else:
            from osd.runtime.generic import GenericDecoder  # imports 100 MB of transformers in seconds

            self.decoder = GenericDecoder(model, self.cache, self.taps)
        self._further = embedding.weight.data[self.vocabulary :]
        self.bucketed: BucketedForward | None = None
        if bucketed:
            self.bucketed = BucketedForward(self.decoder, self.cache, scratch, recordable(config))

    @property
    def is_asynchronous(self) -> bool:
        """Whether a device computes ``forward`` while the caller goes on; the path of a GPU on a CPU acts as if so."""
        return self.bucketed is not None

    @property
    def embedding(self) -> Tensor:
        """[vocabulary, hidden], the table of the tokens' embeddings."""
        return ends_of(self.model)[0].weight.data[: self.vocabulary]

    @torch.inference_mode()
    def forward(
        self, rows: PackedRows, wanted: Tensor, layers: range | None = None, states: Tensor | None = None
    ) -> Forward:
        """Run the new tokens ``rows``, store their keys and values, and return the logits of some rows.

        The result is on the device and is not waited for.

        Args:
            rows: on the host.
            wanted: [n] int64 on the host, indices of the rows that need logits.
            layers: adjacent layers to run, None for all. There are logits only if the model's last layer is among them.
            states: [R, hidden], the input of the first of the layers, as in ``Forward.states`` of the layers before;
                None if that is the model's first layer, which reads token ids.

        Raises:
            ValueError: the layers do not exist, ``states`` are missing or not needed, or there are too many embeddings.
        """
        layers = self.checked(layers, states)
        if layers.stop < len(self.layers):
            wanted = wanted[:0]
        rows = self._completed(rows, states)
        if self.bucketed is not None:
            return self.bucketed.forward(rows, wanted, layers, states)
        return self.decoder.forward(rows.settled(), wanted, layers, states)

    def checked(self, layers: range | None, states: Tensor | None) -> range:
        """Return the layers of a forward, all of them for None.

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
    def run_to_exit(
        self, rows: PackedRows, wanted: Tensor, layers: range, states: Tensor | None, exit_rule: ExitRule
    ) -> PartialForward:
        """Run ``forward`` up to the first exit where a row leaves; it may also end at an exit where no row leaves."""
        rows = self._completed(rows, states)
        rows = rows if self.bucketed is not None else rows.settled()
        return self._run_to_exit(rows, wanted, layers, states, exit_rule)

    @torch.inference_mode()
    def fill(self, rows: PackedRows, states: Tensor, layers: range) -> None:
        """Store the keys and values that each of ``layers`` computes from ``states`` [R, hidden] for ``rows``."""
        if self.bucketed is not None:
            self.bucketed.fill(rows, states, layers)
        else:
            self.decoder.fill(rows.settled(), states, layers)

    def _completed(self, rows: PackedRows, states: Tensor | None) -> PackedRows:
        """Return the rows with the model's selection, after filling in their embeddings."""
        if rows.embedded is not None and states is None:
            self.embed(rows.embedded)
        if self._selection is not None and rows.selection is None:
            rows = replace(rows, selection=self._selection)
        return rows

    def begin(self, slot: int) -> None:
        """Prepare ``slot`` for another sequence."""
        if self._selection is not None:
            self._selection.forget(slot)

    def check(self) -> None:
        """Raise TargetLostError if the target cannot compute any more; any thread may call it, and it never waits."""

    def close(self) -> None:
        """End the other processes of a divided target; no forward is possible afterwards."""

    def embed(self, embedded: Tensor) -> None:
        """Set the embeddings of the ids after the vocabulary to ``embedded`` [K, hidden].

        Raises:
            ValueError: K is more than ``embeddings``.
        """
        if len(embedded) > self.embeddings:
            raise ValueError(f"a forward brings {len(embedded)} embeddings, and there is room for {self.embeddings}")
        self._further[: len(embedded)].copy_(embedded)

    def compute(self, rows: PackedRows, wanted: Tensor) -> Forward:
        """Run a forward of all layers over rows that are on the device, while the caller records it."""
        return self.decoder.forward(rows, wanted, range(len(self.layers)), None)

    def stage(self, name: str, value: Tensor) -> Tensor:
        """Return a weight laid out for ``load``; any thread may call it."""
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
                places[name] = getattr(owner, attribute).data[: len(value)]  # keep the embeddings after the vocabulary
        copy_all(places.values(), [staged[name] for name in places])


def runs_own_code(model: nn.Module) -> bool:
    """Return whether a ``SlotModel`` runs the code of ``model`` itself instead of one of our decoders."""
    bucketed = next(model.parameters()).device.type == "cuda"
    return not _fused(model, bucketed) and not _lean(model, bucketed)


def _fused(model: nn.Module, bucketed: bool) -> bool:
    return fusable(model) and not bucketed


def _lean(model: nn.Module, bucketed: bool) -> bool:
    return bucketed and llama_shaped(model)


def _lengthen_table(model: nn.Module, further: int) -> None:
    """Append ``further`` rows to the input embedding of ``model``; a head that shares it keeps its rows.

    Raises:
        ValueError: the embedding is not a plain table, so that its rows would not be used as they are.
    """
    embedding, head = ends_of(model)
    check_table(model)
    old = embedding.weight
    table = torch.cat([old.detach(), old.new_zeros(further, old.shape[1])])
    embedding.weight = nn.Parameter(table, requires_grad=False)
    if head is not None and head.weight is old:
        head.weight = nn.Parameter(table[: len(old)], requires_grad=False)


def _detach_from_file(model: nn.Module) -> None:
    """Copy the weights that are still memory-mapped, so that the file is freed; linear layers are copies already."""
    for tensor in model.parameters():
        tensor.data = tensor.data.clone()


def eos_ids(model: nn.Module) -> frozenset[int]:
    """Return the ids that end a text, of the generation settings and of the configuration."""
    ids: set[int] = set()
    for config in (model.generation_config, model.config):
        eos: Any = getattr(config, "eos_token_id", None)
        ids.update(eos if isinstance(eos, list | tuple) else [] if eos is None else [eos])
    return frozenset(ids)

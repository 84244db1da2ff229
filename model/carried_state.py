"""Tensors that training carries from one window of a document to the next: states of recurrent
layers, last inputs of convolutions, and keys of layers with a window."""

from dataclasses import replace

import torch
from torch import Tensor

from errors import ModelError
from model.mixers import MIXERS
from model.mixers.recurrence import LayerState
from model.model_settings import ModelSettings
from model.position import Accumulate
from model.token_positions import TokenPositions


class CarriedLayer(LayerState):
    """The carried state of one layer. Tensors that it reads and tensors that it stores are
    separate, so a pass can be recomputed for its gradients; none of them has gradients.

    Args:
        before: tensors stored by the previous window.
        kept: number of keys that later queries may attend to.
    """

    def __init__(self, before: dict[str, Tensor], kept: int):
        super().__init__()
        self._stored = before
        self._kept = kept
        self.after: dict[str, Tensor] = {}

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, G, S, ·) of the last tokens before this window, then those of this
        window."""
        return self._joined("k", k, 2), self._joined("v", v, 2)

    def extend_extras(
        self,
        features: Tensor,
        accumulate: Accumulate,
        new: TokenPositions,
    ) -> tuple[Tensor, Tensor]:
        """See `LayerCache.extend_extras`."""
        own = accumulate(features, self._stored.get("extras"), new)
        return own, self._joined("extras", own, 1)

    def _joined(self, name: str, x: Tensor, dim: int) -> Tensor:
        before = self._stored.get(name)
        whole = x
        if before is not None:
            count = before.shape[dim]
            first = max(0, count - self._kept)  # more were kept for a wider window
            before = before.narrow(dim, first, count - first)
            whole = torch.cat([before.to(x.dtype), x], dim)
        count = min(self._kept, whole.shape[dim])
        self._store(name, whole.narrow(dim, whole.shape[dim] - count, count))
        return whole

    def _store(self, name, x):
        self.after[name] = x.detach()


class CarriedState:
    """The state of some rows in one training pass, in place of a cache.

    Args:
        settings: settings of the model, for which `check_carried` does not raise.
        before: tensors of the rows by name, as `after` returns them; empty in the first window.
    """

    def __init__(self, settings: ModelSettings, before: dict[str, Tensor]):
        kinds = settings.resolved_kinds
        self._kept: dict[str, int] = {}
        for name, kind in kinds.items():
            if MIXERS[kind.mixer.name][1].has_attention_weights:
                window = kind.position.window
                assert window is not None
                self._kept[name] = window - 1
        self._kinds = list(kinds)
        self._before = before
        self._positions: dict[str, Tensor] = {}
        self.layers = []
        for i, kind in enumerate(settings.layer_kinds):
            own = {
                name.partition(".")[2]: x for name, x in before.items() if name.startswith(f"{i}.")
            }
            self.layers.append(CarriedLayer(own, self._kept.get(kind, 0)))

    def advance(self, new: TokenPositions) -> dict[str, TokenPositions]:
        """The positions of the keys of this window by layer kind."""
        order = new.order
        document = new.document
        if "order" in self._before:
            order = torch.cat([self._before["order"], order], dim=1)
            document = torch.cat([self._before["document"], document], dim=1)
        count = order.shape[1]
        first = count - min(max(self._kept.values(), default=0), count)
        self._positions = {"order": order[:, first:], "document": document[:, first:]}
        whole = replace(new, order=order, position=order, document=document, unit_steps=False)
        carried = count - new.count
        keys = dict.fromkeys(self._kinds, new)
        return keys | {
            name: whole.part(carried - min(kept, carried), count)
            for name, kept in self._kept.items()
        }

    def after(self) -> dict[str, Tensor]:
        """The tensors to carry to the next window, by name; each has one row per sequence."""
        layers = {
            f"{i}.{name}": x
            for i, layer in enumerate(self.layers)
            for name, x in layer.after.items()
        }
        return layers | (self._positions if self._kept else {})


def can_continue(old: ModelSettings, new: ModelSettings) -> bool:
    """Whether passes under the settings `new` can use what passes under `old` carried: only windows
    and temperatures, which do not act on keys, differ."""
    before = old.resolved_kinds
    return all(
        before[name].position.model_copy(
            update={key: getattr(kind.position, key) for key in ("window", "temperature")}
        )
        == kind.position
        for name, kind in new.resolved_kinds.items()
    )


def check_carried(settings: ModelSettings) -> None:
    """Raise ModelError if layers attend to more tokens than a window."""
    for name, kind in settings.resolved_kinds.items():
        choice = kind.position
        has_keys = MIXERS[kind.mixer.name][1].has_attention_weights
        if has_keys and (choice.window is None or choice.sinks):
            where = settings.position_key(name)
            raise ModelError(
                f"training.state = carry: layers with mixer.name = {kind.mixer.name} attend to all "
                f"earlier tokens or sinks; set {where}.window, without sinks, or training.state to "
                "reset"
            )

"""Biases that a small network computes for each pair on a CPU, by tiles that fit into its cache.

Hidden units that are positive for all pairs of a tile are one linear function, and those that are 0
for all of them are left out, so that few units remain: over most tiles the input varies little.

Shapes: a tile has t queries, in reverse order, and s keys; H heads; W hidden units, of which K bend
in a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NetworkBias:
    """bias_h = Σ_w outer[h, w] · relu(inner[w]·x + offset[w]) with x = near / far, or the gradients
    of these tensors.

    Attributes:
        near: (N,) by distance, in the order of `AttentionMask.by_distance()`.
        far: (T,) by query.
        inner, offset: (W,).
        outer: (H, W).
    """

    near: Tensor
    far: Tensor
    inner: Tensor
    offset: Tensor
    outer: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.near, self.far, self.inner, self.offset, self.outer]

    def tile(
        self,
        origin: int,
        start: int,
        stop: int,
        keys: int,
    ) -> NetworkTile:
        """Queries stop − 1, ..., start and `keys` keys; the first pair has entry `origin` of
        `near`."""
        shape = stop - start, keys
        near = self.near.as_strided(
            shape,
            (1, 1),
            self.near.storage_offset() + origin,
        )
        x = near / self.far[start:stop].flip(0)[:, None]
        ends = torch.addcmul(
            self.offset,
            self.inner,
            torch.stack(x.aminmax())[:, None],
        )  # (2, W)
        linear = (ends > 0).all(0)
        bent = ((ends > 0).any(0) & ~linear).nonzero()[:, 0]
        features = x.new_empty(2 + len(bent), x.numel())
        features[0], features[1] = 1, x.flatten()
        torch.mul(features[1], self.inner[bent, None], out=features[2:])
        features[2:].add_(self.offset[bent, None]).relu_()
        return NetworkTile(
            self,
            x,
            linear.nonzero()[:, 0],
            bent,
            features,
        )


@dataclass(frozen=True)
class NetworkTile:
    """A tile of a `NetworkBias`.

    Attributes:
        x: (t, s) inputs of the network.
        linear: (·,) units that are positive for all pairs.
        bent: (K,) units that are positive for some pairs.
        features: (2 + K, t·s) 1, x and the units that bend.
    """

    network: NetworkBias
    x: Tensor
    linear: Tensor
    bent: Tensor
    features: Tensor

    def bias(self) -> Tensor:
        """(H, t, s)."""
        n = self.network
        outer = n.outer[:, self.linear]
        constant = outer @ n.offset[self.linear]
        slope = outer @ n.inner[self.linear]
        weights = torch.cat([constant[:, None], slope[:, None], n.outer[:, self.bent]], dim=1)
        return (weights @ self.features).view(-1, *self.x.shape)

    def add_gradients(
        self,
        grad: Tensor,
        start: int,
        stop: int,
        sums: NetworkBias,
    ) -> Tensor:
        """Add the gradients of the network's tensors, but for `near`, to those of `sums`.

        Args:
            grad: (H, t, s) of the bias.

        Returns:
            (t, s) the gradient of the entries of `near`.
        """
        n = self.network
        linear = self.linear
        bent = self.bent
        grad = grad.reshape(len(grad), -1)
        products = grad @ self.features.T  # (H, 2 + K)
        total = products[:, 0]
        by_x = products[:, 1]
        outer = n.outer[:, linear]
        sums.outer[:, bent] += products[:, 2:]
        sums.outer[:, linear] += torch.outer(total, n.offset[linear]) + torch.outer(
            by_x, n.inner[linear]
        )
        sums.offset[linear] += total @ outer
        sums.inner[linear] += by_x @ outer
        of_x = (outer @ n.inner[linear]) @ grad
        if len(bent):
            units = n.outer[:, bent].T @ grad  # (K, t·s)
            units = torch.ops.aten.threshold_backward(
                units,
                self.features[2:],
                0,
            )
            sums.offset[bent] += units.sum(1)
            sums.inner[bent] += units @ self.features[1]
            of_x += n.inner[bent] @ units
        of_x = of_x.view_as(self.x)
        far = n.far[start:stop].flip(0)
        sums.far[start:stop] -= ((of_x * self.x).sum(1) / far).flip(0)
        return of_x.div_(far[:, None])

"""Random models around their blocks: residuals, skips, side inputs, losses on hidden states, results nobody uses."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

WIDTH = 16
_MAPS = {
    "mlp": lambda block, x: block.out(torch.tanh(block.inner(x))),
    "gate": lambda block, x: block.out(nn.functional.gelu(block.inner(x))) * torch.sigmoid(x),
    "twice": lambda block, x: block.out(torch.relu(block.inner(x))) + x.sin(),
    "pre-norm": lambda block, x: x + block.out(torch.sigmoid(block.inner(block.norm(x)))),
    "batch norm": lambda block, x: block.batch_norm(block.out(block.inner(x).relu())),
    "dropout": lambda block, x: x + nn.functional.dropout(block.out(torch.relu(block.inner(x))), 0.3),
    "result kept": lambda block, x: torch.tanh(block.out(block.inner(x))),
}
_BETWEEN = ["nothing", "nothing", "nothing", "residual", "scale", "store", "add stored", "join", "detached", "in place"]
_LOSSES = {
    "square": lambda model, hidden: hidden.square().mean(),
    "exp": lambda model, hidden: hidden.exp().mean(),
    "mean": lambda model, hidden: hidden.mean(),
    "head": lambda model, hidden: model.head(hidden).sin().mean(),
}


class RandomBlock(nn.Module):
    """(B, WIDTH), and a side input of the same shape or none -> the same; or a pair, the second of it the input."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.kind = rng.choice(list(_MAPS))
        inner = WIDTH * rng.choice([1, 2, 4])
        self.inner, self.out = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.gives_pair = rng.random() < 0.2
        if rng.random() < 0.15:
            self.inner.requires_grad_(False)

    def forward(self, x: Tensor, side: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        y: Tensor = _MAPS[self.kind](self, x)
        if side is not None:
            y = y + torch.tanh(side) * side if self.kind in ("mlp", "pre-norm") else y * side
        return (y, x) if self.gives_pair else y


class RandomModel(nn.Module):
    """(B, WIDTH) -> scalar loss. The same seed gives the same model."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.layers = nn.ModuleList(RandomBlock(rng) for _ in range(rng.randint(2, 5)))
        count = len(self.layers)
        self.enter = nn.Linear(WIDTH, WIDTH) if rng.random() < 0.5 else nn.Identity()
        self.head, self.joint = nn.Linear(WIDTH, 8), nn.Linear(2 * WIDTH, WIDTH)
        self.between = [rng.choice(_BETWEEN) for _ in range(count)]
        self.takes_side = [rng.random() < 0.3 for _ in range(count)]
        self.losses = [rng.choice([None, None, *_LOSSES]) for _ in range(count)]
        self.renews_side = rng.random() < 0.5
        self.again = rng.random() < 0.2  # the last block runs twice

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        side = torch.sin(x)  # of which nobody may make use
        stored: list[Tensor] = []
        watched: list[tuple[str, Tensor]] = []
        for i, layer in enumerate([*self.layers, *([self.layers[-1]] if self.again else [])]):
            i = min(i, len(self.layers) - 1)
            given = layer(x, side) if self.takes_side[i] else layer(x)
            x = self._combined(self.between[i], given[0] if isinstance(given, tuple) else given, x, stored)
            if self.losses[i] is not None:
                watched.append((self.losses[i], x))
            if self.renews_side:
                side = torch.cos(x)
        loss = self.head(x).square().mean()
        for kind, hidden in watched:
            loss = loss + _LOSSES[kind](self, hidden)
        return loss

    def _combined(self, how: str, y: Tensor, x: Tensor, stored: list[Tensor]) -> Tensor:
        if how == "residual":
            return x + y
        if how == "scale":
            return y * 0.5
        if how == "join":
            return self.joint(torch.cat([y, x], -1))
        if how == "detached":
            return y + x.detach() * 2
        if how == "in place":
            y = y * 1.0
            y += 1.0
        elif how == "add stored" and stored:
            return y + stored.pop()
        elif how == "store":
            stored.append(y)
        return y


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)  # type: ignore[no-any-return]  # modules return Any

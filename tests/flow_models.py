"""Models whose blocks form no plain chain: tensors given to all blocks, code between them, skips, two chains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, VOCABULARY = 32, 48


class Case(NamedTuple):
    """A model, the paths of its blocks, a batch, and the loss."""

    model: nn.Module
    paths: list[str]
    batch: Any
    loss: Callable[[nn.Module, Any], Tensor]


def square_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).float().square().mean()


def token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


class Feed(nn.Module):
    def __init__(self, hidden: int, width: int = WIDTH) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


class Attend(nn.Module):
    """Pre-norm attention; returns its weights too where ``with_weights``."""

    def __init__(self, *, with_weights: bool = False) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.with_weights = with_weights

    def forward(self, x: Tensor, mask: Tensor | None = None, rotary: Any = None, scale: Tensor | None = None) -> Any:
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        if rotary is not None:
            cos, sin = rotary
            query, key = query * cos + query.flip(-1) * sin, key * cos + key.flip(-1) * sin
        scores = query @ key.transpose(-1, -2) / WIDTH**0.5
        weights = (scores if mask is None else scores + mask).softmax(dim=-1)
        x = x + self.out(weights @ value)
        x = x if scale is None else x * scale
        return (x, weights) if self.with_weights else x


class Stack(nn.Module):
    """Three uneven blocks between an embedding and a head; subclasses say how they are run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Feed(hidden) for hidden in (64, 160, 32))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = self.step(layer, x)
        return self.head(x)

    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)


class Decoder(nn.Module):
    """Embedding, layers with a causal mask made once, head."""

    def __init__(self, layers: int = 3, *, with_weights: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Attend(with_weights=with_weights) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x, mask = self.embed(ids), causal(ids)
        for layer in self.layers:
            x = self.step(layer, x, mask)
        return self.head(x)

    def step(self, layer: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return layer(x, mask=mask)


def causal(ids: Tensor) -> Tensor:
    length = ids.shape[1]
    return torch.full((length, length), float("-inf")).triu(1)


class Residual(Stack):
    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x + layer(x)


class Scaled(Stack):
    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x) * 1.5


class Cloned(Stack):
    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x).clone()


class InPlace(Stack):
    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        x = layer(x)
        x += 1
        return x


class NormBetween(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = layer(norm(x)) + x
        return self.head(x)


class DropoutBetween(Stack):
    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x + F.dropout(layer(x), 0.2)


class DeepSupervision(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.embed(x), []
        for layer in self.layers:
            x = layer(x)
            kept.append(x)
        return torch.cat([self.head(y) for y in kept])


class SumOfLosses(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x, total = self.embed(x), torch.zeros(())
        for layer in self.layers:
            x = layer(x)
            total = total + x.square().mean()
        return self.head(x) + total


class BatchNormBetween(Stack):
    """Running statistics are updated by code of the model, once a step."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


class FrozenExtractor(Stack):
    """The first block runs without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.layers[0](self.embed(x))
        for layer in self.layers[1:]:
            x = x + layer(x)
        return self.head(x)


class Branches(Stack):
    """All blocks take the same tensor."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        outputs = [layer(x) for layer in self.layers]
        return self.head(sum(outputs) + torch.sigmoid(outputs[0]))


class Autocast(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.embed(x)
            for layer in self.layers:
                x = x + layer(x)
            return self.head(x).float()


class AddsAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, earlier: list[Tensor]) -> Tensor:
        return torch.tanh(self.linear(x)) + sum(earlier)


class Dense(Stack):
    """Every block takes a list of all that came before; the parts of a gradient share memory while they add up."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AddsAll() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, earlier = self.embed(x), []
        for layer in self.layers:
            earlier.append(x)
            x = layer(x, list(earlier))
        return self.head(x)


class SkipAroundTwo(Stack):
    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](self.embed(x))
        return self.head(self.layers[2](self.layers[1](first)) + first)


class KeepsHidden(Stack):
    """An attribute of the model holds what a block returned."""

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.layers[0](self.embed(x))
        x = self.layers[2](self.layers[1](self.hidden))
        return self.head(x) * self.hidden.mean()


class UNet(nn.Module):
    """Skips from the way down to the way up, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.down = nn.ModuleList(Feed(hidden) for hidden in (64, 128))
        self.middle = Feed(40)
        self.up = nn.ModuleList(Feed(hidden, 2 * WIDTH) for hidden in (96, 64))
        self.narrow = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.embed(x), []
        for block in self.down:
            x = block(x)
            skips.append(x)
        x = self.middle(x)
        for block, narrow in zip(self.up, self.narrow, strict=True):
            x = narrow(block(torch.cat([x, skips.pop()], dim=-1)))
        return self.head(x)


class FirstOfTuple(Decoder):
    def __init__(self) -> None:
        super().__init__(with_weights=True)

    def step(self, layer: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return layer(x, mask)[0]


class HoldsTuple(Decoder):
    """The tuple with the weights lives until the next layer has returned."""

    def __init__(self) -> None:
        super().__init__(with_weights=True)

    def forward(self, ids: Tensor) -> Tensor:
        x, mask = self.embed(ids), causal(ids)
        for layer in self.layers:
            outputs = layer(x, mask=mask)
            x = outputs[0]
        return self.head(x)


class Rotary(Decoder):
    def forward(self, ids: Tensor) -> Tensor:
        angles = torch.arange(ids.shape[1]).float()[:, None] * torch.linspace(0.1, 1.0, WIDTH)
        x, mask, rotary = self.embed(ids), causal(ids), (angles.cos(), angles.sin())
        for layer in self.layers:
            x = layer(x, mask=mask, rotary=rotary)
        return self.head(x)


class LearnedScale(Decoder):
    """A tensor with a gradient that every layer takes: its gradient adds up from the last layer to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x, scale = self.embed(ids), self.scales(ids).sigmoid()
        for layer in self.layers:
            x = layer(x, scale=scale)
        return self.head(x)


class Tied(Decoder):
    def forward(self, ids: Tensor) -> Tensor:
        x, mask = self.embed(ids), causal(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return x @ self.embed.weight.T


class CrossAttend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.keyvalue, self.feed = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), Feed(64)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        key, value = self.keyvalue(memory).chunk(2, dim=-1)
        x = x + (self.query(x) @ key.transpose(-1, -2)).softmax(dim=-1) @ value
        return x + self.feed(x)


class EncoderDecoder(nn.Module):
    """Two chains; every block of the second takes what the first one gave."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Attend() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(CrossAttend() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        memory = self.embed(ids)
        for block in self.encoder:
            memory = block(memory)
        memory, x = self.norm(memory), self.embed(ids.flip(1))
        for block in self.decoder:
            x = block(x, memory)
        return self.head(x)


class Shared(Stack):
    """The whole list runs twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in (*self.layers[:2], *self.layers[:2], self.layers[2]):
            x = layer(x)
        return self.head(x)


class OneLayer(Decoder):
    """One layer, called three times with a mask; its weights' gradients add up."""

    def __init__(self) -> None:
        super().__init__(layers=1)

    def forward(self, ids: Tensor) -> Tensor:
        x, mask = self.embed(ids), causal(ids)
        for _ in range(3):
            x = self.layers[0](x, mask)
        return self.head(x)


class _Shifted(Feed):
    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return super().forward(x if shift is None else x + shift)


class WeightForAll(Stack):
    """A weight of the model's own that every block is handed: the parts of its gradient wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Shifted(hidden) for hidden in (64, 160, 32))
        self.shift = nn.Parameter(torch.randn(128, WIDTH))

    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x, self.shift)


class SlicesOfWeight(WeightForAll):
    """Each block gets a slice of a large weight, whose gradient is as large as all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(512, WIDTH))

    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x, self.shift[:128])


def _stack(kind: type[Stack]) -> Callable[[], Case]:
    return lambda: Case(kind(), ["layers.*"], torch.randn(128, 8), square_loss)


def _decoder(kind: type[Decoder]) -> Callable[[], Case]:
    return lambda: Case(kind(), ["layers.*"], torch.randint(0, VOCABULARY, (3, 20)), token_loss)


CASES: dict[str, Callable[[], Case]] = {
    **{
        kind.__name__: _stack(kind)
        for kind in (
            Residual, Scaled, Cloned, InPlace, NormBetween, DropoutBetween, DeepSupervision, SumOfLosses,
            SkipAroundTwo, Shared, BatchNormBetween, FrozenExtractor, Branches, Autocast, Dense,
            WeightForAll, SlicesOfWeight,
        )
    },
    **{
        kind.__name__: _decoder(kind)
        for kind in (Decoder, FirstOfTuple, HoldsTuple, Rotary, LearnedScale, Tied, OneLayer)
    },
    "UNet": lambda: Case(UNet(), ["down.*", "middle", "up.*"], torch.randn(128, 8), square_loss),
    "EncoderDecoder": lambda: Case(
        EncoderDecoder(), ["encoder.*", "decoder.*"], torch.randint(0, VOCABULARY, (3, 20)), token_loss
    ),
}  # fmt: skip

"""The zoo: one row for each model, with what is to become of it. ``tests/zoo/examine.py`` says what is looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptplan.models import UNet
from tests.zoo import blocks as kind
from tests.zoo.blocks import WIDTH

LossFn = Callable[[nn.Module, Any], Tensor]
Make = Callable[[], tuple[nn.Module, Any]]


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


@dataclass(frozen=True)
class Entry:
    """One model.

    Attributes:
        feature: what is hard about it.
        make: the model and its batch; everything is seeded before each call.
        blocks: as in ``profile_model``; None: found by one forward.
        kept: part of the reason for which some of its blocks are never recomputed; None: each may be.
        refused: part of the message with which profiling refuses it; None: it runs.
        profile_loss_fn: what is profiled where it is not what is trained.
        is_slow: it runs in the nightly tests only.
    """

    name: str
    feature: str
    make: Make
    loss_fn: LossFn = mean_square
    blocks: str | None = "layers.*"
    kept: str | None = None
    refused: str | None = None
    profile_loss_fn: LossFn | None = None
    is_slow: bool = False


class Stack(nn.Module):
    """Layers in a row, something before and something after."""

    def __init__(self, *layers: nn.Module, before: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        self.before = before or nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.after = after or nn.Identity()

    def forward(self, x: Any) -> Any:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return self.after(x)


def rows() -> Tensor:
    return torch.randn(16, 64, WIDTH)


def pixels() -> Tensor:
    return torch.randn(8, 8, 16, 16)


def tokens() -> Tensor:
    return torch.randint(32, (16, 64))


def stack(
    make: Callable[[], nn.Module], batch: Callable[[], Any] = rows, before: Callable[[], nn.Module] | None = None
) -> Make:
    """Three layers of one kind."""
    return lambda: (Stack(*(make() for _ in range(3)), before=before() if before else None), batch())


# --- models that call their layers in ways of their own --------------------------------------------------------------


class TiedLanguageModel(nn.Module):
    """The head uses the embedding's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(kind.Mlp(dropout=0.1) for _ in range(3))
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def shared_weights() -> tuple[nn.Module, Any]:
    """Layers with matrices of their own but one ``up`` in common."""
    model = Stack(*(kind.Mlp() for _ in range(3)))
    for layer in model.layers:
        layer.up.weight = model.layers[0].up.weight
    return model, rows()


def shared_parts(moves: bool) -> tuple[nn.Module, Any]:
    """One activation, one dropout and one table for all layers, as where they are made before the layers."""
    parts = nn.GELU(), nn.Dropout(0.1), kind.Table(moves)
    return Stack(*(kind.HasParts(*parts) for _ in range(3))), rows()


class OneLayerTwice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in (self.layers[0], self.layers[1], self.layers[1], self.layers[2]):
            x = layer(x)
        return x


class Spread(Stack):
    """Layers that take what the one before returned as several arguments, or as keywords."""

    def forward(self, first: Any) -> Any:
        value = first
        for layer in self.layers:
            value = layer(**value) if isinstance(value, dict) else layer(*value)
        return value


class FromTensor(Stack):
    """What the layers hand on starts as one tensor."""

    def __init__(self, *layers: nn.Module, begin: Callable[[Tensor], Any], end: Callable[[Any], Tensor]) -> None:
        super().__init__(*layers)
        self.begin, self.end = begin, end

    def forward(self, x: Tensor) -> Tensor:
        value = self.begin(self.before(x))
        for layer in self.layers:
            if isinstance(value, dict):
                value = layer(**value)
            else:
                value = layer(*value) if isinstance(value, tuple) else layer(value)
        return self.end(value)


def begin_state(x: Tensor) -> kind.State:
    return kind.State(x, "a note", {"count": 0, "scale": x.mean()})


def end_state(state: kind.State) -> Tensor:
    return state.hidden + state.extra["scale"] * state.extra["count"]


def with_zero(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.new_zeros(())


def twins(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.flip(-1)


def first_and_sum(value: tuple[Tensor, Tensor]) -> Tensor:
    return value[0] + 0.01 * value[1]


class MaskedDecoder(Stack):
    """P10: ``h = layer(h, mask=mask)[0]`` with a mask that the model makes from its input."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        for layer in self.layers:
            h = layer(h, mask=mask)[0]
        return h


class HandsPositions(Stack):
    """Learned positions, of which each layer is handed a slice."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.positions = nn.Parameter(0.1 * torch.randn(256, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x, self.positions[: x.shape[1]])
        return x


class Diffusion(nn.Module):
    """The embedding of the time step goes to every block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_time = nn.Linear(1, WIDTH)
        self.layers = nn.ModuleList(kind.TimeConditioned() for _ in range(3))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        embedded = self.embed_time(time)
        for layer in self.layers:
            x = layer(x, time=embedded)
        return x


def denoise(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(*batch) - batch[0]).square().mean()


class SkipUNet(nn.Module):
    """Skips that the model keeps in a list, as U-Nets are mostly written."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(kind.Mlp() for _ in range(2))
        self.up = nn.ModuleList(kind.Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
        for layer in self.up:
            x = layer(x + skips.pop())
        return x


class SumOfAll(Stack):
    """Every layer's output reaches the loss by itself (deep supervision, feature pyramids)."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        total = x.new_zeros(())
        for layer in self.layers:
            x = layer(x)
            total = total + x.mean()
        return x + total


class ResidualOutside(Stack):
    """``x = x + layer(norm(x))`` written in the model: code between the blocks."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)) for _ in range(3)))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


class LayerDrop(Stack):
    """Whole layers left out at random."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                x = layer(x)
        return x


def auxiliary_loss(model: nn.Module, batch: Tensor) -> Tensor:
    loss = model(batch).square().mean()
    return loss + 0.01 * sum(layer.auxiliary for layer in model.layers)


def critic(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def gradient_penalty(model: nn.Module, batch: Tensor) -> Tensor:
    """Second-order gradients: the loss holds the gradient of a critic by its input."""
    x = batch.detach().requires_grad_()
    score = model(x).mean()
    (gradient,) = torch.autograd.grad(score, x, create_graph=True)
    return score + (gradient.flatten(1).norm(dim=1) - 1).square().mean()


def under_autocast(model: nn.Module, batch: Tensor) -> Tensor:
    """Autocast as most loops enter it: its cache of weight copies on."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(batch).float().square().mean()


def hooked() -> tuple[nn.Module, Any]:
    """Hooks of every kind, which count how often they fire and change what they are given."""
    model = Stack(*(kind.Mlp() for _ in range(3)))
    fired: list[str] = []

    def halve(gradient: Tensor) -> Tensor:
        fired.append("weight")
        return gradient * 0.5

    for layer in model.layers:
        layer.up.weight.register_hook(halve)
        layer.register_forward_pre_hook(lambda *_: fired.append("before"))
        layer.register_forward_hook(lambda *_: fired.append("after"))
        layer.register_full_backward_hook(lambda *_: fired.append("backward"))
    model.fired = fired
    return model, rows()


def side_channel() -> tuple[nn.Module, Any]:
    place: dict[str, Tensor] = {}
    return Stack(*(kind.WritesAside(place, reads=index > 0) for index in range(3))), rows()


def frozen_norms() -> tuple[nn.Module, Any]:
    model = Stack(*(kind.BatchNormConv() for _ in range(3)), before=nn.Conv2d(8, 8, 1))
    for layer in model.layers:
        layer.norm1.eval()
        layer.norm2.eval()
    return model, pixels()


def low_rank() -> tuple[nn.Module, Any]:
    """C04: the input needs no gradient, and neither does most of the model."""
    model = Stack(*(kind.LowRank() for _ in range(3)))
    model.before.requires_grad_(False)
    return model, rows()


def encoder() -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 48, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), rows()


def uneven_unet() -> tuple[nn.Module, Any]:
    return UNet(widths=[4, 8, 16], image_size=16, channels=3, classes=5), torch.randn(2, 3, 16, 16)


ENTRIES = [
    Entry("dropout", "draws from torch's stream", stack(lambda: kind.Mlp(dropout=0.3))),
    Entry("random LeakyReLU", "slopes drawn from torch's stream", stack(kind.RandomSlope)),
    Entry(
        "batch norm",
        "running statistics, a batch counter",
        stack(kind.BatchNormConv, pixels, lambda: nn.Conv2d(8, 8, 1)),
    ),
    Entry("frozen batch norm", "train mode differs within a block", frozen_norms),
    Entry("spectral norm", "a power iteration in two buffers", stack(kind.SpectralNorm)),
    Entry("weight norm", "a parametrization computes the weight", stack(kind.WeightNorm)),
    Entry("pruned", "a mask and a hook compute the weight", stack(kind.Pruned, lambda: torch.randn(64, 64, WIDTH))),
    Entry("moving average", "a buffer that the forward changes and uses", stack(kind.MovingAverage)),
    Entry("call counter", "a Python attribute that changes", stack(kind.CountsCalls), kept="attribute 'calls'"),
    Entry(
        "key-value cache", "a list that grows with each call", stack(kind.CacheInAttribute), kept="attribute 'cache'"
    ),
    Entry("experts, load in a buffer", "routing by data, a counter", stack(lambda: kind.Experts("buffer"))),
    Entry(
        "experts, loss in an attribute",
        "an auxiliary loss that the training loop collects",
        stack(lambda: kind.Experts("attribute")),
        loss_fn=auxiliary_loss,
        kept="attribute 'auxiliary'",
    ),
    Entry(
        "experts, loss handed on",
        "routing by data, tuples between blocks",
        lambda: (FromTensor(*(kind.Experts("output") for _ in range(3)), begin=with_zero, end=first_and_sum), rows()),
    ),
    Entry(
        "Python's stream",
        "a coin from `random`",
        stack(lambda: kind.DrawsFrom(kind.python_coin)),
        kept="Python's or NumPy's",
    ),
    Entry(
        "NumPy's stream",
        "a coin from `np.random`",
        stack(lambda: kind.DrawsFrom(kind.numpy_coin)),
        kept="Python's or NumPy's",
    ),
    Entry(
        "a torch generator of its own", "a private stream", stack(kind.PrivateTorchStream), kept="attribute 'stream'"
    ),
    Entry(
        "a NumPy generator of its own", "a private stream", stack(kind.PrivateNumpyStream), kept="attribute 'stream'"
    ),
    Entry("side channel", "a tensor goes past the chain in a dict", side_channel, kept="attribute 'place'"),
    Entry(
        "in place, the same tensor",
        "the input comes back changed",
        stack(kind.AddsToInput),
        kept="changes its own input",
    ),
    Entry(
        "in place on its input",
        "the kept input would be wrong",
        stack(kind.InPlaceOnInput),
        kept="changes its own input",
    ),
    Entry("in place inside", "operators that overwrite", stack(kind.InPlaceInside)),
    Entry("views", "what is handed on is a view", stack(kind.GivesViews)),
    Entry("custom autograd function", "a backward of the user's", stack(kind.CustomFunction)),
    Entry(
        "gradient penalty",
        "second-order gradients; the plan is made for the loss without it",
        stack(lambda: kind.Mlp(dropout=0.1)),
        loss_fn=gradient_penalty,
        profile_loss_fn=critic,
    ),
    Entry(
        "gradient penalty, profiled",
        "the loss itself runs a backward",
        stack(kind.Mlp),
        loss_fn=gradient_penalty,
        refused="the loss calls torch.autograd.grad",
    ),
    Entry(
        "checkpoint inside",
        "blocks that recompute by themselves",
        stack(kind.ChecksPoints),
        refused="torch.utils.checkpoint is called by layers.0, layers.1, layers.2",
    ),
    Entry("hooks", "module hooks, a hook that changes a weight's gradient", hooked),
    Entry("LoRA", "a frozen base, an input without gradient", low_rank),
    Entry("shared matrix", "one parameter in every block", shared_weights),
    Entry("shared parts", "one activation, one dropout, one table for all", lambda: shared_parts(moves=False)),
    Entry(
        "shared parts, one of which changes",
        "a buffer that every block changes and uses",
        lambda: shared_parts(moves=True),
        kept="is shared with block",
    ),
    Entry(
        "tied embedding", "one parameter before and after", lambda: (TiedLanguageModel(), tokens()), loss_fn=next_token
    ),
    Entry(
        "one layer twice",
        "a module that runs two times",
        lambda: (OneLayerTwice(*(kind.Mlp() for _ in range(3))), rows()),
    ),
    Entry(
        "decoder with a mask",
        "`h = layer(h, mask=mask)[0]` (P10)",
        lambda: (MaskedDecoder(*(kind.MaskedLayer() for _ in range(3))), rows()),
    ),
    Entry(
        "dataclass",
        "text, None and a dict between blocks (C05)",
        lambda: (FromTensor(*(kind.TakesDataclass() for _ in range(3)), begin=begin_state, end=end_state), rows()),
    ),
    Entry(
        "dict",
        "outputs that become keyword arguments",
        lambda: (
            FromTensor(
                *(kind.TakesDict() for _ in range(3)),
                begin=lambda x: {"hidden": x, "total": x.mean()},
                end=lambda v: v["hidden"] + v["total"],
            ),
            rows(),
        ),
    ),
    Entry(
        "None",
        "`(hidden, None)` between blocks",
        lambda: (
            FromTensor(*(kind.GivesNone() for _ in range(3)), begin=lambda x: (x, None), end=lambda v: v[0]),
            rows(),
        ),
    ),
    Entry("LSTM", "one kernel for the whole sequence", stack(kind.Recurrent)),
    Entry("post-norm encoder", "torch's own layers, their fast path", encoder),
    Entry("U-Net, skips handed on", "uneven blocks, tuples", uneven_unet, blocks=None),
    Entry("U-Net, skips in a list", "outputs used twice", lambda: (SkipUNet(), rows()), blocks=None),
    Entry(
        "two streams",
        "RevNet's pair of tensors",
        lambda: (FromTensor(*(kind.Reversible() for _ in range(3)), begin=twins, end=first_and_sum), rows()),
    ),
    Entry(
        "diffusion",
        "a time embedding to every block",
        lambda: (Diffusion(), (rows(), torch.rand(16, 1))),
        loss_fn=denoise,
    ),
    Entry(
        "deep supervision", "every output reaches the loss", lambda: (SumOfAll(*(kind.Mlp() for _ in range(3))), rows())
    ),
    Entry("residual in the model", "code between the blocks", lambda: (ResidualOutside(), rows())),
    Entry(
        "layer drop",
        "layers that do not run",
        lambda: (LayerDrop(*(kind.Mlp() for _ in range(3))), rows()),
        refused="does not run",
    ),
    Entry("autocast inside", "half precision in a block", stack(kind.HalfInside)),
    Entry("autocast around", "half precision, its weight cache on", stack(kind.Mlp), loss_fn=under_autocast),
    Entry(
        "autocast around, a layer twice",
        "two calls share copies of weights in its cache",
        lambda: (OneLayerTwice(*(kind.Mlp() for _ in range(3))), rows()),
        loss_fn=under_autocast,
        refused="compute with one weight",
    ),
    Entry(
        "positions for every block",
        "a slice of one weight between the blocks",
        lambda: (HandsPositions(*(kind.TakesPositions() for _ in range(3))), rows()),
    ),
    Entry("Fourier mixing", "complex numbers", stack(kind.Fourier)),
    Entry("detached path", "a part without gradient", stack(kind.Detaches)),
]

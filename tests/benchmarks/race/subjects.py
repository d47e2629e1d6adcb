"""The models of the race, each with a batch and a loss: always the same ones, by their seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptplan.data import Batch
from ckptplan.data.spec import DataSpec
from ckptplan.models import GPT, ChainModel, UNet, ViT

SEED = 0


class PostNormChain(ChainModel):
    """PyTorch's own encoder layers: post-norm, ReLU, each with another width inside, between two linear layers."""

    def __init__(self, hidden_widths: Sequence[int], width: int, heads: int, patches: int, dropout: float) -> None:
        super().__init__()
        self.expects = DataSpec("images", channels=1, image_size=patches, classes=10)
        self.embed = nn.Linear(patches, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, hidden, dropout, "relu", batch_first=True)
            for hidden in hidden_widths
        )
        self.head = nn.Linear(width, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Images (B, 1, S, S), a row at a time -> logits (B, 10)."""
        x = self.embed(inputs.squeeze(1))
        for block in self.layers:
            x = block(x)
        return self.head(x.mean(dim=1))


@dataclass(frozen=True)
class Subject:
    """A model that runs, and how to make the same one again (under fake tensors, say)."""

    name: str
    make: Callable[[], tuple[ChainModel, Batch]]
    model: ChainModel
    batch: Batch

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.layers)

    def step(self) -> Tensor:
        """Forward and loss of the model as it stands."""
        return loss_of(self.model, self.batch)

    def step_with(self, layers: Sequence[nn.Module]) -> Tensor:
        """The same with other modules in the place of the blocks."""
        with replaced_layers(self.model, layers):
            return self.step()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch.inputs)
    return F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())


@contextmanager
def replaced_layers(model: ChainModel, layers: Sequence[nn.Module]) -> Iterator[None]:
    own = model.layers
    model.layers = nn.ModuleList(layers)
    try:
        yield
    finally:
        model.layers = own


def _language(model: Callable[[], GPT], batch_size: int) -> tuple[ChainModel, Batch]:
    made = model()
    tokens = torch.randint(0, made.expects.vocab_size, (batch_size, made.expects.sequence_length + 1))
    return made, Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _images(model: Callable[[], ChainModel], batch_size: int) -> tuple[ChainModel, Batch]:
    made = model()
    spec = made.expects
    images = torch.randn(batch_size, spec.channels, spec.image_size, spec.image_size)
    return made, Batch(images, torch.randint(0, spec.classes, (batch_size,)))


MODELS: dict[str, Callable[[], tuple[ChainModel, Batch]]] = {
    "gpt12": lambda: _language(lambda: GPT(layers=12, width=256, heads=8, sequence_length=256, vocab_size=1024), 8),
    "gpt24": lambda: _language(lambda: GPT(layers=24, width=128, heads=4, sequence_length=128), 8),
    "vit": lambda: _images(
        lambda: ViT(layers=8, width=128, heads=4, patch_size=8, image_size=64, channels=3, classes=10), 16
    ),
    "unet": lambda: _images(lambda: UNet(widths=[16, 32, 64, 128], image_size=64, channels=3, classes=10), 8),
    "postnorm": lambda: _images(lambda: PostNormChain([256, 512, 128, 1024] * 2, 128, 4, 64, 0.0), 16),
}
# For the test, seconds each; the second draws random numbers.
QUICK: dict[str, Callable[[], tuple[ChainModel, Batch]]] = {
    "gpt-quick": lambda: _language(lambda: GPT(layers=4, width=32, heads=2, sequence_length=32, vocab_size=64), 4),
    "dropout-quick": lambda: _language(
        lambda: GPT(layers=4, width=32, heads=2, sequence_length=32, vocab_size=64, dropout=0.1), 4
    ),
    "unet-quick": lambda: _images(lambda: UNet(widths=[8, 16, 32], image_size=16, channels=3, classes=10), 8),
    "postnorm-quick": lambda: _images(lambda: PostNormChain([64, 128, 32, 256], 32, 2, 16, 0.1), 8),
}


def make_subject(name: str) -> Subject:
    make = (MODELS | QUICK)[name]
    torch.manual_seed(SEED)
    model, batch = make()
    for parameter in model.parameters():  # they stand before every step, and so count nothing
        parameter.grad = torch.zeros_like(parameter)
    return Subject(name, make, model, batch)

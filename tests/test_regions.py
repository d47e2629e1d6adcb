"""What runs around the blocks: a model may hold on to what it calls its first block with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ckptplan.measure import profile_model
from ckptplan.memory import LiveStorages
from ckptplan.planners import plan_checkpoints
from ckptplan.proof import prove_model
from ckptplan.subject import Trials


class HoldsItsInput(nn.Module):
    """As ``nn.TransformerEncoder`` does: ``output = src``, and ``src`` stays until the forward returns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = x
        for layer in self.layers:
            y = layer(y)
        return self.head(y)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 128, batch_first=True), 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)))


@pytest.mark.parametrize(("make", "paths"), [(HoldsItsInput, "layers.*"), (Encoder, "encoder.layers.*")])
@pytest.mark.parametrize("fraction", [1.0, 0.8])
def test_what_the_model_holds_under_another_name_is_not_taken_off_the_head(
    make: type[nn.Module], paths: str, fraction: float
) -> None:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    model, tokens = make(), torch.randint(0, 50, (8, 32))
    profile = profile_model(model, paths, tokens, loss_fn, num_warmup=0, num_trials=1)
    plan = plan_checkpoints(profile, target_kind="activation_budget_fraction", target_value=fraction, cost="flops")
    proof = prove_model(model, plan, tokens, loss_fn, device=torch.device("cpu"), trials=Trials(0, 1))
    assert plan.predicted_peak_bytes == proof.peak_bytes
    assert proof.gradients.bitwise_equal


def peaks_of_a_plain_step(model: nn.Module, tokens: Tensor, upscale: int) -> tuple[int, int]:
    """By live storages: the most in the backward of head and loss, and from when the output's gradient is there."""
    peaks: dict[str, int] = {}

    def step() -> Tensor:
        return wide_loss(model, tokens, upscale)

    step().backward()  # gradients stand
    live = LiveStorages()

    def output_arrives(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(lambda gradient: restart("loss"))

    def last_block_arrives(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(lambda gradient: restart("head"))

    def restart(name: str) -> None:
        peaks[name], live.peak_bytes = live.peak_bytes, live.level_bytes

    handles = [model.register_forward_hook(output_arrives)]
    handles.append(model.get_submodule("layers.3").register_forward_hook(last_block_arrives))
    with live:
        loss = step()
        live.peak_bytes = live.level_bytes
        loss.backward()
    for handle in handles:
        handle.remove()
    return max(peaks["loss"], peaks["head"]), peaks["head"]


def wide_loss(model: nn.Module, tokens: Tensor, upscale: int) -> Tensor:
    """The more often it is repeated, the more the loss's own backward takes beside that of the head."""
    output = model(tokens)
    return output.repeat(1, upscale).exp().mean() if upscale > 1 else output.mean()


@pytest.mark.parametrize("upscale", [1, 6])
def test_the_backward_of_the_head_is_told_apart_from_that_of_the_loss(upscale: int) -> None:
    model, tokens = HoldsItsInput(), torch.randint(50, (64,))
    profile = profile_model(
        model, ["layers.*"], tokens, lambda m, t: wide_loss(m, t, upscale), num_warmup=0, num_trials=1, memory="live"
    )
    assert profile.post is not None
    whole, head = peaks_of_a_plain_step(model, tokens, upscale)
    found = profile.post.head_backward_peak_bytes
    assert found is not None
    assert profile.post.cost.backward_peak_bytes - found == whole - head
    assert (whole > head) == (upscale == 6)


def test_where_no_output_of_the_model_is_seen_nothing_is_told_apart() -> None:
    class OwnLoss(HoldsItsInput):
        def loss(self, tokens: Tensor) -> Tensor:
            return self.forward(tokens).square().mean()

    model, tokens = OwnLoss(), torch.randint(50, (64,))
    profile = profile_model(model, ["layers.*"], tokens, lambda m, t: m.loss(t), num_warmup=0, num_trials=1)
    assert profile.post is not None
    assert profile.post.head_backward_peak_bytes is None

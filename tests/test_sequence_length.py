"""The longest sequence that fits, against trying every length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ckptplan
from ckptplan.errors import InfeasibleTargetError, SizeRefusedError
from ckptplan.measure import profile_model
from ckptplan.memory import LiveStorages
from ckptplan.planners import least_nested_peak, no_checkpoint_peak, smallest_reachable
from ckptplan.scaling import largest_within
from ckptplan.sequence_length import length_of, with_length


class Block(nn.Module):
    """Attention whose scores are kept: bytes grow as the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, positions: int = 200) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(positions, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def batch_of(length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(11, (2, length), generator=torch.Generator().manual_seed(length))
    return tokens, tokens.roll(1, 1)


def really(length: int) -> Any:
    return profile_model(Net(), ["layers.*"], batch_of(length), loss_fn, num_warmup=0, num_trials=1)


def longest(length: int, budget: Any, **options: Any) -> Any:
    return ckptplan.longest_sequence(Net(), batch_of(length), loss_fn, budget, say=None, **options)


@pytest.mark.parametrize(("planner", "least"), [("optimal", least_nested_peak), ("dp", smallest_reachable)])
def test_the_longest_is_that_of_trying_every_length_nearby(planner: str, least: Any) -> None:
    found = longest(24, 0.8, planner=planner)
    allowed = int(no_checkpoint_peak(really(24)) * 0.8)
    around = range(found.length - 2, found.length + 3)
    assert found.length == max(length for length in around if least(really(length))[0] <= allowed)
    assert found.length > 24
    assert found.points[-1].predicted_peak_bytes == found.measured_peak_bytes <= allowed
    assert [point.length for point in found.points] == sorted(point.length for point in found.points)
    assert all(point.budget_bytes == allowed for point in found.points)


def test_the_plan_of_the_answer_trains_within_the_budget_and_adds_the_flops_that_it_says() -> None:
    found = longest(16, 0.7)
    model, batch = Net(), batch_of(found.length)
    loss_fn(model, batch).backward()  # gradients stand before a step is measured
    with ckptplan.checkpointed(model, found.plan), LiveStorages() as live:
        before = live.level_bytes
        loss_fn(model, batch).backward()
    assert 0 < live.peak_bytes - before <= found.points[-1].budget_bytes
    ratios = [point.recompute_flops_ratio for point in found.points]
    assert ratios[0] == 0
    assert 0 < ratios[-1] < 1


def test_a_size_counts_what_stands_beside_activations_and_the_batch_itself() -> None:
    found = longest(16, "1MiB", planner="dp", confirm=False)
    parameters = sum(p.numel() * 4 for p in Net().parameters())
    for point in found.points:
        assert point.budget_bytes == 2**20 - 2 * parameters - 2 * 2 * point.length * 8
    assert found.measured_peak_bytes is None


def test_only_multiples_and_no_longer_than_the_limit() -> None:
    found = longest(16, "1MiB", planner="dp", confirm=False, multiple_of=8)
    alone = longest(16, "1MiB", planner="dp", confirm=False)
    assert found.length == alone.length // 8 * 8
    assert longest(16, "1MiB", planner="dp", confirm=False, most=20).length == 20


def test_a_table_of_positions_that_ends_is_the_limit_and_is_told() -> None:
    found = ckptplan.longest_sequence(Net(positions=40), batch_of(16), loss_fn, "64MiB", say=None, planner="dp")
    assert found.length == 40
    assert "the model does not run with sequences of 41: IndexError: index out of range in self" in found.notes


def test_the_models_own_error_at_the_length_that_was_given_is_not_explained_away() -> None:
    with pytest.raises(IndexError, match="index out of range"):
        ckptplan.longest_sequence(Net(positions=8), batch_of(16), loss_fn, "64MiB", say=None)


def test_a_budget_below_the_shortest_is_infeasible_with_the_least() -> None:
    with pytest.raises(
        InfeasibleTargetError, match="not even sequences of 8 fit: their least activation peak is"
    ) as it:
        longest(16, "16KiB", multiple_of=8)
    assert it.value.smallest_reachable_bytes > it.value.budget_bytes == 0


def test_the_answer_is_told_with_what_was_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    found = ckptplan.longest_sequence(Net(), batch_of(16), loss_fn, 0.9, planner="dp", multiple_of=4)
    said = capsys.readouterr().out
    assert said.splitlines() == [f"ckptplan: {line}" for line in found.text.splitlines()]
    assert f"longest sequence that fits: {found.length}" in said
    assert f"a real step of {found.length} took" in said


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"most": 0}, "most=0; expected a whole number of tokens, 1 or more"),
        ({"multiple_of": True}, "multiple_of=True"),
        ({"most": 8, "multiple_of": 64}, "most=8 is less than multiple_of=64"),
        ({"resize": lambda batch, n: batch}, "gave tensors of lengths .16.; expected"),
        ({"budget": 1.5}, "budget=1.5"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        longest(16, **{"budget": "1MiB", **options})


def test_batches_of_any_form_are_made_longer_and_those_without_one_length_refused() -> None:
    batch = {"ids": torch.arange(6).reshape(2, 3), "labels": torch.tensor([1, 2]), "name": "x"}
    assert with_length(batch, 5)["ids"].tolist() == [[0, 1, 2, 0, 1], [3, 4, 5, 3, 4]]
    assert with_length(batch, 2)["labels"].tolist() == [1, 2]
    assert length_of(batch) == 3
    with pytest.raises(ValueError, match=r"dimension 1 of its tensors is \[3, 4\]"):
        length_of((torch.zeros(2, 3), torch.zeros(2, 4)))


def test_memory_that_this_machine_does_not_have_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptplan.sequence_length.available_host_bytes", lambda: 2**20)
    found = longest(16, "1TiB", planner="dp", confirm=False)
    assert found.points[-1].predicted_peak_bytes <= 2**19
    assert any("half of what this machine has free" in note for note in found.notes)


@pytest.mark.parametrize("growth", [2, float("inf")])
def test_the_search_finds_what_trying_all_finds_along_lines_curves_and_steps(growth: float) -> None:
    def square(n: int) -> int:
        return 100 + 3 * n + 2 * n * n

    def bent(n: int) -> int:
        return 50 * n + (10_000 if n > 77 else 0)

    for needed in (square, bent, lambda n: 7 * n):
        for room in (0, 1, 500, 5_000, 123_456):
            for ends in (None, 3, 60):
                seen: list[int] = []

                def over(n: int, needed: Any = needed, room: int = room, ends: Any = ends, seen: Any = seen) -> Any:
                    seen.append(n)
                    return None if ends is not None and n > ends else needed(n) - room

                found = largest_within(over, 300, start=(4, 16), growth=growth)
                fits = [n for n in range(1, 301) if needed(n) <= room and (ends is None or n <= ends)]
                assert found == max(fits, default=0)
                assert len(seen) == len(set(seen)) <= 22


def test_sizes_that_a_model_refuses_are_named_and_one_sample_need_not_run() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    def mean(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    with pytest.raises(InfeasibleTargetError, match="not even one sample fits"):
        ckptplan.maximize(Normed(), torch.randn(8, 8), mean, 0.01, say=None)

    class Fixed(Normed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(8, 8))

    with pytest.raises(
        SizeRefusedError, match=r"does not run with a batch of 2: RuntimeError: shape '\[8, 8\]' is invalid"
    ):
        ckptplan.maximize(Fixed(), torch.randn(8, 8), mean, 0.5, say=None)


def test_a_batch_that_this_machine_cannot_hold_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    monkeypatch.setattr("ckptplan.batch_size.available_host_bytes", lambda: 2**16)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(3)))
    found = ckptplan.maximize(layers, torch.randn(8, 8), mean, "1TiB", "batch", say=None)
    assert found.measured_peak_bytes is None
    assert found.notes == (
        "the largest batch is not confirmed: this machine has no memory free for such a batch",
        f"no real step of {found.largest.batch_size} was run: this machine has not as much memory free",
    )

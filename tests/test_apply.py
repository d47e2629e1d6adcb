"""Running a plan: the same training as without one, whatever the plan, the call and the order of things."""

from __future__ import annotations

import copy
import inspect
import io
import subprocess
import sys
import warnings
from collections import namedtuple
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptplan.apply import apply_plan, checkpointed
from ckptplan.blocks import CheckpointableBlock, declare_blocks
from ckptplan.errors import PlanIncompatibleError
from ckptplan.measure import profile_blocks
from ckptplan.nodes import blocks_of
from ckptplan.plan import CheckpointPlan
from tests.chains import DropoutBlock, declared, flat_texts
from tests.tracker import LiveBytes

TREES = [
    "R(0 1) K2 K3",
    "R(0 1 2 3)",
    "K0 R(1 R(2 3))",
    "R(R(0 1) 2) R(3)",
    "R(R(R(0) 1) 2 R(3))",
    "R(R(0) R(1) R(2) R(3))",
]


def forced(text: str, blocks: tuple[CheckpointableBlock, ...]) -> CheckpointPlan:
    return CheckpointPlan.from_text(text, [b.block_id for b in blocks])


class TestTheTrainingIsTheSame:
    """C01: dropout, five AdamW steps, then the random stream."""

    @staticmethod
    @cache
    def run(text: str | None) -> tuple[list[float], list[Tensor], Tensor]:
        torch.manual_seed(0)
        layers = nn.ModuleList(DropoutBlock() for _ in range(4))
        head = nn.Linear(16, 3)
        x, y = torch.randn(32, 16), torch.randint(0, 3, (32,))
        blocks = declare_blocks(layers, [(str(i), layer) for i, layer in enumerate(layers)])
        run_layers: nn.Module = nn.Sequential(*layers)
        if text is not None:
            run_layers = apply_plan(blocks, forced(text, blocks), (x,))
        optimizer = torch.optim.AdamW([*layers.parameters(), *head.parameters()], lr=1e-2)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(head(run_layers(x)), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [p.detach() for p in (*layers.parameters(), *head.parameters())], torch.rand(3)

    @pytest.mark.parametrize("text", [*flat_texts(4), *TREES])
    def test_losses_parameters_and_random_stream_equal_the_plain_runs(self, text: str) -> None:
        plain = self.run(None)
        losses, parameters, drawn = self.run(text)
        assert len(set(losses)) == 5
        assert losses == plain[0]
        assert all(torch.equal(a, b) for a, b in zip(parameters, plain[1], strict=True))
        assert torch.equal(drawn, plain[2])


class Counting(nn.Module):
    """BatchNorm, a moving average that feeds the result, and a count of forward calls outside the module."""

    counts: dict[int, int] = {}  # noqa: RUF012

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6))
        self.register_buffer("ema", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.counts[self.index] = self.counts.get(self.index, 0) + 1
        y = self.inner(x)
        if self.training:
            with torch.no_grad():
                self.ema.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return x + torch.tanh(y - self.ema) * y


class TestBuffersAndCounts:
    """C03: three steps, then a training forward without gradients, then an evaluation."""

    @staticmethod
    @cache
    def run(text: str | None) -> dict[str, Any]:
        torch.manual_seed(0)
        layers = nn.Sequential(*(Counting(i) for i in range(4)))
        blocks = declare_blocks(layers, [(str(i), layer) for i, layer in enumerate(layers)])
        chain: nn.Module = layers if text is None else apply_plan(blocks, forced(text, blocks), (torch.randn(16, 6),))
        torch.manual_seed(1)
        batches = [torch.randn(16, 6) for _ in range(5)]
        gradients, counts = [], []
        for x in batches[:3]:
            layers.zero_grad()
            Counting.counts.clear()
            chain(x).square().sum().backward()
            counts.append(dict(Counting.counts))
            gradients.append([p.grad.clone() for p in layers.parameters()])
        with torch.no_grad():
            chain(batches[3])
        buffers = {name: b.clone() for name, b in layers.named_buffers()}
        chain.eval()
        with torch.no_grad():
            evaluated = chain(batches[4])
        return {"gradients": gradients, "counts": counts, "buffers": buffers, "evaluated": evaluated}

    @pytest.mark.parametrize("text", [*flat_texts(4)[1::5], *TREES])
    def test_gradients_and_buffers_equal_the_plain_runs_and_evaluation_too(self, text: str) -> None:
        plain = self.run(None)
        found = self.run(text)
        for mine, theirs in zip(found["gradients"], plain["gradients"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert {n for n, b in found["buffers"].items() if not torch.equal(b, plain["buffers"][n])} == set()
        assert found["buffers"]["0.inner.1.num_batches_tracked"] == 4
        assert torch.equal(found["evaluated"], plain["evaluated"])

    @pytest.mark.parametrize(
        ("text", "calls"),
        [
            ("K0 K1 K2 K3", [1, 1, 1, 1]),
            ("R(0) K1 R(2) K3", [2, 1, 2, 1]),
            ("R(0 1) R(2 3)", [2, 2, 2, 2]),
            ("R(R(0 1) 2) R(3)", [3, 3, 2, 2]),
            ("R(R(R(0) 1) 2) R(3)", [4, 3, 2, 2]),
            # a node at a replay's end is not entered by that replay: it stops when the node's input is there
            ("K0 R(1 R(2 3))", [1, 2, 2, 2]),
            ("R(R(0) R(1) R(2) R(3))", [3, 3, 3, 2]),
        ],
    )
    def test_a_block_runs_once_more_for_each_replay_around_it(self, text: str, calls: list[int]) -> None:
        assert self.run(text)["counts"] == [dict(enumerate(calls))] * 3


class TestCalling:
    @staticmethod
    def chain(text: str = "R(0 1) R(2) K3") -> tuple[nn.Module, nn.Sequential, Tensor]:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)))
        blocks = declare_blocks(layers, [(str(i), layer) for i, layer in enumerate(layers)])
        x = torch.randn(16, 8)
        return apply_plan(blocks, forced(text, blocks), (x,)), layers, x

    def test_the_container_holds_the_same_modules_and_parameters_and_leaves_the_model_alone(self) -> None:
        container, layers, x = self.chain()
        assert all(a is b for a, b in zip(container.blocks, layers, strict=True))
        assert {id(p) for p in container.parameters()} == {id(p) for p in layers.parameters()}
        assert torch.equal(container(x), layers(x))
        assert all("forward" not in vars(layer) for layer in layers)

    def test_a_second_backward_adds_exactly_the_first_ones_gradient_again(self) -> None:
        for text in ("R(0 1) R(2) K3", "R(R(0) 1) R(2 R(3))"):
            container, _, x = self.chain(text)
            loss = container(x).square().sum()
            loss.backward(retain_graph=True)
            once = [p.grad.clone() for p in container.parameters()]
            loss.backward()
            assert all(torch.equal(p.grad, 2 * g) for p, g in zip(container.parameters(), once, strict=True))

    def test_smaller_last_batches_and_other_shapes_run(self) -> None:
        container, layers, _ = self.chain()
        for shape in ((3, 8), (1, 8), (2, 5, 8)):
            x = torch.randn(shape)
            assert torch.equal(container(x), layers(x))
            container(x).sum().backward()

    def test_without_gradients_each_block_runs_once_and_nothing_is_kept(self) -> None:
        container, _, x = self.chain()
        with torch.no_grad():
            assert not container(x).requires_grad

    def test_in_eval_mode_with_gradients_the_plan_is_kept(self) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(*(Counting(i) for i in range(2)))
        blocks = declare_blocks(layers, [(str(i), layer) for i, layer in enumerate(layers)])
        container = apply_plan(blocks, forced("R(0) K1", blocks), (torch.randn(4, 6),))
        container.eval()
        Counting.counts.clear()
        container(torch.randn(4, 6)).sum().backward()
        assert Counting.counts == {0: 2, 1: 1}

    def test_frozen_inputs_and_adapters_get_their_gradients(self) -> None:
        """C04: nobody has to say that the input needs a gradient."""

        class Adapter(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.base = nn.Linear(16, 16).requires_grad_(False)
                self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                return torch.tanh(self.base(x) + self.up(self.down(x)))

        torch.manual_seed(0)
        layers = nn.Sequential(Adapter(), Adapter(), Adapter())
        blocks = declare_blocks(layers, [(str(i), layer) for i, layer in enumerate(layers)])
        x = torch.randn(8, 16)
        layers(x).square().mean().backward()
        expected = {n: p.grad for n, p in layers.named_parameters()}
        assert sum(g is not None for g in expected.values()) == 6
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for text in flat_texts(3):
                layers.zero_grad()
                apply_plan(blocks, forced(text, blocks), (x,))(x).square().mean().backward()
                found = {n: p.grad for n, p in layers.named_parameters()}
                assert all((g is None) == (found[n] is None) for n, g in expected.items())
                assert all(torch.equal(g, found[n]) for n, g in expected.items() if g is not None)


Point = namedtuple("Point", "x weight")


class TestStructures:
    def test_tuples_namedtuples_dicts_and_keywords_named_like_checkpoints_own_go_through(self) -> None:
        class First(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, x: Tensor, debug: Tensor | None = None) -> Point:
                return Point(self.linear(x) * (1 if debug is None else debug), x.sum())

        class Second(First):
            def forward(self, x: Tensor, weight: Tensor, debug: Tensor | None = None) -> dict[str, Any]:
                return {"x": self.linear(x) * weight, "label": "name", "context_fn": None}

        class Third(First):
            def forward(self, *, x: Tensor, label: str, context_fn: None) -> Tensor:
                assert label == "name"
                return self.linear(x).tanh()

        torch.manual_seed(0)
        blocks = declared([First(), Second(), Third()])
        x, debug = torch.randn(3, 4), torch.full((4,), 2.0, requires_grad=True)
        results = []
        for text in ["K0 K1 K2", *flat_texts(3)[1:], "R(0 1) K2", "R(0 1 2)", "R(0 R(1 2))"]:
            container = apply_plan(blocks, forced(text, blocks), (x,), {"debug": debug})
            container.zero_grad()
            debug.grad = None
            container(x, debug=debug).square().sum().backward()
            results.append([p.grad.clone() for p in (*container.parameters(), debug)])
        assert len(results) == 11
        for found in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))

    def test_dataclasses_and_everything_in_them_go_through_plans_to_second_order(self) -> None:
        """C05."""

        @dataclass
        class Result:
            tensor: Tensor
            nothing: None
            extra: dict[str, Any]

        class First(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(5, 5).double()

            def forward(self, x: Tensor, scale: float = 2.0, mask=None, flag: bool = False, meta=None) -> Result:
                y = torch.tanh(self.linear(x)) * scale
                return Result(y, None, {"scalar": y.sum(), "text": "t", "nested": (y.square(), 3)})

        class Second(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(5, 5).double()

            def forward(self, given: Result) -> Result:
                nested, three = given.extra["nested"]
                assert (given.nothing, given.extra["text"], three) == (None, "t", 3)
                y = self.linear(given.tensor) + nested * given.extra["scalar"]
                return Result(y, None, {"scalar": y.mean(), "text": "t", "nested": (y * y, 3)})

        torch.manual_seed(0)
        blocks = declared([First(), Second(), Second()])
        x = torch.randn(5, dtype=torch.float64, requires_grad=True)

        def loss_of(output: Result) -> Tensor:
            assert type(output) is Result
            assert list(output.extra) == ["scalar", "text", "nested"]
            return output.tensor.sum() + output.extra["scalar"] + output.extra["nested"][0].sum()

        results = []
        for text in [*flat_texts(3), "R(0 1) K2", "R(0 R(1 2))", "R(R(0) 1 2)"]:
            container = apply_plan(blocks, forced(text, blocks), (x,))
            loss = loss_of(container(x))
            first = torch.autograd.grad(loss, [x, *container.parameters()], create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, *container.parameters()])
            results.append([*first, *second])
            assert torch.autograd.gradcheck(lambda t, c=container: loss_of(c(t)), (x,))
        for found in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))

    @pytest.mark.parametrize("form", ["old", "new"])
    def test_spectral_norms_power_iteration_moves_once_per_step(self, form: str) -> None:
        def chain() -> nn.Sequential:
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                norm = nn.utils.spectral_norm if form == "old" else nn.utils.parametrizations.spectral_norm
                return nn.Sequential(*(nn.Sequential(norm(nn.Linear(8, 8)), nn.Tanh()) for _ in range(3)))

        def trained(text: str | None) -> list[Tensor]:
            layers = chain()
            blocks = declare_blocks(layers, [(str(i), layer) for i, layer in enumerate(layers)])
            torch.manual_seed(1)
            x = torch.randn(4, 8)
            run = layers if text is None else apply_plan(blocks, forced(text, blocks), (x,))
            optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                run(x).square().sum().backward()
                optimizer.step()
            return [t.detach() for t in (*layers.parameters(), *layers.buffers())]

        plain = trained(None)
        for text in ("R(0) R(1) R(2)", "R(0 1) K2", "R(R(0) 1) R(2)"):
            assert all(torch.equal(a, b) for a, b in zip(trained(text), plain, strict=True))

    def test_a_mask_reaches_every_layer(self) -> None:
        """P10: layers that return (h, attention), called inside a model with an embedding and a head."""

        class Decoder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
                self.masks: list[Tensor | None] = []

            def forward(self, hidden: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
                y, weights = self.attention(hidden, hidden, hidden, attn_mask=mask)
                return hidden + y, weights

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(10, 16)
                self.layers = nn.ModuleList(Decoder() for _ in range(3))
                self.head = nn.Linear(16, 10)

            def forward(self, tokens: Tensor) -> Tensor:
                mask = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)
                h = self.embed(tokens)
                for layer in self.layers:
                    h = layer(h, mask=mask)[0]
                return self.head(h)

        torch.manual_seed(0)
        net, tokens = Net(), torch.randint(0, 10, (4, 6))
        keys = list(net.state_dict())
        expected = net(tokens)
        expected.square().mean().backward()
        gradients = [p.grad.clone() for p in net.parameters()]
        blocks = [f"layers.{i}" for i in range(3)]
        for text in flat_texts(3):
            net.zero_grad()
            with checkpointed(net, CheckpointPlan.from_text(text, blocks)):
                found = net(tokens)
                found.square().mean().backward()
                assert list(net.state_dict()) == keys
                net(tokens[:1]).sum()
            assert torch.equal(found, expected)
            assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), gradients, strict=True))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


IDS = [f"layers.{i}" for i in range(3)]


class TestPatching:
    @pytest.mark.parametrize("text", ["R(0) K1 R(2)", "R(0 1) R(2)", "K0 R(1 2)", "R(0 R(1 2))", "R(0 1 2)"])
    def test_a_patched_model_trains_as_before_and_is_itself_again_afterwards(self, text: str) -> None:
        torch.manual_seed(0)
        net, x = Net(), torch.randn(5, 4)
        expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
        keys = list(net.state_dict())
        with checkpointed(net, CheckpointPlan.from_text(text, IDS)):
            found = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
            assert list(net.state_dict()) == keys
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert all("forward" not in vars(module) for module in net.modules())

    def test_a_patched_block_shows_the_signature_of_its_own_forward(self) -> None:
        net = Net()
        expected = inspect.signature(net.layers[1].forward)
        with checkpointed(net, CheckpointPlan.from_text("R(0 1) R(2)", IDS)):
            assert [inspect.signature(layer.forward) for layer in net.layers] == [expected] * 3

    def test_permanent_lasts_until_removed(self) -> None:
        net = Net()
        patch = checkpointed(net, CheckpointPlan.from_text("R(0) R(1) K2", IDS)).permanent()
        assert ["forward" in vars(layer) for layer in net.layers] == [True, True, False]
        patch.remove()
        assert not any("forward" in vars(layer) for layer in net.layers)

    def test_an_error_inside_takes_the_patch_off(self) -> None:
        net = Net()
        with pytest.raises(RuntimeError), checkpointed(net, CheckpointPlan.from_text("R(0 1 2)", IDS)):
            net(torch.randn(5, 3))
        assert not any("forward" in vars(layer) for layer in net.layers)

    def test_two_plans_at_once_are_refused(self) -> None:
        net, plan = Net(), CheckpointPlan.from_text("R(0) K1 K2", IDS)
        with (
            checkpointed(net, plan),
            pytest.raises(PlanIncompatibleError, match=r"a plan is active on 'layers.0' already"),
        ):
            checkpointed(net, plan)

    def test_a_second_entry_is_refused_and_the_first_stays(self) -> None:
        net, plan = Net(), CheckpointPlan.from_text("R(0) K1 K2", IDS)
        first, second = checkpointed(net, plan), checkpointed(net, plan)
        first.permanent()
        with pytest.raises(PlanIncompatibleError, match="call remove"):
            second.permanent()
        with pytest.raises(PlanIncompatibleError, match="call remove"):
            first.permanent()
        assert "forward" in vars(net.layers[0])
        first.remove()
        assert "forward" not in vars(net.layers[0])

    def test_a_forward_exchanged_by_others_is_told_apart(self) -> None:
        net, plan = Net(), CheckpointPlan.from_text("R(0) K1 K2", IDS)
        net.layers[1].forward = net.layers[1].forward
        with pytest.raises(PlanIncompatibleError, match="was exchanged by something else"):
            checkpointed(net, plan)

    @pytest.mark.parametrize("text", ["R(0) K1 R(2)", "R(0 1) K2"])
    def test_a_copy_of_a_patched_model_runs_its_own_weights_under_the_plan(self, text: str) -> None:
        net, plan = Net(), CheckpointPlan.from_text(text, IDS)
        checkpointed(net, plan).permanent()
        stored = io.BytesIO()
        torch.save(net, stored)
        stored.seek(0)
        for twin in (copy.deepcopy(net), torch.load(stored, weights_only=False)):
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.mul_(1.5)
            x = torch.randn(4, 4)
            plain = Net()
            plain.load_state_dict(twin.state_dict())
            net.zero_grad()
            twin(x).square().sum().backward()
            plain(x).square().sum().backward()
            assert all(p.grad is None for p in net.parameters())
            for (name, mine), other in zip(twin.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine.grad, other.grad), name

    @pytest.mark.parametrize("plan", ["R(0) K1 K2", None])
    def test_what_is_no_plan_is_told_so(self, plan: object) -> None:
        with pytest.raises(TypeError, match="expected a CheckpointPlan"):
            checkpointed(Net(), plan)
        with pytest.raises(TypeError, match="expected a CheckpointPlan"):
            apply_plan([], plan, ())

    def test_a_plan_for_other_blocks_is_refused_with_all_of_them(self) -> None:
        plan = CheckpointPlan.from_text("R(0) K1", ["layers.7", "blocks.0"])
        with pytest.raises(PlanIncompatibleError) as caught:
            checkpointed(Net(), plan)
        assert len(caught.value.faults) == 2
        assert "'layers.7' is no submodule of Net" in caught.value.faults[0]

    def test_an_existing_checkpoint_wrapper_is_refused(self) -> None:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        net = Net()
        net.layers[1] = checkpoint_wrapper(net.layers[1])
        with pytest.raises(
            PlanIncompatibleError, match=r"recomputes in the model already: layers\.1: a CheckpointWrapper"
        ):
            checkpointed(net, CheckpointPlan.from_text("R(0) K1 K2", IDS))

    def test_module_hooks_fire_once_per_forward(self) -> None:
        net, fired = Net(), []
        for i, layer in enumerate(net.layers):
            layer.register_forward_hook(lambda m, a, o, i=i: fired.append(i))
        net.layers[0][0].weight.register_hook(lambda g: fired.append("gradient"))
        with checkpointed(net, CheckpointPlan.from_text("R(0) R(1) K2", IDS)):
            net(torch.randn(5, 4)).sum().backward()
        assert fired == [0, 1, 2, "gradient"]

    def test_keywords_for_a_later_block_of_a_segment_are_refused(self) -> None:
        class Scaled(nn.Module):
            def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
                return x * scale

        class Calls(Net):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList([nn.Linear(8, 8), Scaled(), nn.Linear(8, 8)])

            def forward(self, x: Tensor) -> Tensor:
                x = self.layers[0](self.embed(x))
                return self.layers[2](self.layers[1](x, scale=3.0))

        net = Calls()
        with (
            checkpointed(net, CheckpointPlan.from_text("R(0 1) K2", IDS)),
            pytest.raises(PlanIncompatibleError, match=r"'layers.1' is not called with exactly what"),
        ):
            net(torch.randn(5, 4))
        expected = net(torch.ones(5, 4))
        with checkpointed(net, CheckpointPlan.from_text("R(0) R(1) K2", IDS)):
            assert torch.equal(net(torch.ones(5, 4)), expected)

    def test_a_constant_beside_the_value_in_a_later_block_of_a_segment_is_refused_not_lost(self) -> None:
        class Adds(nn.Module):
            def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
                return x if y is None else x + y

        class Calls(Net):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList([nn.Linear(8, 8), Adds(), nn.Linear(8, 8)])

            def forward(self, x: Tensor) -> Tensor:
                x = self.layers[0](self.embed(x))
                return self.layers[2](self.layers[1](x, torch.ones(8)))

        net = Calls()
        with (
            checkpointed(net, CheckpointPlan.from_text("R(0 1) K2", IDS)),
            pytest.raises(PlanIncompatibleError, match=r"'layers.1'"),
        ):
            net(torch.randn(5, 4))

    def test_a_part_of_what_a_block_returned_is_refused_inside_a_segment(self) -> None:
        """P10: the model hands on h of (h, weights); a segment would take the weights for the next mask."""

        class Pair(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(8, 8)

            def forward(self, h: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
                h = self.linear(h)
                return (h if mask is None else h * mask), h.tanh()

        class First(Net):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(Pair() for _ in range(3))

            def forward(self, x: Tensor) -> Tensor:
                h = self.embed(x)
                for layer in self.layers:
                    h = layer(h)[0]
                return self.head(h)

        net, x = First(), torch.randn(5, 4)
        expected = net(x)
        with checkpointed(net, CheckpointPlan.from_text("R(0) R(1) R(2)", IDS)):
            assert torch.equal(net(x), expected)
        with (
            checkpointed(net, CheckpointPlan.from_text("R(0 1) K2", IDS)),
            pytest.raises(PlanIncompatibleError, match="block by block"),
        ):
            net(x)

    def test_a_segment_keeps_nothing_alive_after_its_last_block_was_called(self) -> None:
        net, x, tracker = Net(), torch.randn(5, 4), LiveBytes()
        with checkpointed(net, CheckpointPlan.from_text("R(0 1 2)", IDS)):
            with tracker, torch.no_grad():
                net(x)
            assert tracker.peak > 0
            assert tracker.now == 0

    def test_two_containers_and_the_plain_model_run_in_turn(self) -> None:
        blocks = declared([nn.Linear(8, 8), nn.Linear(8, 8)])
        x = torch.randn(2, 8)
        one = apply_plan(blocks, forced("R(0) K1", blocks), (x,))
        two = apply_plan(blocks, forced("R(0 1)", blocks), (x,))
        plain = blocks[1].module(blocks[0].module(x))
        for container in (one, two, one):
            assert torch.equal(container(x), plain)


def test_a_node_that_the_executor_does_not_know_is_refused() -> None:
    from ckptplan.apply import run_node

    with pytest.raises(PlanIncompatibleError, match="'offload' is a kind of node that this executor does not run"):
        run_node("offload", 1, lambda i, v: v, ())  # type: ignore[arg-type]


def test_a_profiled_plan_guards_what_was_observed_and_only_that() -> None:
    blocks = declared([DropoutBlock(), nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)), nn.Linear(16, 16)])
    profile = profile_blocks(blocks, (torch.randn(4, 16),), device="cpu", num_warmup=0, num_trials=1)
    plan = CheckpointPlan.from_text("R(0) R(1) R(2)", profile)
    assert [d.preserve_rng_state for d in plan.decisions] == [True, False, False]
    assert [len(d.mutated_buffers) for d in plan.decisions] == [0, 3, 0]
    assert blocks_of(plan.nodes) == (0, 1, 2)


DATA_PARALLEL = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ckptplan.apply import checkpointed
from ckptplan.plan import CheckpointPlan

class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Adapter(), Adapter(), Adapter()])
        self.unused = nn.Linear(16, 16)
    def forward(self, x):
        x = self.layers[0](x)
        x = self.layers[1](self.layers[1](x))
        return self.layers[2](x)

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(0)
net, x = Net(), torch.randn(8, 16)
names = [f"layers.{i}" for i in range(3)]
used = [p for n, p in net.named_parameters() if p.requires_grad and "unused" not in n]
plain = torch.autograd.grad(net(x).square().mean(), used)
parallel = DistributedDataParallel(net, find_unused_parameters=True)
fired = []
net.layers[1].up.weight.register_hook(lambda g: fired.append(1))
with checkpointed(net, CheckpointPlan.from_text("R(0) R(1) R(2)", names)):
    for _ in range(2):
        net.zero_grad()
        parallel(x[rank * 4 : rank * 4 + 4]).square().mean().backward()
found = [p.grad for p in used]
assert len(found) == 6 and all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(found, plain))
assert all(p.grad is None for n, p in net.named_parameters() if "base" in n)
assert fired == [1, 1], fired
other = [g.clone() for g in found]
for g in other:
    dist.broadcast(g, 0)
assert all(torch.equal(a, b) for a, b in zip(found, other))
dist.barrier()  # waits without the interpreter's lock, which gloo's threads need to let go of their last work
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_with_a_shared_block_and_an_unused_layer_agree(tmp_path) -> None:
    """C04, second part."""
    command = [sys.executable, "-c", DATA_PARALLEL]
    running = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], errors

"""Proofs by real steps: what is wrong is found, what is right passes, and the caller's model is left alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ckptplan.benchmark import BenchmarkResult, compare_results, percentile, run_benchmark
from ckptplan.errors import PlanIncompatibleError
from ckptplan.plan import CheckpointPlan
from ckptplan.proof import StepOutcome, compare_outcomes, is_out_of_memory, prove_model
from ckptplan.subject import Trials
from tests.chains import DropoutBlock, Residual, declared, mean_square

CPU = torch.device("cpu")


class Corrupts(torch.autograd.Function):
    """The identity, whose gradient is wrong if its saved tensor comes from a recomputation."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, fault: str) -> Tensor:
        inside_backward = torch._C._current_graph_task_id() != -1
        ctx.save_for_backward(torch.tensor(float(inside_backward)))
        ctx.fault = fault
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        (is_recomputed,) = ctx.saved_tensors
        if not is_recomputed:
            return gradient, None
        return {"nan": gradient * float("nan"), "missing": None, "doubled": gradient * 2}[ctx.fault], None


class Faulty(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ self.second @ Corrupts.apply(self.third, self.fault)


def benchmark(modules: list[nn.Module], text: str, x: Tensor, target=mean_square, **options: Any) -> BenchmarkResult:
    blocks = declared(modules)
    plan = CheckpointPlan.from_text(text, [b.block_id for b in blocks])
    return run_benchmark(
        blocks, plan, (x,), None, target, **{"device": "cpu", "num_warmup": 0, "num_trials": 2} | options
    )


class TestGradients:
    """P12."""

    @pytest.mark.parametrize("name", ["correctness_rtol", "correctness_atol"])
    @pytest.mark.parametrize(
        ("value", "error"),
        [(math.nan, ValueError), (math.inf, ValueError), (-1e-9, ValueError), ("1e-5", TypeError), (True, TypeError)],
    )
    def test_a_tolerance_that_is_no_amount_is_refused(self, name: str, value: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match=f"{name}={value!r}"):
            benchmark([Faulty("doubled")], "R(0)", torch.randn(4, 8), **{name: value})
        model, plan = nn.Sequential(nn.Linear(8, 8)), CheckpointPlan.from_text("R(0)", ["0"])
        own = name.removeprefix("correctness_")
        tolerance: dict[str, Any] = {own: value}
        with pytest.raises(error, match=f"^{own}={value!r}"):
            prove_model(
                model, plan, torch.randn(4, 8), lambda m, x: m(x).sum(), device=CPU, trials=Trials(0, 1), **tolerance
            )

    def test_nan_tolerances_pass_nothing(self) -> None:
        loss, gradients = torch.zeros(()), {"w": torch.ones(3)}
        found, expected = StepOutcome(loss, {"w": torch.zeros(3)}), StepOutcome(loss, gradients)
        assert not compare_outcomes(found, expected, "r", math.nan, 0.0).passed
        assert not compare_outcomes(found, expected, "r", 0.0, math.nan).passed

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("nan", "third: gradient is not finite"),
            ("missing", "third: gradient missing under the plan"),
            ("doubled", "third: gradient differs by"),
        ],
    )
    def test_one_wrong_gradient_of_one_parameter_fails_however_small_the_loss(self, fault: str, message: str) -> None:
        torch.manual_seed(0)
        modules = [nn.Linear(8, 8), Faulty(fault), nn.Linear(8, 8)]
        x = torch.randn(4, 8)
        result = benchmark(modules, "K0 R(1) K2", x, lambda out: mean_square(out) * 1e-7)
        assert result.correctness_checked
        assert result.correctness_passed is False
        assert result.bitwise_equal is False
        assert len(result.correctness_faults) == 1
        assert message in result.correctness_faults[0]
        assert (result.max_grad_diff is None) is (fault != "doubled")
        good = benchmark(modules, "R(0) K1 R(2)", x, lambda out: mean_square(out) * 1e-7)
        assert good.correctness_passed
        assert good.bitwise_equal

    def test_dropout_passes_to_the_bit(self) -> None:
        modules = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)) for _ in range(3)]
        result = benchmark(modules, "R(0) R(1) R(2)", torch.randn(4, 8))
        assert result.correctness_passed
        assert result.bitwise_equal
        assert result.max_grad_diff == 0.0

    def test_batch_norm_passes_to_the_bit(self) -> None:
        modules = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)]
        assert benchmark(modules, "R(0 1) R(2)", torch.randn(4, 8)).bitwise_equal

    def test_a_buffer_that_the_plan_does_not_guard_is_an_error(self) -> None:
        class Counts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(8, 8)
                self.register_buffer("count", torch.zeros(()))

            def forward(self, x: Tensor) -> Tensor:
                with torch.no_grad():
                    self.count.copy_(self.count + 1)
                return torch.tanh(self.linear(x))

        blocks = declared([Counts(), nn.Linear(8, 8)])
        from dataclasses import replace

        guarded = CheckpointPlan.from_text("R(0) K1", ["b0", "b1"])
        unguarded = replace(
            guarded, decisions=(replace(guarded.decisions[0], mutated_buffers=()), guarded.decisions[1])
        )
        options: dict[str, Any] = {"device": "cpu", "num_trials": 1}
        assert run_benchmark(blocks, guarded, (torch.randn(4, 8),), None, mean_square, **options).correctness_passed
        with pytest.raises(PlanIncompatibleError, match="Counts changes its buffer 'count'"):
            run_benchmark(blocks, unguarded, (torch.randn(4, 8),), None, mean_square, **options)

    def test_a_plan_that_forgets_the_random_state_is_exact_all_the_same(self) -> None:
        from dataclasses import replace

        plan = CheckpointPlan.from_text("R(0) K1", ["b0", "b1"])
        careless = replace(plan, decisions=(replace(plan.decisions[0], preserve_rng_state=False), plan.decisions[1]))
        result = run_benchmark(
            declared([DropoutBlock(), DropoutBlock()]),
            careless,
            (torch.randn(4, 16),),
            None,
            mean_square,
            device="cpu",
            num_trials=1,
        )
        assert result.bitwise_equal

    def test_models_that_draw_from_pythons_and_numpys_streams_are_judged_rightly(self) -> None:
        class Draws(nn.Module):
            """Before its blocks it scales by two numbers, of Python's stream and of NumPy's."""

            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(Residual(16) for _ in range(2))

            def forward(self, x: Tensor) -> Tensor:
                x = x * (1 + random.random() + np.random.random())  # noqa: NPY002
                for layer in self.layers:
                    x = layer(x)
                return x

        plan = CheckpointPlan.from_text("R(0) K1", ["layers.0", "layers.1"])
        before = random.getstate(), np.random.get_state()[2]  # noqa: NPY002
        proof = prove_model(
            Draws(), plan, torch.randn(4, 64), lambda m, x: m(x).square().mean(), device=CPU, trials=Trials(0, 1)
        )
        assert proof.gradients is not None
        assert proof.gradients.bitwise_equal
        assert (random.getstate(), np.random.get_state()[2]) == before  # noqa: NPY002

    def test_each_step_gets_a_batch_of_its_own(self) -> None:
        """The step doubles its batch and takes an entry out: a second step on the same one would fail."""

        def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            batch["x"] *= 2
            return (model(batch["x"]) - batch.pop("y")).square().mean()

        model, batch = nn.Sequential(Residual(16), Residual(16)), {"x": torch.ones(4, 64), "y": torch.ones(4, 64)}
        plan = CheckpointPlan.from_text("R(0) K1", ["0", "1"])
        proof = prove_model(model, plan, batch, loss_fn, device=CPU, trials=Trials(1, 2))
        assert proof.gradients is not None
        assert proof.gradients.bitwise_equal
        assert set(batch) == {"x", "y"}
        assert batch["x"].equal(torch.ones(4, 64))

    def test_other_streams_and_buffers_after_the_step_are_found(self) -> None:
        def outcome(buffer: float, state: int) -> StepOutcome:
            return StepOutcome(torch.zeros(()), {}, {"count": torch.tensor(buffer)}, [torch.tensor([state])])

        assert compare_outcomes(outcome(1.0, 5), outcome(1.0, 5), "r", 0.0, 0.0).passed
        assert compare_outcomes(outcome(2.0, 6), outcome(1.0, 5), "r", 0.0, 0.0).faults == (
            "buffer count differs after the step",
            "the random stream stands elsewhere after the step",
        )
        drawn = StepOutcome(torch.zeros(()), {}, library_states=(2,))
        not_drawn = StepOutcome(torch.zeros(()), {}, library_states=(1,))
        assert compare_outcomes(drawn, not_drawn, "r", 0.0, 0.0).faults == (
            "the random stream of Python or NumPy stands elsewhere after the step",
        )

    def test_each_parameter_is_judged_by_its_own_size(self) -> None:
        loss = torch.ones(())
        big, small = torch.full((3,), 1e6), torch.full((3,), 1e-6)
        expected = StepOutcome(loss, {"big": big, "small": small})
        within = StepOutcome(loss, {"big": big * (1 + 5e-6), "small": small})
        beyond = StepOutcome(loss, {"big": big, "small": small * (1 + 2e-5)})
        assert compare_outcomes(within, expected, "r", 1e-5, 0.0).passed
        assert not compare_outcomes(within, expected, "r", 1e-5, 0.0).bitwise_equal
        check = compare_outcomes(beyond, expected, "r", 1e-5, 0.0)
        assert not check.passed
        assert check.faults[0].startswith("small: gradient differs")
        assert check.max_rel_diff == pytest.approx(2e-5, rel=0.05)
        assert compare_outcomes(beyond, expected, "r", 1e-5, 1e-10).passed

    def test_a_gradient_that_should_not_be_there_and_an_empty_one(self) -> None:
        loss = torch.ones(())
        expected = StepOutcome(loss, {"a": None, "empty": torch.zeros(0)})
        assert compare_outcomes(expected, expected, "r", 1e-5, 0.0).bitwise_equal
        found = StepOutcome(loss, {"a": torch.ones(1), "empty": torch.zeros(0)})
        assert compare_outcomes(found, expected, "r", 1e-5, 0.0).faults == ("a: gradient missing without the plan",)

    def test_sparse_gradients_are_compared_too(self) -> None:
        embedding = nn.Embedding(10, 8, sparse=True)
        result = benchmark([embedding, nn.Linear(8, 8)], "R(0) R(1)", torch.tensor([[1, 2], [1, 3]]))
        assert result.bitwise_equal


class TestFigures:
    def test_a_result_holds_what_was_measured(self) -> None:
        torch.manual_seed(0)
        modules = [Residual(32) for _ in range(3)]
        x = torch.randn(64, 64, requires_grad=True)
        planned = benchmark(modules, "R(0) R(1) K2", x, num_trials=4)
        plain = benchmark(modules, "K0 K1 K2", x, num_trials=4)
        assert planned.activation_peak_bytes < planned.no_checkpoint_activation_peak_bytes
        assert planned.no_checkpoint_activation_peak_bytes == plain.activation_peak_bytes
        parameters = sum(p.numel() * 4 for m in modules for p in m.parameters())
        static = 2 * parameters + 2 * x.numel() * 4  # with gradients
        assert planned.peak_allocated_bytes == static + planned.activation_peak_bytes
        assert len(planned.step_latency_ms) == len(planned.no_checkpoint_step_latency_ms) == 4
        assert planned.batch_shape == "[64,64]"
        assert planned.dtype == "float32"
        assert planned.throughput_samples_per_sec == pytest.approx(64e3 / np.mean(planned.step_latency_ms))
        assert planned.peak_reserved_bytes is None
        assert planned.correctness_reference == "the unplanned step"
        assert planned.environment["torch"] == torch.__version__

    def test_without_a_check_nothing_is_claimed(self) -> None:
        result = benchmark([nn.Linear(8, 8)], "K0", torch.randn(4, 8), check_correctness=False)
        assert (result.correctness_checked, result.correctness_passed, result.bitwise_equal) == (False, None, None)
        assert result.max_grad_diff is None
        assert result.correctness_reference == "not asked for"

    @pytest.mark.parametrize(
        "values", [[3.0], [1.0, 2.0], [5.0, 1.0, 4.0, 2.0], list(np.random.default_rng(0).random(37))]
    )
    @pytest.mark.parametrize("percent", [0, 5, 50, 95, 100])
    def test_percentiles_are_numpys(self, values: list[float], percent: float) -> None:
        assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-12)

    def test_no_values_have_no_percentile(self) -> None:
        assert percentile([], 50) is None

    def test_results_are_compared_by_ratio_with_a_reference_of_theirs(self) -> None:
        base: dict[str, Any] = {
            "peak_reserved_bytes": None,
            "no_checkpoint_activation_peak_bytes": None,
            "no_checkpoint_step_latency_ms": (),
            "batch_shape": "[10,3]",
            "dtype": "float32",
            "correctness_checked": True,
            "correctness_reference": "the unplanned step",
            "correctness_passed": True,
            "correctness_faults": (),
            "bitwise_equal": True,
            "max_grad_diff": 0.0,
        }
        none = BenchmarkResult("none", 300, 200, 202, step_latency_ms=(10.0, 10.0), **base)
        dp = BenchmarkResult("dp", 200, 100, 101, step_latency_ms=(12.0, 13.0), **base)
        dead = BenchmarkResult("all", None, None, None, step_latency_ms=(), **base)
        first, second, third = compare_results([none, dp, dead], "none")
        assert (first.activation_peak_ratio, first.latency_ratio) == (1.0, 1.0)
        assert second.activation_peak_ratio == 0.5
        assert second.peak_allocated_ratio == pytest.approx(2 / 3)
        assert second.latency_ratio == 1.25
        assert second.throughput_ratio == pytest.approx(0.8)
        assert second.prediction_error == pytest.approx(0.01)
        assert (third.activation_peak_ratio, third.latency_ratio, third.prediction_error) == (None, None, None)
        assert compare_results([dp], none)[0] == second
        for results, name in (([none, dp], "missing"), ([dp, dp], "dp")):
            with pytest.raises(ValueError, match="expected one of: "):
                compare_results(results, name)


def out_of_memory(kind: str) -> BaseException:
    if kind == "cuda":
        return torch.cuda.OutOfMemoryError("CUDA out of memory")
    return RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: not enough memory")


class TestOutOfMemory:
    """The step that does not fit is played by a loss that raises as the allocator would."""

    @staticmethod
    def prove(raises: Callable[[nn.Module], bool], kind: str = "cuda"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        plan = CheckpointPlan.from_text("R(0) K1 K2", ["0", "1", "2"])

        def loss_fn(module: nn.Module, x: Tensor) -> Tensor:
            loss = mean_square(module(x))
            if raises(module):
                raise out_of_memory(kind)
            return loss

        return prove_model(model, plan, torch.randn(4, 8), loss_fn, device=CPU, trials=Trials(0, 2))

    @staticmethod
    def is_planned(module: nn.Module) -> bool:
        return "forward" in vars(module[0])

    @staticmethod
    def saves_on_host() -> bool:
        return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None

    @pytest.mark.parametrize("kind", ["cuda", "cpu"])
    def test_an_unplanned_step_that_does_not_fit_is_held_on_the_host_as_reference(self, kind: str) -> None:
        proof = self.prove(lambda m: not self.is_planned(m) and not self.saves_on_host(), kind)
        assert proof.gradients.passed
        assert proof.gradients.bitwise_equal
        assert proof.gradients.reference == "the unplanned step with its saved tensors held on the host"
        assert proof.out_of_memory == "no_checkpoint"
        assert proof.no_checkpoint_peak_bytes is None
        assert proof.no_checkpoint_step_ms == ()
        assert proof.peak_bytes > 0
        assert len(proof.step_ms) == 2

    def test_where_the_host_does_not_hold_it_either_nothing_is_claimed(self) -> None:
        proof = self.prove(lambda m: not self.is_planned(m))
        assert proof.gradients is None
        assert proof.gradients_note == "the unplanned step fits neither the device nor the host's memory"
        assert proof.out_of_memory == "no_checkpoint"

    def test_a_planned_step_that_does_not_fit_is_said_to(self) -> None:
        proof = self.prove(self.is_planned)
        assert proof.out_of_memory == "planned"
        assert proof.peak_bytes is None
        assert proof.step_ms == ()
        assert proof.gradients is None
        assert proof.gradients_note == "the planned step does not fit the device"
        assert proof.no_checkpoint_peak_bytes > 0

    def test_the_public_result_says_so_too(self) -> None:
        def target(out: Tensor) -> Tensor:
            raise out_of_memory("cuda")

        result = benchmark([nn.Linear(8, 8)], "R(0)", torch.randn(4, 8), target)
        assert result.oom
        assert result.error_message == "the planned step does not fit the device"
        assert result.activation_peak_bytes is None
        assert result.peak_allocated_bytes is None
        assert result.step_latency_ms_mean is None
        assert result.throughput_samples_per_sec is None

    def test_other_errors_are_not_taken_for_it(self) -> None:
        assert is_out_of_memory(MemoryError())
        assert not is_out_of_memory(RuntimeError("shapes do not match"))
        assert not is_out_of_memory(ValueError("not enough memory"))
        with pytest.raises(RuntimeError) as refused:
            torch.empty(2**50, dtype=torch.uint8)
        assert is_out_of_memory(refused.value)  # what this torch says on this system

        def target(out: Tensor) -> Tensor:
            raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            benchmark([nn.Linear(8, 8)], "R(0)", torch.randn(4, 8), target)

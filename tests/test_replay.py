"""Replay gives the gradients of plain autograd bit for bit, keeps what it is told to, and runs nothing twice."""

from __future__ import annotations

import ast
import contextlib
import gc
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ckptplan
from ckptplan.graph import Output
from ckptplan.memory import LiveStorageMeter
from ckptplan.replay import Recorder, flat, run_replayed
from ckptplan.trees import same
from tests.block_kinds import KINDS, make_block
from tests.random_programs import RandomProgram

MATRIX_PRODUCTS = ("addmm", "mm", "bmm", "convolution", "mkldnn_rnn_layer")
MIB = 2**20


class Names(Recorder):
    """Every output of every operator of a call."""

    def __init__(self) -> None:
        super().__init__(())
        self.names: list[Output] = []

    def note(self, operation: Any, about: Any, nth: int, out: Any, written: list[Tensor]) -> None:
        super().note(operation, about, nth, out, written)
        self.names += [Output(about.name, nth, i) for i in range(len(flat(out)) + len(written))]


def outputs_of(call: Callable[..., Any], *args: Any) -> list[Output]:
    with Names() as recorder:
        call(*args)
    return recorder.names


class Operators(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def gradients(call: Callable[..., Tensor], block: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Output, gradients of inputs and parameters, buffers and the random stream after one step from equal state."""
    torch.manual_seed(1)
    leaves = [t.clone().requires_grad_() for t in inputs]
    output = call(*(t * 1.0 for t in leaves))
    wanted = [*leaves, *block.parameters()]
    found = torch.autograd.grad(output.square().sum(), wanted, allow_unused=True)
    return [output.detach().clone(), *found, *(b.clone() for b in block.buffers()), torch.get_rng_state()]


def equal(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> bool:
    return all(same(a, b) for a, b in zip(left, right, strict=True))


def replayed(block: nn.Module, keep: Sequence[Output] = ()) -> Callable[..., Any]:
    return lambda *args: run_replayed(block, keep, *args)


# Exactness -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["nothing", "matrix products", "everything"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_kind_of_block_are_those_of_plain_autograd_bit_for_bit(kind: str, kept: str) -> None:
    block, inputs = make_block(kind)
    state = {name: t.clone() for name, t in block.state_dict().items()}
    names = outputs_of(block, *inputs)
    keep = {
        "nothing": [],
        "matrix products": [n for n in names if n.operator in MATRIX_PRODUCTS],
        "everything": names,
    }[kept]
    block.load_state_dict(state)
    expected = gradients(block, block, inputs)
    block.load_state_dict(state)
    assert equal(gradients(replayed(block, keep), block, inputs), expected)


def check_program(seed: int) -> int:
    """1 if the program of that seed is valid (and replay equals plain autograd), 0 if plain autograd refuses it."""
    program = RandomProgram(seed)
    state = {name: t.clone() for name, t in program.state_dict().items()}
    try:
        expected = gradients(program, program, [program.example])
    except RuntimeError:
        return 0
    program.load_state_dict(state)
    names = outputs_of(program, program.example.clone())
    stream = random.Random(seed)
    share = stream.choice((0.0, 0.3, 0.6, 1.0))
    keep = [name for name in names if stream.random() < share]
    program.load_state_dict(state)
    found = gradients(replayed(program, keep), program, [program.example])
    assert equal(found, expected), f"seed {seed}, {share} kept: {[step.kind for step in program.steps]}"
    return 1


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("part", range(10))
def test_random_programs_are_bit_equal(part: int) -> None:
    assert sum(check_program(seed) for seed in range(100 * part, 100 * part + 100)) > 60


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_random_programs_are_bit_equal(part: int) -> None:
    first = 10_000 + 1_000 * part
    assert sum(check_program(seed) for seed in range(first, first + 1_000)) > 700


@pytest.mark.parametrize("kind", ["gpt", "resnet", "llama"])
def test_autocast_is_off_in_the_replay_because_arguments_were_cast_already(kind: str) -> None:
    block, inputs = make_block(kind)
    state = {name: t.clone() for name, t in block.state_dict().items()}

    def cast(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return call(*args).float()

        return run

    expected = gradients(cast(block), block, inputs)
    block.load_state_dict(state)
    assert equal(gradients(cast(replayed(block)), block, inputs), expected)
    block.load_state_dict(state)
    with torch.autocast("cpu", torch.bfloat16):  # the backward inside autocast too
        inside = gradients(block, block, inputs)
        block.load_state_dict(state)
        assert equal(gradients(replayed(block), block, inputs), inside)


def test_running_statistics_and_counters_change_once() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.calls = nn.BatchNorm1d(4), 0
            self.register_buffer("average", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            with torch.no_grad():
                self.average.mul_(0.5).add_(x.mean(0))
            return self.norm(x).tanh() * self.average

    block = Counting()
    x = torch.randn(8, 4, requires_grad=True)
    hooked: list[str] = []
    block.norm.register_forward_hook(lambda *args: hooked.append("norm"))
    run_replayed(block, (), x * 1.0).sum().backward()
    assert (block.calls, hooked, block.norm.num_batches_tracked.item()) == (1, ["norm"], 1)
    assert torch.equal(block.average, x.detach().mean(0))


def test_the_random_stream_stands_where_plain_autograd_leaves_it_and_each_draw_is_repeated() -> None:
    block = nn.Sequential(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))
    x = torch.randn(50, requires_grad=True)
    torch.manual_seed(3)
    output = run_replayed(block, (), x * 1.0)
    after = torch.get_rng_state()
    torch.rand(7)  # others draw between forward and backward
    later = torch.get_rng_state()
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(torch.get_rng_state(), later)
    torch.manual_seed(3)
    plain = block(x * 1.0)
    assert torch.equal(after, torch.get_rng_state())
    assert torch.equal(gradient, torch.autograd.grad(plain.sum(), x)[0])


def test_a_private_generator_is_restored_too() -> None:
    generator = torch.Generator().manual_seed(5)

    def noisy(x: Tensor) -> Tensor:
        return (x.exp() * torch.rand(x.shape, generator=generator)).tanh()

    x = torch.randn(9, requires_grad=True)
    (found,) = torch.autograd.grad(run_replayed(noisy, (), x).sum(), x)
    state = generator.get_state()
    generator.manual_seed(5)
    (expected,) = torch.autograd.grad(noisy(x).sum(), x)
    assert torch.equal(found, expected)
    assert torch.equal(state, generator.get_state())


# Graphs used more than once ------------------------------------------------------------------------------------------


def test_a_retained_graph_gives_the_same_gradients_again() -> None:
    block, inputs = make_block("encoder_dropout")
    x = inputs[0].requires_grad_()
    output = run_replayed(block, (), x * 1.0).sum()
    first = torch.autograd.grad(output, [x, *block.parameters()], retain_graph=True)
    second = torch.autograd.grad(output, [x, *block.parameters()])
    assert equal(first, second)


@pytest.mark.parametrize("kind", ["gated_mlp", "unet", "views"])
def test_second_order_gradients_are_those_of_plain_autograd(kind: str) -> None:
    block, inputs = make_block(kind)

    def second_order(call: Callable[..., Tensor]) -> list[Tensor | None]:
        leaves = [t.clone().requires_grad_() for t in inputs]
        output = call(*(t * 1.0 for t in leaves))
        first = torch.autograd.grad(output.square().mean(), leaves, create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        return list(torch.autograd.grad(penalty, [*leaves, *block.parameters()], allow_unused=True))

    assert equal(second_order(replayed(block)), second_order(block))


def test_a_part_of_the_graph_can_be_asked_for_first() -> None:
    block, inputs = make_block("gpt")
    x = inputs[0].requires_grad_()
    plain = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])
    output = run_replayed(block, (), x).sum()
    weights = torch.autograd.grad(output, list(block.out.parameters()), retain_graph=True)
    rest = torch.autograd.grad(output, [x, *block.parameters()])
    assert equal(weights, plain[-2:])
    assert equal(rest, plain)


def test_a_backward_inside_the_forward_works() -> None:
    def with_gradient(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(leaf.exp().sin().sum(), leaf)
        return (x * slope).tanh()

    x = torch.randn(6, requires_grad=True)
    (found,) = torch.autograd.grad(run_replayed(with_gradient, (), x * 1.0).sum(), x)
    assert torch.equal(found, torch.autograd.grad(with_gradient(x * 1.0).sum(), x)[0])


def test_backward_may_run_in_many_threads_at_once() -> None:
    block, inputs = make_block("gpt")
    x = inputs[0].requires_grad_()
    expected = torch.autograd.grad(block(x).sum(), x)[0]
    outputs = [run_replayed(block, (), x).sum() for _ in range(4)]
    shared = run_replayed(block, (), x)
    outputs += [shared[:, i].sum() for i in range(4)]  # four graphs over one record
    found: dict[int, Tensor] = {}

    def backward(index: int) -> None:
        found[index] = torch.autograd.grad(outputs[index], x, retain_graph=True)[0]

    threads = [threading.Thread(target=backward, args=(i,)) for i in range(len(outputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(found[i], expected) for i in range(4))
    for i in range(4):
        assert torch.equal(found[4 + i], torch.autograd.grad(block(x)[:, i].sum(), x)[0])


def test_without_gradients_the_call_is_plain() -> None:
    block, inputs = make_block("gpt")
    with torch.no_grad(), Operators() as plain:
        block(*inputs)
    with torch.no_grad(), Operators() as seen:
        assert not run_replayed(block, (), *inputs).requires_grad
    assert seen.counts == plain.counts


# What is refused -----------------------------------------------------------------------------------------------------


def test_a_weight_changed_between_forward_and_backward_is_an_error_as_without_replay() -> None:
    layer = nn.Linear(3, 3)
    output = run_replayed(nn.Sequential(nn.Tanh(), layer), (), torch.randn(2, 3, requires_grad=True) * 1.0)
    with torch.no_grad():
        layer.weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"shape \(3, 3\) that backward needs was modified in place"):
        output.sum().backward()


def test_a_kept_tensor_changed_after_the_block_is_an_error() -> None:
    x = torch.randn(4, requires_grad=True)
    output = run_replayed(torch.exp, [Output("exp", 0)], x * 1.0)
    with torch.no_grad():
        output.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified in place"):
        output.sum().backward()


def test_a_block_that_raises_leaves_no_mode_behind() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError(f"after {x.tanh().sum().item()}")

    with pytest.raises(ValueError, match="after"):
        run_replayed(fails, (), torch.randn(3, requires_grad=True))
    x = torch.randn(3, requires_grad=True)
    x.exp().sum().backward()
    assert x.grad is not None


# What is kept --------------------------------------------------------------------------------------------------------


def chain(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return ((x @ first).tanh() @ second).sigmoid().exp() * 2


def held_bytes(keep: Sequence[Output], call: Callable[..., Tensor], *sources: Tensor) -> int:
    """Bytes alive because of the graph, the output's own and the sources' not counted."""
    with LiveStorageMeter() as meter:
        meter.mark("start")
        output = run_replayed(call, keep, *sources)
        meter.mark("end")
    return meter.level("end") - meter.level("start") - output.untyped_storage().nbytes()


def test_only_what_is_kept_stays_alive_to_the_byte() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    first, second = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    one = 64 * 64 * 4
    kept = {
        (): 0,
        (Output("tanh", 0),): one,
        (Output("tanh", 0), Output("sigmoid", 0)): 2 * one,
        (Output("mm", 0),): one,  # tanh is made of it
        (Output("mul", 0),): 0,  # nothing needs the output
        (Output("tanh", 0), Output("mm", 0)): one,  # once tanh is there, nobody needs what it was made of
        (Output("nonsense", 7),): 0,
    }
    assert {keep: held_bytes(keep, chain, x, first, second) for keep in kept} == kept


def test_backward_runs_only_what_lies_between_a_wanted_tensor_and_the_nearest_kept_one() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    first, second = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def run_again(keep: Sequence[Output]) -> dict[str, int]:
        output = run_replayed(chain, keep, x, first, second).sum()
        with Operators() as replay:
            output.backward()
        with Operators() as plain:
            chain(x, first, second).sum().backward()
        forward = Counter({"mm": 2, "tanh": 1, "sigmoid": 1, "exp": 1, "mul": 1})
        again = Counter({op: replay.counts[op] - (plain.counts[op] - forward[op]) for op in forward})
        return {op: count - 1 if op == "sum" else count for op, count in again.items() if count}

    assert run_again(()) == {"mm": 2, "tanh": 1, "sigmoid": 1, "exp": 1}
    assert run_again([Output("tanh", 0)]) == {"mm": 1, "sigmoid": 1, "exp": 1}
    assert run_again([Output("mm", 1)]) == {"mm": 1, "tanh": 1, "sigmoid": 1, "exp": 1}
    assert run_again([Output("tanh", 0), Output("sigmoid", 0)]) == {"exp": 1}
    # SAC would run mm#1 again although its result is only read by a kept operator
    assert run_again([Output("tanh", 0), Output("sigmoid", 0), Output("exp", 0)]) == {}


def test_every_operator_runs_again_at_most_once() -> None:
    for kind in ("gpt", "encoder", "llama", "views", "moe"):
        block, inputs = make_block(kind)
        with Operators() as forward:
            plain = block(*(t.requires_grad_() for t in inputs)).sum()
        with Operators() as backward:
            plain.backward()
        output = run_replayed(block, (), *inputs).sum()
        with Operators() as again:
            output.backward()
        for op in ("mm", "addmm", "bmm", "native_layer_norm", "gelu", "silu", "sigmoid"):
            assert again.counts[op] <= backward.counts[op] + forward.counts[op], (kind, op)


def test_rebuilt_tensors_are_freed_before_earlier_ones_are_rebuilt() -> None:
    weights = [torch.randn(256, 256, requires_grad=True) for _ in range(8)]

    def deep(x: Tensor) -> Tensor:
        for weight in weights:
            x = (x @ weight).tanh()
        return x

    x = torch.randn(1024, 256, requires_grad=True)
    for leaf in (x, *weights):
        leaf.grad = torch.zeros_like(leaf)
    with LiveStorageMeter() as meter:
        meter.mark("start")
        keep = [Output("tanh", i) for i in (1, 3, 5)]
        loss = run_replayed(deep, keep, x).sum()
        meter.mark("forward")
        loss.backward()
        meter.mark("backward")
    # one tensor of the chain is 1 MiB: three kept, then the gradient, what is rebuilt for it, its successor
    assert meter.level("forward") - meter.level("start") == 3 * MIB + 4
    assert meter.peak("forward", "backward") - meter.level("start") < 7 * MIB


def test_memory_goes_with_the_graph_and_waits_for_no_garbage_collector() -> None:
    block, inputs = make_block("encoder_dropout")
    gc.collect()
    gc.disable()
    try:
        with LiveStorageMeter() as meter:
            meter.mark("start")
            output = run_replayed(block, [Output("addmm", 0)], inputs[0] * 1.0)
            meter.mark("held")
            storage = weakref.ref(output.untyped_storage())
            del output
            meter.mark("dropped")
            for parameter in block.parameters():
                parameter.grad = torch.zeros_like(parameter)
            meter.mark("gradients")
            run_replayed(block, (), inputs[0] * 1.0).sum().backward()
            meter.mark("end")
    finally:
        gc.enable()
    assert storage() is None
    assert meter.level("held") > meter.level("start")
    assert meter.level("dropped") == meter.level("start")
    assert meter.level("end") == meter.level("gradients")


def test_a_very_long_record_is_freed_without_recursion() -> None:
    def long(x: Tensor) -> Tensor:
        for _ in range(20_000):
            x = x + 1e-4
        return x.tanh()

    x = torch.zeros(1, requires_grad=True)
    gc.disable()  # its passes over so many objects take most of the time
    try:
        output = run_replayed(long, (), x)
        output.backward()
        del output
    finally:
        gc.enable()
    assert torch.allclose(x.grad, 1 - torch.tensor([2.0]).tanh() ** 2, atol=1e-3)  # type: ignore[arg-type]


def test_fake_tensors_replay_too() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    block, inputs = make_block("encoder_dropout")
    with FakeTensorMode() as mode:
        fake = make_fake(block, mode)
        x = mode.from_tensor(inputs[0]).requires_grad_()
        run_replayed(fake, (), x * 1.0).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == inputs[0].shape


def make_fake(block: nn.Module, mode: Any) -> nn.Module:
    for module in block.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(mode.from_tensor(parameter))
    return block


def test_constants_made_in_inference_mode_are_read() -> None:
    with torch.inference_mode():
        table = torch.full((5,), 2.0)
    x = torch.randn(5, requires_grad=True)
    (found,) = torch.autograd.grad(run_replayed(lambda t: (t.exp() + table).tanh(), (), x).sum(), x)
    assert torch.equal(found, torch.autograd.grad((x.exp() + 2.0).tanh().sum(), x)[0])


def test_an_operator_that_fails_and_is_caught_leaves_the_record_right() -> None:
    def tries(t: Tensor) -> Tensor:
        y = t.exp()
        with contextlib.suppress(RuntimeError):
            y.add_(torch.ones(3))
        return y.tanh() * y

    x = torch.randn(5, requires_grad=True)
    (found,) = torch.autograd.grad(run_replayed(tries, [Output("exp", 0)], x * 1.0).sum(), x)
    assert torch.equal(found, torch.autograd.grad(tries(x * 1.0).sum(), x)[0])


def test_memory_exchanged_under_a_tensor_is_kept() -> None:
    def exchanged(t: Tensor) -> Tensor:
        scratch = torch.zeros(5)
        scratch.set_(torch.full((5,), 3.0))
        return t.exp() * scratch

    x = torch.randn(5, requires_grad=True)
    (found,) = torch.autograd.grad(run_replayed(exchanged, (), x * 1.0).sum(), x)
    assert torch.equal(found, 3.0 * x.detach().exp())


def test_tensors_of_a_subclass_are_kept_as_they_are() -> None:
    class Marked(torch.Tensor):
        pass

    x = torch.randn(5, requires_grad=True)

    def mixed(t: Tensor) -> Tensor:
        return (t.exp().as_subclass(Marked).sin() * 2).as_subclass(torch.Tensor).tanh()

    (found,) = torch.autograd.grad(run_replayed(mixed, (), x * 1.0).sum(), x)
    assert torch.equal(found, torch.autograd.grad(mixed(x * 1.0).sum(), x)[0])


# What of torch is used -----------------------------------------------------------------------------------------------

USED = {
    "torch._C._AutoDispatchBelowAutograd",
    "torch._C._DisableAutocast",
    "torch._subclasses.fake_tensor",
    "torch.utils._python_dispatch",
    "_schema",
    "_version",
}
PACKAGE = Path(ckptplan.__file__).parent


def underscore_names_of_torch(path: Path) -> set[str]:
    """Dotted names that start at torch and hold an underscore name, and underscore attributes of other objects."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch") and "._" in node.module:
            found.add(node.module)
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            is_own = text.startswith(("self._", "cls._", "os._")) or node.attr.startswith("__")
            if node.attr.startswith("_") and not is_own:
                found.add(text if text.startswith("torch.") else node.attr)
    return found


def test_this_file_pins_every_underscore_name_of_torch_that_replay_uses() -> None:
    assert underscore_names_of_torch(PACKAGE / "replay.py") - {"torch._C"} == USED


def test_the_guards_keep_operators_below_autograd_and_autocast() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with torch._C._AutoDispatchBelowAutograd():
            assert not (weight * 2).requires_grad
        with torch._C._DisableAutocast():
            assert torch.mm(weight, weight).dtype == torch.float32
        assert torch.mm(weight, weight).dtype == torch.bfloat16


def test_a_write_in_place_counts_up_the_version_of_every_alias() -> None:
    tensor = torch.zeros(3)
    alias = tensor.detach()
    tensor[0] = 1.0
    assert (tensor._version, alias._version) == (1, 1)


def test_a_schema_tells_writes_views_and_aliases() -> None:
    schema = torch.ops.aten.relu_.default._schema
    assert schema.name == "aten::relu_"
    assert schema.arguments[0].alias_info.is_write
    assert not torch.ops.aten.view.default._schema.returns[0].alias_info.is_write
    assert torch.ops.aten.mul.Tensor._schema.returns[0].alias_info is None


@pytest.mark.parametrize(
    "operator", ["native_batch_norm", "batch_norm_gather_stats_with_counts", "batch_norm_update_stats"]
)
def test_the_writes_of_batch_norm_that_no_schema_declares_are_where_the_table_says(operator: str) -> None:
    from ckptplan.replay import _UNDECLARED_WRITES

    positions, flag = _UNDECLARED_WRITES[operator]
    arguments = getattr(torch.ops.aten, operator).default._schema.arguments
    assert [arguments[i].name for i in positions] == ["running_mean", "running_var"]
    assert not any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
    assert flag is None or arguments[flag].name == "training"


def test_a_storage_has_one_python_object_as_long_as_it_lives() -> None:
    tensor = torch.zeros(3)
    reference = weakref.ref(tensor.untyped_storage())
    gc.collect()
    assert reference() is tensor.view(3).detach().untyped_storage()
    del tensor
    assert reference() is None


def test_dropout_masks_can_be_kept_and_hang_on_no_other_tensor() -> None:
    """On a CPU the mask is made by empty_like and then written: rebuilding it must not rebuild its example."""
    x = torch.randn(64, requires_grad=True)

    def dropped(t: Tensor) -> Tensor:
        return F.dropout(t.exp(), 0.5)

    output = run_replayed(dropped, [Output("exp", 0)], x).sum()
    with Operators() as replay:
        output.backward()
    assert replay.counts["exp"] == 0
    assert replay.counts["bernoulli_"] == 1

"""What a block consists of, found by running it, and the gate that refuses what a replay would get wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptplan.graph import BlockOperators, OperatorCall, Output, Value
from ckptplan.models.transformer import TransformerBlock
from ckptplan.operators import RunBlock, trace_operators, why_not_replayed
from ckptplan.stages import own_copies
from tests.block_kinds import KINDS, make_block


def runner(inputs: Sequence[Tensor]) -> RunBlock:
    given = [t.requires_grad_(t.is_floating_point()) for t in inputs]

    def run(call: Callable[..., Any]) -> Any:
        torch.manual_seed(4)
        return call(*own_copies(given))

    return run


class Calls(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def traced(function: Callable[[Tensor], Tensor]) -> BlockOperators:
    return trace_operators(Calls(function), runner([torch.randn(3, 4)]))


# Tracing -------------------------------------------------------------------------------------------------------------


def test_a_transformer_block_is_ten_operators_and_its_values_have_names_that_say_where_they_are_made() -> None:
    block = TransformerBlock(8, 2, causal=True)
    found = trace_operators(block, runner([torch.randn(1, 4, 8)]))
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert [call.name for call in found.calls] == [
        "native_layer_norm",
        "addmm",
        attention,
        "addmm",
        "add",
        "native_layer_norm",
        "addmm",
        "gelu",
        "addmm",
        "add",
    ]
    names = [found.name_of(v) for v in range(len(found.values))]
    assert names[:6] == [
        "norm1.native_layer_norm#0:0",
        "norm1.native_layer_norm#0:1",
        "norm1.native_layer_norm#0:2",
        "qkv.addmm#0:0",
        f"{attention}#0:0",
        f"{attention}#0:1",
    ]
    kept = {found.name_of(v) for v in found.needed}
    assert "qkv.addmm#0:0" in kept  # attention needs its inputs
    assert "proj.addmm#1:0" not in kept  # only an addition reads it
    sizes = {found.name_of(v): found.values[v].size_bytes for v in found.needed}
    assert sizes["fc.addmm#2:0"] == 4 * 4 * 32


def test_flops_are_those_of_the_matrix_products() -> None:
    found = traced(torch.tanh)
    assert [(call.name, call.flops) for call in found.calls] == [("addmm", 2 * 3 * 4 * 4), ("tanh", 0)]
    assert all(call.time_ms > 0 for call in found.calls)


def test_views_are_no_operators_and_reads_go_through_them() -> None:
    found = traced(lambda x: x.t().contiguous().view(2, 6)[0].exp())
    assert [call.name for call in found.calls] == ["addmm", "clone", "exp"]
    assert [call.reads for call in found.calls] == [(), (0,), (1,)]


def test_an_operator_in_place_makes_a_new_value_and_the_old_one_cannot_be_kept() -> None:
    found = traced(lambda x: x.relu_().mul(2))
    assert found.values == (
        Value(Output("addmm", 0), 48, 0, keepable=False),
        Value(Output("relu_", 0), 48, 1, keepable=True),
        Value(Output("mul", 0), 48, 2, keepable=True),
    )
    assert [call.reads for call in found.calls] == [(), (0,), (1,)]
    assert found.needed == (1,)


def test_memory_that_nobody_filled_whole_is_at_hand_and_no_choice() -> None:
    def half_filled(x: Tensor) -> Tensor:
        made = torch.empty_like(x)
        made[:, :2] = x[:, :2]
        made.detach()[:, 2:] = 1.0
        return made.exp()

    found = traced(half_filled)
    assert [value.output.operator for value in found.values if value.keepable] == ["addmm", "exp"]
    assert found.calls[-1].reads == ()


def test_the_hash_is_of_the_sequence_of_operators() -> None:
    first, again, other = traced(torch.tanh), traced(torch.tanh), traced(torch.exp)
    assert first.sequence_hash == again.sequence_hash != other.sequence_hash


def test_a_name_is_read_back_and_its_path_is_for_the_reader() -> None:
    assert Output.of("layers.0.qkv.addmm#12:0") == Output("addmm", 12, 0)
    assert Output.of("mine::scan#0:1") == Output("mine::scan", 0, 1)
    assert str(Output("relu_", 2)) == "relu_#2:0"
    for wrong in ("qkv", "addmm#1", "addmm#x:0", "a b.addmm#1:0"):
        with pytest.raises(ValueError, match="names no output"):
            Output.of(wrong)


def test_submodules_that_are_called_inside_others_give_the_innermost_path() -> None:
    block = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.GELU()), nn.Linear(4, 4))
    found = trace_operators(block, runner([torch.randn(2, 4)]))
    assert [call.path for call in found.calls] == ["0.0", "0.1", "1"]


def test_a_call_is_plain_data() -> None:
    call = OperatorCall("mm", 0, "", (), (0,), 10, 1.0)
    block = BlockOperators((call,), (Value(Output("mm", 0), 4, 0, True),), (0,), "hash")
    assert block.name_of(0) == "mm#0:0"


# The gate ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_block_passes_the_gate(kind: str) -> None:
    block, inputs = make_block(kind)
    assert why_not_replayed(block, runner(inputs)) is None


def refused(function: Callable[[Tensor], Tensor]) -> str:
    reason = why_not_replayed(Calls(function), runner([torch.randn(3, 4)]))
    assert reason is not None
    return reason


def test_a_write_through_numpy_is_found_and_named() -> None:
    def written(x: Tensor) -> Tensor:
        table = torch.zeros(3, 4)
        table.numpy()[:] = 3.0
        return (x * table).tanh()

    assert "the result of zeros#0 (shape (3, 4)) was changed before" in refused(written)


def test_a_write_after_an_operator_has_read_the_memory_is_found_too() -> None:
    def written(x: Tensor) -> Tensor:
        table = torch.zeros(3, 4)
        y = x + table
        table.numpy()[:] = 3.0
        return y.exp() + table

    assert "zeros#0 (shape (3, 4)) was changed before 'add' read it" in refused(written)


def test_a_write_to_a_buffer_through_a_pointer_is_found() -> None:
    buffer = torch.ones(4)

    def written(x: Tensor) -> Tensor:
        y = x * buffer
        buffer.numpy()[:] += 1.0
        return y + buffer

    assert "a tensor from outside (shape (4,)) was changed before" in refused(written)


def test_an_operator_that_writes_without_saying_so_is_named() -> None:
    library = torch.library.Library("ckptplan_test", "FRAGMENT")
    library.define("lie(Tensor x, Tensor noise) -> Tensor")

    def lie(x: Tensor, noise: Tensor) -> Tensor:
        noise.numpy()[:] += 1.0
        return x * 2

    library.impl("lie", lie, "CPU")
    noise = torch.zeros(4)
    reason = refused(lambda x: x.exp() * torch.ops.ckptplan_test.lie(x.detach(), noise))
    assert "was changed while 'ckptplan_test::lie' ran, which does not declare that it writes" in reason


def test_data_changed_after_it_was_saved_shows_in_the_gradients() -> None:
    def changed(x: Tensor) -> Tensor:
        y = x.tanh()
        y.data.mul_(2)  # plain autograd reads the changed memory
        return y

    assert refused(changed) == "outputs, gradients, buffers or random stream of a replay differ from plain autograd's"


def test_a_block_that_changes_its_input_in_place_is_refused() -> None:
    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x.mul_(2)
            return x.tanh()

    assert why_not_replayed(Doubles(), runner([torch.randn(3)])) == "its forward changes its own input in place"


def test_an_operator_that_gives_another_result_the_second_time_is_named() -> None:
    stream = iter(range(100))

    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = torch.full_like(x, float(next(stream)))
            ctx.save_for_backward(y)
            return x * y

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * ctx.saved_tensors[0]

    # replayed, full_like has the same number; run anew by the gate, the block is another one each time
    assert "differ from plain autograd's" in refused(Counts.apply)


def test_a_block_that_does_not_run_under_a_record_or_at_all_is_refused() -> None:
    def no_modes(x: Tensor) -> Tensor:
        if torch._C._len_torch_dispatch_stack():
            raise NotImplementedError("no rule for this operator")
        return x.tanh()

    assert refused(no_modes) == "it does not run under a record: NotImplementedError: no rule for this operator"

    def broken(x: Tensor) -> Tensor:
        raise ZeroDivisionError("always")

    assert "ZeroDivisionError: always" in refused(broken)

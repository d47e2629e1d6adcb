"""A load cannot lie: everything is compared first, all faults are told at once, and then nothing has changed."""

from __future__ import annotations

import copy
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from ckptplan.errors import StateMismatchError
from ckptplan.state import CheckpointManager

Pair = namedtuple("Pair", ["left", "right"])


def saved(tmp_path: Path, payload: dict[str, Any]) -> CheckpointManager:
    states = CheckpointManager(tmp_path, mode="sync")
    states.save("a", payload).result()
    return states


def faults(states: CheckpointManager, into: dict[str, Any], **settings: Any) -> list[str]:
    with pytest.raises(StateMismatchError, match="nothing has been changed") as caught:
        states.load("a", into=into, **settings)
    return list(caught.value.faults)


# --- merge rules ---


def test_tensors_and_containers_are_filled_in_place_tuples_and_leaves_replaced(tmp_path: Path) -> None:
    states = saved(
        tmp_path, {"d": {"t": torch.arange(3.0), "l": [1, {"n": 2}], "p": (3, torch.ones(2)), "s": "new"}, "step": 5}
    )
    tensor, in_tuple, inner_list = torch.zeros(3), torch.zeros(2), [0, {"n": 0}]
    inner = {"t": tensor, "l": inner_list, "p": (0, in_tuple), "s": "old"}
    into = {"d": inner, "step": 0}
    loaded = states.load("a", into=into)
    assert loaded is into
    assert loaded["d"] is inner
    assert inner["t"] is tensor
    assert tensor.tolist() == [0, 1, 2]
    assert inner["l"] is inner_list
    assert inner_list == [1, {"n": 2}]
    assert inner["p"][0] == 3
    assert inner["p"][1] is in_tuple
    assert in_tuple.tolist() == [1, 1]
    assert inner["s"] == "new"
    assert into["step"] == 5


def test_items_that_the_template_does_not_name_are_skipped(tmp_path: Path) -> None:
    states = saved(tmp_path, {"a": 1, "b": torch.ones(2)})
    assert states.load("a", into={"a": 0}) == {"a": 1}


def test_none_takes_everything_and_an_empty_dict_is_a_filter(tmp_path: Path) -> None:
    states = saved(tmp_path, {"d": {"x": torch.ones(2), "n": [1]}})
    assert states.load("a", into={"d": {"x": None, "n": None}})["d"]["n"] == [1]
    assert states.load("a", into={"d": None})["d"]["x"].tolist() == [1, 1]
    assert faults(states, {"d": {}}) == [
        "d.x: unexpected: in the checkpoint, not in the template",
        "d.n: unexpected: in the checkpoint, not in the template",
    ]
    assert states.load("a", into={"d": {}}, strict=False) == {"d": {}}


def test_strict_off_loads_what_both_have_recursively(tmp_path: Path) -> None:
    states = saved(tmp_path, {"d": {"both": {"x": 1, "stored": 2}, "stored": 3, "l": [1, 2, 3]}})
    into = {"d": {"both": {"x": 0, "mine": "kept"}, "mine": "kept too", "l": [0, 0]}}
    states.load("a", into=into, strict=False)
    assert into == {"d": {"both": {"x": 1, "mine": "kept"}, "mine": "kept too", "l": [1, 2]}}


def test_a_strided_an_offset_and_a_gradient_tensor_are_filled_in_place(tmp_path: Path) -> None:
    base = torch.zeros(4, 6)
    targets = {
        "strided": base[:, ::2],
        "t": torch.zeros(3, 2).t(),
        "leaf": torch.zeros(3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.zeros(3)),
        "complex": torch.zeros(2, dtype=torch.complex64).conj(),
    }
    stored = {
        "strided": torch.arange(12.0).view(4, 3),
        "t": torch.arange(6.0).view(2, 3),
        "leaf": torch.arange(3.0),
        "parameter": torch.arange(3.0),
        "complex": torch.tensor([1 + 1j, 2 - 3j]),
    }
    states = saved(tmp_path, {"d": stored})
    kept = dict(targets)
    states.load("a", into={"d": targets})
    for name, tensor in stored.items():
        assert targets[name] is kept[name]
        assert torch.equal(targets[name].detach().resolve_conj(), tensor), name
    assert base[:, 1::2].eq(0).all()


def test_numpy_arrays_are_filled_in_place(tmp_path: Path) -> None:
    states = saved(tmp_path, {"x": np.arange(6).reshape(2, 3)})
    target = np.zeros((2, 3), np.int64)
    assert states.load("a", into={"x": target})["x"] is target
    assert target.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert faults(states, {"x": np.zeros((2, 3), np.float32)}) == ["x: expected <f4 [2, 3], stored is <i8 [2, 3]"]


def test_a_namedtuple_template_gives_its_own_class(tmp_path: Path) -> None:
    states = saved(tmp_path, {"x": Pair(1, torch.ones(2))})
    loaded = states.load("a", into={"x": Pair(0, torch.zeros(2))})["x"]
    assert type(loaded) is Pair
    assert loaded.left == 1
    assert loaded.right.tolist() == [1, 1]
    assert faults(states, {"x": (0, None)}) == ["x: expected a tuple, stored is a namedtuple"]


# --- faults ---


def test_every_fault_of_every_item_is_listed_at_once_and_nothing_changes(tmp_path: Path) -> None:
    """The predecessor broadcast, cast, truncated and left rows untouched, silently."""
    stored = {"ok": torch.ones(2), "shape": torch.ones(1), "more": torch.ones(8), "dtype": torch.tensor([70000.0]),
              "gone": 1, "kind": torch.ones(2), "leaf": "text", "list": [1, 2], "pair": (1, 2)}  # fmt: skip
    states = saved(tmp_path, {"d": stored, "e": {"x": 1}})
    into = {
        "d": {"ok": torch.zeros(2), "shape": torch.zeros(4), "more": torch.zeros(10), "dtype": torch.zeros(1).half(),
              "new": 0, "kind": {"x": 1}, "leaf": 5, "list": [1], "pair": [1, 2]},
        "e": 3,
        "absent": None,
    }  # fmt: skip
    before = copy.deepcopy(into)
    assert faults(states, into) == [
        "d.new: missing in the checkpoint",
        "d.gone: unexpected: in the checkpoint, not in the template",
        "d.shape: expected float32 [4], stored is float32 [1]; nothing is cast or reshaped",
        "d.more: expected float32 [10], stored is float32 [8]; nothing is cast or reshaped",
        "d.dtype: expected float16 [1], stored is float32 [1]; nothing is cast or reshaped",
        "d.kind: expected a dict, stored is float32 [2]",
        "d.leaf: expected int 5, stored is str 'text'",
        "d.list: expected a list of 1, stored is one of 2",
        "d.pair: expected a list, stored is a tuple",
        "e: expected int 3, stored is a dict",
        "absent: missing in the checkpoint, which holds d, e; leave it out of into=",
    ]
    assert into["d"]["ok"].tolist() == before["d"]["ok"].tolist() == [0, 0]
    assert {name: value for name, value in into["d"].items() if not isinstance(value, torch.Tensor)} == {
        name: value for name, value in before["d"].items() if not isinstance(value, torch.Tensor)
    }


def test_templates_tied_in_another_way_than_what_is_stored_are_refused(tmp_path: Path) -> None:
    states = saved(tmp_path, {"d": {"a": torch.ones(4), "b": torch.zeros(4)}})
    shared = torch.zeros(4)
    assert faults(states, {"d": {"a": shared, "b": shared}}) == [
        "d.b: shares memory with d.a in the template, but is stored apart from it"
    ]
    expanded = torch.zeros(1).expand(4)
    assert "several elements share one place" in faults(states, {"d": {"a": expanded, "b": torch.zeros(4)}})[0]


def test_stored_ties_load_into_tied_and_into_separate_templates(tmp_path: Path) -> None:
    value = torch.arange(6.0)
    states = saved(tmp_path, {"d": {"a": value, "b": value.view(2, 3), "c": value[2:4]}})
    tied = torch.zeros(6)
    states.load("a", into={"d": {"a": tied, "b": tied.view(2, 3), "c": tied[2:4]}})
    assert tied.tolist() == list(range(6))
    apart = {"a": torch.zeros(6), "b": torch.zeros(2, 3), "c": torch.zeros(2)}
    states.load("a", into={"d": apart})
    assert apart["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert apart["c"].tolist() == [2, 3]


def test_map_location_and_bad_arguments(tmp_path: Path) -> None:
    states = saved(tmp_path, {"x": torch.ones(2)})
    assert states.load("a", map_location="cpu")["x"].device.type == "cpu"
    assert states.load("a", map_location="meta")["x"].device.type == "meta"
    with pytest.raises(TypeError, match="into=list"):
        states.load("a", into=[])  # type: ignore[arg-type]


# --- modules ---


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.turned = torch.nn.Parameter(torch.randn(5, 4).t())
        self.register_buffer("small_view", torch.arange(1_000_000.0)[7:17])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x))) + self.turned.sum()


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(0, 10, (8,))).square().mean().backward()
        optimizer.step()


def test_model_and_optimizer_resume_exactly(tmp_path: Path) -> None:
    """C16, B62, B73: tied weights, a transposed parameter, a view as buffer, moments, learning rate, random streams."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    trained(model, optimizer, 3)
    schedule.step()
    states = CheckpointManager(tmp_path)
    payload = {"model": model, "optimizer": optimizer, "schedule": schedule, "rng": torch.get_rng_state(), "step": 3}
    info = states.save("a", payload).result()
    assert info.size_bytes < 4 * 3 * (40 + 8 + 20 + 10) + 1000 + 5056 + 4 * 4096
    trained(model, optimizer, 2)
    expected = copy.deepcopy(model.state_dict())

    fresh = Tied()
    names = {name: tensor.data_ptr() for name, tensor in fresh.state_dict().items()}
    new_optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    new_schedule = torch.optim.lr_scheduler.CosineAnnealingLR(new_optimizer, 10)
    into = {
        "model": fresh,
        "optimizer": new_optimizer,
        "schedule": new_schedule,
        "rng": torch.get_rng_state(),
        "step": 0,
    }
    states.load("latest", into=into)
    assert into["model"] is fresh
    assert into["optimizer"] is new_optimizer
    assert into["step"] == 3
    assert new_optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0] == new_schedule.get_last_lr()[0]
    assert {name: tensor.data_ptr() for name, tensor in fresh.state_dict().items()} == names, "identity is kept"
    assert fresh.head.weight is fresh.embed.weight
    torch.set_rng_state(into["rng"])
    trained(fresh, new_optimizer, 2)
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    states.close()


def test_loading_twice_fills_the_live_moments_in_place(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    states = saved(tmp_path, {"optimizer": optimizer})
    moment = optimizer.state[model.weight]["exp_avg"]
    stored = moment.clone()
    optimizer.step()
    states.load("a", into={"optimizer": optimizer})
    assert optimizer.state[model.weight]["exp_avg"] is moment
    assert torch.equal(moment, stored)


def test_moments_keep_their_dtype_beside_parameters_of_another(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.tensor([1.0001, 2.0])
    states = saved(tmp_path, {"optimizer": optimizer})
    fresh = torch.optim.SGD([weight], momentum=0.9)
    states.load("a", into={"optimizer": fresh})
    assert fresh.state[weight]["momentum_buffer"].dtype is torch.float32
    assert fresh.state[weight]["momentum_buffer"].tolist() == torch.tensor([1.0001, 2.0]).tolist()


def test_an_optimizers_own_empty_state_is_a_template_for_everything(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    states = saved(tmp_path, {"optimizer": optimizer.state_dict()})
    template = torch.optim.Adam(model.parameters(), lr=0.25).state_dict()
    loaded = states.load("a", into={"optimizer": template})["optimizer"]
    assert set(loaded["state"]) == {0, 1}
    assert loaded["param_groups"][0]["lr"] == 0.25


def test_an_optimizer_of_another_shape_or_kind_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = saved(tmp_path, {"o": optimizer})
    fewer = torch.optim.SGD([model.weight], lr=0.1)
    assert faults(states, {"o": fewer}) == ["o.param_groups.0: expected 1 parameters, stored are 2"]
    groups = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    assert faults(states, {"o": groups}) == ["o.param_groups: expected 2 parameter groups, stored are 1"]
    adam = torch.optim.Adam(model.parameters())
    assert "is it another optimizer?" in faults(states, {"o": adam})[0]
    assert adam.param_groups[0]["lr"] == 1e-3


def test_a_renamed_misshapen_or_missing_parameter_is_named_before_anything_changes(tmp_path: Path) -> None:
    states = saved(tmp_path, {"model": {"weight": torch.ones(2, 3), "bias": torch.ones(3), "old": torch.ones(1)}})
    model = torch.nn.Linear(3, 2)
    model.register_buffer("new", torch.zeros(1))
    before = copy.deepcopy(model.state_dict())
    assert faults(states, {"model": model}) == [
        "model.new: missing in the checkpoint",
        "model.old: unexpected: in the checkpoint, not in the template",
        "model.bias: expected float32 [2], stored is float32 [3]; nothing is cast or reshaped",
    ]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_compiled_and_data_parallel_modules_keep_plain_names(tmp_path: Path) -> None:
    """B71, C16: names in the file are those of the plain model."""
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    wrapped = torch.nn.DataParallel(torch.compile(plain, backend="eager"))
    inner = torch.nn.Sequential(torch.compile(plain[0], backend="eager"), plain[1])
    for index, module in enumerate((plain, wrapped, inner, torch.compile(plain, backend="eager"))):
        states = saved(tmp_path / str(index), {"model": module})
        assert list(states.load("a")["model"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        for target in (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), inner, wrapped):
            with torch.no_grad():
                kept = plain[0].weight.clone()
                target.state_dict()[next(iter(target.state_dict()))].zero_()
                states.load("a", into={"model": target})
                assert torch.equal(target.state_dict()[next(iter(target.state_dict()))], kept)


def test_an_average_of_weights_loads_whatever_is_wrapped_round_it_or_was(tmp_path: Path) -> None:
    """B72: names of every stored object, not only the model's, are plain, so a changed plan breaks none of them."""

    def plain() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    def compiled_block() -> torch.nn.Module:
        module = plain()
        module[0] = torch.compile(module[0], backend="eager")
        return module

    def checkpointed_block() -> torch.nn.Module:
        module = plain()
        module[1] = checkpoint_wrapper(module[1])
        return module

    makers = [plain, lambda: torch.compile(plain(), backend="eager"), compiled_block, checkpointed_block]
    for number, make in enumerate(makers):
        model = make()
        average = AveragedModel(model)
        average.update_parameters(model)
        states = saved(tmp_path / str(number), {"model": model, "average": average})
        plain_names = ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert list(states.load("a")["average"]) == ["n_averaged", *(f"module.{name}" for name in plain_names)]
        for other in makers:
            into = {"model": other(), "average": AveragedModel(other())}
            states.load("a", into=into)
            assert into["average"].n_averaged == 1
            for name in ("model", "average"):
                expected = {"model": model, "average": average}[name].parameters()
                assert all(map(torch.equal, into[name].parameters(), expected))


class WithExtra(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra = {"seen": 0}
        self.loads = 0

    def get_extra_state(self) -> Any:
        return dict(self.extra)

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.loads += 1
        return super().load_state_dict(state_dict, strict, assign)


def test_a_module_that_watches_its_loading_is_asked(tmp_path: Path) -> None:
    module = WithExtra()
    module.extra = {"seen": 3, "more": [1]}
    states = saved(tmp_path, {"m": module})
    fresh = WithExtra()
    states.load("a", into={"m": fresh})
    assert fresh.extra == {"seen": 3, "more": [1]}
    assert fresh.loads == 1
    assert torch.equal(fresh.weight, module.weight)


class Meter:
    def __init__(self) -> None:
        self.values: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def test_any_object_with_state_comes_back(tmp_path: Path) -> None:
    meter = Meter()
    meter.values = [1, torch.ones(2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    steps = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1), [2, 5])
    states = saved(tmp_path, {"meter": meter, "scaler": scaler, "steps": steps})
    fresh, new_scaler = Meter(), torch.amp.GradScaler("cpu", init_scale=2.0)
    states.load("a", into={"meter": fresh, "scaler": new_scaler, "steps": None})
    assert fresh.values[0] == 1
    assert fresh.values[1].tolist() == [1, 1]
    assert new_scaler.get_scale() == 8.0
    assert faults(states, {"steps": fresh})[0] == "steps.values: missing in the checkpoint"


def test_ten_of_two_hundred_tensors_read_little_more_than_their_bytes(tmp_path: Path) -> None:
    states = saved(tmp_path, {"w": {f"t{index}": torch.full((50_000,), float(index)) for index in range(200)}})
    reads: list[int] = []
    from ckptplan.state import storage

    original = storage._read_all

    def counted(descriptor: int, offset: int, target: memoryview, path: str) -> None:
        reads.append(len(target))
        original(descriptor, offset, target, path)

    storage._read_all = counted
    try:
        names = [f"t{index}" for index in range(0, 200, 20)]
        loaded = states.load("a", into={"w": dict.fromkeys(names)}, strict=False)["w"]
    finally:
        storage._read_all = original
    assert all(loaded[name].unique().tolist() == [float(name[1:])] for name in names)
    manifest_bytes = (tmp_path / "a" / "manifest.json").stat().st_size
    header_bytes = int.from_bytes((tmp_path / "a" / "w.0.safetensors").read_bytes()[:8], "little") + 8
    assert sum(reads) <= 10 * 200_000 + 2 * manifest_bytes + header_bytes

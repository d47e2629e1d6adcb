"""Names of kept outputs, plans with Selective nodes: text, JSON, simulation, the referee, execution."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ckptplan import choices
from ckptplan.apply import apply_plan, checkpointed
from ckptplan.blocks import CheckpointableBlock, select_blocks
from ckptplan.check import check_plan
from ckptplan.costs import SelectiveOption, StageCost
from ckptplan.errors import PlanIncompatibleError
from ckptplan.explanation import explain
from ckptplan.graph import Output
from ckptplan.measure import Trials, profile_blocks, profile_model
from ckptplan.models import GPT
from ckptplan.nodes import Keep, Recompute, Selective, parse_plan_text
from ckptplan.plan import CheckpointPlan
from ckptplan.planners import plan_checkpoints
from ckptplan.profiles import BlockProfile, ChainProfile
from ckptplan.proof import prove_model
from ckptplan.report.tables import plan_rows
from ckptplan.selective import find_option, short_names
from ckptplan.simulate import simulate_plan
from ckptplan.training import loss_of
from tests.chains import mean_square
from tests.test_promises import MODELS, batch_for

CPU = torch.device("cpu")
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
QKV, FC, OUT = "attn.qkv.addmm#0:0", "mlp.fc.addmm#2:0", "mlp.out.addmm#3:0"
NORM1, NORM2 = ("norm.native_layer_norm#0:0", "norm.native_layer_norm#0:1"), ("norm.native_layer_norm#1:0",)
ATTN = (f"{ATTENTION}#0:0", f"{ATTENTION}#0:1")


def option(*saved_ops: str, saved: int = 10, time_ms: float | None = 1.0, flops: int | None = 100) -> SelectiveOption:
    return SelectiveOption(saved_ops, StageCost(saved, 50, 60), time_ms, flops, "hash")


def block(*options: SelectiveOption, block_id: str = "b") -> BlockProfile:
    return BlockProfile(
        block_id,
        output_bytes=5,
        output_gradient_bytes=5,
        keep=StageCost(40, 45, 60),
        recompute=StageCost(0, 20, 60),
        recompute_time_ms=3.0,
        recompute_flops=300,
        forward_flops=300,
        forward_time_ms=3.0,
        selective=options,
    )


# Names ---------------------------------------------------------------------------------------------------------------


def names_of(*options: SelectiveOption) -> list[tuple[str, ...]]:
    profile = block(*options)
    return [short_names(profile, one) for one in options]


def test_an_output_is_called_by_the_shortest_form_that_stands_for_one_operator_call() -> None:
    assert names_of(option(QKV, *ATTN, FC), option(*ATTN, "gelu#0:0"), option()) == [
        ("qkv", "attention", "fc"),
        ("attention", "gelu"),
        (),
    ]


def test_forms_grow_where_shorter_ones_are_ambiguous() -> None:
    assert names_of(option(*NORM1, *NORM2)) == [("native_layer_norm#0", "native_layer_norm#1")]
    assert names_of(option("a.fc.addmm#0:0", "b.fc.addmm#1:0")) == [("a.fc", "b.fc")]
    assert names_of(option("fc.addmm#0:0", "fc.relu_#0:0")) == [("addmm", "relu_")]
    assert names_of(option("mine::scan#0:0", "addmm#0:0")) == [("mine::scan", "addmm")]


def test_options_that_keep_different_results_of_the_same_calls_are_called_in_full() -> None:
    first, both = option(NORM1[0]), option(*NORM1)
    profile = block(first, both)
    assert short_names(profile, first) == (NORM1[0],)
    assert short_names(profile, both) == NORM1
    assert find_option(profile, [NORM1[0]]) is first
    assert find_option(profile, NORM1) is both


@pytest.mark.parametrize("seed", range(30))
def test_every_option_is_found_by_its_short_names_and_by_its_full_ones(seed: int) -> None:
    stream = random.Random(seed)
    known = [
        f"{path}{operator}#{nth}:{position}"
        for nth, path in enumerate(("", "a.", "a.b.", "c.b.", "a."))
        for operator in (stream.choice(["mm", "add", "mul"]),)
        for position in (0, 1)
    ]
    options = {tuple(sorted(stream.sample(known, stream.randint(0, 6)))): None for _ in range(6)}
    profile = block(*(option(*saved) for saved in options))
    for one in profile.selective:
        assert find_option(profile, short_names(profile, one)) is one
        assert find_option(profile, one.saved_ops) is one


def test_a_name_that_stands_for_nothing_or_for_two_calls_is_refused() -> None:
    profile = block(option(QKV, FC), option(FC, OUT))
    with pytest.raises(PlanIncompatibleError, match=r"'proj' names nothing that an option keeps; known: attn.qkv"):
        find_option(profile, ["proj"])
    with pytest.raises(PlanIncompatibleError, match=r"'addmm' may be attn.qkv.addmm#0 or mlp.fc.addmm#2 or"):
        find_option(profile, ["addmm"])
    with pytest.raises(PlanIncompatibleError, match=r"no option that keeps exactly \[qkv\]; its options: \[qkv,fc\]"):
        find_option(profile, ["qkv"])
    with pytest.raises(PlanIncompatibleError, match="no selective options in its profile; profile with selective=True"):
        find_option(block(), [])


# Text and JSON -------------------------------------------------------------------------------------------------------


def test_text_names_the_kept_outputs_in_brackets() -> None:
    nodes = parse_plan_text("K0 S1[qkv,attention] R(2) S3[]")
    assert nodes == (Keep(0), Selective(1, ("qkv", "attention")), Recompute((Keep(2),)), Selective(3, ()))


@pytest.mark.parametrize("text", ["S[qkv]", "S1", "S1[qkv", "S1[a b]", "S1[a]S2[b]", "S1[[a]]"])
def test_text_of_another_form_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(ValueError, match=r"found .* at position"):
        parse_plan_text(text)


@pytest.mark.parametrize("text", ["R(S0[fc])", "R(0 S1[])", "S0[fc,fc]", "S0[fc,]"])
def test_a_selective_node_inside_a_recomputation_or_with_a_name_twice_is_no_plan(text: str) -> None:
    with pytest.raises((PlanIncompatibleError, ValueError)):
        CheckpointPlan.from_text(text, ["a", "b"][: 2 if "1" in text else 1])


def chain() -> ChainProfile:
    options = (option(saved=0, flops=250), option(QKV, *ATTN, FC))
    return ChainProfile(tuple(block(*options, block_id=f"b{i}") for i in range(3)))


def test_a_plan_from_text_resolves_short_names_and_stores_full_ones_with_the_hash() -> None:
    plan = CheckpointPlan.from_text("S0[qkv,attention,fc] K1 S2[]", chain())
    assert plan.decisions[0].saved_ops == (QKV, *ATTN, FC)
    assert plan.decisions[0].sequence_hash == "hash"
    assert plan.decisions[1].saved_ops is None
    assert plan.decisions[2].saved_ops == ()
    assert (plan.kept, plan.recomputed, plan.selective) == (1, 1, 1)  # S2[] keeps nothing: all of it is made again
    assert [d.checkpointed for d in plan.decisions] == [False, False, True]
    assert [d.executor for d in plan.decisions] == ["replay", None, "replay"]
    assert CheckpointPlan.from_json(plan.to_json()) == plan
    stored = json.loads(plan.to_json())
    assert stored["tree"]["text"] == "S0[qkv,attention,fc] K1 S2[]"
    assert stored["decisions"][0]["saved_ops"] == [QKV, *ATTN, FC]


def test_a_changed_name_in_a_stored_plan_is_refused() -> None:
    plan = CheckpointPlan.from_text("S0[qkv,attention,fc] K1 K2", chain())
    with pytest.raises(PlanIncompatibleError):
        CheckpointPlan.from_json(plan.to_json().replace(FC, OUT))


def test_without_a_profile_names_are_written_in_full() -> None:
    assert CheckpointPlan.from_text(f"S0[{QKV}]", ["a"]).decisions[0].saved_ops == (QKV,)
    with pytest.raises(
        PlanIncompatibleError, match=r"'qkv' is no full name of an output .* make the plan with a profile"
    ):
        CheckpointPlan.from_text("S0[qkv]", ["a"])


def test_tree_and_decisions_must_agree() -> None:
    plan = CheckpointPlan.from_text("S0[qkv,attention,fc] K1 K2", chain())
    kept = replace(plan.decisions[0], saved_ops=None)
    with pytest.raises(PlanIncompatibleError, match="saved_ops=None but the tree keeps part of it"):
        replace(plan, decisions=(kept, *plan.decisions[1:]))
    other = replace(plan.decisions[0], saved_ops=(QKV,))
    with pytest.raises(
        PlanIncompatibleError, match=r"the tree keeps \[qkv, attention, fc\] but saved_ops is \[attn.qkv"
    ):
        replace(plan, decisions=(other, *plan.decisions[1:]))


def test_a_profile_with_options_is_read_back_as_it_was() -> None:
    profile = chain()
    assert ChainProfile.from_json(profile.to_json()) == profile


# Simulation, the referee, planners -----------------------------------------------------------------------------------


def test_the_cost_of_a_selective_node_is_its_options() -> None:
    profile = chain()
    plan = CheckpointPlan.from_text("S0[qkv,attention,fc] R(1) S2[]", profile)
    cost = simulate_plan(profile, plan)
    assert (cost.recompute_time_ms, cost.recompute_flops) == (5.0, 650)
    assert cost.retained_bytes == (10, 5, 5)  # its own bytes; the boundaries that the second and third hold
    blocks = tuple(replace(b, activation_bytes_estimate=40) for b in profile)
    additive = plan_checkpoints(
        blocks,
        target_kind="activation_budget_bytes",
        target_value=100,
        planner="text",
        text="S0[qkv,attention,fc] K1 S2[]",
        memory_model="additive",
    )
    assert additive.predicted_peak_bytes == 10 + 40 + 0
    check_plan(blocks, additive)


def test_a_planner_may_return_selective_nodes_and_the_referee_checks_them() -> None:
    profile = chain()

    def planner(chain: ChainProfile, budget_bytes: int, *, cost: str, memory_model: str) -> Any:
        return [Selective(0, ("qkv", "attention", "fc")), Selective(1, ()), Keep(2)]

    plan = plan_checkpoints(profile, target_kind="activation_budget_bytes", target_value=1000, planner=planner)
    assert plan.text == "S0[qkv,attention,fc] S1[] K2"
    assert plan.decisions[0].saved_ops == (QKV, *ATTN, FC)
    assert plan.decisions[0].recompute_time_ms == 1.0
    assert "kept in part: qkv, attention, fc" in plan.decisions[0].reason
    check_plan(profile, plan)
    wrong = replace(plan, decisions=(replace(plan.decisions[0], sequence_hash="other"), *plan.decisions[1:]))
    with pytest.raises(PlanIncompatibleError, match="of operators other; the profile's option is"):
        check_plan(profile, wrong)
    assert [row.decision for row in plan_rows(profile, plan)] == [
        "keep part",
        "replay",
        "keep",
    ]


def test_a_plan_of_options_that_the_profile_does_not_hold_is_refused() -> None:
    profile = chain()
    plan = CheckpointPlan.from_text("S0[qkv,attention,fc] K1 K2", profile)
    bare = replace(profile, blocks=tuple(replace(b, selective=()) for b in profile))
    for check in (check_plan, simulate_plan):
        with pytest.raises(PlanIncompatibleError, match="no selective options"):
            check(bare, plan)


@pytest.mark.parametrize("seed", range(40))
def test_simulator_and_referee_agree_on_random_plans_with_options(seed: int) -> None:
    stream = random.Random(seed)

    def cost() -> StageCost:
        sharing = stream.choice((None, stream.randint(0, 300)))
        flags = (stream.random() < 0.5, stream.random() < 0.5)
        return StageCost(
            stream.randint(0, 90), stream.randint(0, 99), stream.randint(0, 200), flags[:1], flags[1:], sharing
        )

    blocks = []
    for i in range(6):
        passed = stream.random() < 0.2 and i > 0
        blocks.append(
            BlockProfile(
                f"b{i}",
                output_bytes=0 if passed else stream.randint(1, 60),
                output_is_input=(0 if passed else None,),
                output_gradient_bytes=10,
                keep=cost(),
                recompute=cost(),
                recompute_time_ms=1.0,
                selective=(SelectiveOption(("mm#0:0",), cost(), 0.5),),
            )
        )
    profile = ChainProfile(tuple(blocks), input_bytes=(0,))
    nodes = [stream.choice((f"K{i}", f"R({i})", f"S{i}[mm]")) for i in range(6)]
    plan = plan_checkpoints(
        profile, target_kind="activation_budget_bytes", target_value=10**6, planner="text", text=" ".join(nodes)
    )
    check_plan(profile, plan)


# Real blocks ---------------------------------------------------------------------------------------------------------


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(model, batch)


def loss_under_autocast(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(model, batch, torch.bfloat16)


LOSSES = {"float32": loss, "bf16": loss_under_autocast}


@cache
def measured(name: str, precision: str = "float32") -> tuple[nn.Module, Any, ChainProfile]:
    torch.manual_seed(0)
    model = MODELS[name]()
    batch = batch_for(model)
    blocks = select_blocks(model).blocks
    profile = profile_model(model, blocks, batch, LOSSES[precision], num_warmup=0, num_trials=1, selective=True)
    return model, batch, profile


def random_text(profile: ChainProfile, stream: random.Random) -> str:
    nodes = []
    for i, one in enumerate(profile):
        choices = [f"K{i}", *(f"S{i}[{','.join(short_names(one, o))}]" for o in one.selective)]
        nodes.append(stream.choice([*choices, f"R({i})"] if one.eligible_for_checkpoint else choices))
    return " ".join(nodes)


@pytest.mark.parametrize("precision", list(LOSSES))
@pytest.mark.parametrize("name", list(MODELS))
def test_peaks_of_plans_with_options_are_predicted_to_the_byte_and_gradients_are_equal(
    name: str, precision: str
) -> None:
    model, batch, profile = measured(name, precision)
    assert all(one.selective for one in profile), [one.warnings for one in profile]
    stream = random.Random(name)
    off, unequal = [], []
    for _ in range(4):
        plan = CheckpointPlan.from_text(random_text(profile, stream), profile)
        step = LOSSES[precision]
        proof = prove_model(model, plan, batch, step, device=CPU, trials=Trials(0, 1), time_steps=False)
        predicted = simulate_plan(profile, plan).peak_bytes
        if predicted != proof.peak_bytes:
            off.append(f"{plan.text}: predicted {predicted}, measured {proof.peak_bytes}")
        if proof.gradients is None or not proof.gradients.bitwise_equal:
            unequal.append(plan.text)
    assert (off, unequal) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_every_option_of_every_block_alone_is_predicted_to_the_byte(name: str) -> None:
    model, batch, profile = measured(name)
    off = []
    for i, one in enumerate(profile):
        for chosen in one.selective:
            for other in ("K{}", "R({})"):
                nodes = [
                    other.format(j) if profile[j].eligible_for_checkpoint else f"K{j}" for j in range(len(profile))
                ]
                nodes[i] = f"S{i}[{','.join(short_names(one, chosen))}]"
                plan = CheckpointPlan.from_text(" ".join(nodes), profile)
                proof = prove_model(model, plan, batch, loss_of, device=CPU, trials=Trials(0, 1), time_steps=False)
                if not proof.gradients.bitwise_equal or simulate_plan(profile, plan).peak_bytes != proof.peak_bytes:
                    off.append(plan.text)
    assert off == []


def test_the_free_option_of_a_transformer_block_keeps_the_products_and_runs_none_again() -> None:
    _, _, profile = measured("gpt")
    free = [o for o in profile[1].selective if o.flops == 0]
    cheapest = min(free, key=lambda o: o.cost.saved_bytes)
    assert set(short_names(profile[1], cheapest)) == {"qkv", "attention", "add", "fc"}
    assert cheapest.cost.saved_bytes < 0.65 * profile[1].keep.saved_bytes  # type: ignore[union-attr]
    assert profile[1].selective[0].saved_ops == ()
    assert len(profile[1].selective) <= 12
    assert all(o.time_ms is not None and o.time_ms >= 0 for o in profile[1].selective)


def test_a_part_that_is_given_is_measured_though_the_search_does_not_propose_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Options are found by measured times: a plan printed by one run must not depend on the times of another."""
    monkeypatch.setattr(choices, "propose_keep_sets", lambda operators: [])
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    batch = batch_for(model)
    full = ("qkv.addmm#0:0", "fc.addmm#2:0")
    given = (("attention", "qkv"), full, ("no such name",))
    profile = profile_model(model, None, batch, loss_of, num_warmup=0, num_trials=1, selective=given)
    found = [{Output.of(name).operator for name in option.saved_ops} for option in profile[0].selective]
    assert found == [{"addmm", ATTENTION}, {"addmm"}]
    assert all(option.time_ms is not None for option in profile[0].selective)
    text = " ".join([f"S0[{','.join(full)}]", *(f"S{i}[qkv,attention]" for i in range(1, len(profile)))])
    plan = CheckpointPlan.from_text(text, profile)
    assert plan.selective == len(profile)
    proof = prove_model(model, plan, batch, loss_of, device=CPU, trials=Trials(0, 1), time_steps=False)
    assert proof.gradients is not None
    assert proof.gradients.bitwise_equal
    assert simulate_plan(profile, plan).peak_bytes == proof.peak_bytes


def test_a_container_and_a_patched_model_run_selective_plans() -> None:
    model, batch, profile = measured("gpt")
    assert isinstance(model, GPT)
    text = " ".join(f"S{i}[{','.join(short_names(b, b.selective[1]))}]" for i, b in enumerate(profile))
    plan = CheckpointPlan.from_text(text, profile)
    plain = loss_of(model, batch)
    expected = torch.autograd.grad(plain, list(model.parameters()))
    with checkpointed(model, plan):
        found = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert all("forward" not in vars(b) for b in model.layers)


class WritesThroughNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.zeros(8)
        table.numpy()[:] = 2.0
        return (self.linear(x) * table).tanh()


def test_a_block_that_fails_the_gate_has_no_options_and_says_why() -> None:
    modules = [WritesThroughNumpy(), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))]
    blocks = tuple(CheckpointableBlock(f"b{i}", i, m) for i, m in enumerate(modules))
    x = torch.randn(4, 8)
    profile = profile_blocks(
        blocks, (x,), device="cpu", num_warmup=0, num_trials=1, make_target=mean_square, selective=True
    )
    assert profile[0].selective == ()
    assert "not replayed: the result of zeros#0" in profile[0].warnings[0]
    assert profile[0].recompute is not None  # whole, by running the code again, it is right
    assert profile[1].selective
    with pytest.raises(PlanIncompatibleError, match="not replayed: the result of zeros#0"):
        CheckpointPlan.from_text("S0[] K1", profile)
    plan = CheckpointPlan.from_text("R(0) S1[]", profile)
    assert torch.equal(apply_plan(blocks, plan, (x,))(x), modules[1](modules[0](x)))
    told = [block.reason for block in explain(profile, plan).blocks]
    assert "no part of it can be kept: the result of zeros#0" in told[0]
    assert "no part of it" not in told[1]


class AddsThroughNumpy(WritesThroughNumpy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.ones(8)
        table.numpy()[:] += 1.0
        return (self.linear(x) * table).tanh()


def test_where_the_gate_says_no_selective_checkpointing_is_silently_wrong_and_the_whole_block_is_right() -> None:
    """Why such blocks have no options at all: PyTorch's own way to keep operators' outputs keeps what was written to
    them afterwards, and the code, run again, writes once more. It looks for writes by version counters, as all do.
    """
    block, x = AddsThroughNumpy(), torch.randn(4, 8)
    blocks = (CheckpointableBlock("b0", 0, block),)
    profile = profile_blocks(blocks, (x,), device="cpu", num_warmup=0, num_trials=1, make_target=mean_square)
    assert "does not see (NumPy, a raw pointer)" in profile[0].warnings[0]

    def gradients(run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        return list(torch.autograd.grad(run(x).square().mean(), list(block.parameters())))

    def keep_ones() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.ones.default])

    plain = gradients(block)
    selective = gradients(lambda x: checkpoint(block, x, use_reentrant=False, context_fn=keep_ones))
    whole = gradients(apply_plan(blocks, CheckpointPlan.from_text("R(0)", profile), (x,)))
    assert not any(torch.allclose(a, b) for a, b in zip(plain, selective, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain, whole, strict=True))


def test_without_being_asked_for_options_only_the_replay_of_the_whole_block_is_measured() -> None:
    blocks = (CheckpointableBlock("b", 0, nn.Sequential(nn.Linear(4, 4), nn.Tanh())),)
    profile = profile_blocks(blocks, (torch.randn(2, 4),), device="cpu", num_warmup=0, num_trials=1)
    assert [option.saved_ops for option in profile[0].selective] == [()]
    assert profile[0].selective[0].flops == profile[0].recompute_flops == 2 * 2 * 4 * 4
    with pytest.raises(PlanIncompatibleError, match="profile with selective=True"):
        CheckpointPlan.from_text("S0[tanh]", profile)
    off = profile_blocks(blocks, (torch.randn(2, 4),), device="cpu", num_warmup=0, num_trials=1, memory="off")
    assert off[0].selective == ()

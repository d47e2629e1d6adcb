"""The plan: text and JSON both ways, ill-formed trees beside well-formed ones, tampering refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptplan.errors import PlanIncompatibleError, UnsupportedPlanVersionError
from ckptplan.nodes import (
    Keep,
    PlanNode,
    Recompute,
    blocks_of,
    nodes_text,
    parse_plan_text,
    recomputed_blocks,
    tree_faults,
)
from ckptplan.plan import CheckpointDecision, CheckpointPlan
from ckptplan.profiles import BlockProfile, ChainProfile


@st.composite
def trees(draw: st.DrawFn, max_blocks: int = 12) -> tuple[PlanNode, ...]:
    """Any well-formed plan over 1 to ``max_blocks`` blocks."""
    return _draw_nodes(draw, 0, draw(st.integers(1, max_blocks)), depth=0)


def _draw_nodes(draw: st.DrawFn, first: int, stop: int, depth: int) -> tuple[PlanNode, ...]:
    nodes: list[PlanNode] = []
    while first < stop:
        after = draw(st.integers(first + 1, stop))
        if depth < 3 and draw(st.booleans()) and not (depth > 0 and (first, after) == (0, stop)):
            inner = _draw_nodes(draw, first, after, depth + 1)
            if len(inner) == 1 and isinstance(inner[0], Recompute):
                inner = inner[0].children
            nodes.append(Recompute(inner))
        else:
            nodes.extend(Keep(i) for i in range(first, after))
        first = after
    return tuple(nodes)


def digest_of(data: Any) -> str:
    """Of a part of a plan's file, whatever the version."""
    text = json.dumps(data, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _plan(text: str = "K0 R(1) R(2 R(3 4))", **changes: Any) -> CheckpointPlan:
    plan = CheckpointPlan.from_text(text)
    decisions = list(plan.decisions)
    decisions[0] = dataclasses.replace(
        decisions[0], eligible_for_checkpoint=False, exclusion_reason="writes to a list", retained_bytes=7
    )
    filled = {
        "decisions": tuple(decisions),
        "planner": "dynamic_programming",
        "target_kind": "activation_budget_bytes",
        "target_value": 100,
        "budget_bytes": 100,
        "predicted_peak_bytes": 90,
        "predicted_peak_at": "3 backward",
        "no_checkpoint_peak_bytes": 150,
        "predicted_cost": 2.5,
        "optimality_gap": 0.0,
        "fingerprint": "f" * 64,
        "environment": {"torch": "2.13.0"},
    }
    return dataclasses.replace(plan, **(filled | changes))


class TestText:
    def test_the_example_of_the_design_reads_as_a_nest(self) -> None:
        assert parse_plan_text("K0 R(1) R(2 R(3 4))") == (
            Keep(0),
            Recompute((Keep(1),)),
            Recompute((Keep(2), Recompute((Keep(3), Keep(4))))),
        )

    @pytest.mark.parametrize(
        ("text", "same"),
        [
            ("K0-3", "K0 K1 K2 K3"),
            ("R(0-3)", "R(0 1 2 3)"),
            ("K0-1 R(2 3-4) R(5)", "K0 K1 R(2 3 4) R(5)"),
            ("  K0   R( 1 )\n", "K0 R(1)"),
            ("R(K0 K1-2)", "R(0 1 2)"),
            ("C0[0.50] C1[1] C2[0] C3[1e-05]", "C0[0.5] C1[1.0] C2[0.0] C3[1e-05]"),
            ("R(0 R(1-2)R(3))", "R(0 R(1 2) R(3))"),
        ],
    )
    def test_short_forms_mean_the_long_ones(self, text: str, same: str) -> None:
        assert nodes_text(parse_plan_text(text)) == same

    @settings(deadline=None)
    @given(trees())
    def test_any_tree_comes_back_from_its_text(self, nodes: tuple[PlanNode, ...]) -> None:
        assert parse_plan_text(nodes_text(nodes)) == nodes

    @settings(deadline=None)
    @given(trees())
    def test_any_tree_over_all_blocks_is_well_formed(self, nodes: tuple[PlanNode, ...]) -> None:
        assert tree_faults(nodes, len(blocks_of(nodes))) == []

    @pytest.mark.parametrize(
        ("text", "position", "parts"),
        [
            ("K0 X1", 3, ["'X1'", "K<block>"]),
            ("K0 C1", 3, ["'C1'", "C<block>[<budget>]"]),
            ("C0[half]", 0, ["'C0[half]'"]),
            ("R(0 C1[-0.5])", 4, ["'C1[-0.5])'"]),
            ("K0 O1-3", 3, ["found 'O1-3'", "O<block>"]),
            ("K0 1", 3, ["'1'", "K<block>"]),
            ("R(0 x)", 4, ["'x)'", "a block number"]),
            ("K0)", 2, ["')'"]),
            ("K0 K-1", 3, ["'K-1'"]),
            ("K1.5", 0, ["'K1.5'"]),
            ("K0K1", 0, ["'K0K1'"]),
        ],
    )
    def test_errors_show_position_found_and_allowed(self, text: str, position: int, parts: list[str]) -> None:
        with pytest.raises(ValueError, match=f"at position {position}") as caught:
            parse_plan_text(text)
        message = str(caught.value)
        assert all(part in message for part in parts), message
        assert message.splitlines()[-1].index("^") == position + 2

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("R(0 1", "not closed"),
            ("", "empty"),
            ("  ", "empty"),
            ("K3-1", "does not ascend"),
            ("K0-99999999", "too large; at most 1,000,000 blocks"),
        ],
    )
    def test_other_bad_texts_are_refused(self, text: str, part: str) -> None:
        with pytest.raises(ValueError, match=part):
            parse_plan_text(text)

    def test_text_has_to_be_text(self) -> None:
        with pytest.raises(TypeError, match="plan text is a list"):
            parse_plan_text(["K0"])  # type: ignore[arg-type]


class TestTree:
    @pytest.mark.parametrize(
        ("text", "fault"),
        [
            ("K0 K2", "blocks 1 to 1 are missing before block 2"),
            ("K0 K1", "blocks 2 to 2 are missing at the end"),
            ("K0 K1 K1 K2", "block 1 comes again or out of order"),
            ("K1 K0 K2", "block 0 comes again or out of order"),
            ("K0 K1 K2 K3", "block 3 is out of range: there are 3 blocks, 0 to 2"),
            ("R(0 1) R(1 2)", "block 1 comes again or out of order"),
            ("R(R(0)) K1 K2", "wraps a recomputation in another"),
        ],
    )
    def test_what_is_no_plan_over_three_blocks_is_refused(self, text: str, fault: str) -> None:
        with pytest.raises(PlanIncompatibleError, match=fault):
            CheckpointPlan.from_text(text, ["a", "b", "c"])

    @pytest.mark.parametrize("text", ["K0 K1 K2", "R(0 1) K2", "R(0) R(1) R(2)", "R(0 R(1 2))", "R(R(0 1) 2)"])
    def test_its_well_formed_twins_are_taken(self, text: str) -> None:
        assert CheckpointPlan.from_text(text, ["a", "b", "c"]).text == text

    def test_nodes_made_by_hand_are_judged_too(self) -> None:
        with pytest.raises(PlanIncompatibleError, match="recomputes nothing"):
            CheckpointPlan((Recompute(()),), (CheckpointDecision("a", True),))
        with pytest.raises(PlanIncompatibleError, match=r"Keep\(True\)"):
            CheckpointPlan((Keep(True),), (CheckpointDecision("a", False),))
        with pytest.raises(PlanIncompatibleError, match="Selective, Offload, Compiled or CompiledModel"):
            CheckpointPlan(("K0",), (CheckpointDecision("a", False),))  # type: ignore[arg-type]

    def test_counts_are_of_blocks_not_of_nodes(self) -> None:
        plan = CheckpointPlan.from_text("K0 R(1) R(2 R(3 4))")
        assert (plan.kept, plan.recomputed) == (1, 4)
        assert recomputed_blocks(plan.nodes) == {1, 2, 3, 4}

    def test_a_forced_plan_takes_ids_costs_and_fingerprint_from_the_profile(self) -> None:
        blocks = (
            BlockProfile("first", recompute_time_ms=1.5, is_stochastic=False),
            BlockProfile("second", recompute_time_ms=2.5, is_stochastic=True),
        )
        chain = ChainProfile(blocks, fingerprint="abc")
        plan = CheckpointPlan.from_text("K0 R(1)", chain)
        assert plan.block_ids == ("first", "second")
        assert [d.recompute_time_ms for d in plan.decisions] == [1.5, 2.5]
        assert [d.preserve_rng_state for d in plan.decisions] == [False, True]
        assert plan.fingerprint == "abc"
        assert CheckpointPlan.from_text("K0 R(1)", blocks).block_ids == ("first", "second")

    def test_a_forced_plan_may_not_recompute_what_cannot_be(self) -> None:
        chain = ChainProfile((BlockProfile("a", eligible_for_checkpoint=False, exclusion_reason="grows a list"),))
        with pytest.raises(PlanIncompatibleError, match="not eligible: grows a list"):
            CheckpointPlan.from_text("R(0)", chain)


class TestJson:
    def test_a_plan_comes_back_equal_and_writes_equal_bytes(self, tmp_path: Path) -> None:
        plan = _plan()
        plan.save(tmp_path / "plan.json")
        again = CheckpointPlan.load(tmp_path / "plan.json")
        assert again == plan
        assert again.digest == plan.digest
        assert again.to_json() == plan.to_json() == (tmp_path / "plan.json").read_text(encoding="utf-8")
        assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]

    @settings(deadline=None)
    @given(trees(), st.floats(0, 1e12), st.one_of(st.none(), st.integers(0, 10**18)))
    def test_any_plan_comes_back(self, nodes: tuple[PlanNode, ...], cost: float, peak: int | None) -> None:
        plan = dataclasses.replace(
            CheckpointPlan.from_text(nodes_text(nodes)), predicted_cost=cost, predicted_peak_bytes=peak
        )
        again = CheckpointPlan.from_json(plan.to_json())
        assert again == plan
        assert again.to_json() == plan.to_json()

    def test_an_integer_cost_stays_an_integer(self) -> None:
        flops = 3 * 10**17 + 1
        assert CheckpointPlan.from_json(_plan(predicted_cost=flops).to_json()).predicted_cost == flops

    def test_the_file_says_that_checkpointing_is_not_reentrant(self) -> None:
        assert json.loads(_plan().to_json())["tree"]["use_reentrant"] is False

    @pytest.mark.parametrize(
        ("tamper", "said"),
        [
            (lambda d: d["decisions"][1].update(checkpointed=False), "block '1': checkpointed=False but the tree"),
            (lambda d: d["tree"].update(text="K0 K1 R(2 R(3 4))"), "block '1': checkpointed=True but the tree keeps"),
            (
                lambda d: (
                    d["tree"].update(text="K0 K1 R(2 R(3 4))"),
                    d["decisions"][1].update(checkpointed=False, executor=None),
                ),
                "section 'tree' is not what was written",
            ),
            (lambda d: d["decisions"][1].update(executor=None), "section 'decisions' is not what was written"),
            (
                lambda d: d["decisions"][1].update(executor="replay"),
                "executor='replay' but what runs its node is check",
            ),
            (lambda d: d["decisions"][0].update(executor="checkpoint"), "its node is nothing: the block is kept"),
            (
                lambda d: d["decisions"][0].update(eligible_for_checkpoint=True, exclusion_reason=None),
                "section 'decisions' is not what was written",
            ),
            (lambda d: d["decisions"][0].update(eligible_for_checkpoint=True), "eligible and excluded at once"),
            (lambda d: d["decisions"][1].update(checkpointed="yes"), "checkpointed is 'yes', a str; expected bool"),
            (lambda d: d["decisions"][1].update(checkpointed=1), "checkpointed is 1, a int; expected bool"),
            (lambda d: d["decisions"][1].update(preserve_rng_state=False), "section 'decisions'"),
            (lambda d: d["prediction"].update(predicted_peak_bytes=89), "section 'prediction'"),
            (lambda d: d["prediction"].update(predicted_peak_bytes=-1), "predicted_peak_bytes is -1"),
            (lambda d: d["prediction"].update(predicted_peak_bytes=90.5), "predicted_peak_bytes is 90.5, a float"),
            (lambda d: d["prediction"].update(predicted_cost=2.4), "section 'prediction'"),
            (lambda d: d["tree"].update(use_reentrant=True), "use_reentrant is True; only false is run"),
            (lambda d: d["tree"].update(use_reentrant=0), "use_reentrant is 0"),
            (lambda d: d["tree"].pop("use_reentrant"), "missing use_reentrant"),
            (lambda d: d["model"].update(fingerprint="e" * 64), "section 'model'"),
            (lambda d: d["target"].update(planner="greedy"), "section 'target'"),
            (lambda d: d["target"].update(target_value=101), "section 'target'"),
            (lambda d: d["decisions"].pop(), "out of range"),
            (lambda d: d.update(extra=1), "unknown extra"),
            (lambda d: d["decisions"][0].update(extra=1), r"decisions\[0\]: keys unknown extra"),
            (lambda d: d["target"].pop("planner"), "missing planner"),
            (lambda d: d.update(digest="0" * 64), "digest is '000"),
            (lambda d: d["tree"].update(text="K0 R(1)  R(2 R(3 4))"), "canonical form"),
            (lambda d: d["tree"].update(text="K0 Q1 R(2 R(3 4))"), "found 'Q1'"),
            (lambda d: d["tree"].update(text="K0 C1[0.5] R(2 R(3 4))"), "checkpointed=True but the tree keeps it"),
            (lambda d: d.update(decisions={}), "decisions is {}; expected a list"),
        ],
    )
    def test_each_change_to_the_file_is_refused_with_what_differs(
        self, tamper: Callable[[dict[str, Any]], Any], said: str
    ) -> None:
        data = json.loads(_plan().to_json())
        tamper(data)
        with pytest.raises(PlanIncompatibleError, match=said):
            CheckpointPlan.from_json(json.dumps(data))

    def test_what_the_version_before_wrote_is_read_as_strictly(self) -> None:
        plan = CheckpointPlan.from_text("K0 R(1) S2[]")
        data = json.loads(plan.to_json()) | {"schema": "ckptplan.plan/1"}
        for decision in data["decisions"]:
            del decision["executor"]
        data["decisions"][2]["checkpointed"] = False
        sections = {n: data[n] for n in data.keys() - {"schema", "environment", "digest", "section_digests"}}
        data["section_digests"] = {name: digest_of(part)[:16] for name, part in sections.items()}
        data["digest"] = digest_of(sections)
        assert CheckpointPlan.from_json(json.dumps(data)) == plan
        data["decisions"][1]["reason"] = "another"
        with pytest.raises(PlanIncompatibleError, match="section 'decisions' is not what was written"):
            CheckpointPlan.from_json(json.dumps(data))

    def test_another_version_is_refused_by_name(self) -> None:
        data = json.loads(_plan().to_json()) | {"schema": "ckptplan.plan/3"}
        with pytest.raises(
            UnsupportedPlanVersionError, match=r"'ckptplan.plan/3'; this version reads 'ckptplan.plan/2'"
        ):
            CheckpointPlan.from_json(json.dumps(data))

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("[]", "holds a list"),
            ("{", "is not JSON"),
            ('{"schema": NaN}', "holds NaN"),
            ('{"schema": "a", "schema": "b"}', "key 'schema' stands twice"),
        ],
    )
    def test_what_is_no_object_is_refused(self, text: str, said: str) -> None:
        with pytest.raises(PlanIncompatibleError, match=said):
            CheckpointPlan.from_json(text)

    def test_the_file_is_named_in_the_error(self, tmp_path: Path) -> None:
        (tmp_path / "plan.json").write_text("{}", encoding="utf-8")
        with pytest.raises(UnsupportedPlanVersionError, match=r"plan\.json"):
            CheckpointPlan.load(tmp_path / "plan.json")


class TestDigest:
    def test_every_field_but_the_environment_decides_the_digest(self) -> None:
        plan = _plan()
        changes: dict[str, Any] = {
            "planner": "greedy",
            "target_kind": "max_slowdown",
            "target_value": 100.5,
            "budget_bytes": 101,
            "memory_model": "additive",
            "cost_kind": "flops",
            "predicted_peak_bytes": 91,
            "predicted_peak_at": "4 backward",
            "no_checkpoint_peak_bytes": 151,
            "predicted_cost": 2.75,
            "optimality_gap": None,
            "feasible": False,
            "fingerprint": "e" * 64,
        }
        fields = {f.name for f in dataclasses.fields(CheckpointPlan)}
        assert fields == {*changes, "nodes", "decisions", "environment"}
        digests = {name: dataclasses.replace(plan, **{name: value}).digest for name, value in changes.items()}
        assert len({plan.digest, *digests.values()}) == len(changes) + 1
        assert dataclasses.replace(plan, environment={"torch": "2.14.0"}).digest == plan.digest

    def test_every_flag_of_a_decision_decides_it_too(self) -> None:
        plan = _plan()
        changes: dict[str, Any] = {
            "block_id": "other",
            "exclusion_reason": "another",
            "retained_bytes": 8,
            "recompute_time_ms": 1.0,
            "recompute_flops": 5,
            "preserve_rng_state": False,
            "mutated_buffers": ("running_mean",),
            "reason": "kept",
        }
        seen = {plan.digest}
        for name, value in changes.items():
            first = dataclasses.replace(plan.decisions[0], **{name: value})
            seen.add(dataclasses.replace(plan, decisions=(first, *plan.decisions[1:])).digest)
        assert len(seen) == len(changes) + 1

    def test_segments_of_equal_blocks_but_other_shape_differ(self) -> None:
        assert CheckpointPlan.from_text("R(0 1)").digest != CheckpointPlan.from_text("R(0) R(1)").digest


class TestDiff:
    def test_equal_plans_have_no_difference(self) -> None:
        assert _plan().diff(_plan()) == []

    def test_each_difference_is_one_line(self) -> None:
        plan, other = _plan(), _plan("K0 K1 R(2 R(3 4))", predicted_peak_bytes=95)
        assert plan.diff(other) == [
            "text: K0 R(1) R(2 R(3 4)) -> K0 K1 R(2 R(3 4))",
            "predicted_peak_bytes: 90 -> 95",
            "block '1' checkpointed: True -> False",
            "block '1' executor: 'checkpoint' -> None",
        ]

    def test_plans_of_other_lengths_say_so(self) -> None:
        lines = CheckpointPlan.from_text("K0").diff(CheckpointPlan.from_text("K0 K1"))
        assert lines == ["text: K0 -> K0 K1", "number of blocks: 1 -> 2"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"predicted_cost": float("nan")}, "predicted_cost is nan"),
        ({"optimality_gap": -0.1}, "optimality_gap is -0.1"),
        ({"budget_bytes": -5}, "budget_bytes is -5"),
        ({"memory_model": "sum"}, "memory_model is 'sum'; expected one of peak, additive"),
        ({"cost_kind": "energy"}, "cost_kind is 'energy'; expected one of time, flops"),
    ],
)
def test_a_plan_holds_no_impossible_value(change: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanIncompatibleError, match=said):
        _plan(**change)

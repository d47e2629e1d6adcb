"""Profiles: figures as they come in, what a planner may rely on, and the file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptplan.costs import StageCost
from ckptplan.errors import TimingOnlyProfileError, UnsupportedPlanVersionError
from ckptplan.profiles import (
    BlockProfile,
    ChainProfile,
    RegionProfile,
    as_chain,
    name_some,
    recompute_costs,
    require_memory,
)


def _block(name: str, **changes: Any) -> BlockProfile:
    known: dict[str, Any] = {
        "output_bytes": (4,),
        "output_gradient_bytes": 4,
        "keep": StageCost(10, 14, 18),
        "recompute": StageCost(0, 8, 19),
        "activation_bytes_estimate": 10,
        "recompute_time_ms": 1.5,
    }
    return BlockProfile(name, **(known | changes))


def _chain() -> ChainProfile:
    return ChainProfile(
        (_block("a", kind="k", warnings=("noisy",)), _block("b", output_is_input=(0,), recompute_flops=7)),
        pre=RegionProfile("pre", StageCost(1, 2, 3, (False,), (True,)), output_bytes=(5,)),
        post=RegionProfile("post", StageCost(1, 2, 3)),
        input_bytes=(64,),
        loss_region="measured",
        meter="cpu",
        fingerprint="abc",
        environment={"torch": "2.13.0", "threads": 1},
    )


class TestFigures:
    def test_single_numbers_and_flags_stand_for_tuples_of_one(self) -> None:
        cost = StageCost(1, 2, 3, keeps_input=True, keeps_output=False)  # type: ignore[arg-type]
        block = BlockProfile("a", output_bytes=5, output_is_input=None)  # type: ignore[arg-type]
        assert (cost.keeps_input, cost.keeps_output) == ((True,), (False,))
        assert (block.output_bytes, block.output_is_input) == ((5,), (None,))

    def test_numbers_of_numpy_become_plain_ones(self) -> None:
        block = BlockProfile(
            "a",
            output_bytes=np.array([3, 4]),  # type: ignore[arg-type]
            activation_bytes_estimate=np.int64(9),  # type: ignore[arg-type]
            recompute_time_ms=np.float32(0.5),  # type: ignore[arg-type]
            eligible_for_checkpoint=np.bool_(False),  # type: ignore[arg-type]
        )
        assert block == BlockProfile(
            "a",
            output_bytes=(3, 4),
            activation_bytes_estimate=9,
            recompute_time_ms=0.5,
            eligible_for_checkpoint=False,
        )
        assert type(block.activation_bytes_estimate) is int
        assert type(block.output_bytes[0]) is int
        assert type(block.recompute_time_ms) is float
        assert type(block.eligible_for_checkpoint) is bool

    def test_outputs_are_memory_of_their_own_unless_said(self) -> None:
        assert BlockProfile("a", output_bytes=(3, 4)).output_is_input == (None, None)

    @pytest.mark.parametrize(
        ("make", "error", "said"),
        [
            (lambda: BlockProfile("a", recompute_time_ms=float("nan")), ValueError, "block 'a': recompute_time_ms=nan"),
            (lambda: BlockProfile("a", forward_time_ms=float("inf")), ValueError, "forward_time_ms=inf"),
            (lambda: BlockProfile("a", activation_bytes_estimate=-1), ValueError, "activation_bytes_estimate=-1"),
            (lambda: BlockProfile("a", output_bytes=(3, -4)), ValueError, "output_bytes=-4"),
            (lambda: BlockProfile("a", recompute_flops=-7), ValueError, "recompute_flops=-7"),
            (lambda: StageCost(-1, 0, 0), ValueError, "saved_bytes=-1"),
            (lambda: StageCost(1.5, 0, 0), TypeError, "saved_bytes=1.5 is a float; expected a whole"),
            (lambda: StageCost(True, 0, 0), TypeError, "saved_bytes=True is a bool"),
            (lambda: StageCost(0, 0, 0, keeps_input=(1,)), TypeError, "keeps_input=1 is a int"),
            (lambda: BlockProfile("a", recompute_time_ms="1"), TypeError, "recompute_time_ms='1' is a str"),
            (lambda: BlockProfile("a", output_bytes=(1, 2), output_is_input=(None,)), ValueError, "1 entries for 2"),
            (lambda: RegionProfile("post", StageCost(0, 0, 0), forward_time_ms=-1.0), ValueError, "region 'post'"),
            (lambda: ChainProfile(()), ValueError, "no blocks"),
            (lambda: ChainProfile((BlockProfile("a"), BlockProfile("a"))), ValueError, "'a' stands twice"),
        ],
    )
    def test_a_bad_figure_is_refused_naming_block_and_field(
        self, make: Callable[[], Any], error: type[Exception], said: str
    ) -> None:
        with pytest.raises(error, match=said):
            make()


class TestSequence:
    def test_a_chain_is_a_sequence_of_its_blocks(self) -> None:
        chain = _chain()
        assert len(chain) == 2
        assert [block.block_id for block in chain] == ["a", "b"] == list(chain.block_ids)
        assert chain[1].block_id == "b"
        assert chain[:1] == (chain.blocks[0],)

    def test_a_plain_sequence_is_taken_for_a_chain(self) -> None:
        chain = as_chain([_block("a"), _block("b")])
        assert chain.block_ids == ("a", "b")
        assert as_chain(chain) is chain

    def test_what_is_no_block_profile_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"profiles\[1\] is a str; expected a BlockProfile"):
            as_chain([_block("a"), "b"])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="no blocks"):
            as_chain([])


class TestRequireMemory:
    def test_full_profiles_pass_under_both_models(self) -> None:
        require_memory(_chain(), "peak")
        require_memory(_chain(), "additive")

    @pytest.mark.parametrize("model", ["peak", "additive"])
    def test_a_timing_only_profile_is_refused_even_with_bytes_filled_in(self, model: Any) -> None:
        with pytest.raises(TimingOnlyProfileError, match="'b'") as caught:
            require_memory(ChainProfile((_block("a"), _block("b", timing_only=True))), model)
        assert caught.value.block_ids == ("b",)

    def test_missing_peak_fields_are_named_with_their_blocks(self) -> None:
        blocks = (_block("a", keep=None), _block("b", output_bytes=()), _block("c", keep=None, recompute=None))
        with pytest.raises(ValueError, match="peak") as caught:
            require_memory(ChainProfile(blocks), "peak")
        message = str(caught.value)
        assert "keep of 'a', 'c'; output_bytes of 'b'; recompute of 'c'" in message
        assert "memory_model='additive'" in message

    def test_a_block_that_is_not_recomputed_needs_no_figures_for_it(self) -> None:
        require_memory(ChainProfile((_block("a", recompute=None, eligible_for_checkpoint=False),)), "peak")

    def test_the_last_gradient_is_needed_only_where_no_loss_was_measured(self) -> None:
        blocks = (_block("a"), _block("b", output_gradient_bytes=None))
        with pytest.raises(ValueError, match="output_gradient_bytes of 'b'"):
            require_memory(ChainProfile(blocks), "peak")
        require_memory(ChainProfile(blocks, post=RegionProfile("post", StageCost(0, 0, 0))), "peak")

    def test_the_additive_model_needs_the_estimates_only(self) -> None:
        bare = ChainProfile((BlockProfile("a", activation_bytes_estimate=0),))
        require_memory(bare, "additive")
        with pytest.raises(ValueError, match="activation_bytes_estimate of 'b'"):
            require_memory(ChainProfile((*bare.blocks, BlockProfile("b"))), "additive")

    @pytest.mark.parametrize(
        ("blocks", "said"),
        [
            ((_block("a"), _block("b", keep=StageCost(0, 0, 0, (True, True)))), "'b': keeps_input has 2 flags for 1"),
            ((_block("a", recompute=StageCost(0, 0, 0, (True,), (True, False, False))),), "'a': keeps_output has 3"),
            ((_block("a"), _block("b", output_is_input=(1,))), "'b': output_is_input=.* beyond its 1 input"),
        ],
    )
    def test_flags_that_match_no_storage_are_refused(self, blocks: tuple[BlockProfile, ...], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            require_memory(ChainProfile(blocks), "peak")

    def test_an_unknown_model_is_refused(self) -> None:
        with pytest.raises(ValueError, match="memory_model='sum'"):
            require_memory(_chain(), "sum")  # type: ignore[arg-type]


class TestRecomputeCosts:
    def test_the_median_comes_before_the_mean(self) -> None:
        blocks = (_block("a", recompute_time_upper_bound_ms_mean=9.0), _block("b", recompute_time_ms=None))
        blocks = (blocks[0], dataclasses.replace(blocks[1], recompute_time_upper_bound_ms_mean=2.0))
        assert recompute_costs(ChainProfile(blocks), "time") == (1.5, 2.0)

    def test_without_any_time_every_block_costs_one(self) -> None:
        blocks = (_block("a", recompute_time_ms=None), _block("b", recompute_time_ms=None))
        assert recompute_costs(ChainProfile(blocks), "time") == (1.0, 1.0)

    def test_some_times_only_is_an_error_naming_the_others(self) -> None:
        blocks = (_block("a"), _block("b", recompute_time_ms=None))
        with pytest.raises(ValueError, match="recompute_time_ms, which is missing for 'b'"):
            recompute_costs(ChainProfile(blocks), "time")

    def test_flops_are_never_made_up(self) -> None:
        with pytest.raises(ValueError, match="recompute_flops, which is missing for 'a'"):
            recompute_costs(ChainProfile((_block("a"),)), "flops")

    def test_a_block_that_cannot_be_recomputed_has_no_cost(self) -> None:
        blocks = (_block("a"), _block("b", eligible_for_checkpoint=False, recompute_time_ms=None))
        assert recompute_costs(ChainProfile(blocks), "time") == (1.5, None)

    def test_an_unknown_cost_is_refused(self) -> None:
        with pytest.raises(ValueError, match="cost='energy'"):
            recompute_costs(_chain(), "energy")  # type: ignore[arg-type]


class TestFile:
    def test_a_profile_comes_back_equal(self, tmp_path: Path) -> None:
        chain = _chain()
        chain.save(tmp_path / "profile.json")
        again = ChainProfile.load(tmp_path / "profile.json")
        assert again == chain
        assert again.to_json() == chain.to_json()

    @pytest.mark.parametrize(
        ("tamper", "said"),
        [
            (lambda d: d.update(extra=1), "keys unknown extra"),
            (lambda d: d.pop("meter"), "keys missing meter"),
            (lambda d: d["blocks"][1].pop("keep"), r"blocks\[1\]: keys missing keep"),
            (lambda d: d["blocks"][0]["keep"].update(saved_bytes=1.5), r"blocks\[0\]: keep: saved_bytes is 1.5"),
            (lambda d: d["blocks"][0]["keep"].update(saved_bytes=-1), "saved_bytes=-1"),
            (lambda d: d["blocks"][0]["keep"].update(saved_bytes=True), "saved_bytes is True, a bool"),
            (lambda d: d["blocks"][0].update(eligible_for_checkpoint="yes"), "expected bool"),
            (lambda d: d["blocks"][0].update(output_bytes=5), "output_bytes is 5; expected a list"),
            (lambda d: d.update(loss_region="guessed"), "loss_region is 'guessed'; expected one of"),
            (lambda d: d.update(blocks=[]), "no blocks"),
            (lambda d: d.update(environment=[]), "environment is .*, a list; expected dict"),
        ],
    )
    def test_a_file_that_is_off_is_refused_with_the_place(
        self, tmp_path: Path, tamper: Callable[[dict[str, Any]], Any], said: str
    ) -> None:
        data = json.loads(_chain().to_json())
        tamper(data)
        path = tmp_path / "profile.json"
        path.write_text(json.dumps(data), encoding="utf-8")
        with pytest.raises(ValueError, match=said) as caught:
            ChainProfile.load(path)
        assert "profile.json" in str(caught.value)

    def test_another_version_is_refused(self) -> None:
        data = json.loads(_chain().to_json()) | {"schema": "ckptplan.profile/9"}
        with pytest.raises(UnsupportedPlanVersionError, match=r"ckptplan\.profile/9"):
            ChainProfile.from_json(json.dumps(data))


def test_long_lists_of_names_are_cut() -> None:
    assert name_some(["a", "b"]) == "'a', 'b'"
    assert name_some([str(i) for i in range(10)], limit=2) == "'0', '1' and 8 more"

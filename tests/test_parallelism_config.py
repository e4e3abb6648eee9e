# SPDX-License-Identifier: Apache-2.0
"""ParallelismConfig: sizes, names and refusals; the recipes of fp8 and the words of Megatron-LM beside it."""

import pytest
import torch
from rank_pool import on_ranks

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.config.megatron import MegatronLMPlugin
from accelerate.config.parallel import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig
from accelerate.config.precision import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accelerate.parallelism_config import ParallelismConfig
from accelerate.runtime.mesh import data_shard


def test_sizes_and_names():
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2, cp_size=2)
    assert (
        config.total_size == 16
        and config.data_parallel_size == 4
        and config.non_data_parallel_size == 4
    )
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "tp", "cp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert config.cp_handler.cp_comm_strategy == "allgather" and config.tp_handler is not None
    assert ParallelismConfig().fsdp_dim_names == ["dp_shard_cp"]
    config.tp_size = 1  # libraries set sizes afterwards
    assert config.total_size == 8 and not config.tp_enabled
    assert config.to_json()["dp_shard_size"] == 2


class ExpertParallel(ParallelismConfig):
    """As packages add a dimension: it is outermost, and counts in the total size."""

    def __post_init__(self):
        super().__post_init__()
        self._sizes["ep"] = 1
        self._set_size("ep", 2)

    @property
    def total_size(self):
        return super().total_size * self.ep_size

    @property
    def active_mesh_dims(self):
        return ["ep", *super().active_mesh_dims]

    def _get_mesh(self):
        dims = self.active_mesh_dims
        return tuple(dims), tuple(self._sizes[name] for name in dims)


def test_a_dimension_of_another_package():
    config = ExpertParallel(dp_shard_size=2)
    assert config.mesh_shape == {"ep": 2, "dp_shard": 2}
    config.validate(4)
    assert [data_shard(config, rank) for rank in range(4)] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    config = ParallelismConfig(dp_shard_size=2)
    assert config._get_mesh() == (("dp_shard",), (2,))
    config._set_size("ep", 2)
    assert config.mesh_shape == {"dp_shard": 2, "ep": 2}
    config.validate(4)
    assert [data_shard(config, rank) for rank in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]


@on_ranks(2)
def test_a_mesh_of_another_package_alone():
    accelerator = Accelerator(cpu=True, parallelism_config=ExpertParallel())
    assert accelerator.torch_device_mesh["ep"].size() == 2


@on_ranks(4)
def test_the_mesh_has_the_dimension_of_another_package():
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ExpertParallel(dp_shard_size=2),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
    )
    mesh = accelerator.torch_device_mesh
    assert {name: mesh[name].size() for name in ("ep", "dp_shard")} == {"ep": 2, "dp_shard": 2}
    model = accelerator.prepare(torch.nn.Linear(2, 1, dtype=torch.float64))
    inputs = torch.eye(2, dtype=torch.float64)[mesh["dp_shard"].get_local_rank()]
    accelerator.backward(model(inputs).sum())
    expected = torch.full((1, 2), 0.5, dtype=torch.float64)
    torch.testing.assert_close(model.weight.grad.full_tensor(), expected)


def test_variables(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    config = ParallelismConfig(tp_size=2)
    assert config.total_size == 4 and config.cp_handler.cp_comm_strategy == "alltoall"
    with pytest.raises(
        ValueError, match=r"cp_size=2 \(PARALLELISM_CONFIG_CP_SIZE\) x tp_size=2 = 4 processes"
    ):
        config.validate(2)


def test_validation_shows_the_product():
    with pytest.raises(
        ValueError, match=r"dp_shard_size=3 x tp_size=2 = 6 processes, but 4 were started"
    ):
        ParallelismConfig(dp_shard_size=3, tp_size=2).validate(4)
    ParallelismConfig(dp_shard_size=2, tp_size=2).validate(4)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"tp_size": 0}, "tp_size must be an integer of at least 1"),
        ({"tp_size": "2"}, "tp_size='2'"),
        ({"cp_size": 2, "sp_size": 2}, "mutually exclusive"),
        ({"cp_size": 2, "cp_backend": "deepspeed"}, "cp_backend"),
        ({"sp_size": 2, "sp_backend": "torch"}, "sp_backend"),
        (
            {"cp_size": 2, "cp_handler": DeepSpeedSequenceParallelConfig()},
            "TorchContextParallelConfig",
        ),
    ],
)
def test_refusals(options, named):
    with pytest.raises(ValueError, match=named):
        ParallelismConfig(**options)


def test_handlers_refuse_unknown_words():
    with pytest.raises(ValueError, match="cp_comm_strategy"):
        TorchContextParallelConfig("ring")
    with pytest.raises(ValueError, match="sp_seq_length"):
        DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False)
    with pytest.raises(ValueError, match="eager"):
        DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager")


def test_fp8_recipes(monkeypatch):
    assert MSAMPRecipeKwargs().opt_level == "O2"
    with pytest.raises(ValueError, match="O3"):
        MSAMPRecipeKwargs("O3")
    for kind, package in ((AORecipeKwargs, "torchao"), (TERecipeKwargs, "transformer_engine")):
        monkeypatch.setattr("accelerate.config.precision.is_available", lambda name: False)
        with pytest.raises(ImportError, match=package):
            kind()
    monkeypatch.setattr("accelerate.config.precision.is_available", lambda name: True)
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "2")
    recipe = TERecipeKwargs(fp8_format="e4m3")
    assert (recipe.margin, recipe.fp8_format, recipe.amax_history_len) == (2, "E4M3", 1024)
    assert recipe.to_kwargs() == {"fp8_format": "E4M3"}
    with pytest.raises(ValueError, match="fp8_format"):
        TERecipeKwargs(fp8_format="E3M4")


def test_megatron_words_map_to_our_layout(monkeypatch):
    monkeypatch.setenv("MEGATRON_LM_PP_DEGREE", "2")
    plugin = MegatronLMPlugin(tp_degree=2, use_distributed_optimizer=True)
    assert plugin.parallelism(8) == {"tp_size": 2, "pp_size": 2, "cp_size": 1, "dp_shard_size": 2}
    with pytest.raises(ValueError, match="does not divide the 6 processes"):
        plugin.parallelism(6)
    with pytest.raises(ValueError, match="expert_model_parallel_size"):
        MegatronLMPlugin(expert_model_parallel_size=2).parallelism(8)


def test_arguments_of_megatron_are_refused():
    plugin = MegatronLMPlugin(num_micro_batches=2)
    with pytest.raises(ValueError, match=r"the optimizer .*prepare"):
        plugin.set_optimizer_type(None)
    with pytest.raises(ValueError, match="batch size of the loader"):
        plugin.set_training_args(4, 2)

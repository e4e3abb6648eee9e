# SPDX-License-Identifier: Apache-2.0
"""DeepSpeedPlugin and HfDeepSpeedConfig: fields and variables, "auto" values, conflicts with both values."""

import base64
import json
from types import SimpleNamespace

import pytest

from accelerate.config.deepspeed import (
    DeepSpeedPlugin,
    HfDeepSpeedConfig,
    get_active_deepspeed_plugin,
)


def test_config_from_fields():
    plugin = DeepSpeedPlugin(
        zero_stage=3,
        offload_param_device="nvme",
        offload_param_nvme_path="/fast",
        gradient_clipping=1.0,
        gradient_accumulation_steps=4,
        zero3_save_16bit_model=True,
    )
    assert plugin.deepspeed_config == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "nvme", "nvme_path": "/fast"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
    }
    assert plugin.zero3_init_flag is True and plugin.hf_ds_config.is_zero3()


def test_variables_and_file(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "1.5")
    plugin = DeepSpeedPlugin()
    assert (
        plugin.zero_stage == 1
        and plugin.gradient_clipping == 1.5
        and plugin.zero3_init_flag is False
    )
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps({"gradient_accumulation_steps": 3, "zero_optimization": {"stage": 2}})
    )
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == 2 and plugin.gradient_accumulation_steps == 3
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file,zero_stage")
    with pytest.raises(ValueError, match="zero_stage is"):
        DeepSpeedPlugin()


def test_auto_is_filled_and_conflicts_show_both_values():
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "optimizer": {"params": {"lr": "auto"}},
        "gradient_accumulation_steps": 8,
    }
    plugin = DeepSpeedPlugin(hf_ds_config=given)
    known = {"zero_optimization.reduce_bucket_size": 55, "optimizer.params.lr": 0.1}
    with pytest.raises(ValueError) as caught:
        plugin.deepspeed_config_process(
            train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=9, **known
        )
    assert "train_micro_batch_size_per_gpu=2 vs arg train_micro_batch_size_per_gpu=4" in str(
        caught.value
    )
    assert "gradient_accumulation_steps=8 vs arg gradient_accumulation_steps=9" in str(caught.value)
    assert plugin.get_value("optimizer.params.lr") == 0.1 and not plugin.is_auto(
        "optimizer.params.lr"
    )
    assert given["optimizer"]["params"]["lr"] == "auto", "the user's dict is not ours to change"
    plugin = DeepSpeedPlugin()
    with pytest.raises(ValueError, match="`gradient_clipping` not found in kwargs"):
        plugin.fill_match("gradient_clipping", must_match=False)


@pytest.mark.parametrize(
    "precision, bf16, fp16", [("bf16", True, False), ("fp16", False, True), ("no", False, False)]
)
def test_mixed_precision(precision, bf16, fp16):
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision(precision)
    assert plugin.deepspeed_config["bf16"]["enabled"] is bf16
    assert plugin.deepspeed_config["fp16"]["enabled"] is fp16


def test_refusals():
    with pytest.raises(ValueError, match="ZeRO optimization config"):
        DeepSpeedPlugin(hf_ds_config={"bf16": {"enabled": True}})
    with pytest.raises(ValueError, match=r"Received: /nope\.json"):
        DeepSpeedPlugin(hf_ds_config="/nope.json")
    fixed = DeepSpeedPlugin(
        hf_ds_config={"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    )
    with pytest.raises(ValueError, match=r"mixed_precision='bf16'.*fp16\.enabled=True"):
        fixed.set_mixed_precision("bf16")
    with pytest.warns(UserWarning, match="Stage 3"):
        assert DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True).zero3_init_flag is False


def test_selection():
    first, second = DeepSpeedPlugin(), DeepSpeedPlugin()
    with pytest.raises(ValueError, match="select_deepspeed_plugin"):
        first.select()
    second.select(_from_accelerator_state=True)
    assert second.selected and not first.selected
    assert (
        get_active_deepspeed_plugin(SimpleNamespace(deepspeed_plugins={"a": first, "b": second}))
        is second
    )
    with pytest.raises(ValueError, match="none were enabled"):
        get_active_deepspeed_plugin(SimpleNamespace(deepspeed_plugins=None))


def test_tree_of_dotted_keys():
    config = HfDeepSpeedConfig(
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "a": {"b": False, "d": {"e": 1}},
        }
    )
    assert config.is_zero2() and not config.is_zero3() and config.is_offload()
    assert config.is_false("a.b") and not config.is_true("a.b") and not config.is_false("a.missing")
    assert config.find_config_node("a.d.e") == ({"e": 1}, "e") and config.find_config_node(
        "z.y"
    ) == (None, "y")
    config.del_config_sub_tree("a.d")
    assert config.config["a"] == {"b": False}
    with pytest.raises(ValueError, match=r"q\.d"):
        config.del_config_sub_tree("q.d", must_exist=True)
    encoded = base64.urlsafe_b64encode(b'{"a": 1}').decode()
    assert HfDeepSpeedConfig(encoded).get_value("a") == 1

# SPDX-License-Identifier: Apache-2.0
"""`accelerate.commands.config.sagemaker`: the questions on a job of Amazon SageMaker, under the API's name."""

from __future__ import annotations

from ...core.constants import SAGEMAKER_PARALLEL_EC2_INSTANCES as SAGEMAKER_PARALLEL_EC2_INSTANCES
from ...core.enums import ComputeEnvironment
from .config_args import SageMakerConfig
from .config_utils import (
    _ask_field,
    _ask_options,
    _convert_mixed_precision,
    _convert_sagemaker_distributed_mode,
)


def get_sagemaker_input() -> SageMakerConfig:
    """Ask for the instances, the role and the precision of a job; return the answers without writing them."""
    kind = _ask_options(
        "Distribution",
        ["none", "data parallelism", "model parallelism"],
        _convert_sagemaker_distributed_mode,
    )
    precision = _ask_options(
        "Mixed precision", ["no", "fp16", "bf16", "fp8"], _convert_mixed_precision
    )
    return SageMakerConfig(
        compute_environment=ComputeEnvironment.AMAZON_SAGEMAKER,
        distributed_type=kind,
        mixed_precision=precision.value,
        use_cpu=False,
        debug=False,
        ec2_instance_type=_ask_field("Instance type [ml.p3.2xlarge]: ", default="ml.p3.2xlarge"),
        iam_role_name=_ask_field("IAM role: "),
        profile=_ask_field("AWS profile [default]: ", default="default"),
        region=_ask_field("Region [us-east-1]: ", default="us-east-1"),
        num_machines=_ask_field("Number of machines [1]: ", int, 1, "Enter a whole number."),
    )

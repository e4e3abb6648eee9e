# SPDX-License-Identifier: Apache-2.0
"""SageMaker's data parallel backend with a stand-in for its library: asked for by variables; told where absent."""

import os

import pytest
from ranks import run_ranks

from accelerate.core.errors import ConfigurationError
from accelerate.runtime import backends

LIBRARY = """
import torch.distributed as dist


def make(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)


dist.Backend.register_backend("smddp", make, devices=["cpu"])
"""

WORKER = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
assert accelerator.state.backend == "smddp", accelerator.state.backend
assert accelerator.reduce(torch.tensor([float(accelerator.process_index)])).item() == 1.0
"""


def test_a_job_with_data_parallelism_uses_its_backend(tmp_path):
    folder = tmp_path / "smdistributed" / "dataparallel" / "torch"
    folder.mkdir(parents=True)
    (folder / "torch_smddp.py").write_text(LIBRARY)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    asked = {
        "ACCELERATE_USE_SAGEMAKER": "true",
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL",
    }
    run_ranks(WORKER, 2, env={"PYTHONPATH": path, **asked})


def test_an_image_without_the_library_is_told():
    with pytest.raises(ConfigurationError, match="library is missing"):
        backends.register(backends.SMDDP)

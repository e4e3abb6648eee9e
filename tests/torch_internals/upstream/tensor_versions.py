# SPDX-License-Identifier: Apache-2.0
"""Whether a tensor was written in place cannot be asked by a public name."""

import torch

tensor = torch.ones(2)
before = tensor._version
tensor.add_(1)
assert tensor._version > before
if not hasattr(torch.Tensor, "version"):
    raise SystemExit("only Tensor._version counts the writes in place")

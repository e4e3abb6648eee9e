# SPDX-License-Identifier: Apache-2.0
"""Whether a tensor is a view of a parameter cannot be asked by a public name."""

import torch

weight = torch.nn.Parameter(torch.ones(2, 3))
view = weight.t()
assert view._base is weight
if not hasattr(torch.Tensor, "base"):
    raise SystemExit("only Tensor._base says of which tensor a view is one")

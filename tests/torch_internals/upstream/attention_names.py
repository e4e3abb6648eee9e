# SPDX-License-Identifier: Apache-2.0
"""A TorchFunctionMode does not see the attention inside of nn.TransformerEncoderLayer, in a torch function."""

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

seen = []


class Record(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        seen.append(function)
        return function(*args, **(kwargs or {}))


layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
with Record():
    layer(torch.randn(1, 4, 8))
if F.scaled_dot_product_attention not in seen:
    names = [function.__name__ for function in seen if "attention" in function.__name__]
    raise SystemExit(f"only {names} is seen, and not its call of scaled_dot_product_attention")

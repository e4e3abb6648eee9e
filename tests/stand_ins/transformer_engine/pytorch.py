# SPDX-License-Identifier: Apache-2.0
"""The engine's layers for torch, computing in full precision, and its autocast, which notes how it is entered."""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

# (enabled, recipe) of each autocast that was entered, and the (enabled, class of the layer) of each forward.
entered, computed = [], []
_enabled = [False]


@contextlib.contextmanager
def autocast(enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False):
    entered.append((enabled, recipe))
    _enabled.append(enabled)
    try:
        yield
    finally:
        _enabled.pop()


class _Module(nn.Module):
    """As the engine's own: on CUDA unless told otherwise, with a state of its own beside the parameters."""

    def _note(self):
        computed.append((_enabled[-1], type(self).__name__))

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        assert state is None or isinstance(state, torch.Tensor)


class Linear(_Module):
    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda"):
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        like = {"dtype": params_dtype or torch.get_default_dtype(), "device": device}
        self.weight = nn.Parameter(torch.randn(out_features, in_features, **like))
        # Without a bias an empty tensor that is no parameter stands in its place.
        self.bias = (
            nn.Parameter(torch.randn(out_features, **like)) if bias else torch.empty(0, **like)
        )

    def forward(self, inp):
        self._note()
        if _enabled[-1]:
            assert inp.shape[-1] % 16 == 0 and inp.numel() // inp.shape[-1] % 8 == 0, (
                "no kernel for these shapes"
            )
        return F.linear(inp, self.weight, self.bias if self.use_bias else None)


class LayerNorm(_Module):
    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        params_dtype=None,
        zero_centered_gamma=False,
        device="cuda",
    ):
        super().__init__()
        shape = (
            (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        )
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        like = {"dtype": params_dtype or torch.get_default_dtype(), "device": device}
        self.weight, self.bias = (
            nn.Parameter(torch.ones(shape, **like)),
            nn.Parameter(torch.zeros(shape, **like)),
        )

    def forward(self, inp):
        self._note()
        return F.layer_norm(inp, self.weight.shape, self.weight, self.bias, self.eps)


class LayerNormLinear(_Module):
    pass


class LayerNormMLP(_Module):
    pass


class TransformerLayer(_Module):
    pass

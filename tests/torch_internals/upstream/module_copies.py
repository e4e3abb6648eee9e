# SPDX-License-Identifier: Apache-2.0
"""A module of another class cannot be made with the parameters and submodules of one, without its constructor."""

import copy

from torch import nn


class Wide(nn.Linear):
    """FSDP2 gives a module another class, whose initialization has to see the class of the user."""


plain = nn.Linear(2, 2)
wide = Wide.__new__(Wide)
wide.__dict__ = copy.copy(plain.__dict__)
wide.register_parameter("weight", nn.Parameter(plain.weight.detach() * 2))
if plain.weight is wide.weight:
    raise SystemExit(
        "a copy of a module's attributes shares its table of parameters: only the private _parameters tells them apart"
    )

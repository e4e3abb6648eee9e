# SPDX-License-Identifier: Apache-2.0
"""Runs an example script of diffusers as it is, with a stand-in for the transforms of torchvision.

Each torchvision release needs one torch release, so the clients' environment has none. Usage: SCRIPT [ARGUMENT...]"""

import runpy
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import datasets  # noqa: F401
import numpy as np
import torch

# The libraries look for torchvision here, once, and have to find none.
from diffusers import DDPMPipeline, StableDiffusionControlNetPipeline  # noqa: F401
from transformers.utils import is_torchvision_available

assert not is_torchvision_available()


class InterpolationMode:
    BILINEAR, LANCZOS = 2, 1


def compose(steps):
    def apply(image):
        for step in steps:
            image = step(image)
        return image

    return apply


def channels_first(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


transforms = ModuleType("torchvision.transforms")
transforms.InterpolationMode = InterpolationMode
transforms.Compose = compose
transforms.Resize = lambda size, interpolation: (
    lambda image: image.resize((size, size), interpolation)
)
# The images are square, so nothing is left to crop.
transforms.CenterCrop = transforms.RandomCrop = lambda size: lambda image: image
transforms.Lambda = lambda function: function
transforms.PILToTensor = lambda: channels_first
transforms.ToTensor = lambda: lambda image: channels_first(image).float() / 255
transforms.ConvertImageDtype = lambda dtype: lambda image: image.to(dtype) / 255
transforms.Normalize = lambda mean, std: lambda image: (image - mean[0]) / std[0]

torchvision = ModuleType("torchvision")
torchvision.__spec__ = ModuleSpec("torchvision", None)
torchvision.transforms = transforms
sys.modules.update({"torchvision": torchvision, "torchvision.transforms": transforms})

sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")

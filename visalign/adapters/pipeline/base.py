# SPDX-License-Identifier: Apache-2.0
"""Members that all policies of diffusers pipelines share: encoding of images, the reference, saved weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visalign.adapters.lora import LoraSettings
from visalign.adapters.offload import AUTOENCODER, on_device
from visalign.adapters.weights import TrainedWeights
from visalign.atomic import umask_permissions

from .encoding import ImageEncoder
from .lora import LoraStart, load_lora, save_lora
from .quantization import dtype_of


class DiffusersPolicy(ABC):
    """Base of `PipelinePolicy` and `SD3Policy`."""

    pipe: Any
    networks: Mapping[str, Any]  # Part of the pipeline that denoises -> network
    lora: LoraSettings | None
    autocast: torch.dtype | None
    storage_dtype: torch.dtype
    _image_size: int | tuple[int, int] | None
    _start: LoraStart | None
    _trained: TrainedWeights

    @property
    def image_size(self) -> int | tuple[int, int] | None:
        """Image size as passed; setting it changes `latent_shape` and `sigmas`, and encoded conditions are void."""
        return self._image_size

    @image_size.setter
    def image_size(self, size: int | tuple[int, int] | None) -> None:
        if size != self._image_size:
            self._resize(size)
            self._image_size = size
            vars(self).pop("_encoder", None)  # what it measured was of the other size

    @abstractmethod
    def _resize(self, size: int | tuple[int, int] | None) -> None:
        """Set what depends on the image size; None is the model's own."""

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return next(next(iter(self.networks.values())).parameters()).device  # diffusers' `device` walks all modules

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the network's matrix products."""
        return self.autocast or dtype_of(next(iter(self.networks.values())))

    def encode_images(self, images: Sequence[Tensor]) -> Tensor:
        """Encode B images [3, h, w] in [0, 1] of any size, see `ImageEncoder`; `decode` is the inverse."""
        with on_device(self.pipe, AUTOENCODER, self.device):
            return self._encoder(images)

    @cached_property
    def _encoder(self) -> ImageEncoder:
        return ImageEncoder(self)

    def reference(self) -> AbstractContextManager[None]:
        """Restore the model from before training inside the block; nestable. Call backward outside."""
        return self._trained.reference()

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters that the optimizer moves, in the order of the network."""
        return self._trained.named()

    def save(self, folder: Path) -> None:
        """Write what was trained in float32: a LoRA as `save_lora`, else the pipeline (SD3.5 with T5: 21 GB)."""
        if self.lora is not None:
            save_lora(type(self.pipe), self.networks, Path(folder), self._start)
        else:
            with self._own_parts():
                self.pipe.save_pretrained(folder)
        umask_permissions(Path(folder))

    def _own_parts(self) -> AbstractContextManager[None]:
        """Give the pipeline its own components back inside the block."""
        return nullcontext()

    def load(self, folder: Path) -> None:
        """Read what `save` of an equally built policy wrote; the reference stays what it was."""
        if self.lora is not None:
            load_lora(self.networks, Path(folder))
            return
        for part, network in self.networks.items():
            saved = type(network).from_pretrained(folder, subfolder=part, dtype=self.storage_dtype)
            network.load_state_dict(saved.state_dict())

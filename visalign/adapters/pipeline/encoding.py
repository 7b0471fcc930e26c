# SPDX-License-Identifier: Apache-2.0
"""Clean latents of images: the inverse of a pipeline's way from its latents to its autoencoder.

That way (scaling, shift, means and deviations, packing) is not written down here for each family. The input
of the autoencoder is recorded while a policy decodes chosen latents x. Where it is a·x + b in another order,
which further latents confirm, it is inverted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visalign.errors import UserError
from visalign.swapping import swapped_weights

DIGIT = 1024  # base in which positions in a latent are written, so that float32 holds each digit exactly enough


class _AtAutoencoder(Exception):
    """Leaves a pipeline's call at its autoencoder."""


class ImageEncoder:
    """Encodes images for a policy that decodes by `pipe.vae`; computed in float32, the posterior's mode. A way to
    the autoencoder that cannot be inverted is refused, as are videos.
    """

    @torch.no_grad()
    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.vae: Any = getattr(policy.pipe, "vae", None)
        if not hasattr(self.vae, "encode"):
            self._refuse("its pipeline has no autoencoder with an encoder")
        with _in_float32(self.vae):
            images, zero = self._input(torch.zeros(policy.latent_shape), decoded=True)
            if zero.ndim not in (4, 5) or (zero.ndim == 5 and zero.shape[2] != 1):
                self._refuse(f"its autoencoder is given {list(zero.shape)}, which is no single image")
            height, width = images.shape[-2:]
            self.size, self._given = (height, width), zero.shape
            self._shift = zero.flatten()
            self._scale = self._input(torch.ones(policy.latent_shape))[1].flatten() - self._shift
            position = torch.arange(count := zero.numel())
            if count != math.prod(policy.latent_shape) or not bool(self._scale.all()):
                self._refuse("its pipeline leaves latents out on the way to the autoencoder")
            high, low = (self._digit(digit) for digit in (position // DIGIT, position % DIGIT))
            self._order = high * DIGIT + low
            x = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(zero.device)
            if not torch.equal(self._order.sort().values.cpu(), position) or not torch.allclose(
                self._input(x.view(policy.latent_shape))[1].flatten(),
                self._scale * x[self._order] + self._shift,
                rtol=1e-4,
                atol=1e-5,
            ):
                self._refuse("its pipeline does more than to scale, shift and reorder latents")

    @torch.no_grad()
    def __call__(self, images: Sequence[Tensor]) -> Tensor:
        """Encode B images [3, H, W] in [0, 1] of any size (`fitted`) as latents in the policy's storage dtype."""
        batches, policy = [], self.policy
        with _in_float32(self.vae):
            for start in range(0, len(images), policy.decode_batch):
                chunk = [fitted(image.float(), self.size) for image in images[start:][: policy.decode_batch]]
                x = 2 * torch.stack(chunk).to(policy.device) - 1
                if self.vae.config.get("in_channels") == 4:  # the fourth is opacity
                    x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
                encoded = self.vae.encode(x if len(self._given) == 4 else x[:, :, None])
                z = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded[0]
                if z.shape[1:] != self._given[1:]:
                    self._refuse(f"its autoencoder makes {list(z.shape[1:])} of {list(x.shape[1:])}")
                latents = torch.empty_like(z).flatten(1)
                latents[:, self._order] = (z.flatten(1) - self._shift) / self._scale
                batches.append(latents.view(-1, *policy.latent_shape).to(policy.storage_dtype))
        return torch.cat(batches)

    def _input(self, latent: Tensor, *, decoded: bool = False) -> tuple[Tensor, Tensor]:
        """Return (images if `decoded`, the autoencoder's input) of one latent in float32."""
        original, inputs, is_own = self.vae.decode, [], "decode" in vars(self.vae)

        def decode(z: Tensor, *args: Any, **kwargs: Any) -> Any:
            inputs.append(z.float())
            if not decoded:
                raise _AtAutoencoder
            return original(z, *args, **kwargs)

        images = latent
        self.vae.decode = decode
        try:
            images = self.policy.decode(latent[None].to(self.policy.device))
        except _AtAutoencoder:
            pass
        finally:
            del self.vae.decode
            if is_own:
                self.vae.decode = original
        if len(inputs) != 1 or len(inputs[0]) != 1:
            self._refuse("its pipeline asks the autoencoder otherwise than once for an image")
        return images, inputs[0]

    def _digit(self, digit: Tensor) -> Tensor:
        """Return one digit of where each of the autoencoder's numbers comes from, [n]."""
        numbers = self._input(digit.float().view(self.policy.latent_shape))[1].flatten()
        return ((numbers - self._shift) / self._scale).round().long()

    def _refuse(self, why: str) -> None:
        kind = type(self.policy.pipe).__name__
        raise UserError(
            f"{kind}: images cannot be made latents of it, for {why}. Leave data.pairs out, or give an adapter that "
            "has encode_images (model.adapter=path/to/file.py:Class)."
        )


def fitted(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize an image [3, H, W]: scale it until it covers the size, then cut the middle."""
    height, width = image.shape[-2:]
    scale = max(size[0] / height, size[1] / width)
    if scale != 1:
        covering = max(size[0], round(height * scale)), max(size[1], round(width * scale))
        resized = F.interpolate(image[None], covering, mode="bicubic", antialias=True, align_corners=False)
        image = resized[0].clamp(0, 1)
    top, left = ((have - want) // 2 for have, want in zip(image.shape[-2:], size, strict=True))
    return image[:, top : top + size[0], left : left + size[1]]


def _in_float32(module: torch.nn.Module) -> AbstractContextManager[None]:
    half = [t for t in [*module.parameters(), *module.buffers()] if t.is_floating_point() and t.dtype.itemsize < 4]
    return swapped_weights(half, [t.data.float() for t in half])

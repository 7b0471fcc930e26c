# SPDX-License-Identifier: Apache-2.0
"""Devices and autocast by name, and whether a device has the arithmetic for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .errors import UserError

if TYPE_CHECKING:
    import torch

Autocast = Literal["auto", "float32", "bfloat16", "float16"]


def check_device(name: str, error: type[Exception] = UserError) -> None:
    """Refuse a device that cannot compute here, by the message of torch: unknown, absent, or without memory
    of its own, as `meta` is."""
    import torch

    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as cause:
        raise error(f"The device {name!r} cannot be used ({str(cause).splitlines()[0]}).") from cause


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices in hardware; a CPU that does not takes about ten times
    the time of float32."""
    import torch

    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    try:  # only oneDNN can tell; a private question, which another torch may not answer
        return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


def autocast_dtype(name: Autocast | None, device: torch.device) -> torch.dtype | None:
    """The dtype that a network runs under autocast in, or None for none.

    Args:
        name: A dtype's name; "auto": bfloat16 where the device multiplies it, else none; None: none.
        device: Where the network runs.
    """
    import torch

    if name == "auto":
        return torch.bfloat16 if multiplies_bfloat16(device) else None
    return None if name is None else getattr(torch, name)

# SPDX-License-Identifier: Apache-2.0
"""Check devices and choose autocast dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .errors import UserError

if TYPE_CHECKING:
    import torch

Autocast = Literal["auto", "float32", "bfloat16", "float16"]


def default_device() -> str:
    """Return "cuda" where torch has a CUDA device, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(name: str, error: type[Exception] = UserError) -> None:
    """Raise if torch cannot compute on this device: unknown, absent, or without storage (`meta`)."""
    import torch

    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as cause:
        reason = str(cause).splitlines()[0].split(". ")[0]
        usable = ", ".join(["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))])
        raise error(f"The device {name!r} cannot be used ({reason}). Here are: {usable}.") from cause


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return True if the device multiplies bfloat16 in hardware; a CPU without it is ten times slower."""
    import torch

    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    try:  # only oneDNN knows; a private operator that other torch versions may lack
        return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


def check_dtype(name: str, device: torch.device, key: str) -> None:
    """Raise where a GPU would only emulate the dtype that the setting `key` names."""
    import torch

    if name == "bfloat16" and device.type == "cuda" and not multiplies_bfloat16(device):
        card = torch.cuda.get_device_name(device)
        raise UserError(f"{key} is bfloat16, which {card} does not multiply. Set {key}=float16 or float32.")


def autocast_dtype(name: Autocast | None, device: torch.device) -> torch.dtype | None:
    """Return the autocast dtype, or None for no autocast; "auto" is bfloat16 where the hardware multiplies it."""
    import torch

    if name == "auto":
        return torch.bfloat16 if multiplies_bfloat16(device) else None
    return None if name is None else getattr(torch, name)

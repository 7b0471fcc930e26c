# SPDX-License-Identifier: Apache-2.0
"""Scores by the released inference of HPSv3, EditReward and VideoAlign: run where it can be imported.

`python vlm_official.py JUDGE CODE FOLDER` with transformers 4.45.2 (EditReward: 4.57.0), the peft of its time, and
Pillow 11, whose order of resizing ours has. CODE is a copy of the released code, FOLDER what
`tests.support.judges.published_vlm` made. None of our code is imported. The training packages, decord (a clip is
an array here) and flash attention (by torch's) are replaced; the numbers are float32.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers
import yaml

RATE = 4.0


class Clip:
    """Frames of a file, as decord's VideoReader gives them."""

    def __init__(self, path: str) -> None:
        self.frames = np.load(path.removeprefix("file://"))

    def __len__(self) -> int:
        return len(self.frames)

    def get_avg_fps(self) -> float:
        return RATE

    def get_batch(self, index: list[int]) -> Any:
        batch: Any = ModuleType("batch")
        batch.asnumpy = lambda: self.frames[index]
        return batch


STUBS: dict[str, dict[str, Any]] = {
    "datasets": {"load_dataset": None, "concatenate_datasets": None},
    "decord": {"VideoReader": Clip},
    "matplotlib": {},
    "matplotlib.pyplot": {},
    "matplotlib.patches": {},
    "torch.utils.tensorboard": {"SummaryWriter": None},
    "trl": {"RewardTrainer": object, "get_kbit_device_map": None, "get_quantization_config": lambda _: None},
}


def hpsv3(folder: Path, prompts: list[str]) -> torch.Tensor:
    """Mean and log-deviation of the folder's images."""
    package: Any = import_module("hpsv3")
    config = _config(folder, package, "HPSv3_7B")
    judge = package.HPSv3RewardInferencer(config, str(folder / "HPSv3.safetensors"), device="cpu")
    return judge.reward([str(folder / f"{number}.png") for number in range(len(prompts))], prompts)


def edit_reward(folder: Path, prompts: list[str]) -> torch.Tensor:
    """Mean and log-deviation of the folder's images as edits of the one before."""
    package: Any = import_module("EditReward")
    judge = package.EditRewardInferencer(
        _config(folder, package, "EditReward-Qwen2.5-7B-VL"), str(folder), device="cpu"
    )
    images = [str(folder / f"{number}.png") for number in range(len(prompts))]
    return judge.reward(prompts, [*images[-1:], *images[:-1]], images)


def video_align(folder: Path, prompts: list[str]) -> torch.Tensor:
    """Sum and parts of the folder's clips, two at a time."""
    released: Any = import_module("inference")
    settings = released.TrainingConfig
    released.TrainingConfig = lambda **options: settings(**options | {"disable_flash_attn2": True})
    judge = released.VideoVLMRewardInference(str(folder / "VideoReward"), device="cpu", dtype=torch.float32)
    clips, rewards = [str(folder / f"{number}.npy") for number in range(len(prompts))], []
    for first in range(0, len(prompts), 2):
        rewards += judge.reward(clips[first : first + 2], prompts[first : first + 2])
    return torch.tensor([[reward[key] for key in ("Overall", "VQ", "MQ", "TA")] for reward in rewards])


def _config(folder: Path, package: Any, name: str) -> str:
    """Write the released configuration for a small model on the CPU."""
    config = yaml.safe_load((Path(package.__file__).parent / "config" / f"{name}.yaml").read_text())
    config |= {"model_name_or_path": str(folder / "base"), "bf16": False, "torch_dtype": "float32"}
    config |= {"output_dir": str(folder / "output"), "report_to": "none"}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return str(folder / f"{name}.yaml")


def main(judge: str, code: str, directory: str) -> None:
    """Print a row for each image or clip."""
    for name, content in STUBS.items():
        sys.modules[name] = module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(content)
    sys.path.insert(0, code)
    folder = Path(directory)
    config: Any = transformers.AutoConfig.from_pretrained(folder / "base")
    base = getattr(transformers, config.architectures[0])(config)
    torch.save(base.state_dict(), folder / "base" / "pytorch_model.bin")  # replaced by the checkpoint's, strictly
    with torch.no_grad():
        rows = globals()[judge](folder, json.loads((folder / "prompts.json").read_text()))
    print(json.dumps(rows.tolist()))


if __name__ == "__main__":
    main(*sys.argv[1:])

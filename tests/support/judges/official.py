# SPDX-License-Identifier: Apache-2.0
"""Judges on random checkpoints in their published layouts, and what the published recipes make of them.

The recipes run the libraries' and the judges' own classes and image transforms, none of ours. `python -m
tests.support.judges.official [NAME ...]` writes the scores of all judges, or of those named, to
tests/golden/official/judges.json, which tests/rewards/scorers/test_official.py holds ours against. Its
"sources" say whose code ran, at which version, and what was computed anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from tests.support.models import published_layouts
from tests.support.models.clip import CONTEXT, SIZES, tiny_clip_config
from tests.support.models.published_layouts import (
    head,
    mps_layers,
    open_clip_vit,
    save_pickled_module,
    transformers_clip,
)
from tests.support.models.vision_language import TEMPLATE, tiny_seeing_model, tiny_seeing_tokenizer
from visalign.rewards.chat.unified_reward import Mode

FROZEN = Path(__file__).parents[2] / "golden" / "official" / "judges.json"
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PROMPTS = ["a red circle", "Tom &amp; Jerry, don't stop 42", "two  blue squares " * 12, "é 日本 🙂"]
SHAPES = ((41, 44), (32, 35), (35, 32), (60, 47))
"""Height and width of the images; three columns or rows are left over in two of them."""
VOCABULARY, SIDE = 49408, 32
LARGE = {**SIZES, "vocabulary": VOCABULARY}
OPEN_CLIP = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": SIDE, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": VOCABULARY, "width": 32, "heads": 2, "layers": 1},
}
PIXELS: dict[str, Any] = {"min_pixels": 64, "max_pixels": 4096}


def images() -> list[Image.Image]:
    """Noise of other sizes each; numpy's generator is the same everywhere."""
    random = np.random.default_rng(7)
    return [Image.fromarray(random.integers(0, 256, (*shape, 3), dtype=np.uint8)) for shape in SHAPES]


RATE = 4.0
"""Frames a second that the clips show."""


def clips() -> list[np.ndarray]:
    """Of 5, 9, 20 and 37 frames, uint8 [F, H, W, 3] each."""
    random = np.random.default_rng(8)
    return [
        random.integers(0, 256, (length, *shape, 3), dtype=np.uint8)
        for length, shape in zip((5, 9, 20, 37), SHAPES, strict=True)
    ]


def weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Norms near 1, the rest N(0, 0.04), from numpy."""
    random, state = np.random.default_rng(seed), {}
    for key, shape in shapes.items():
        if key.endswith("position_ids"):
            state[key] = torch.arange(shape[1])[None]
            continue
        noise = torch.tensor(random.standard_normal(shape, dtype=np.float32) * np.float32(0.2))
        state[key] = 1 + noise if key.endswith("weight") and len(shape) == 1 else noise
        if key == "logit_scale":
            state[key] = torch.tensor(4.6)
    return state


def _clip_folder(folder: Path, seed: int, *, config: bool = True) -> Path:
    folder.mkdir(parents=True)
    torch.save(weights(transformers_clip(**LARGE), seed), folder / "pytorch_model.bin")
    if config:
        (folder / "config.json").write_text(json.dumps(tiny_clip_config(VOCABULARY, 2)))
    return folder


def _clip_model(folder: Path) -> Any:
    from transformers import CLIPConfig, CLIPModel

    model = CLIPModel(CLIPConfig.from_dict(json.loads((folder / "config.json").read_text())))
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    model.load_state_dict({k: v for k, v in state.items() if not k.endswith("position_ids")})
    return model.eval()


def _clip_tokens() -> Any:
    """transformers' CLIPTokenizer on the published vocabulary."""
    from open_clip import SimpleTokenizer
    from transformers import CLIPTokenizer

    words = SimpleTokenizer()
    names = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    vocabulary = {names.get(word, word): place for word, place in words.encoder.items()}
    merges: Any = list(words.bpe_ranks)
    return CLIPTokenizer(vocab=vocabulary, merges=merges)


def _processed(images: Sequence[Image.Image]) -> Tensor:
    """transformers' CLIPImageProcessor on PIL's images."""
    from transformers import CLIPImageProcessorPil

    size: dict[str, Any] = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    return CLIPImageProcessorPil(**size)(list(images), return_tensors="pt")["pixel_values"]


def _torchvision(images: Sequence[Image.Image]) -> Tensor:
    """OpenAI's transform; `N_preprocess` holds the released one's own numbers."""
    from torchvision import transforms as tv

    resize = tv.Resize(SIDE, tv.InterpolationMode.BICUBIC, antialias=True)
    steps: list[Any] = [resize, tv.CenterCrop(SIDE), tv.ToTensor(), tv.Normalize(MEAN, STD)]
    transform: Any = tv.Compose(steps)
    return torch.stack([transform(image) for image in images])


def _cosine(model: Any, pixels: Tensor, tokens: Any) -> Tensor:
    image = F.normalize(model.get_image_features(pixel_values=pixels).pooler_output, dim=-1)
    text = F.normalize(model.get_text_features(**tokens).pooler_output, dim=-1)
    return (image * text).sum(-1)


def _layers(widths: Sequence[int], places: Sequence[int], state: dict[str, Tensor]) -> nn.Module:
    """The published five-layer head without nonlinearity, in evaluation mode."""
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    for layer, place in zip(layers, places, strict=True):
        layer.load_state_dict({kind: state[f"layers.{place}.{kind}"] for kind in ("weight", "bias")})
    return nn.Sequential(*layers)


WIDTHS, PLACES = (16, 24, 12, 8, 4, 1), (0, 2, 4, 6, 7)


def pick_score(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """exp(logit_scale) · cos of CLIPProcessor's pixels and tokens."""
    from visalign.rewards.scorers.pick_score import PickScore

    place = _clip_folder(folder / "pick", 1)

    def official() -> Tensor:
        model = _clip_model(place)
        tokens = _clip_tokens()(PROMPTS, padding=True, truncation=True, max_length=CONTEXT, return_tensors="pt")
        return model.logit_scale.exp() * _cosine(model, _processed(images()), tokens)

    return PickScore(place), official


def ict(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """The cosine alone; texts by open_clip's tokenizer."""
    from visalign.rewards.scorers.ict import Ict

    place = _clip_folder(folder / "ict", 2)

    def official() -> Tensor:
        from open_clip import SimpleTokenizer

        ids = SimpleTokenizer(context_length=CONTEXT)(PROMPTS)
        return _cosine(_clip_model(place), _processed(images()), {"input_ids": ids})

    return Ict(place), official


def hp(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """The projected embedding, not normalised, through the head."""
    from visalign.rewards.scorers.hp import Hp

    place = _clip_folder(folder / "hp" / "hp_backbone", 3)
    file = folder / "hp" / "hp_scorer" / "mlp_pytorch_model.bin"
    file.parent.mkdir()
    torch.save(weights(head(16, WIDTHS[1:]), 4), file)

    def official() -> Tensor:
        layers = _layers(WIDTHS, PLACES, torch.load(file, weights_only=True))
        return layers(_clip_model(place).get_image_features(_processed(images())).pooler_output)[:, 0]

    return Hp(folder / "hp"), official


def laion_aesthetic(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """OpenAI's transform, the normalised embedding, the head."""
    from visalign.rewards.scorers.laion_aesthetic import LaionAesthetic

    place = _clip_folder(folder / "laion", 5)
    torch.save(weights(head(16, WIDTHS[1:]), 6), place / "head.pth")

    def official() -> Tensor:
        layers = _layers(WIDTHS, PLACES, torch.load(place / "head.pth", weights_only=True))
        found = _clip_model(place).get_image_features(_torchvision(images())).pooler_output
        return layers(F.normalize(found, dim=-1))[:, 0]

    return LaionAesthetic(place, head=place / "head.pth"), official


def hps_v2(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """The transform, model and tokenizer of hpsv2 1.2.0, whose wheel is unpacked in HPSV2_CODE (with open_clip's
    vocabulary, which the wheel lacks); without it the frozen numbers.
    """
    from visalign.rewards.scorers.hps_v2 import FILES, HpsV2

    sizes: dict[str, Any] = {"text": (32, 128, 1), "vision": (32, 128, 1), "embed": 16, "context": 16}
    sizes |= {"vocabulary": VOCABULARY, "patch": 8, "image": SIDE}
    file = folder / FILES["2.1"]
    torch.save({"epoch": 1, "state_dict": weights(open_clip_vit(**sizes), 7)}, file)

    def official() -> Tensor:
        if "HPSV2_CODE" not in os.environ:
            return torch.tensor(json.loads(FROZEN.read_text())["hps_v2"])
        for name in ("hpsv2", "hpsv2.src", "hpsv2.src.open_clip"):  # their own openings fetch weights
            package = ModuleType(name)
            package.__path__ = [str(Path(os.environ["HPSV2_CODE"]) / name.replace(".", "/"))]
            sys.modules[name] = package
        transform, network, words = (
            import_module(f"hpsv2.src.open_clip.{name}") for name in ("transform", "model", "tokenizer")
        )
        model = network.CLIP(**OPEN_CLIP)
        model.load_state_dict(torch.load(file, weights_only=True)["state_dict"])
        model.eval()
        ids = words.tokenize(PROMPTS, context_length=16)
        read = transform.image_transform(SIDE, is_train=False, resize_longest_max=True)
        image = model.encode_image(torch.stack([read(one) for one in images()]), normalize=True)
        return (image * model.encode_text(ids, normalize=True)).sum(-1)

    return HpsV2(file, architecture=OPEN_CLIP), official


def _seeing(folder: Path, seed: int, **changes: Any) -> tuple[Any, Any]:
    """A tiny Qwen2-VL with numpy's weights, and its processor with the library's PIL image processor."""
    from transformers import Qwen2VLImageProcessorPil, Qwen2VLProcessor, Qwen2VLVideoProcessor

    model = tiny_seeing_model(max_position_embeddings=8192, **changes)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items() if key != "lm_head.weight"}
    model.load_state_dict(weights(shapes, seed), strict=False)
    model.tie_weights()
    size: Any = {"shortest_edge": 64, "longest_edge": 4096}
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessorPil(patch_size=4, size=size),
        tokenizer=tiny_seeing_tokenizer(),
        video_processor=Qwen2VLVideoProcessor(patch_size=4),
        chat_template=TEMPLATE,
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model.eval(), processor


def _asked(processor: Any, text: str, *images: Image.Image) -> Any:
    """The processor's inputs; an image is resized before, by PIL, as qwen-vl-utils does it, and in the
    order of Pillow up to 12, the width first: 13 takes the height first where that is cheaper.
    """
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    shown, bicubic = [], Image.Resampling.BICUBIC
    for image in images:
        height, width = smart_resize(image.height, image.width, factor=8, **PIXELS)
        shown.append(image.resize((width, image.height), bicubic).resize((width, height), bicubic))
    content = [*({"type": "image"} for _ in shown), {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    written = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return processor(text=[written], images=shown, return_tensors="pt")


def vqa_score(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """The softmax over the whole vocabulary at the next word, one image at a time; here the word is "y"."""
    from visalign.rewards.questions.vqa import SHOWS, VqaScore

    model, processor = _seeing(folder / "vlm", 8)
    text = SHOWS.messages[0]["content"][1]["text"]

    def official() -> Tensor:
        yes, found = processor.tokenizer.convert_tokens_to_ids("y"), []
        for image, prompt in zip(images(), _SPELLED, strict=True):
            inputs = _asked(processor, text.replace("{prompt}", prompt), image)
            found.append(model(**inputs).logits[0, -1].double().softmax(-1)[yes])
        return torch.stack(found)

    return VqaScore(folder / "vlm", answer="y"), official


QUESTIONS = [["How many circles?", "four"], ["How many cats?", "seventy"], ["a cat on a mat?", "Yes"]]
"""Of one record, for Soft-TIFA; its code reads a number above ten as "other"."""


def soft_tifa(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """GenEval 2's evaluation.py: the first token of each spelling, probabilities added; geometric mean."""
    from visalign.rewards.questions.vqa import SoftTifa

    model, processor = _seeing(folder / "vlm", 12)
    counted = {"four": ("four", "Four", " four", " Four", "4", " 4")}
    counted["seventy"] = ("seventy", "Seventy", " seventy", " Seventy", "other", " other")

    def official() -> Tensor:
        found = []
        for image in images():
            log = torch.zeros((), dtype=torch.float64)
            for question, answer in QUESTIONS:
                inputs = _asked(processor, f"{question} Answer in one word.", image)
                prob = model(**inputs).logits[0, -1].double().softmax(-1)
                forms = counted.get(answer, ("Yes", "yes", " yes", " Yes"))
                first = [processor.tokenizer.encode(form)[0] for form in forms]
                log += prob[first].sum().log()
            found.append((log / len(QUESTIONS)).exp())
        return torch.stack(found)

    return SoftTifa(folder / "vlm", spellings="published"), official


def hpsv3(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """The released forward: embeddings with the image's in their places, plain positions, the head on the
    state at the reward token; its mean.
    """
    from safetensors.torch import save_file

    from visalign.rewards.hpsv3.judge import HPSv3
    from visalign.rewards.hpsv3.loading import PUBLISHED_TEMPLATE

    base = folder / "hpsv3" / "base"
    _seeing(base, 9)
    _, processor = _seeing(folder / "unused", 9)
    processor.tokenizer.add_special_tokens({"additional_special_tokens": ["<|Reward|>"]})
    token = processor.tokenizer.convert_tokens_to_ids("<|Reward|>")
    model: Any = tiny_seeing_model(vocab_size=token + 1, max_position_embeddings=8192)
    model.config.tie_word_embeddings = False
    state = weights({key: tuple(value.shape) for key, value in model.state_dict().items()}, 10)
    state["lm_head.weight"] = state["model.language_model.embed_tokens.weight"].clone()
    model.load_state_dict(state)
    shapes = {"0": (1024, 32), "3": (16, 1024), "5": (2, 16)}
    layers = {f"rm_head.{n}.weight": shape for n, shape in shapes.items()}
    layers |= {f"rm_head.{n}.bias": (shape[0],) for n, shape in shapes.items()}
    ranknet = weights(layers, 11)
    old = {
        key.removeprefix("model.") if "visual" in key else key.replace("model.language_model.", "model."): held
        for key, held in state.items()
    }
    save_file({k: v.contiguous() for k, v in (old | ranknet).items()}, folder / "hpsv3" / "HPSv3.safetensors")
    text = PUBLISHED_TEMPLATE.messages[0]["content"][1]["text"]

    def official() -> Tensor:
        trunk, found = model.eval().model, []
        for image, prompt in zip(images(), _SPELLED, strict=True):
            inputs = _asked(processor, text.replace("{prompt}", prompt), image)
            ids = inputs["input_ids"]
            embedded = trunk.get_input_embeddings()(ids)
            seen = trunk.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
            mask = (ids == model.config.image_token_id)[..., None].expand_as(embedded)
            embedded = embedded.masked_scatter(mask, torch.cat(list(seen)))
            states = trunk.language_model(inputs_embeds=embedded, attention_mask=inputs["attention_mask"])[0]
            at = states[0, ids[0] == token]
            for number in ("0", "3", "5"):
                at = F.linear(at, ranknet[f"rm_head.{number}.weight"], ranknet[f"rm_head.{number}.bias"])
                at = at.relu() if number != "5" else at
            found.append(at[0, 0])
        return torch.stack(found)

    return HPSv3(folder / "hpsv3" / "HPSv3.safetensors", base=base, **PIXELS), official


def video_align(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """The released forward on transformers' and peft's own classes: two frames a second, resized by
    torchvision, a video's tokens, plain positions, the head at three tokens, the sum in deviations.
    """
    from peft import LoraConfig, get_peft_model

    from visalign.rewards.hpsv3.video_align import TEMPLATE as QUESTION
    from visalign.rewards.hpsv3.video_align import TOKENS, VideoAlign

    base, checkpoint = folder / "base", folder / "VideoReward" / "checkpoint-20"
    _, processor = _seeing(base, 16)
    processor.tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    places = processor.tokenizer.convert_tokens_to_ids(list(TOKENS))
    model: Any = tiny_seeing_model(vocab_size=places[-1] + 1, max_position_embeddings=8192)
    names = [n for n, m in model.model.language_model.named_modules() if isinstance(m, nn.Linear)]
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=[f"model.language_model.{name}" for name in names])
    with warnings.catch_warnings():  # peft 0.18 reads a property that transformers 5.23 has renamed
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        wrapped: Any = get_peft_model(model, lora)
    state = weights({key: tuple(value.shape) for key, value in wrapped.state_dict().items()}, 17)
    state |= {key: 0.2 * held for key, held in state.items() if ".lora_" in key}
    embeddings = "base_model.model.model.language_model.embed_tokens.weight"
    state["base_model.model.lm_head.weight"] = state[embeddings]
    wrapped.load_state_dict(state)
    head = weights({"rm_head.weight": (1, 32)}, 18)["rm_head.weight"]
    checkpoint.mkdir(parents=True)
    old = {
        key.replace("model.model.visual.", "model.visual.").replace("model.language_model.", "model."): held
        for key, held in (state | {"base_model.model.rm_head.weight": head}).items()
    }
    torch.save({key: held.clone() for key, held in old.items()}, checkpoint / "model.pth")
    normal = {"VQ_mean": 3.7, "VQ_std": 2.2, "MQ_mean": 1.2, "MQ_std": 1.4, "TA_mean": 2.8, "TA_std": 2.5}
    told = {
        "data_config": {"eval_dim": ["VQ", "MQ", "TA"], "prompt_template_type": "detailed_special"},
        "model_config": {"use_special_tokens": True, "output_dim": 1, "reward_token": "special"},
        "peft_lora_config": {"lora_r": 4, "lora_alpha": 8, "use_rslora": False},
        "inference_config": normal,
    }
    told["data_config"] |= {"fps": 2.0, "max_frame_pixels": 2048, "sample_type": "uniform"}
    (folder / "VideoReward" / "model_config.json").write_text(json.dumps(told))
    text = QUESTION.messages[0]["content"][1]["text"]

    def official() -> Tensor:
        trunk, found = wrapped.eval().base_model.model.model, []
        for clip, prompt in zip(clips(), _SPELLED, strict=True):
            inputs = _shown(processor, text.replace("{prompt}", prompt), clip)
            ids = inputs["input_ids"]
            embedded = trunk.get_input_embeddings()(ids)
            seen = trunk.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"])
            mask = (ids == model.config.video_token_id)[..., None].expand_as(embedded)
            embedded = embedded.masked_scatter(mask, torch.cat(list(seen.pooler_output)))
            states = trunk.language_model(inputs_embeds=embedded, attention_mask=inputs["attention_mask"])[0]
            said = dict(zip(("VQ", "MQ", "TA"), states[0, torch.isin(ids[0], torch.tensor(places))], strict=True))
            raw = {part: F.linear(state, head)[0] for part, state in said.items()}
            found.append(sum((raw[p] - normal[f"{p}_mean"]) / normal[f"{p}_std"] for p in raw))
        return torch.stack(found)

    judge = VideoAlign(folder / "VideoReward", base=base, clip_fps=RATE, min_pixels=PIXELS["min_pixels"])
    return judge, official


def _shown(processor: Any, text: str, clip: np.ndarray) -> Any:
    """The processor's inputs of a video, of which two frames a second are taken, four at least and an even
    number, and resized as tensors.
    """
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import resize
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    count = 2 * round(min(max(len(clip) / RATE * 2.0, 4), len(clip) // 2 * 2) / 2)
    frames = torch.tensor(clip)[torch.linspace(0, len(clip) - 1, count).round().long()].permute(0, 3, 1, 2)
    size = smart_resize(*clip.shape[1:3], factor=8, min_pixels=PIXELS["min_pixels"], max_pixels=2048)
    frames = resize(frames, list(size), interpolation=InterpolationMode.BICUBIC, antialias=True)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
    written = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    written = written.replace("<|image_pad|>", "<|video_pad|>")
    kept = {"do_resize": False, "do_sample_frames": False, "cap_pixels_per_frame": False}
    return processor(text=[written], videos=[frames], videos_kwargs=kept, return_tensors="pt")


def edit_reward(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """The released forward once for each head: source and edit, the head at every token, read at the reward
    token, the mean of both heads' outputs; the first of them.
    """
    from safetensors.torch import save_file

    from visalign.rewards.hpsv3.edit_reward import QUESTIONS, EditReward

    base = folder / "base"
    _, processor = _seeing(base, 12)
    processor.tokenizer.add_special_tokens({"additional_special_tokens": ["<|Reward|>"]})
    token = processor.tokenizer.convert_tokens_to_ids("<|Reward|>")
    model: Any = tiny_seeing_model("qwen2_5_vl", vocab_size=token + 1, max_position_embeddings=8192)
    model.config.tie_word_embeddings = False
    tiny_seeing_model("qwen2_5_vl", max_position_embeddings=8192).config.save_pretrained(base)
    state = weights({key: tuple(value.shape) for key, value in model.state_dict().items()}, 13)
    state["lm_head.weight"] = state["model.language_model.embed_tokens.weight"].clone()
    model.load_state_dict(state)
    heads = [_ranknet_head(32, 14), _ranknet_head(32, 15)]
    both = {f"rm_heads.head_{n}.{key}": held for n, own in enumerate(heads) for key, held in own.items()}
    save_file({k: v.contiguous() for k, v in (state | both).items()}, folder / "model.safetensors")

    def official() -> Tensor:
        trunk, found = model.eval().model, []
        for image, prompt in zip(images(), _SPELLED, strict=True):
            said = []
            for question, own in zip(QUESTIONS, heads, strict=True):
                text = question.messages[0]["content"][2]["text"].replace("{prompt}", prompt)
                inputs = _asked(processor, text, SOURCE, image)
                ids = inputs["input_ids"]
                embedded = trunk.get_input_embeddings()(ids)
                seen = trunk.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
                mask = (ids == model.config.image_token_id)[..., None].expand_as(embedded)
                embedded = embedded.masked_scatter(mask, torch.cat(list(seen.pooler_output)))
                states = trunk.language_model(inputs_embeds=embedded, attention_mask=inputs["attention_mask"])[0]
                layers = nn.Sequential(
                    nn.Linear(32, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU()
                ).append(nn.Linear(16, 2))
                layers.load_state_dict(own)
                said.append(layers.eval()(states)[ids == token].view(1, -1))
            found.append(torch.stack(said).mean(0)[0, 0])
        return torch.stack(found)

    return EditReward(folder / "model.safetensors", base=base, **PIXELS), official


def _ranknet_head(width: int, seed: int) -> dict[str, Tensor]:
    """Tensors of the published head under the names of its layers."""
    shapes: dict[str, tuple[int, ...]] = {
        "0.weight": (1024, width),
        "3.weight": (16, 1024),
        "5.weight": (2, 16),
    }
    return weights(shapes | {"0.bias": (1024,), "3.bias": (16,), "5.bias": (2,)}, seed)


SOURCE = Image.fromarray(np.random.default_rng(8).integers(0, 256, (36, 30, 3), dtype=np.uint8))
"""What the images are edits of, for judges of edits."""


def mps(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """The evaluation's forward on the released cross model, whose code stands in the folder that MPS_CODE
    names; without it the frozen numbers.
    """
    from visalign.rewards.scorers.mps import OVERALL, Mps

    state = {f"model.{k}": v for k, v in weights(transformers_clip(**LARGE), 16).items()}
    state |= weights(mps_layers(16, 8, 2, layers=2), 17)
    (folder / "config.json").write_text(json.dumps(tiny_clip_config(VOCABULARY, 2)))
    file = folder / "MPS_overall_checkpoint.pth"
    save_pickled_module(state, file)

    def official() -> Tensor:
        if "MPS_CODE" not in os.environ:
            return torch.tensor(json.loads(FROZEN.read_text())["mps"])
        sys.path.insert(0, os.environ["MPS_CODE"])
        layers = import_module("trainer.models.cross_modeling").Cross_model(16, 2, 8, 2)
        layers.load_state_dict(
            {k.removeprefix("cross_model."): v for k, v in state.items() if k.startswith("cross_model.")}
        )
        torch.save({k[6:]: v for k, v in state.items() if k.startswith("model.")}, folder / "pytorch_model.bin")
        clip, found = _clip_model(folder), []
        tokens = _clip_tokens()

        def words(text: str) -> tuple[Tensor, Tensor]:
            ids = tokens([text], padding="max_length", truncation=True, max_length=CONTEXT, return_tensors="pt")
            told = clip.text_model(input_ids=ids["input_ids"])
            return clip.text_projection(told.last_hidden_state), clip.text_projection(told.pooler_output)

        for image, prompt in zip(images(), PROMPTS, strict=True):
            text, end = words(prompt)
            seen = clip.vision_model(pixel_values=_processed([image])).last_hidden_state
            seen = clip.visual_projection(seen)
            like = torch.einsum("bid,bjd->bji", text, words(OVERALL)[0]).max(1, keepdim=True)[0]
            mask = torch.where(like / like.max() > 0.3, 0, float("-inf")).repeat(1, seen.shape[1], 1)
            said = F.normalize(layers(seen, text, mask)[:, 0], dim=-1)
            found.append(clip.logit_scale.exp() * (F.normalize(end, dim=-1) @ said.T)[0, 0])
        return torch.stack(found)

    return Mps(file), official


def image_reward(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """ImageReward's own classes, by the Python that IMAGE_REWARD_PYTHON names on the copy of its code that
    IMAGE_REWARD_CODE names; without them the frozen numbers.
    """
    from visalign.rewards.scorers.image_reward import ImageReward

    signs = [*"abcdefghijklmnopqrstuvwxyz0123456789&;,.'日本", "two", "blue", "square", "##s"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *signs]
    words += [f"##{sign}" for sign in signs if len(sign) == 1]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    reading = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(reading))
    vocabulary, width = len(words) + 2, 32
    layout = published_layouts.image_reward(
        text=(width, 64, 2), vision=(24, 96, 2), vocabulary=vocabulary, context=40, patch=8, image=SIDE
    )
    torch.save(weights(layout, 18), folder / "ImageReward.pt")
    med = {"architectures": ["BertModel"], "hidden_size": width, "intermediate_size": 64}
    med |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 40}
    med |= {"vocab_size": vocabulary, "add_cross_attention": True, "layer_norm_eps": 1e-12}
    (folder / "med_config.json").write_text(json.dumps(med))
    sizes = {"img_size": SIDE, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "width": width}
    (folder / "sizes.json").write_text(json.dumps(sizes))
    (folder / "prompts.json").write_text(json.dumps(PROMPTS))
    (folder / "images").mkdir()
    for number, image in enumerate(images()):
        image.save(folder / f"images/{number}.png")

    def official() -> Tensor:
        if "IMAGE_REWARD_PYTHON" not in os.environ:
            return torch.tensor(json.loads(FROZEN.read_text())["image_reward"])
        script = Path(__file__).with_name("image_reward_official.py")
        asked = [os.environ["IMAGE_REWARD_PYTHON"], script, os.environ["IMAGE_REWARD_CODE"], folder]
        told = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
        return torch.tensor(json.loads(told.splitlines()[-1]))

    return ImageReward(folder, vision_heads=3), official


NUMBERS = 48
"""Answers that the random UnifiedReward can give, each one token."""


def unified_reward(folder: Path, *, mode: Mode) -> tuple[Any, Callable[[], Tensor]]:
    """The released script: Qwen2.5-VL's own `generate` after its processor, and the numbers of the text.

    Random weights write nothing that can be read. So the vocabulary has whole answers as tokens, which alone
    have rows in the output layer, and an answer's embedding is the direction of the end's row.
    """
    from visalign.rewards.chat.unified_reward import UnifiedReward
    from visalign.rewards.vlm.published import published_prompt

    draws = np.random.default_rng(20).integers(100, 501, (NUMBERS, 3)) / 100
    forms = {
        "aspects": "Alignment Score (1-5): {}\nCoherence Score (1-5): {}\nStyle Score (1-5): {}",
        "final": "cat (animal): 1\nFinal Score: {}",
    }
    spelled = [forms[mode].format(*row) for row in draws]
    points = draws.mean(1) if mode == "aspects" else draws[:, 0]
    _, processor = _seeing(folder, 34)
    processor.tokenizer.add_tokens(spelled)
    first, end = processor.tokenizer.convert_tokens_to_ids(spelled[0]), processor.tokenizer.eos_token_id
    model: Any = tiny_seeing_model("qwen2_5_vl", vocab_size=first + NUMBERS, max_position_embeddings=8192)
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = False
    model.lm_head = nn.Linear(32, first + NUMBERS, bias=False)
    state = weights({key: tuple(value.shape) for key, value in model.state_dict().items()}, 34)
    rows = weights({"answers": (NUMBERS, 32), "end": (32,)}, 20)
    state["lm_head.weight"] = torch.zeros(first + NUMBERS, 32)
    state["lm_head.weight"][first:] = rows["answers"]
    state["lm_head.weight"][end] = F.normalize(rows["end"], dim=0) * 1.2
    state["model.language_model.embed_tokens.weight"][first:] = 500 * rows["end"]
    model.load_state_dict(state)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)

    def official() -> Tensor:
        found = []
        for image, prompt in zip(images(), _SPELLED, strict=True):
            inputs = _asked(processor, published_prompt(f"unified_reward_{mode}").replace("{prompt}", prompt), image)
            ids = model.eval().generate(**inputs, max_new_tokens=512)[:, inputs["input_ids"].shape[1] :]
            text = processor.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            found.append(points[spelled.index(text[0])])
        return torch.tensor(found)

    return UnifiedReward(model=str(folder), mode=mode, **PIXELS), official


_SPELLED = ["a red circle", "two squares", "a cat on a mat", "x"]
"""Prompts in letters of the tiny tokenizer."""
JUDGES = {
    **{"pick_score": pick_score, "ict": ict, "hp": hp, "laion_aesthetic": laion_aesthetic, "hps_v2": hps_v2},
    **{
        "vqa_score": vqa_score, "soft_tifa": soft_tifa, "hpsv3": hpsv3, "edit_reward": edit_reward,
        "video_align": video_align, "mps": mps, "image_reward": image_reward,
        "unified_reward": partial(unified_reward, mode="aspects"),
        "unified_reward_final": partial(unified_reward, mode="final"),
    },
}  # fmt: skip
"""Name -> (our judge on a checkpoint that it makes in a folder, the official scores of it)."""


def prompts_of(name: str) -> list[str]:
    """What a judge is asked with."""
    spelled = ("vqa_score", "soft_tifa", "hpsv3", "edit_reward", "video_align")
    spelled += ("unified_reward", "unified_reward_final")
    return _SPELLED if name in spelled else PROMPTS


def main(names: Sequence[str]) -> None:
    """Write what the official recipes give, of the judges named or of all."""
    found = json.loads(FROZEN.read_text())
    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        for name in names or JUDGES:
            folder = Path(place) / name
            folder.mkdir()
            found[name] = JUDGES[name](folder)[1]().double().tolist()
    FROZEN.parent.mkdir(exist_ok=True)
    FROZEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

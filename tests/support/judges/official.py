# SPDX-License-Identifier: Apache-2.0
"""Judges on random checkpoints in their published layouts, and their scores by the published recipes.

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

from tests.support.judges.published_vlm import COLUMNS, FROZEN, edit_reward, hpsv3, video_align, vlm_inputs
from tests.support.models import published_layouts
from tests.support.models.clip import CONTEXT, SIZES, tiny_clip_config
from tests.support.models.published_layouts import (
    head,
    mps_layers,
    open_clip_vit,
    random_state,
    save_pickled_module,
    transformers_clip,
)
from tests.support.models.vision_language import TEMPLATE, tiny_seeing_model, tiny_seeing_tokenizer
from visalign.rewards.chat.unified_reward import Mode

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
    """Noise of different sizes; numpy's generator is the same everywhere."""
    random = np.random.default_rng(7)
    return [Image.fromarray(random.integers(0, 256, (*shape, 3), dtype=np.uint8)) for shape in SHAPES]


def _clip_folder(folder: Path, seed: int, *, config: bool = True) -> Path:
    folder.mkdir(parents=True)
    torch.save(random_state(transformers_clip(**LARGE), seed), folder / "pytorch_model.bin")
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
    vocabulary = {names.get(word, word): index for word, index in words.encoder.items()}
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


def _layers(widths: Sequence[int], indices: Sequence[int], state: dict[str, Tensor]) -> nn.Module:
    """The published five-layer head without nonlinearity, in evaluation mode."""
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    for layer, index in zip(layers, indices, strict=True):
        layer.load_state_dict({kind: state[f"layers.{index}.{kind}"] for kind in ("weight", "bias")})
    return nn.Sequential(*layers)


WIDTHS, PLACES = (16, 24, 12, 8, 4, 1), (0, 2, 4, 6, 7)


def pick_score(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """exp(logit_scale) · cos of CLIPProcessor's pixels and tokens."""
    from visalign.rewards.scorers.pick_score import PickScore

    path = _clip_folder(folder / "pick", 1)

    def official() -> Tensor:
        model = _clip_model(path)
        tokens = _clip_tokens()(PROMPTS, padding=True, truncation=True, max_length=CONTEXT, return_tensors="pt")
        return model.logit_scale.exp() * _cosine(model, _processed(images()), tokens)

    return PickScore(path), official


def ict(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """The cosine alone; texts by open_clip's tokenizer."""
    from visalign.rewards.scorers.ict import Ict

    path = _clip_folder(folder / "ict", 2)

    def official() -> Tensor:
        from open_clip import SimpleTokenizer

        ids = SimpleTokenizer(context_length=CONTEXT)(PROMPTS)
        return _cosine(_clip_model(path), _processed(images()), {"input_ids": ids})

    return Ict(path), official


def hp(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """The projected embedding, not normalised, through the head."""
    from visalign.rewards.scorers.hp import Hp

    path = _clip_folder(folder / "hp" / "hp_backbone", 3)
    file = folder / "hp" / "hp_scorer" / "mlp_pytorch_model.bin"
    file.parent.mkdir()
    torch.save(random_state(head(16, WIDTHS[1:]), 4), file)

    def official() -> Tensor:
        layers = _layers(WIDTHS, PLACES, torch.load(file, weights_only=True))
        return layers(_clip_model(path).get_image_features(_processed(images())).pooler_output)[:, 0]

    return Hp(folder / "hp"), official


def laion_aesthetic(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """OpenAI's transform, the normalised embedding, the head."""
    from visalign.rewards.scorers.laion_aesthetic import LaionAesthetic

    path = _clip_folder(folder / "laion", 5)
    torch.save(random_state(head(16, WIDTHS[1:]), 6), path / "head.pth")

    def official() -> Tensor:
        layers = _layers(WIDTHS, PLACES, torch.load(path / "head.pth", weights_only=True))
        embedding = _clip_model(path).get_image_features(_torchvision(images())).pooler_output
        return layers(F.normalize(embedding, dim=-1))[:, 0]

    return LaionAesthetic(path, head=path / "head.pth"), official


def hps_v2(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """The transform, model and tokenizer of hpsv2 1.2.0, whose wheel is unpacked in HPSV2_CODE (with open_clip's
    vocabulary, which the wheel lacks); without it the frozen numbers.
    """
    from visalign.rewards.scorers.hps_v2 import FILES, HpsV2

    sizes: dict[str, Any] = {"text": (32, 128, 1), "vision": (32, 128, 1), "embed": 16, "context": 16}
    sizes |= {"vocabulary": VOCABULARY, "patch": 8, "image": SIDE}
    file = folder / FILES["2.1"]
    torch.save({"epoch": 1, "state_dict": random_state(open_clip_vit(**sizes), 7)}, file)

    def official() -> Tensor:
        if "HPSV2_CODE" not in os.environ:
            return torch.tensor(json.loads(FROZEN.read_text())["hps_v2"])
        for name in ("hpsv2", "hpsv2.src", "hpsv2.src.open_clip"):  # their `__init__` files fetch weights
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
        image = model.encode_image(torch.stack([read(picture) for picture in images()]), normalize=True)
        return (image * model.encode_text(ids, normalize=True)).sum(-1)

    return HpsV2(file, architecture=OPEN_CLIP), official


def _seeing(folder: Path, seed: int, **changes: Any) -> tuple[Any, Any]:
    """A tiny Qwen2-VL with numpy's weights, and its processor with the library's PIL image processor."""
    from transformers import Qwen2VLImageProcessorPil, Qwen2VLProcessor, Qwen2VLVideoProcessor

    model = tiny_seeing_model(max_position_embeddings=8192, **changes)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items() if key != "lm_head.weight"}
    model.load_state_dict(random_state(shapes, seed), strict=False)
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
    """The processor's inputs. PIL resizes an image first, as qwen-vl-utils does it: the width before the height,
    as in Pillow up to 12. Pillow 13 takes the height first where that is cheaper.
    """
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    resized, bicubic = [], Image.Resampling.BICUBIC
    for image in images:
        height, width = smart_resize(image.height, image.width, factor=8, **PIXELS)
        resized.append(image.resize((width, image.height), bicubic).resize((width, height), bicubic))
    content = [*({"type": "image"} for _ in resized), {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    written = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return processor(text=[written], images=resized, return_tensors="pt")


def vqa_score(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """The softmax over the whole vocabulary at the next word, one image at a time; here the word is "y"."""
    from visalign.rewards.questions.vqa import SHOWS, VqaScore

    model, processor = _seeing(folder / "vlm", 8)
    text = SHOWS.messages[0]["content"][1]["text"]

    def official() -> Tensor:
        yes, probabilities = processor.tokenizer.convert_tokens_to_ids("y"), []
        for image, prompt in zip(images(), _SPELLED, strict=True):
            inputs = _asked(processor, text.replace("{prompt}", prompt), image)
            probabilities.append(model(**inputs).logits[0, -1].double().softmax(-1)[yes])
        return torch.stack(probabilities)

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
        scores = []
        for image in images():
            log = torch.zeros((), dtype=torch.float64)
            for question, answer in QUESTIONS:
                inputs = _asked(processor, f"{question} Answer in one word.", image)
                prob = model(**inputs).logits[0, -1].double().softmax(-1)
                forms = counted.get(answer, ("Yes", "yes", " yes", " Yes"))
                first = [processor.tokenizer.encode(form)[0] for form in forms]
                log += prob[first].sum().log()
            scores.append((log / len(QUESTIONS)).exp())
        return torch.stack(scores)

    return SoftTifa(folder / "vlm", spellings="published"), official


def mps(folder: Path) -> tuple[Any, Callable[[], Tensor]]:
    """The evaluation's forward on the released cross model, whose code stands in the folder that MPS_CODE
    names; without it the frozen numbers.
    """
    from visalign.rewards.scorers.mps import OVERALL, Mps

    state = {f"model.{k}": v for k, v in random_state(transformers_clip(**LARGE), 16).items()}
    state |= random_state(mps_layers(16, 8, 2, layers=2), 17)
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
        clip, scores = _clip_model(folder), []
        tokens = _clip_tokens()

        def words(text: str) -> tuple[Tensor, Tensor]:
            ids = tokens([text], padding="max_length", truncation=True, max_length=CONTEXT, return_tensors="pt")
            output = clip.text_model(input_ids=ids["input_ids"])
            return clip.text_projection(output.last_hidden_state), clip.text_projection(output.pooler_output)

        for image, prompt in zip(images(), PROMPTS, strict=True):
            text, end = words(prompt)
            features = clip.vision_model(pixel_values=_processed([image])).last_hidden_state
            features = clip.visual_projection(features)
            like = torch.einsum("bid,bjd->bji", text, words(OVERALL)[0]).max(1, keepdim=True)[0]
            mask = torch.where(like / like.max() > 0.3, 0, float("-inf")).repeat(1, features.shape[1], 1)
            fused = F.normalize(layers(features, text, mask)[:, 0], dim=-1)
            scores.append(clip.logit_scale.exp() * (F.normalize(end, dim=-1) @ fused.T)[0, 0])
        return torch.stack(scores)

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
    torch.save(random_state(layout, 18), folder / "ImageReward.pt")
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
        command = [os.environ["IMAGE_REWARD_PYTHON"], script, os.environ["IMAGE_REWARD_CODE"], folder]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return torch.tensor(json.loads(output.splitlines()[-1]))

    return ImageReward(folder, vision_heads=3), official


NUMBERS = 48
"""Answers that the random UnifiedReward can give, each one token."""


def unified_reward(folder: Path, *, mode: Mode) -> tuple[Any, Callable[[], Tensor]]:
    """The released script: Qwen2.5-VL's own `generate` after its processor, and the numbers of the text.

    Random weights write nothing that can be read. So whole answers are tokens, the only ones with rows in the
    output layer; an answer's embedding is the direction of the end's row.
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
    state = random_state({key: tuple(value.shape) for key, value in model.state_dict().items()}, 34)
    rows = random_state({"answers": (NUMBERS, 32), "end": (32,)}, 20)
    state["lm_head.weight"] = torch.zeros(first + NUMBERS, 32)
    state["lm_head.weight"][first:] = rows["answers"]
    state["lm_head.weight"][end] = F.normalize(rows["end"], dim=0) * 1.2
    state["model.language_model.embed_tokens.weight"][first:] = 500 * rows["end"]
    model.load_state_dict(state)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)

    def official() -> Tensor:
        scores = []
        for image, prompt in zip(images(), _SPELLED, strict=True):
            inputs = _asked(processor, published_prompt(f"unified_reward_{mode}").replace("{prompt}", prompt), image)
            ids = model.eval().generate(**inputs, max_new_tokens=512)[:, inputs["input_ids"].shape[1] :]
            text = processor.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            scores.append(points[spelled.index(text[0])])
        return torch.tensor(scores)

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


def inputs_of(name: str) -> tuple[list[Any], list[str], list[dict[str, Any]]]:
    """Images or clips, prompts and records for a judge."""
    if name in COLUMNS:
        return vlm_inputs(name)
    spelled = name in ("vqa_score", "soft_tifa", "unified_reward", "unified_reward_final")
    return images(), _SPELLED if spelled else PROMPTS, [{"vqa_list": QUESTIONS}] * 4


def main(names: Sequence[str]) -> None:
    """Write the official recipes' scores, of the judges named or of all."""
    frozen = json.loads(FROZEN.read_text())
    with tempfile.TemporaryDirectory() as root, torch.no_grad():
        for name in names or JUDGES:
            folder = Path(root) / name
            folder.mkdir()
            frozen[name] = JUDGES[name](folder)[1]().double().tolist()
    FROZEN.parent.mkdir(exist_ok=True)
    FROZEN.write_text(json.dumps(frozen, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""From images and prompts to features and cosines: read, deduplicated, batched, cached, or with gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from visalign.interfaces import Metadata, RewardCapabilities, Scores
from visalign.memory import BatchSize
from visalign.rewards.base.contract import (
    Request,
    check_choices,
    check_counts,
    make_scores,
    prompt_problem,
    read_request,
    scatter,
)
from visalign.rewards.base.identity import Identity
from visalign.rewards.catalogue import check_options
from visalign.rewards.weights.checkpoint_files import dtype_of, precision_on
from visalign.rewards.weights.feature_cache import FeatureCache, encode_once, image_key, text_key
from visalign.rewards.weights.fingerprints import WeightPrint, evaluation_mode, weight_state
from visalign.rewards.weights.hub import revision_of
from visalign.rewards.weights.resize import SETTINGS as PREPROCESSING
from visalign.rewards.weights.resize import (
    batch_levels,
    fitting_images,
    model_pixels,
    normalised,
    target_shape,
)

from .encoder import ClipEncoder, ClipParts
from .loading import load_clip

PROMPTS = 4096  # Prompts whose notes are kept
IMAGE_CACHE_BYTES = 64 << 20
"""Default limit of stored image features: 16,384 embeddings of 1024 numbers."""


class ClipTowers:
    """A contrastive model as the judges use it; loaded when it is first needed.

    Equal images and equal prompts are encoded once per call, and not again in later calls while their features are in
    the cache. Images on a GPU are encoded each time, since to compare them takes longer. The cache forgets all when a
    weight of the model changes.

    Args:
        model: what `load_clip` takes, or a model that is loaded already.
        precision: of the towers: "fp32", "bf16", "fp16", or "auto": "bf16" on a GPU that multiplies it, else "fp32".
            Cosines are float32 always.
        batch_size: images or prompts in one forward pass; "auto" measures how many fit a GPU, and is 64 elsewhere.
        cache_bytes: limit of the stored features of images, and again of texts; 0 stores nothing.
        load: makes the model of a precision instead of `load_clip`.
        preprocess: replaces entries of the model's own preprocessing; `weights.resize.SETTINGS` lists them.
    """

    def __init__(
        self,
        model: str | Path | ClipParts,
        *,
        device: str | torch.device = "cpu",
        precision: str = "auto",
        batch_size: int | Literal["auto"] = 64,
        cache_bytes: int = IMAGE_CACHE_BYTES,
        load: Callable[[str], ClipParts] | None = None,
        preprocess: Mapping[str, Any] | None = None,
    ) -> None:
        check_counts("ClipTowers", batch_size=None if batch_size == "auto" else batch_size)
        for key in preprocess or {}:
            check_choices("ClipTowers", preprocess=(key, PREPROCESSING))
        self.source = str(model.folder or "") if isinstance(model, ClipParts) else str(model)
        self.precision = precision_on(device, precision)
        dtype_of(self.precision)  # refuses unknown ones before anything is loaded
        self.batch = BatchSize(batch_size, self._encode_blank, default=64)
        self.images = FeatureCache(cache_bytes)
        self.texts = FeatureCache(cache_bytes)
        self._changes = dict(preprocess or {})
        self._weights_seen: int | None = None
        self._notes: dict[str, tuple[str, str | None]] = {}
        if isinstance(model, ClipParts):
            self._load: Callable[[str], ClipParts] = lambda precision: model
            _ = self.parts
        else:
            self._load = load or (lambda precision: load_clip(model, device=device, precision=precision))

    @cached_property
    def parts(self) -> ClipParts:
        """Model with its tokenizer and preprocessing."""
        with torch.inference_mode(False):  # weights that were made inside it could not be told apart
            parts = self._load(self.precision)
            self._print = WeightPrint(parts.encoder, parts.weights)  # its weights are now those of the files
            return parts

    @property
    def batch_size(self) -> int:
        return self.batch.read()

    def _encode_blank(self, count: int) -> Tensor:
        with self._judging():
            blank = torch.zeros(count, 3, *target_shape(self.preprocess), device=self.encoder.device)
            return self.encoder.encode_image(blank)

    @cached_property
    def preprocess(self) -> dict[str, Any]:
        """All that happens between pixels and the model, as `model_levels` reads it."""
        return {**self.parts.preprocess, **self._changes}

    @property
    def encoder(self) -> ClipEncoder:
        return self.parts.encoder

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the weight files, "" without a folder; of the memory once a weight was changed."""
        _ = self.parts
        return str(self._print)

    def identity(self, judge: str, *, head: str = "", **options: Any) -> Identity:
        """Make the identity of a judge on these towers; `head` is the fingerprint of its other weights."""
        return Identity(
            judge=judge,
            model=self.source,
            weights=f"{self.fingerprint} {head}".rstrip(),
            revision=revision_of(self.parts.folder),
            preprocessing=self.preprocess,
            dtype=self.precision,
            options=options,
        )

    def image_features(self, request: Request, reasons: list[str | None]) -> tuple[list[int], Tensor]:
        """Return (rows, embeddings [n, D] float32 on the CPU, not normalised) of the rows without a reason.

        Notes a reason where an image is refused.
        """
        rows, images = fitting_images(request, reasons, self.preprocess)
        if not rows:
            return rows, torch.zeros(0)

        def encode(positions: list[int]) -> Tensor:
            levels = batch_levels([images[i] for i in positions], self.preprocess, self.encoder.device)
            return self.encoder.encode_image(normalised(levels / 255, self.preprocess))

        with self._judging():
            if images[0].is_cuda:  # to hash an image on the host takes longer than to encode it
                chunks = torch.arange(len(images)).split(self.batch_size)
                return rows, torch.cat([encode(chunk.tolist()) for chunk in chunks]).cpu()
            keys = [image_key(image) for image in images]
            features = encode_once(keys, lambda k: encode(k).cpu(), cache=self.images, batch_size=self.batch_size)
            return rows, features

    def text_features(self, prompts: Sequence[str]) -> Tensor:
        """Compute embeddings [N, D] float32 on the CPU, not normalised, of N prompts."""

        def encode(positions: list[int]) -> Tensor:
            return self.encoder.encode_text(self.parts.tokenizer([prompts[i] for i in positions])).cpu()

        with self._judging():
            keys = [text_key(prompt) for prompt in prompts]
            return encode_once(keys, encode, cache=self.texts, batch_size=self.batch_size)

    def image_features_with_gradient(self, images: Tensor) -> Tensor:
        """Compute `image_features` of images [B, 3, H, W], differentiable in their pixels and the weights."""
        return self.encoder.encode_image(normalised(model_pixels(images, self.preprocess), self.preprocess))

    def pixels(self, images: Sequence[Tensor]) -> Tensor:
        """Preprocess N images [3, H, W] in [0, 1] to [N, 3, h, w], normalised, float32."""
        return normalised(batch_levels(images, self.preprocess, images[0].device) / 255, self.preprocess)

    def tokens(self, prompts: Sequence[str]) -> Tensor:
        """Tokenize N prompts to ids [N, L]; too long ones are cut before the end token."""
        return self.parts.tokenizer(list(prompts))

    def read_prompts(self, prompts: Sequence[str], reasons: list[str | None]) -> list[str]:
        """Note which prompts are cut; mark those that are empty, no text, or hold the model's own marks."""
        if len(self._notes) > PROMPTS:
            self._notes = {}  # another thread may still read the old ones
        notes = self._notes
        new = {prompt: ("", prompt_problem(prompt)) for prompt in prompts if prompt not in notes}
        sound = [prompt for prompt, (_, problem) in new.items() if problem is None]
        end = self.parts.end
        if end is not None and sound:
            tokenizer = self.parts.tokenizer
            length = tokenizer(sound[:1]).shape[1]
            full = tokenizer(sound, context_length=4 * length)
            # A word behind the prompt tells an end token of the prompt from padding, which may look like it.
            longer = tokenizer([f"{prompt} a" for prompt in sound], context_length=4 * length)
            for number, prompt in enumerate(sound):
                ids = longer[number].tolist()
                behind = ids[ids.index(end) + 1 :] if end in ids else []
                spelled = "end" if len(set(behind)) > 1 else "start" if self._start in ids[1:] else ""
                if spelled:
                    reason = f"the prompt spells out the model's {spelled} token; remove it from the text"
                    new[prompt] = ("", reason)
                elif int((full[number] == end).int().argmax()) > length - 1:
                    new[prompt] = (f"the prompt was cut to {length} tokens", None)
        notes |= new  # complete: an error above leaves no half of a note
        for row, prompt in enumerate(prompts):
            reasons[row] = reasons[row] or notes[prompt][1]
        return [notes[prompt][0] for prompt in prompts]

    @cached_property
    def _start(self) -> int | None:
        """Token that every text begins with, if there is one."""
        first = set(self.parts.tokenizer(["a", "two circles", "!"])[:, 0].tolist())
        return first.pop() if len(first) == 1 else None

    @contextmanager
    def _judging(self) -> Iterator[None]:
        """Enter evaluation mode without gradients; empty the caches if a weight changed since they filled."""
        encoder = self.encoder
        state = weight_state(encoder)
        if state != self._weights_seen:
            self.images.clear()
            self.texts.clear()
            self._weights_seen = state
        # Features are kept, and those of inference mode could not meet a gradient later.
        with evaluation_mode(encoder), torch.inference_mode(False), torch.no_grad():
            yield


def cosine(left: Tensor, right: Tensor) -> Tensor:
    """Compute [N] float32 cosines of the rows of two tensors [N, D]."""
    product = F.normalize(left.float(), dim=-1) * F.normalize(right.float(), dim=-1)
    # A product of two normalised rows may end a rounding error above 1.
    return product.sum(-1).clamp(-1, 1)


class ClipJudge:
    """Judge on a contrastive model whose score is the cosine of image and prompt, or a function of it.

    A prompt longer than the model's context is cut before the end token; the sample's `text` says so, and its
    part "cut" is 1, which is 0 elsewhere. One that spells out the end token in its middle is invalid.

    Args:
        model: where nothing else is said a folder of open_clip or transformers, a packaged name, a hub id of
            open_clip, "transformers:organisation/model", or "architecture:tag".
        **towers: precision, batch_size, cache_bytes, ... of `ClipTowers`.
    """

    name: str
    unit = "cosine"
    range = (-1.0, 1.0)
    higher_is_better = True
    capabilities = RewardCapabilities(takes_gpu_images=True)

    def __init__(self, model: str | Path, *, device: str | torch.device = "cpu", **towers: Any) -> None:
        check_options(self.name, ClipTowers, {"model": model, "device": device, **towers})
        self.towers = ClipTowers(model, device=device, **towers)

    def scaled(self, cosine: Tensor) -> Tensor | None:
        """Return the score of cosines [n], which are a part then; None where the cosine is the score."""
        return None

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score per (image, prompt); metadata is not looked at."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        notes = self.towers.read_prompts(request.prompts, reasons)
        rows, image = self.towers.image_features(request, reasons)
        scores = image
        if rows:
            scores = cosine(image, self.towers.text_features([request.prompts[row] for row in rows]))
        parts = {"cut": torch.tensor([float(bool(note)) for note in notes])}
        value = self.scaled(scores)
        if value is not None:
            parts["cosine"], scores = scatter(scores, rows, len(request)), value
        return make_scores(scatter(scores, rows, len(request)), reasons, self.unit, parts=parts, text=notes)

    def score_with_gradient(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Score images [B, 3, H, W] in [0, 1], differentiably in the pixels: [B] float32."""
        image = self.towers.image_features_with_gradient(images)
        cosines = cosine(image, self.towers.text_features(prompts).to(image.device))
        value = self.scaled(cosines)
        return cosines if value is None else value

    @property
    def identity(self) -> Identity:
        return self.towers.identity(self.name)


class ClipHeadJudge(ClipJudge):
    """Judge of images alone by a head on their embeddings: subclasses define `rate`."""

    capabilities = RewardCapabilities(needs_prompt=False, takes_gpu_images=True)
    rate: Callable[[Tensor], Tensor]
    """Map embeddings [n, D] float32 on the CPU, not normalised, to scores [n], differentiably."""

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, features = self.towers.image_features(request, reasons)
        values = self.rate(features) if rows else features
        return make_scores(scatter(values, rows, len(request)), reasons, self.unit)

    def score_with_gradient(self, images: Tensor, prompts: Sequence[str] | None = None) -> Tensor:
        features = self.towers.image_features_with_gradient(images)
        return self.rate(features.cpu()).to(features.device)

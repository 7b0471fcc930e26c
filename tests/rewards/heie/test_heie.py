# SPDX-License-Identifier: Apache-2.0
"""HEIE's form: views whole and in tiles, fused maps, heads that learn where the shapes world is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from assets.build.heatmaps import heatmap_quality
from assets.build.heie import HeieData, pooled, train_heads
from assets.build.wrong_regions import find_wrong_objects, wrong_pixels
from tests.support.judges.vision_language import PROMPTS, ask_text, given, images, tiny_engine, why
from visalign.data.shapes.prompts import parse_prompt
from visalign.data.shapes.scenes import Scene, SceneObject
from visalign.evaluation.statistics.selective import auroc
from visalign.rewards import RewardError, check_reward
from visalign.rewards.heie.heads import (
    HeieHeads,
    HeieSettings,
    View,
    compute_views,
    cut_tiles,
    draw_maps,
    splice_tiles,
)
from visalign.rewards.heie.judge import Heie
from visalign.rewards.vlm.engine import Query

ASK = ask_text("wrong {prompt}?")
SMALL = HeieSettings(hidden=32, features=32, width=32, cells=4)


def heads(settings: HeieSettings = SMALL, seed: int = 0) -> HeieHeads:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return HeieHeads(settings).eval()


def asks(pictures, prompts=PROMPTS):
    return [Query(images=[image], prompt=prompt) for image, prompt in zip(pictures, prompts, strict=False)]


def scene(*objects, prompt):
    parts = [SceneObject(shape=shape, color=color, x=x, y=y, radius=9.3) for shape, color, x, y in objects]
    return Scene(
        record=parse_prompt(prompt), objects=tuple(parts), background=(90, 90, 90), style="flat", texture_seed=0
    )


RED = ("circle", "red", 15, 15)
BOTH = "a red circle and a blue square"


@pytest.mark.parametrize(
    ("prompt", "objects", "blame"),
    [
        (BOTH, [("square", "blue", 45, 45)], [False, False]),
        (BOTH, [("square", "green", 45, 45)], [False, True]),
        ("two red circles", [("circle", "red", 50, 50), ("circle", "red", 12, 50)], [True, True, True]),
        ("a red circle right of a blue square", [("square", "blue", 50, 15)], [True, True]),
        ("a red circle", [("cross", "white", 45, 45)], [False, True]),
    ],
)
def test_objects_that_break_the_prompt_are_found(prompt, objects, blame):
    example = scene(RED, *objects, prompt=prompt)
    assert find_wrong_objects(example, example.record) == blame


def test_wrong_pixels_cover_the_object_that_is_to_blame():
    example = scene(("circle", "red", 15, 15), ("square", "green", 45, 45), prompt="a red circle and a blue square")
    wrong = wrong_pixels(example, example.record)
    assert wrong.shape == (64, 64) and wrong.dtype == np.float32
    assert wrong.sum() == pytest.approx((2 * 9.3) ** 2, rel=0.05)
    assert wrong[45, 45] == 1 and wrong[15, 15] == 0
    assert wrong_pixels(replace(example, objects=example.objects[:1]), example.record).sum() == 0  # one is missing


def test_tiles_are_cut_enlarged_and_spliced():
    image = torch.arange(16.0).view(1, 4, 4).expand(3, -1, -1) / 16
    tiles = cut_tiles(image, 2)
    assert [tile.shape for tile in tiles] == [(3, 4, 4)] * 4
    assert float(tiles[0].mean()) < float(tiles[1].mean()) < float(tiles[2].mean()) < float(tiles[3].mean())
    assert cut_tiles(image, 1) == [] and len(cut_tiles(image[:, :1], 2)) == 4
    heatmap = torch.arange(24.0).view(1, 4, 6)
    parts = torch.stack([heatmap[0, r : r + 2, c : c + 3] for r in (0, 2) for c in (0, 3)])[None]
    assert torch.equal(splice_tiles(parts, 2, 2), heatmap)


def test_fusion_weights_the_surer_map_more():
    class Fixed:
        settings = SMALL

        def mapper(self, hidden, context, features, grid):
            cold = torch.full((len(hidden), 4, 4), -20.0)
            cold[0] = 20.0  # the whole image is wrong everywhere, its tiles nowhere
            std = torch.full_like(cold, 1.0)
            std[0] = 0.1
            return cold, std.log()

        def scorer(self, hidden, heat):
            return heat.mean((1, 2))

    view = View(torch.zeros(5, 32), torch.zeros(5, 4, 32), (2, 2))
    maps = draw_maps(Fixed(), [view])  # type: ignore[arg-type]  # the two calls are all that is used
    weight = np.exp(-0.1) / (np.exp(-0.1) + np.exp(-1.0))
    assert maps.heat.shape == (1, 8, 8)
    assert torch.allclose(maps.heat, torch.full((1, 8, 8), weight, dtype=maps.heat.dtype), atol=1e-6)
    assert torch.allclose(maps.std, torch.full((1, 8, 8), weight * 0.1 + (1 - weight)).to(maps.std), atol=1e-6)


def test_views_hold_the_models_states_and_features():
    engine = tiny_engine()
    pictures = images(2, size=32)
    views, reasons = compute_views(engine, ASK, asks(pictures), 2)
    assert reasons == [None, None] and given(views[0]).grid == (4, 4)
    assert given(views[0]).hidden.shape == (5, 32) and given(views[0]).features.shape == (5, 16, 32)
    assert torch.allclose(given(views[1]).hidden[0], engine.hidden(ASK, asks(pictures)).states[1], atol=1e-5)
    untiled, _ = compute_views(engine, ASK, asks(pictures), 1)
    assert torch.equal(given(untiled[0]).features[0], given(views[0]).features[0])


@pytest.mark.parametrize("tiles", [1, 2])
def test_the_contract_holds(tiles):
    judge = Heie(tiny_engine(), heads=heads(), tiles=tiles, template=ASK, size=16)
    check_reward(judge, images=images(4, size=32), prompts=PROMPTS)


def test_an_explanation_has_maps_text_and_masked_rows():
    judge = Heie(tiny_engine(max_tokens=150), heads=heads(), template=ASK, size=20, max_new_tokens=4)
    report = judge.explain([*images(2, size=32), "no.png", *images(1, size=24)], ["a", "b" * 300, "c", "d"])
    assert report.heatmap.shape == report.heatmap_std.shape == (4, 20, 20)
    assert report.scores.valid.tolist() == [True, False, False, True]
    assert report.heatmap[[0, 3]].isfinite().all() and report.heatmap[[1, 2]].isnan().all()
    assert (report.heatmap[0] >= 0).all() and (report.heatmap[0] <= 1).all() and (report.heatmap_std[0] > 0).all()
    assert given(report.text)[0] and given(report.text)[1] == given(report.text)[2] == ""
    assert "reads 150" in why(report.scores, 1) and "no such image" in why(report.scores, 2)
    scores = judge.score(images(1, size=32), ["a"])
    assert scores.value[0] == pytest.approx(report.scores.value[0].item(), abs=1e-6) and scores.text is None
    assert scores.parts["max_heat"][0] == pytest.approx(report.heatmap[0].max().item(), abs=1e-6)


def test_heads_survive_a_round_trip_through_their_file(tmp_path):
    original = heads()
    original.save(tmp_path / "h.safetensors")
    read = HeieHeads.load(tmp_path / "h.safetensors")
    assert read.settings == SMALL
    assert (tmp_path / "h.safetensors").stat().st_mode & 0o777 == 0o644
    engine = tiny_engine()
    scores = [Heie(engine, heads=h, template=ASK).score(images(2), PROMPTS[:2]) for h in (original, read)]
    assert torch.equal(scores[0].value, scores[1].value)
    with pytest.raises(FileNotFoundError, match="no HEIE heads"):
        HeieHeads.load(tmp_path / "none")
    (tmp_path / "bad").write_bytes(b"no")
    with pytest.raises(RewardError, match=r"is no file of HEIE heads, visalign-heie-2: .*no whole safetensors file"):
        HeieHeads.load(tmp_path / "bad")
    from safetensors.torch import save_file

    state = original.state_dict()
    save_file(state, tmp_path / "other")
    with pytest.raises(RewardError, match=r"is no file of HEIE heads, .*format"):
        HeieHeads.load(tmp_path / "other")
    from safetensors import safe_open

    with safe_open(tmp_path / "h.safetensors", "pt") as opened:
        metadata = opened.metadata()
    state.pop("mapper.token.weight")
    save_file({**state, "extra": torch.zeros(1)}, tmp_path / "cut", metadata=metadata)
    with pytest.raises(RewardError, match=r"missing: mapper\.token\.weight; unexpected: extra"):
        HeieHeads.load(tmp_path / "cut")


def test_wrong_options_are_refused():
    engine = tiny_engine()
    with pytest.raises(ValueError, match="tiles is 0"):
        Heie(engine, heads=heads(), tiles=0)
    with pytest.raises(ValueError, match="read 8 and 32 numbers, this model has 32"):
        Heie(engine, heads=heads(replace(SMALL, hidden=8)))
    with pytest.raises(FileNotFoundError, match=r"shapes-vlm.*take 'shapes-heie'"):
        Heie("shapes-vlm")
    with pytest.raises(RewardError, match="bring no heads; give heads="):
        Heie(engine)


def test_a_model_whose_features_have_no_grid_is_refused():
    judge = Heie(tiny_engine("internvl"), heads=heads(), template=ASK)
    with pytest.raises(RewardError, match="needs features on a grid"):
        judge.score(images(1), ["a"])


def test_identity_tells_heads_tiles_and_cells():
    engine = tiny_engine()
    judges = [
        Heie(engine, heads=heads(), template=ASK),
        Heie(engine, heads=heads(seed=1), template=ASK),
        Heie(engine, heads=heads(), template=ASK, tiles=1),
        Heie(engine, heads=heads(), template=ASK, size=16),  # of whose cells the parts are
    ]
    assert len({judge.identity.digest for judge in judges}) == 4
    assert Heie(engine, heads=heads(), template=ASK).identity.digest == judges[0].identity.digest


def patched(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Grey images, half of them with a bright patch that is wrong: (images, heat, score)."""
    rng = np.random.default_rng(seed)
    pixels = torch.full((count, 3, 32, 32), 0.4) + 0.05 * torch.from_numpy(rng.normal(size=(count, 1, 32, 32))).float()
    heat = torch.zeros(count, 32, 32)
    score = torch.ones(count)
    for row in range(0, count, 2):
        y, x = rng.integers(0, 24, size=2)
        pixels[row, :, y : y + 8, x : x + 8] += 0.5
        heat[row, y : y + 8, x : x + 8] = 1.0
        score[row] = 0.0
    return pixels.clamp(0, 1), heat, score


def test_heads_learn_where_and_whether_an_image_is_wrong():
    engine = tiny_engine()
    train, heldout = patched(200, 0), patched(60, 1)

    def data_of(pictures: torch.Tensor, heat: torch.Tensor, score: torch.Tensor) -> HeieData:
        views, _ = compute_views(engine, ASK, asks(pictures, ["a"] * len(pictures)), 1)
        return HeieData(views=[given(view) for view in views], heat=heat, score=score)

    data, test = data_of(*train), data_of(*heldout)
    model = heads()

    def measured():
        with torch.no_grad():
            maps = draw_maps(model, test.views)
        return maps, heatmap_quality(maps.heat, pooled(test.heat, maps.heat))

    before = measured()[1]
    losses = train_heads(model, data, steps=150, batch=32)
    maps, after = measured()
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.5
    assert before.auc < 0.75 and after.auc > 0.92
    assert after.correlation > 0.6 and auroc(maps.score, test.score > 0.5) > 0.95
    assert maps.std.mean().item() == pytest.approx(2**0.5 * after.error, rel=0.7)

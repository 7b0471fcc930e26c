# SPDX-License-Identifier: Apache-2.0
"""`visalign sample`: draws by prompt and seed, searches, the page, what is refused; the demo draws the same."""

import gc
import json
import math
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image, ImageSequence
from typer.testing import CliRunner

from tests.support.models.pipelines import tiny_folder, tiny_pipeline
from tests.support.models.sd3 import build_tiny_sd3, tiny_sd3_pipeline
from tests.support.training.images import Brightness, ToyPolicy
from visalign.adapters import LoraSettings, load_policy
from visalign.adapters.pipeline.policy import PipelinePolicy
from visalign.evaluation.pages.base import plain
from visalign.evaluation.pages.sample_page import sample_page
from visalign.flow.rollout import rollout
from visalign.flow.search import ZeroOrderSearch
from visalign.interfaces import RewardCapabilities
from visalign.pipelines.cli.app import app
from visalign.pipelines.sample import job
from visalign.pipelines.sample.demo import build_demo
from visalign.pipelines.sample.job import SampleSettings, sample_images
from visalign.pipelines.score.image_rows import find_images, image_rows
from visalign.rewards import load_reward
from visalign.seeds import sample_seed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_sd3(tmp_path_factory.mktemp("models") / "sd3")


def run(*arguments):
    return CliRunner().invoke(app, ["sample", *map(str, arguments)])


def rows(output):
    return [json.loads(line) for line in (output / "images.jsonl").read_text().splitlines()]


def pixels(path):
    return np.asarray(Image.open(path))


def test_an_image_depends_on_its_prompt_and_seed_alone(folder, tmp_path):
    (tmp_path / "p.txt").write_text("a red circle\ntwo blue squares\n")
    result = run(tmp_path / "p.txt", "-m", folder, "--steps", 2, "--seeds", "0-2", "-o", tmp_path / "all")
    assert result.exit_code == 0 and "6 images in" in result.output
    sides = [(row["prompt"], row["seed"]) for row in rows(tmp_path / "all")[2:4]]
    assert sides == [("a red circle", 2), ("two blue squares", 0)]
    assert pixels(tmp_path / "all" / "grid.png").shape == (128, 192, 3)
    assert "index.html and grid.png to look at" in " ".join(result.output.split())
    more = ("--seeds", "2", "--batch-size", 1, "-r", "sharpness")
    assert run("a red circle", "-m", folder, "--steps", 2, *more, "-o", tmp_path / "one").exit_code == 0
    one = rows(tmp_path / "one")[0]
    assert one["sharpness"] > 0
    first, second = pixels(tmp_path / "all" / "0000_2.png"), pixels(tmp_path / "one" / one["image"])
    assert np.abs(first.astype(int) - second).max() <= 1
    assert np.abs(first.astype(int) - pixels(tmp_path / "all" / "0000_1.png")).max() > 5


def test_a_table_of_samples_keeps_the_fields_of_its_prompts(folder, tmp_path):
    record = {"tag": "counting", "include": [{"class": "cup", "count": 2}], "share": None}
    lines = [{"prompt": "two cups", **record}, {"prompt": "a sun", "source": None, "level": math.nan}]
    (tmp_path / "p.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    result = run(tmp_path / "p.jsonl", "-m", folder, "--steps", 1, "--seeds", "0", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    kept = {"tag": "counting", "include": [{"class": "cup", "count": 2}]}
    assert [row.get("metadata") for row in rows(tmp_path / "out")] == [kept, None]
    assert [row.metadata for row in image_rows([tmp_path / "out" / "images.jsonl"])] == [kept, None]
    own = SampleSettings(model=str(folder), steps=1, seeds=(0,))
    samples = sample_images([{"prompt": "a", "source": Path("a.png"), "n": 1}], own, tmp_path / "x")
    assert samples[0]["metadata"] == {"n": 1}, "what JSON can hold"


@pytest.mark.parametrize(
    ("name", "more", "sampling"),
    [
        ("shapes-sd3", {}, (10, None, "float32")),
        ("tiny", {}, (28, 7.0, "float32")),
        ("tiny", {"steps": 4, "options": {"guidance": None}}, (4, None, "float32")),
        ("half", {}, (28, 7.0, "float32")),  # float16 has no fast arithmetic on a CPU
        ("half", {"device": "cuda"}, (28, 7.0, "float16")),
    ],
)
def test_what_is_left_out_is_the_pipelines_own(folder, tmp_path, monkeypatch, name, more, sampling):
    monkeypatch.setattr(job, "check_device", lambda device: None)
    if name == "half":
        tiny_sd3_pipeline().to(torch.float16).save_pretrained(tmp_path / "half")
    path = {"shapes-sd3": name, "tiny": str(folder), "half": str(tmp_path / "half")}[name]
    own = job.SampleSettings(model=path, **more).with_own_sampling()
    assert (own.steps, own.options.get("guidance"), own.dtype) == sampling


@pytest.mark.parametrize(
    ("pipeline", "model", "sampling"),
    [
        ("flow_grpo", {"guidance": None, "image_size": [16, 32]}, (5, None, [16, 32])),
        ("pref_grpo", {"guidance": 4.5, "use_t5": False, "max_sequence_length": 256}, (5, 4.5, None)),
        ("sft_images", {"guidance": None}, (5, 6.0, None)),
        ("sft_images", {"path": "a/model", "guidance": None}, (28, 7.0, None)),  # evaluation sets nothing
        ("sft_images", {"path": "a/sd3-turbo", "guidance": None}, (3, None, None)),  # distilled
        ("sft_images", {"path": "a/model", "guidance": 4.5}, (3, 4.5, None)),
        ("sft_images", {"path": "shapes-sd3"}, (3, None, None)),
        ("text_grpo", {"guidance": 3.0}, (28, 7.0, None)),
        (None, {"guidance": 3.0}, (28, 7.0, None)),  # of another tool
        ("flow_grpo", "stabilityai/sd3", (28, 7.0, None)),  # likewise
    ],
)
def test_a_result_is_sampled_as_its_run_evaluated(folder, tmp_path, capsys, monkeypatch, pipeline, model, sampling):
    content = {"pipeline": pipeline, "model": model, "rollout": {"steps": 3}, "evaluation": {"steps": 5}}
    content["rollout"] |= {"timestep_schedule": "plain"}
    content["evaluation"] |= {"solver": "dpmpp_2m"}
    if pipeline == "sft_images":
        content["data"] = {"images": "photos"}
        content["evaluation"] = None if "path" in model else {**content["evaluation"], "guidance": 6.0}
    (lora := tmp_path / "run" / "lora").mkdir(parents=True)
    (lora / "config.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "config.yaml").write_text("[")  # beside another LoRA's file; nothing that can be read
    copy = shutil.copytree(folder, tmp_path / "model")
    shutil.copy(lora / "config.yaml", copy)
    weights = [{"lora": [f"{lora}:0.5", tmp_path / "other.safetensors"], "model": str(folder)}, {"model": str(copy)}]
    for settings in weights:
        own = job.SampleSettings(**settings).with_own_sampling()
        assert (own.steps, own.options.get("guidance"), own.options.get("image_size")) == sampling
        assert own.with_own_sampling() == own and "max_sequence_length" not in own.options
        assert own.options.get("use_t5") is ((pipeline != "pref_grpo") and None)
        is_read = pipeline not in ("text_grpo", None) and isinstance(model, dict)
        assert own.timestep_schedule == ("plain" if is_read else "diffusers")
        assert own.solver == ("dpmpp_2m" if sampling[0] == 5 else "euler")
        steered = job.SampleSettings(**settings, best_of=2, resample_after=[0])
        assert steered.with_own_sampling().solver == "euler"
    message = "as the weights' run evaluated: steps 5, solver dpmpp_2m, timestep_schedule plain"
    assert (message in capsys.readouterr().err) == (sampling[0] == 5)
    monkeypatch.chdir(lora)  # no folder of the packaged model
    assert job.SampleSettings(model="shapes-sd3").with_own_sampling().options == {}
    explicit = job.SampleSettings(**settings, steps=2, options={"guidance": 2.0}).with_own_sampling()
    assert (explicit.steps, explicit.options["guidance"]) == (2, 2.0)


def test_several_files_and_prompts_are_read_together(folder, tmp_path):
    (tmp_path / "a.txt").write_text("a red circle\ntwo blue squares\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "a cross"}\n{"prompt": "a red circle", "tag": "colors"}\n')
    drawn = (tmp_path / "a.txt", "a triangle", tmp_path / "b.jsonl")
    result = run(*drawn, "-m", folder, "--steps", 1, "--seeds", 0, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    prompts = [row["prompt"] for row in rows(tmp_path / "out")]
    assert prompts == ["a red circle", "two blue squares", "a triangle", "a cross"]


@pytest.mark.parametrize(
    ("count", "dark"), [(2, " 1 of 2 seeds have no draw to prefer, and keep the first."), (1, "")]
)
def test_a_judge_that_fails_is_named(count, dark, tmp_path, monkeypatch):
    """Without a score there is no best draw; a null in the table alone is easily overlooked."""

    class Judge(Brightness):
        def score(self, images, prompts, metadata=None):
            valid = torch.tensor([prompt != "dark" for prompt in prompts])
            reason = [None if ok else "too dark" for ok in valid]
            return replace(super().score(images, prompts, metadata), valid=valid, reason=reason)

    monkeypatch.setattr(job, "load_sampler", lambda settings: ToyPolicy())
    settings = job.SampleSettings(seeds=(0,), steps=2, best_of=count)
    message = f"{count} of {2 * count} draws could not be judged: too dark.{dark}"
    with pytest.warns(UserWarning, match=re.escape(message)):
        job.sample_images([{"prompt": "bright"}, {"prompt": "dark"}], settings, tmp_path, rewards={"b": Judge()})


def test_the_solver_is_that_which_was_asked_for(folder, tmp_path):
    arguments = ("a red circle", "-m", folder, "--steps", 4, "--seeds", 3, "--option", "guidance=null")
    for name in ("euler", "dpmpp_2m"):
        assert run(*arguments, "--solver", name, "-o", tmp_path / name).exit_code == 0
    policy = load_policy(folder, lora=LoraSettings())
    drawn = {"sigmas": policy.sigmas(4), "seeds": [sample_seed("sample", "a red circle", 3, 0)], "solver": "dpmpp_2m"}
    with torch.no_grad():
        [expected] = policy.decode(rollout(policy, policy.encode(["a red circle"]), **drawn).latents)
    expected = expected.clamp(0, 1).mul(255).round().permute(1, 2, 0).numpy()
    by_euler, by_dpmpp = (pixels(tmp_path / name / "0000_3.png").astype(int) for name in ("euler", "dpmpp_2m"))
    assert np.abs(by_dpmpp - expected).max() <= 1 < np.abs(by_euler - expected).max()
    assert "dpmpp_2m" in (tmp_path / "dpmpp_2m" / "index.html").read_text()


def test_the_page_shows_each_image_beside_its_prompt_under_its_seed(folder, tmp_path):
    prompts = ("a <b>red</b> circle", "two & squares")
    more = ("-r", "sharpness", "--best-of", 2, "--option", "guidance=3")
    result = run(*prompts, "-m", folder, "--steps", 2, "--seeds", "0,3", *more, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "out" / "index.html").read_text()
    assert prompts[0] not in page
    table = page.split("<tbody>")[1]
    for prompt, row in zip(("a &lt;b&gt;red&lt;/b&gt; circle", "two &amp; squares"), (0, 1), strict=True):
        cells = table.split("<tr>")[1 + row].split("<td>")
        assert f'<th scope="row">{prompt}</th>' in cells[0]
        for cell, seed, record in zip(cells[1:], (0, 3), rows(tmp_path / "out")[2 * row :], strict=False):
            assert f'src="{record["image"]}" alt="Seed {seed}: {prompt}"' in cell
            assert f'href="{record["image"]}"' in cell and (tmp_path / "out" / record["image"]).is_file()
            assert f"sharpness {plain(record['sharpness'])}" in cell
    assert [page.count(text) for text in ("Seed 0</th>", "Seed 3</th>", "<img ", "Draws of a seed")] == [1, 1, 4, 1]
    failed = [{"image": "a.png", "prompt": "", "seed": 0, "r": None}]
    page = sample_page(failed, size=(8, 8), rewards={"r": "bits"}, facts=[])
    assert "bits, mean; 1 failed" in page and "r failed" in page and "(empty)" in page


@pytest.mark.parametrize("search", [None, ZeroOrderSearch(rounds=1, candidates=2)], ids=["draws", "search"])
@pytest.mark.parametrize("compares", ["", "group", "batch"])
def test_of_many_draws_one_batch_and_the_best_are_in_memory(search, compares, tmp_path, monkeypatch):
    """They equal those of all draws at once; a reward that compares draws gets all of them."""
    policy: Any = ToyPolicy()
    alive, peak, sizes = [0], [0], []
    decode = policy.decode

    def counted(latents):
        images = decode(latents).numpy().copy()
        alive[0] += len(images)
        weakref.finalize(images, lambda: alive.__setitem__(0, alive[0] - len(latents)))
        peak[0] = max(peak[0], alive[0])
        return torch.from_numpy(images)

    class Judge(Brightness):
        capabilities = RewardCapabilities(needs_group=compares == "group", needs_batch=compares == "batch")

        def score(self, images, prompts, metadata=None):
            sizes.append(len(images))
            return super().score(images, prompts, metadata)

    monkeypatch.setattr(policy, "decode", counted)
    monkeypatch.setattr(job, "load_sampler", lambda settings: policy)
    settings = job.SampleSettings(seeds=(0, 5), steps=2, best_of=11, batch_size=3, search=search)
    records = [{"prompt": "bright"}, {"prompt": "dark"}]
    table = job.sample_images(records, settings, tmp_path / "out", rewards={"brightness": Judge()})
    assert max(sizes) == (11 if compares else 3) and alive == [0]
    assert compares or peak[0] <= (3 if search is None else 6)
    for row in table:
        seeds = [sample_seed("sample", row["prompt"], row["seed"], i) for i in range(11)]
        condition, sigmas = policy.encode([row["prompt"]] * 11), policy.sigmas(2)
        if search is None:
            latents = rollout(policy, condition, sigmas=sigmas, seeds=seeds).latents
        else:
            liked = lambda images: Judge().score(images, [row["prompt"]] * len(images)).value  # noqa: B023, E731
            latents = search(policy, condition, liked, sigmas=sigmas, seeds=seeds)
        images = decode(latents).mul(255).round() / 255  # as files hold them
        scores = Brightness().score(images, [row["prompt"]] * 11).value
        best = int(scores.argmax())
        assert row["brightness"] == pytest.approx(float(scores[best]), abs=1e-6)
        expected = decode(latents[best : best + 1])[0].mul(255).round().byte().permute(1, 2, 0).numpy()
        image = pixels(tmp_path / "out" / row["image"]).astype(int)
        assert np.abs(image - expected).max() <= 1


ZERO_ORDER = ("--search", "zero_order", "--search-option", "rounds=2", "--search-option", "radius=0.8")
PATHS = ("--search", "paths", "--best-of", 2, "--search-option", "branches=3", "--search-option", "start=2")


def test_scores_are_those_of_the_files(folder, tmp_path):
    runner = CliRunner()
    drawing = ["sample", "a cat", "--model", str(folder), "--steps", "2", "--best-of", "2", "-r", "sharpness"]
    assert runner.invoke(app, [*drawing, "-o", str(tmp_path / "out")]).exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / job.TABLE).read_text().splitlines()]
    images = [Image.open(tmp_path / "out" / row["image"]) for row in rows]
    expected = load_reward("sharpness").score(images, ["a cat"] * 4).value
    torch.testing.assert_close(torch.tensor([row["sharpness"] for row in rows]), expected, rtol=1e-6, atol=0)
    blank = runner.invoke(app, [*drawing, " ", "-o", str(tmp_path / "no")])
    assert blank.exit_code == 2 and "A prompt is blank" in blank.output


def test_a_search_on_the_packaged_model_tells_its_cost(tmp_path):
    """The first pivot is the draw of no search, and it stays where nothing is better."""
    common = ("a red circle", "two blue squares", "--steps", 4, "--seeds", "0,1", "-r", "saturation")
    costs = {"one": ((), 4), "zero": (ZERO_ORDER, 3 * 4), "paths": (PATHS, 2 * (2 + 3 * 3))}
    values = {}
    for name, (more, cost) in costs.items():
        result = run(*common, *more, "-o", tmp_path / name)
        assert result.exit_code == 0, result.output
        assert f"Denoising took {4 * cost} forward-equivalents" in " ".join(result.output.split())
        assert [row["forward_equivalents"] for row in rows(tmp_path / name)] == [cost] * 4
        values[name] = [row["saturation"] for row in rows(tmp_path / name)]
    better = [zero >= one for zero, one in zip(values["zero"], values["one"], strict=True)]
    assert all(better) and sum(values["zero"]) > sum(values["one"]) + 0.01
    assert sum(values["paths"]) > sum(values["one"]) + 0.01


def test_adapters_of_a_run_are_used(folder, tmp_path):
    policy = load_policy(folder, lora=LoraSettings(rank=2, alpha=4))
    with torch.no_grad():
        for _, weight in policy.trainable_parameters():
            weight.add_(0.3)
    policy.save(tmp_path / "lora")
    common = ("a red circle", "-m", folder, "--steps", 2, "--seeds", "0")
    for name, more in (("bare", ()), ("with", ("--lora", tmp_path / "lora"))):
        assert run(*common, *more, "-o", tmp_path / name).exit_code == 0
    bare, changed = (pixels(tmp_path / name / "0000_0.png").astype(int) for name in ("bare", "with"))
    assert np.abs(bare - changed).max() > 5
    other = tiny_folder("sd15", tmp_path / "sd15")
    options = ("--option", "guidance=3", "--option", "image_size=[32,16]", "-m", other, "--steps", 2)
    assert run("a star", *options, "-o", tmp_path / "other").exit_code == 0
    assert pixels(tmp_path / "other" / "0000_3.png").shape == (32, 16, 3)


def test_a_video_is_written_whole_beside_its_middle_frame(tmp_path, monkeypatch):
    pipe, options = tiny_pipeline("wan")
    policy = PipelinePolicy(pipe, **{**options, "num_frames": 9})
    monkeypatch.setattr(job, "load_sampler", lambda settings: policy)
    settings = job.SampleSettings(seeds=(0, 1), steps=2)
    frames = load_reward("frames", reward="saturation", frames=9)
    judges = {"saturation": load_reward("saturation"), "all": frames}
    table = job.sample_images([{"prompt": "a ball rolls"}], settings, tmp_path / "out", rewards=judges)
    assert [row["image"] for row in table] == ["0000_0.png", "0000_1.png"]
    assert [row["clip"] for row in table] == ["0000_0.webp", "0000_1.webp"]
    assert rows(tmp_path / "out") == table
    seeds = [sample_seed("sample", "a ball rolls", seed, 0) for seed in (0, 1)]
    sigmas, condition = policy.sigmas(2), policy.encode(["a ball rolls"] * 2)
    with torch.no_grad():
        videos = policy.decode_frames(rollout(policy, condition, sigmas=sigmas, seeds=seeds).latents)
    for row, clip, value in zip(table, videos, frames.score(videos, ["", ""]).value.tolist(), strict=True):
        with Image.open(tmp_path / "out" / row["clip"]) as animation:
            pages = [np.asarray(page.convert("RGB")).astype(int) for page in ImageSequence.Iterator(animation)]
            assert animation.info["duration"] == 62, "16 frames a second"  # whole milliseconds
        levels = clip.mul(255).round().byte().permute(0, 2, 3, 1).numpy()
        assert len(pages) == 9 and np.abs(np.stack(pages) - levels).max() <= 1
        assert np.array_equal(pages[4], pixels(tmp_path / "out" / row["image"]))
        assert not np.array_equal(pages[4], pages[3])
        assert row["all"] == pytest.approx(value, abs=1e-4) != row["saturation"]
    sources = re.findall(r'<img src="([^"]*)"[^>]* width="32" height="16"', (tmp_path / "out/index.html").read_text())
    assert sources == ["0000_0.webp", "0000_1.webp"]
    for clips, ending in ((False, "png"), (True, "webp")):
        paths = find_images([tmp_path / "out"], clips=clips)
        assert [path.name for path in paths] == [f"0000_{seed}.{ending}" for seed in (0, 1)]
    [again, _] = image_rows([tmp_path / "out" / "images.jsonl"], names={"image": "clip"})
    assert Path(again.image) == tmp_path / "out" / "0000_0.webp"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seeds", "a"), "--seeds is 'a'; give numbers from 0 up"),
        (("--seeds", "3-1"), "--seeds is '3-1'; give numbers from 0 up"),
        (("--best-of", 2), "nothing says what is best; give a reward (-r)"),
        (("--lora", "nowhere"), "There is no LoRA nowhere. Give a run folder"),
        (("--solver", "dpmpp_2m", "--steer", 1), "--solver is dpmpp_2m, and --steer takes Euler steps"),
        (("--option", "image_size=[16]"), "image_size is (16,); give one number or [height, width]"),
        (("--steer", "1"), "--steer resamples the draws of a seed: give best_of"),
        (("--search", "zero_order"), "--search is given and nothing says what is best; give a reward (-r)"),
        (("--search", "zero"), "--search is 'zero'. Did you mean 'zero_order'? Allowed: zero_order, paths."),
        ((*ZERO_ORDER, "--search-option", "round=1"), "argument 'round'. Did you mean 'rounds'"),
        ((*PATHS, "--steer", 1, "-r", "sharpness"), "--search and --steer are two ways to one image"),
        (("--device", "foo"), "The device 'foo' cannot be used"),
    ],
)
def test_refusals(folder, tmp_path, arguments, message):
    options = arguments if "-m" in arguments else ("-m", folder, *arguments)
    result = run("a red circle", *options, "-o", tmp_path / "out")
    assert result.exit_code != 0 and message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_no_image_is_lost(folder, tmp_path):
    (tmp_path / "kept.png").write_bytes(b"")
    result = run("a red circle", "-m", folder, "-o", tmp_path)
    assert result.exit_code != 0 and "is no empty folder" in " ".join(result.output.split())


@pytest.mark.filterwarnings("ignore")  # sockets and event loops that Gradio leaves open
def test_the_slider_goes_from_the_model_to_its_lora(tmp_path, capfd):
    pytest.importorskip("gradio", reason="the extra demo is not installed")
    client: Any = pytest.importorskip("gradio_client")
    folder = build_tiny_sd3(tmp_path / "model")
    policy: Any = load_policy(folder, lora=LoraSettings(rank=2, alpha=4))
    with torch.no_grad():
        for _, weight in policy.trainable_parameters():
            weight.add_(0.3)
    policy.save(tmp_path / "lora")
    settings = SampleSettings(model=str(folder), lora=[tmp_path], steps=2, seeds=[3])
    page = build_demo(settings)
    assert "on cpu in float32" in capfd.readouterr().err
    _, address, _ = page.launch(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    try:
        ask = client.Client(address, verbose=False, download_files=tmp_path)
        drawn = [pixels(ask.predict("a red circle", 3, 2, strength, api_name="/draw")) for strength in (0, 1, 1)]
        with pytest.raises(Exception, match="Write a prompt"):
            ask.predict(" ", 3, 2, 1.0, api_name="/draw")
    finally:
        page.close()
        del page, ask
        gc.collect()  # while warnings of what Gradio leaves open are ignored
    for lora, image in (([], drawn[0]), ([tmp_path], drawn[1])):
        output = tmp_path / f"own{len(lora)}"
        own_settings = SampleSettings(model=str(folder), lora=lora, steps=2, seeds=[3])
        sample_images([{"prompt": "a red circle"}], own_settings, output)
        assert np.array_equal(pixels(output / "0000_3.png"), image)
    assert np.array_equal(drawn[1], drawn[2]) and not np.array_equal(drawn[0], drawn[1])

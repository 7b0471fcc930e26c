# SPDX-License-Identifier: Apache-2.0
"""The command line: output, messages of refusals, and a light --help."""

from __future__ import annotations

import errno
import json
import re
import shlex
import signal
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer.main
from PIL import Image
from typer.testing import CliRunner, Result

from tests.support.judges.brightness import Brightness
from visalign import __main__, __version__, doctor
from visalign import config as config_module
from visalign.errors import ConfigError, UserError
from visalign.interfaces import Scores
from visalign.pipelines import jobs as cli_jobs
from visalign.pipelines.cli import messages as cli_messages
from visalign.pipelines.cli import show as cli_show
from visalign.pipelines.cli.app import app
from visalign.pipelines.score import score
from visalign.pipelines.score.image_rows import ImageRow, find_images
from visalign.pipelines.shared import run_folder
from visalign.precision import autocast_dtype

ROOT = Path(__file__).resolve().parents[2]
HEADER = "# Toy job.\n# Command: visalign train toy\n# Hardware: none. Duration: none. Expected: nothing\n"


@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    seed: int = 0
    steps: int = 10


class Toy:
    """Stands in for a pipeline module; records its calls and does what a test wants."""

    ToyConfig = ToyConfig

    def __init__(self) -> None:
        self.calls: list[tuple[ToyConfig, Path, bool]] = []
        self.fail: Callable[[], object] = lambda: None

    def run(self, config: ToyConfig, output: Path, resume: bool) -> run_folder.RunSummary:
        self.calls.append((config, output, resume))
        output.mkdir(parents=True, exist_ok=True)
        (output / "partial").touch()
        self.fail()
        (output / "report.html").write_text("<html></html>")
        (output / "lora").mkdir(exist_ok=True)
        numbers = {
            "before": {"accuracy": 0.5, "by_category": {"two_objects": 0.25}},
            "after": {"accuracy": 0.625, "by_category": {"two_objects": 0.75}},
            "seconds": 318.2,
            "gain": {"estimate": 0.125, "low": 0.1, "high": 0.15, "level": 0.95},
        }
        (output / "summary.json").write_text(json.dumps(numbers))
        return run_folder.RunSummary(numbers, ["visalign", "sample", "a red circle"])

    def plan(self, config: ToyConfig) -> dict[str, Any]:
        return {"expected_seconds": 318.2, "batch": {"samples": 48 * config.steps, "forward_equivalents": 12.5}}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Toy:
    """A pipeline `toy`, two packaged configurations of it, and an empty working folder."""
    pipeline = Toy()
    monkeypatch.setitem(sys.modules, "visalign_toy_pipeline", pipeline)  # pyright: ignore[reportArgumentType]  # quacks
    monkeypatch.setitem(cli_jobs.PIPELINES, "toy", "visalign_toy_pipeline:ToyConfig")
    packaged = tmp_path / "packaged"
    packaged.mkdir()
    for name in ("toy", "shapes_quickstart"):
        (packaged / f"{name}.yaml").write_text(f"{HEADER}pipeline: toy\nsteps: 5\n")
    monkeypatch.setattr(config_module, "config_folder", lambda: packaged)
    monkeypatch.setattr(cli_show, "config_folder", lambda: packaged)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return pipeline


def visalign(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="visalign")


def test_help_names_every_command() -> None:
    result = visalign("--help")
    assert result.exit_code == 0
    for command in ("quickstart", "train", "score", "doctor", "configs"):
        assert command in result.stdout
        assert visalign(command, "--help").exit_code == 0
    titles = re.findall(r"^╭─ (\w+) ─", result.stdout, re.MULTILINE)
    assert titles == ["Options", "Train", "Reward", "Evaluate", "Data", "Project"]
    assert "Exits with" not in result.stdout, "a list has the first sentence"


@pytest.mark.parametrize("name", sorted(typer.main.get_command(app).commands))  # type: ignore[attr-defined]
def test_help_fits_80_columns_with_an_example_that_parses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    text = visalign(name, "--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"<(list|int|str|bool)|range>|<=x", text)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    words = shlex.split(" ".join(command.epilog.removeprefix("Example: ").split()))
    assert words[:2] == ["visalign", name]
    command.make_context(name, words[2:])  # refuses unknown options
    assert visalign("--version").stdout.strip() == __version__


def test_python_m_visalign_prints_its_help_without_heavy_imports() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "visalign", "--help"]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "Usage: visalign [OPTIONS] COMMAND" in process.stdout
    imported = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert "rich" in imported
    assert not imported & {"torch", "numpy", "diffusers", "transformers", "open_clip", "accelerate", "peft"}


def test_an_unknown_command_exits_2_with_the_nearest() -> None:
    result = visalign("trian")
    assert result.exit_code == 2
    assert "No such command 'trian'" in result.stderr and "train" in result.stderr


def test_visalign_yaml_of_the_folder_is_the_default(toy: Toy) -> None:
    for arguments in ([], ["steps=3"]):
        refused = visalign("plan", *arguments)
        assert refused.exit_code == 2 and "this folder has no visalign.yaml" in refused.stderr
    Path("visalign.yaml").write_text("pipeline: toy\nseed: 7\n")
    assert visalign("train", "--output", "first").exit_code == 0
    assert visalign("train", "steps=3", "seed=2", "--output", "second").exit_code == 0
    assert [(config.seed, config.steps) for config, *_ in toy.calls] == [(7, 10), (2, 3)]


def test_train_runs_the_configuration_with_its_overrides(toy: Toy) -> None:
    result = visalign("train", "toy", "seed=3", "--output", "out")
    assert result.exit_code == 0, result.output
    assert visalign("train", "toy", "seed=3", "--output", "out", "--resume").exit_code == 0
    assert toy.calls.pop() == (ToyConfig(seed=3, steps=5), Path("out"), True)
    assert toy.calls == [(ToyConfig(seed=3, steps=5), Path("out"), False)]
    assert "two objects" in result.stdout and "+0.500" in result.stdout
    assert "Held-out accuracy +12.5 points, 95% interval +10.0 to +15.0" in result.stdout
    assert "Cost: 5 min 18 s." in result.stdout
    assert "out/report.html" in result.stdout and "out/lora" in result.stdout
    assert "visalign sample 'a red circle'" in result.stdout


def test_quickstart_writes_to_a_dated_folder_and_names_the_next_command(toy: Toy) -> None:
    result = visalign("quickstart", "steps=6", "--seed", "4")
    assert result.exit_code == 0, result.output
    [(config, output, resume)] = toy.calls
    assert config == ToyConfig(seed=4, steps=6) and not resume
    assert output.parent == Path("runs") and output.match("shapes_quickstart-????????-??????")
    assert "visalign train shapes_flow_grpo" in result.stdout


def test_dry_run_shows_configuration_and_plan_and_runs_nothing(toy: Toy) -> None:
    result = visalign("train", "toy", "steps=7", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "seed: 0\nsteps: 7\n" in result.stdout
    for text in ("expected seconds", "5 min 18 s", "samples", "336", "forward equivalents", "12.500"):
        assert text in result.stdout
    assert toy.calls == [] and list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["toi"], "Configuration 'toi' does not exist. Did you mean 'toy'?"),
        (["toy", "sead=1"], "Unknown key 'sead' in the override 'sead=1'. Did you mean 'seed'?"),
        (["toy", "steps=many"], "Key 'steps' in the override 'steps=many': got 'many' (str), expected int."),
        (["toy", "--resume"], "No output folder given, but --resume continues the run of one folder."),
        (["toy", "--resume", "-o", "gone"], "There is no folder 'gone' to resume."),
    ],
)
def test_train_refuses_by_name_and_writes_nothing(toy: Toy, arguments: list[str], message: str) -> None:
    result = visalign("train", *arguments)
    assert result.exit_code == 2
    assert f"Error: {message}" in result.stderr and "Traceback" not in result.output
    assert toy.calls == [] and list(Path().iterdir()) == []


def test_a_file_must_name_a_pipeline(toy: Toy) -> None:
    for text, message in (
        ("seed: 1", "names no pipeline. Write a line 'pipeline: NAME' with one of: flow_grpo, pref_grpo"),
        ("pipeline: flow_gpro", "pipeline 'flow_gpro', which does not exist. Did you mean 'flow_grpo'?"),
    ):
        Path("mine.yaml").write_text(text)
        result = visalign("train", "mine.yaml")
        assert result.exit_code == 2 and message in result.stderr


def test_an_output_folder_with_something_in_it_is_refused(toy: Toy) -> None:
    Path("out").mkdir()
    assert visalign("train", "toy", "-o", "out").exit_code == 0
    before = sorted(path.name for path in Path("out").iterdir())
    result = visalign("train", "toy", "-o", "out")
    assert result.exit_code == 2
    assert "The output folder 'out' is not empty, and nothing is overwritten." in result.stderr
    assert sorted(path.name for path in Path("out").iterdir()) == before and len(toy.calls) == 1
    Path("toy.txt").touch()
    assert "The output 'toy.txt' is a file." in visalign("train", "toy", "-o", "toy.txt").stderr


def test_several_processes_need_a_common_folder(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UserError, match="No output folder given, but 2 processes share one folder"):
        run_folder.output_folder(None, "toy", resume=False)
    Path("out").mkdir()
    Path("out/of-the-first-process").touch()
    assert run_folder.output_folder(Path("out"), "toy", resume=False) == Path("out")


def test_ctrl_c_says_how_to_go_on(toy: Toy) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    toy.fail = interrupt
    result = visalign("train", "toy", "seed=2", "-o", "my out")
    assert result.exit_code == 130
    assert "visalign train toy seed=2 --output 'my out' --resume" in result.stderr


def test_sigterm_is_said_by_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as stopped, cli_messages.user_messages():
        signal.raise_signal(signal.SIGTERM)
    assert stopped.value.exit_code == 143 and "Stopped by SIGTERM." in capsys.readouterr().err


def _raise(error: BaseException) -> None:
    raise error


def test_errors_for_the_user_are_messages_and_the_others_are_not() -> None:
    for error in (ConfigError("x"), OSError(errno.ENOSPC, "No space left on device", "file")):
        with pytest.raises(typer.Exit) as stopped, cli_messages.user_messages():
            _raise(error)
        assert stopped.value.exit_code == cli_messages.USER_ERROR
    for error in (ValueError("of somebody else's code"), KeyError("a slip")):
        with pytest.raises(type(error)), cli_messages.user_messages():
            _raise(error)


@pytest.mark.parametrize(("folder", "ending"), [(".", " --resume"), ("nowhere", "")])
def test_a_run_that_was_stopped_before_its_folder_begins_anew(folder, ending, capsys):
    with (
        pytest.raises(typer.Exit),
        cli_messages.user_messages(resume="visalign train x --resume", folder=Path(folder)),
    ):
        raise KeyboardInterrupt
    assert capsys.readouterr().err.rstrip().endswith(f"visalign train x{ending}")


def test_warnings_are_printed_without_the_code_they_come_from() -> None:
    def warning() -> str:
        return warnings.formatwarning(UserWarning("the cache was damaged"), UserWarning, __file__, 1)

    with pytest.raises(typer.Exit), cli_messages.user_messages():
        assert warning() == "Warning: the cache was damaged\n"
        raise ConfigError("x")
    assert __file__ in warning(), "what others set is back"


def _ours(source: str) -> BaseException:
    """Return the error that `source` raises in a module with a name of the package."""
    module = types.ModuleType("visalign.made_up")
    try:
        exec(source, module.__dict__)
    except (ValueError, RuntimeError, TypeError, ArithmeticError, MemoryError) as error:
        return error
    raise AssertionError("the source raised nothing")


def test_only_a_raise_of_ours_is_deliberate() -> None:
    assert cli_messages.is_deliberate(_ours("raise ValueError('group_size is 1')"))
    assert not cli_messages.is_deliberate(_ours("int('x')"))
    assert not cli_messages.is_deliberate(_ours("import torch\ntorch.zeros(2, 3) @ torch.zeros(2, 3)"))
    assert not cli_messages.is_deliberate(ValueError("never raised"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise FloatingPointError('The rollout ended in latents that are not finite')", "The rollout ended in"),
        ("raise MemoryError", r"Out of memory \(\)\. Give smaller numbers"),
        ("import torch\ntorch.empty(10**15)", r"Out of memory \(.*you tried to allocate"),
        ("import numpy\nnumpy.empty(10**15)", r"Out of memory \(Unable to allocate"),
        ("open('a\\0b')", "A path holds a NUL character"),
    ],
)
def test_divergence_memory_and_impossible_paths_are_messages(
    source: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit), cli_messages.user_messages():
        raise _ours(source)
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("an import was broken off"), typer.Exit(130)])
def test_ctrl_c_during_imports_is_a_message(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def importing() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as stop:
            if not isinstance(error, typer.Exit):
                raise error from None
            try:  # as typer does between the start and our command
                raise error from stop
            except typer.Exit:
                sys.exit(130)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    monkeypatch.setattr(__main__, "_run", importing)
    try:
        with pytest.raises(SystemExit) as stopped:
            __main__.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped.value.code == 130 and capsys.readouterr().err == "Interrupted: Stopped by Ctrl-C.\n"


def test_the_traceback_can_be_asked_for(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISALIGN_TRACEBACK", "1")
    with pytest.raises(ConfigError, match="does not exist"):
        CliRunner().invoke(app, ["train", "toi"], catch_exceptions=False)


def test_a_message_is_framed_in_a_terminal_only(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "a " * 100 + "[red]end"
    cli_messages.show_message(long, title="Error", style="red")
    assert f"Error: {long}" in capsys.readouterr().err
    monkeypatch.setenv("FORCE_COLOR", "1")
    cli_messages.show_message(long, title="Error", style="red")
    framed = capsys.readouterr().err
    assert "╭─" in framed and "[red]end" in framed


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a black and a white image and a broken one."""
    folder = tmp_path / "images"
    folder.mkdir()
    for name, level in (("b_white", 255), ("a_black", 0)):
        Image.fromarray(np.full((8, 8, 3), level, dtype=np.uint8)).save(folder / f"{name}.png")
    (folder / "c_broken.JPG").write_bytes(b"no image")
    monkeypatch.chdir(tmp_path)
    return folder


def _table(files: list[Path]) -> list[ImageRow]:
    return [ImageRow(image=str(file), prompt="x") for file in files]


def test_a_valid_score_that_is_no_number_is_a_row_with_its_reason(images: Path) -> None:
    class Wild(Brightness):
        def score(self, images: Any, prompts: Any, metadata: Any = None) -> Scores:
            value = torch.tensor([float("nan"), float("inf"), 0.5])
            return Scores(value=value, valid=torch.ones(3, dtype=torch.bool), unit="grey")

    rows = score.score_rows(_table(find_images([images])), {"wild": Wild()})
    reasons = [f"the reward returned {value}, which is no score" for value in ("nan", "inf")]
    assert [(row.value, row.reason) for row in rows] == [*((None, why) for why in reasons), (0.5, None)]


def test_batches_do_not_change_the_rows(images: Path) -> None:
    with pytest.warns(UserWarning, match=r"Images named twice count once: .*b_white\.png"):
        files = find_images([images, images / "b_white.png"])
    rewards = {"one": Brightness(), "two": Brightness()}
    sizes: list[int] = []
    rows = score.score_rows(_table(files), rewards, batch_size=2, on_batch=sizes.append)
    assert rows == score.score_rows(_table(files), rewards) and sizes == [2, 1]
    names = [(Path(row.image).stem, row.reward) for row in rows[:3]]
    assert names == [("a_black", "one"), ("a_black", "two"), ("b_white", "one")]
    with pytest.raises(UserError, match="No images were named"):
        find_images([])


def test_configs_lists_and_shows(toy: Toy) -> None:
    listed = visalign("configs")
    assert listed.exit_code == 0
    assert re.search(r"toy +toy +Toy job\.", listed.stdout)
    for option, fits in (("--family", "toy"), ("--algorithm", "TOY"), ("--search", "JOB to-y")):
        assert "Toy job." in visalign("configs", option, fits).stdout
        refused = visalign("configs", option, "flux")
        assert refused.exit_code == 2 and f"configuration fits {option} 'flux'" in refused.stderr
    printed = visalign("configs", "toy")
    assert printed.stdout == f"{HEADER}pipeline: toy\nsteps: 5\n"
    refused = visalign("configs", "toi")
    assert refused.exit_code == 2 and "Did you mean 'toy'?" in refused.stderr


def test_packaged_configurations_have_a_line_each() -> None:
    listed = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["configs"]).stdout
    assert len(listed.splitlines()) == 2 + len(config_module.list_configs())


@pytest.fixture
def models(tmp_path: Path) -> Path:
    from safetensors.numpy import save_file

    for name in doctor.PACKAGED:
        (tmp_path / "assets" / name).mkdir(parents=True)
        save_file({"w": np.zeros(1000, dtype=np.float16)}, tmp_path / "assets" / name / "model.safetensors")
    return tmp_path / "assets"


def test_doctor_passes_on_a_whole_installation(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visalign.config.list_configs", lambda: ["toy"])
    report = doctor.examine(models)
    assert report.passed, report.text
    for text in (
        f"visalign:     {__version__}",
        "torch 2",
        "cpu (",
        "rewards and pipelines are found",
        "1 weight files",
    ):
        assert text in report.text
    for name in ("advantages", "one SDE step", "verifier", "model shapes-sd3"):
        assert f"PASS  {name}:" in report.text
    assert report.text.endswith("All checks passed.")


def test_auto_autocast_is_bfloat16_where_the_device_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for answer, dtype, word in ((True, torch.bfloat16, "with"), (False, None, "without")):
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
        monkeypatch.setattr(torch.ops, "mkldnn", types.SimpleNamespace(_is_mkldnn_bf16_supported=lambda a=answer: a))
        assert autocast_dtype("auto", cpu) is dtype
        assert f", {word} bf16 arithmetic" in doctor._devices()
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    assert autocast_dtype("auto", cpu) is None
    assert autocast_dtype("bfloat16", cpu) is torch.bfloat16 and autocast_dtype(None, cpu) is None


def test_doctor_names_what_is_broken(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = models / "shapes-sd3" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    (models / "shapes-clip" / "model.safetensors").unlink()
    monkeypatch.setattr(doctor, "NEEDED", ("torch", "no-such-package"))
    monkeypatch.setattr("visalign.config.list_configs", list)
    monkeypatch.setattr("visalign.core.advantages.group.group_advantages", lambda *_, **__: torch.ones(4))
    monkeypatch.setattr("visalign.data.shapes.verifier.verify", lambda *_: _raise(ValueError("broken")))
    report = doctor.examine(models)
    assert not report.passed
    for text in (
        "FAIL  packages: not installed: no-such-package. Run: python -m pip install 'visalign[images]'",
        "FAIL  configurations: 0 YAML files in",
        "model.safetensors' is damaged",
        "FAIL  model shapes-clip: 0 weight files in",
        "FAIL  advantages: rewards 1, 3 | 7, 7 give [1.0, 1.0, 1.0, 1.0]",
        "FAIL  verifier: ValueError: broken",
        f"6 of {6 + len(doctor.PACKAGED)} checks failed.",
    ):
        assert text in report.text


def test_doctor_sees_a_lost_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "visalign").mkdir()
    (tmp_path / "visalign" / "rewards").write_text("../rewards")  # as git writes it without support of links
    monkeypatch.setattr(doctor, "__file__", str(tmp_path / "visalign" / "doctor.py"))
    passed, detail = doctor._wings()
    assert not passed and "should be a link to ../rewards, and is none" in detail


def test_doctor_exits_1_on_failure_and_hides_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/users/ada"))
    report = doctor.Report(facts={}, checks={"x": (False, "at /users/ada/x and /users/adam")})
    monkeypatch.setattr(doctor, "examine", lambda: report)
    result = visalign("doctor")
    assert result.exit_code == 1
    assert "FAIL  x: at ~/x and /users/adam" in result.stdout and "1 of 1 checks failed." in result.stdout
    monkeypatch.setattr(doctor, "examine", lambda: doctor.Report(facts={}, checks={}))
    assert visalign("doctor").exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("score", "images", "-p", "a circle", "-r", "sharpness"),
        ("compare", "images/a_black.png", "images/b_white.png", "-p", "a circle", "-r", "sharpness"),
        ("evaluate", "shapes:pairs", "-r", "sharpness"),
        ("agree", "shapes:quality", "-r", "sharpness", "-r", "jpeg_size"),
        ("probe-reward", "sharpness"),
    ],
)
def test_a_device_that_is_not_there_is_refused(arguments: tuple[str, ...], images: Path) -> None:
    result = visalign(*arguments, "--device", "cuda:99")
    assert result.exit_code == 2 and "The device 'cuda:99' cannot be used" in result.output, result.output

# SPDX-License-Identifier: Apache-2.0
"""Configurations: what they resolve to, and the words of refusals."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from visalign import config as config_module
from visalign.config import config_to_yaml, flatten, list_configs, load_config, read_config, resolve_config, to_plain
from visalign.errors import ConfigError
from visalign.schema import allowed_keys


@dataclass(frozen=True, kw_only=True)
class Term:
    weight: float = 1.0
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    scales: dict[str, float] = field(default_factory=lambda: {"all": 1.0})


@dataclass(frozen=True, kw_only=True)
class Job:
    seed: int = 0
    group_size: int = 8
    note: str | None = None
    schedule: Literal["flow", "dance"] = "flow"
    seeds: list[int] = field(default_factory=lambda: [1])
    shift: tuple[float, ...] = (1.0,)
    amp: bool = False
    rewards: dict[str, Term] = field(default_factory=lambda: {"shapes": Term()})
    optimizer: Optimizer = field(default_factory=Optimizer)
    second: Optimizer | None = None

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(f"group_size is {self.group_size}; a group needs at least 2 samples.")


@dataclass(frozen=True, kw_only=True)
class Needs:
    model: str
    steps: int = 10


@dataclass(frozen=True, kw_only=True)
class Circle:
    shape: Literal["circle"] = "circle"
    radius: Annotated[float, Field(gt=0)] = 1.0


@dataclass(frozen=True, kw_only=True)
class Box:
    shape: Literal["box", "cube"] = "box"
    width: int = 1
    note: Term = field(default_factory=Term)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    figure: Annotated[Circle | Box, Field(discriminator="shape")] = field(default_factory=lambda: Circle(radius=3))


@pytest.fixture
def write(tmp_path: Path):
    def _write(text: str, name: str = "job.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return _write


def test_defaults_alone_are_the_dataclass_itself() -> None:
    assert load_config(Job) == Job()


def test_file_then_overrides(write) -> None:
    path = write("pipeline: flow_grpo\nseed: 3\noptimizer:\n  learning_rate: 1e-3\nshift: [1, 2.5]\n")
    loaded = load_config(Job, path, ["seed=4", "optimizer.weight_decay=.1", "second.learning_rate=2", "note='7'"])
    assert loaded == Job(
        seed=4,
        note="7",
        shift=(1.0, 2.5),
        optimizer=Optimizer(learning_rate=1e-3, weight_decay=0.1),
        second=Optimizer(learning_rate=2.0),
    )
    assert isinstance(loaded.optimizer.learning_rate, float) and isinstance(loaded.shift, tuple)
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.seed = 5  # pyright: ignore[reportAttributeAccessIssue]  # the test is that this fails


def test_a_dict_in_the_file_replaces_the_default_one_and_an_override_edits_it(write) -> None:
    path = write("rewards:\n  clip: {weight: 2, options: {model: tiny}}\n")
    assert load_config(Job, path).rewards == {"clip": Term(weight=2.0, options={"model": "tiny"})}
    edited = load_config(Job, path, ["rewards.clip.weight=3", "rewards.jpeg.weight=0.1"])
    assert edited.rewards["clip"] == Term(weight=3.0, options={"model": "tiny"})
    assert edited.rewards["jpeg"] == Term(weight=0.1)
    assert load_config(Job, None, ["rewards.shapes.weight=5"]).rewards == {"shapes": Term(weight=5.0)}
    assert load_config(Job, path, ["rewards={jpeg: {}}"]).rewards == {"jpeg": Term()}


def test_a_section_of_the_file_keeps_the_other_defaults_of_the_section(write) -> None:
    loaded = load_config(Job, write("optimizer: {weight_decay: 1}"))
    assert loaded.optimizer == Optimizer(weight_decay=1.0, scales={"all": 1.0})


def test_null_is_allowed_only_where_the_type_says_so(write) -> None:
    filled = write("note: x\nsecond: {weight_decay: 1}\n")
    assert load_config(Job, filled).note == "x" and load_config(Job, filled).second is not None
    assert load_config(Job, filled, ["note=null"]).note is None
    assert load_config(Job, filled, ["second=null"]).second is None
    with pytest.raises(ConfigError, match=r"Key 'seed' in the override 'seed=null': got null, expected int"):
        load_config(Job, None, ["seed=null"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grup_size: 4", r"Unknown key 'grup_size' in '.*job.yaml'. Did you mean 'group_size'\? Allowed at"),
        ("optimizer: {learning_rat: 1}", r"'optimizer.learning_rat'.* mean 'optimizer.learning_rate'\?"),
        ("optimizer: {lr: 1}", r"Allowed under 'optimizer': learning_rate, weight_decay, scales\."),
        ("weight_decai: 1", r"mean 'optimizer.weight_decay' or 'second.weight_decay'\?"),
        ("rewards: {clip: {weigth: 1}}", r"Unknown key 'rewards.clip.weigth' .* 'rewards.clip.weight'\?"),
        ("3: x", r"Unknown key '3' in"),
        ("seed: " + "9" * 4400, r"job.yaml': not valid YAML: Exceeds the limit"),
        ("seed: " + "[" * 60 + "]" * 60, r"job.yaml': not valid YAML: it is nested more than 32 deep"),
        ("name: a: " + "b" * 9000, r"job.yaml', line 1, column 8: not valid YAML"),
        ("amp: " + "b" * 9000, r"Key 'amp' .* got 'b{299}\.\.\. \(9002 characters\) \(str\), expected bool"),
        ("seed: many", r"Key 'seed' in '.*job.yaml': got 'many' \(str\), expected int\."),
        ("seed: yes", r"Key 'seed' .* got 'True' \(str\), expected int"),
        ("seed: 1.5", r"Key 'seed' .* got 1.5 \(float\), expected int"),
        ("schedule: cosine", r"Key 'schedule' .* got 'cosine' \(str\), expected one of 'flow', 'dance'\."),
        ("seeds: [1, b]", r"Key 'seeds\[1\]' in .* got 'b' \(str\), expected int\."),
        ("optimizer: 3", r"Key 'optimizer' .* got 3 \(int\), expected a mapping with the keys learning_rate"),
        ("rewards: clip", r"Key 'rewards' .* from names to mappings with the keys weight, options"),
        ("rewards: {clip: {weight: heavy}}", r"Key 'rewards.clip.weight' .* got 'heavy' \(str\), expected f"),
        ("group_size: 1", r"group_size is 1; a group needs at least 2 samples"),
        ("note: ${nothing}", r"Key 'note': Interpolation key 'nothing' not found"),
        ("seed: 1\nseed: 2", r"job.yaml', line 2, column 1: not valid YAML: found duplicate key"),
        ("seed: 1\nnote: [1,\n", r"job.yaml', line 3, column 1: not valid YAML: .*list of .key: value. lines"),
        ("- a\n- b", r"its top level is a list. A configuration is a list of 'key: value' lines"),
    ],
)
def test_a_bad_file_is_refused_by_name(write, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(Job, write(text))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", r"Override 'seed' is not of the form key.sub=value"),
        ("optimizer..x=3", r"is not of the form key.sub=value"),
        ("rewards={a:{}}", r"is not valid YAML. .*put a blank behind each colon of a mapping \({key: value}\)"),
        ("seeds=\udcff", r"its value '.*' is not valid YAML"),
        ("seed=" + "9" * 4400, r"its value '9{99}\.\.\. \(4402 characters\) is not valid YAML"),
        ("seed=0x" + "f" * 4000, r"is not valid YAML: a whole number has more than 30 digits"),
        ("name=" + "[" * 60 + "]" * 60, r"is not valid YAML: it is nested more than 32 deep"),
        ("name=" + "[" * 9000, r"is not valid YAML"),
        ('name="a\\0b"', r"is not valid YAML: a text holds a NUL or half of a character"),
        ("optimizer.lr=1", r"Unknown key 'optimizer.lr' in the override 'optimizer.lr=1'"),
        ("optimizer={3: 1}", r"Unknown key 'optimizer.3' in the override"),
        ("seed.x=1", r"Key 'seed' in the override 'seed.x=1': got \{'x': 1\} \(dict\), expected int"),
        ("amp=perhaps", r"Key 'amp' in the override 'amp=perhaps': got 'perhaps' \(str\), expected bool"),
    ],
)
def test_a_bad_override_is_refused_by_name(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(Job, None, [override])


def test_each_variant_of_a_union_has_its_own_keys_and_defaults(write) -> None:
    assert load_config(Drawing) == Drawing()
    assert load_config(Drawing, None, ["figure.radius=2"]).figure == Circle(radius=2.0)
    for order in (["figure.shape=cube", "figure.width=4"], ["figure.width=4", "figure.shape=cube"]):
        assert load_config(Drawing, None, order).figure == Box(shape="cube", width=4)
    file = write("figure: {shape: box, note: {weight: 2}}")
    assert load_config(Drawing, file).figure == Box(note=Term(weight=2.0))
    assert load_config(Drawing, write(config_to_yaml(load_config(Drawing, file)), "b.yaml")).figure == Box(
        note=Term(weight=2.0)
    )
    assert {"figure.radius", "figure.width", "figure.note.weight"} <= set(allowed_keys(Drawing))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("figure.width=4", r"It is read where figure.shape is box or cube\. Allowed .*: shape, radius\."),
        ("figure.shape=squar", r"Key 'figure.shape' .* got 'squar' .*'circle', 'box', 'cube'"),
        ("figure.shape=cub", r"Key 'figure.shape' .* Did you mean 'cube'\?"),
        ("figure.radius=0", r"Key 'figure.radius' .* got 0 \(int\). Input should be greater than 0\."),
        ("figure=3", r"Key 'figure' .* got 3 \(int\)"),
    ],
)
def test_what_no_variant_takes_is_refused_by_name(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(Drawing, None, [override])


def test_a_required_key_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"Key 'model': .*[Mm]issing mandatory value.* Set it in the file"):
        load_config(Needs)
    assert load_config(Needs, None, ["model=x"]) == Needs(model="x")


def test_a_file_that_is_no_text_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "image.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match=r"image.yaml'.*not valid YAML"):
        load_config(Job, tmp_path / "image.yaml")
    with pytest.raises(ConfigError, match=r"is a folder, not a YAML file"):
        load_config(Job, tmp_path)


def test_an_empty_file_means_the_defaults(write) -> None:
    assert load_config(Job, write("")) == load_config(Job, write("# only a comment\n", "b.yaml")) == Job()


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "packaged"
    folder.mkdir()
    for name in ("shapes_quickstart", "shapes_flow_grpo"):
        (folder / f"{name}.yaml").write_text("seed: 1\n")
    monkeypatch.setattr(config_module, "config_folder", lambda: folder)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize("name", ["shapes_flow_grpo", "configs/shapes_flow_grpo.yaml"])
def test_a_packaged_name_is_found_from_any_folder_and_a_users_file_first(packaged: Path, name: str) -> None:
    assert resolve_config(name) == packaged / "shapes_flow_grpo.yaml"
    assert load_config(Job, name).seed == 1
    Path("shapes_flow_grpo.yaml").write_text("seed: 2\n")
    assert load_config(Job, "shapes_flow_grpo.yaml").seed == 2 and load_config(Job, "shapes_flow_grpo").seed == 1


def test_a_missing_file_names_the_nearest(packaged: Path) -> None:
    message = r"Configuration 'shapes_flow_gpro' does not exist. Did you mean 'shapes_flow_grpo'.* 2 names"
    with pytest.raises(ConfigError, match=message):
        resolve_config("shapes_flow_gpro")
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_config("elsewhere/shapes_flow_grpo.yaml")
    assert list_configs() == ["shapes_flow_grpo", "shapes_quickstart"]


def test_yaml_round_trip(write) -> None:
    job = Job(seed=5, note="x: y", second=Optimizer(), rewards={"clip": Term(weight=0.25, options={"a": "b"})})
    assert load_config(Job, write(config_to_yaml(job))) == job
    assert to_plain(job) == read_config(write(config_to_yaml(job)))
    assert to_plain(job)["rewards"]["clip"]["weight"] == 0.25


def test_flatten_and_the_allowed_keys_agree() -> None:
    flat = flatten(Job(second=Optimizer(scales={}), optimizer=Optimizer(scales={})))
    assert flat["optimizer.scales"] == {}
    assert flat["optimizer.learning_rate"] == 1e-4 and flat["rewards.shapes.weight"] == 1.0
    allowed = set(allowed_keys(Job))
    assert {key.replace(".shapes.", ".*.") for key in flat} <= allowed
    assert "rewards.*.weight" in allowed

# SPDX-License-Identifier: Apache-2.0
"""Commands on inputs that are broken, odd or hostile, drawn from seeds: none may end in a traceback or hang.

    python tests/benchmarks/processes/fuzz_commands.py [--seed 0] [--count 2000] [--only SEED ...]

Command `n` of seed `s` is drawn from the number s·1,000,000 + n alone, in a folder of its own: `--only` runs
single numbers again and prints what they said. Printed are the commands by exit code, and each that let an
exception out, ended with a code that is none of ours (0, 1, 2, 130), took longer than `--seconds`, or printed
JSON that is none.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from typer.testing import CliRunner

from visalign.data.shapes.prompts import heldout_prompts
from visalign.evaluation.probes.catalogue import PAIR_PROBES
from visalign.pipelines.cli.app import app

CODES = (0, 1, 2, 130)
TRAININGS = 0.2
"""Share of the commands of `train` that train; the others print the plan."""
ODD = (
    "", " ", "x", "\x1b[2J", "=1+1", "\u202e", "\udcff", "é" * 50, "x" * 5000, "[red]a[/red]", "{{ 7 }}",
    "<b>", "nan", "-1", "1e999", "0", "None", "null", "[]", "{}", "'", '"', "\\", "a\nb", "..", "/",
    "%s", "$HOME",
)  # fmt: skip
NUMBERS = ("0", "1", "2", "3", "100", "-1", "nan", "1e10", "x", "", "0.5", "99999999999999999999")
REWARDS = (
    "sharpness", "jpeg_size", "shapes_verifier", "no_such", "own.py:ok", "own.py:none", "own.py:wide",
    "own.py:", "own.py:text", "own.py:raises", "own.py:leaves", "own.py:short", "own.py:prints",
    "broken.py:f", "own.py:Judge", "no_file.py:f", "sharpness,jpeg_size", ":", "os:getcwd", "own.py:nan",
    "own.py:bool", "own.py:huge",
)  # fmt: skip
OWN = """
import sys
def ok(images, prompts, metadata): return [0.5 + i for i in range(len(images))]
def none(images, prompts, metadata): return [None] * len(images)
def nan(images, prompts, metadata): return [float("nan")] * len(images)
def huge(images, prompts, metadata): return [1e308 * (-1) ** i for i in range(len(images))]
def bool(images, prompts, metadata): return [True] * len(images)
def wide(images, prompts, metadata): return [[1.0, 2.0]] * len(images)
def text(images, prompts, metadata): return ["a"] * len(images)
def short(images, prompts, metadata): return [1.0]
def raises(images, prompts, metadata): raise KeyError("=x\\x1b[2J")
def leaves(images, prompts, metadata): sys.exit(0)
def prints(images, prompts, metadata):
    print("hello")
    return ok(images, prompts, metadata)
class Judge:
    name, unit = "mine", "u"
"""


@dataclass
class Case:
    """One command and what came of it."""

    number: int
    arguments: list[str]
    code: int | None = None
    said: str = ""
    fault: str | None = None


def images(r: random.Random) -> list[str]:
    """Files that are images, nearly images, or none."""
    modes = {"rgb.png": "RGB", "l.png": "L", "p.png": "P", "rgba.webp": "RGBA", "c.jpg": "CMYK"}
    for name, mode in modes.items():
        Image.new(mode, (r.choice((1, 2, 8, 33)), r.choice((1, 8, 33)))).save(name)
    Image.effect_noise((24, 24), 60).save("noise.png")
    whole = Path("noise.png").read_bytes()
    Path("cut.png").write_bytes(whole[: r.randrange(len(whole))])
    flipped = bytearray(whole)
    for _ in range(r.randrange(1, 6)):
        flipped[r.randrange(len(flipped))] ^= 1 << r.randrange(8)
    Path("flipped.png").write_bytes(flipped)
    Path("empty.png").touch()
    Path("words.png").write_text("no image")
    Path("=cmd.png").write_bytes(whole)
    Path("folder.png").mkdir()
    Path("deep/er").mkdir(parents=True)
    shutil.copy("noise.png", "deep/er/one.png")
    with suppress(OSError):
        Path("loop.png").symlink_to("loop.png")
        Path("dangling.png").symlink_to("nowhere")
    return [*sorted(os.listdir()), "missing.png", ".", "deep", "a" * 300 + ".png", "https://x.invalid/a.png"]


def value(r: random.Random) -> Any:
    """What a cell or a JSON value may hold."""
    odd: list[Any] = [None, True, 0, -1, 0.5, 1e308, 10**30, float("nan"), [], {}, ["a"], {"a": 1}, [[1]]]
    return r.choice([*odd, *ODD])


def row(r: random.Random, kind: str) -> dict[str, Any]:
    """A record of a table of pairs, images with scores, or images with prompts; some keys odd or gone."""
    image = ("noise.png", "rgb.png", "l.png", "cut.png", "missing.png", "deep/er/one.png")
    made: dict[str, Any] = {"prompt": r.choice(("a red circle", "two blue squares", "a cat"))}
    if kind == "pairs":
        made |= {"image_left": r.choice(image), "image_right": r.choice(image)}
        made |= {"label": r.choice((0, 1, 0.5, "left", "right", "tie")), "annotator": r.choice("abc")}
    else:
        made |= {"image": r.choice(image), "score": r.random(), "hp": r.random()}
    for _ in range(r.choice((*[0] * 30, 1, 2))):
        made[r.choice([*made, "extra"])] = value(r)
    if r.random() < 0.003:
        made.pop(r.choice([*made]))
    return made


def table(r: random.Random, kind: str) -> str:
    """A table in one of the formats, at times damaged."""
    rows = [row(r, kind) for _ in range(r.choice((0, 1, 2, 5, 30, 30, 40, 60)))]
    name = f"{kind}.{r.choice(('jsonl', 'json', 'csv', 'tsv', 'jsonl', 'csv', 'parquet', 'txt'))}"
    if name.endswith("json"):
        text = json.dumps(r.choice((rows, {"rows": rows}, rows[:1])))
    elif name.endswith(("csv", "tsv")):
        sign = "\t" if name.endswith("tsv") else r.choice((",", ",", ",", ";"))
        heads = list(dict.fromkeys(key for one in rows for key in one)) or ["prompt"]
        lines = [heads, *([one.get(key, "") for key in heads] for one in rows)]
        text = "\n".join(sign.join(str(cell).replace("\n", " ") for cell in line) for line in lines)
    else:
        text = "\n".join(json.dumps(one) for one in rows)
    raw = bytearray(text.encode("utf-8", "surrogatepass"))
    if name.endswith("parquet"):
        import pyarrow
        import pyarrow.parquet

        with suppress(
            pyarrow.ArrowException, UnicodeError, OverflowError
        ):  # columns of mixed kinds: the file is the text then
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), name)
            raw = bytearray(Path(name).read_bytes())
    if r.random() < 0.1 and raw:
        for _ in range(r.randrange(1, 9)):
            raw[r.randrange(len(raw))] = r.randrange(256)
    if r.random() < 0.05:
        raw = bytearray(r.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b"PAR1"))) + raw
    if r.random() < 0.05:
        raw = raw[: r.randrange(len(raw) + 1)]
    Path(name).write_bytes(raw)
    return name


def some(r: random.Random, *options: tuple[str, Callable[[], str]]) -> list[str]:
    """Some of the options, each with a value; a few twice."""
    chosen = [option for option in options if r.random() < 0.15]
    return [part for name, draw in chosen for part in ([name, draw()] if draw() != "-" else [name])]


def arguments(r: random.Random) -> list[str]:
    """A command line; the files that it names are made in the current folder."""
    found = images(r)
    Path("own.py").write_text(OWN)
    Path("broken.py").write_text(
        r.choice(("def f(:", "import sys\nsys.exit(3)", "import nothing_here", "1/0", "\x00"))
    )
    Path("file").write_text("x")
    outputs = ("new.json", "new.html", "new.csv", "new", "file", "file/x.html", "file/x.json", "a/b/c.json")
    outputs += (".", "", "/proc/x", "/proc/x.json", "/sys/x.html")

    def image() -> str:
        return r.choice(("noise.png", "rgb.png", "l.png", "deep")) if r.random() < 0.75 else r.choice(found)

    def judge() -> str:
        return r.choice((*REWARDS[:2], "own.py:ok")) if r.random() < 0.75 else r.choice(REWARDS)

    def output() -> str:
        return r.choice(outputs[:4]) if r.random() < 0.7 else r.choice(outputs)

    def odd() -> str:
        return r.choice(ODD)

    def number() -> str:
        return r.choice(("1", "2", "3")) if r.random() < 0.7 else r.choice(NUMBERS)

    def option() -> str:
        return r.choice(("sharpness.x=1", "quality=3", "jpeg_size.quality=300", "a.b.c", "=", *ODD))

    def flag() -> str:
        return "-"

    prompt = ("-p", lambda: r.choice(("a red circle", *ODD)))
    shared = (prompt, ("-o", output), ("--cache", output), ("--option", option), ("--batch-size", number))
    more = (("--limit", number), ("--seed", number), ("--resume", flag), ("--json", flag))
    command = r.choice(
        (
            "score", "score", "compare", "rank", "agree", "evaluate", "evaluate", "probe-reward", "train",
            "train-reward", "plan", "sample",
        )
    )  # fmt: skip
    if command == "score":
        what = [image() if r.random() < 0.7 else table(r, "images") for _ in range(r.choice((1, 1, 2, 4)))]
        form = ("-f", lambda: r.choice(("json", "jsonl", "csv", "table", "xml")))
        return [
            command, *what, "-r", judge(), *some(r, *shared, form, ("--page", output), ("--resume", flag)),
        ]  # fmt: skip
    if command in ("compare", "rank"):
        what = [image() for _ in range(r.choice((1, 2, 2, 3, 4)))]
        levels = (("--json", flag), ("--level", number))
        return [command, *what, "-r", judge(), "-p", "x", *some(r, *shared[:4], *levels)]
    if command == "agree":
        what = r.choice((lambda: ".", lambda: "deep", lambda: table(r, "images"), image))()
        return [command, what, "-r", judge(), "-r", judge(), "-p", "x", *some(r, *shared, *more, ("-s", odd))]
    if command == "evaluate":
        odds = r.choice((lambda: table(r, "images"), image, odd))
        what = table(r, "pairs") if r.random() < 0.6 else odds()
        kind = r.random() < 0.7
        asked = ["-r", judge()] if kind else r.choice((["-s", "hp"], ["-s", "score"], []))
        draws = ("--resamples", lambda: r.choice(("100", "100", "100", "1", "x")))
        rest = (draws, ("--bins", number), ("--max-failure-rate", number))
        rest = (*rest, ("--fuse", flag), ("--labels", odd))
        own = (("-o", output), ("--cache", output), ("--batch-size", number), ("--swap-sides", flag))
        return [command, what, *asked, *some(r, *own, *rest, *more[:3])]
    if command == "probe-reward":
        return [command, judge(), *_probing(r, image, odd, some(r, ("-o", output), ("--json", flag)))]
    if command == "train":
        return [command, *_training(r, some(r, ("-o", output), ("--resume", flag)))]
    if command == "train-reward":
        return [command, *_reward_training(r, some(r, ("-o", output), ("--resume", flag)))]
    if command == "plan":
        return [command, r.choice((*TRAINED, *PLANNED, odd())), *_changes(r), *some(r, ("--json", flag))]
    what = r.choice((["a red circle"], ["a red circle", odd()], [image()], [table(r, "images")], [odd()]))
    return [command, *what, "-o", output(), *_sampling(r, judge, odd, image)]


def _probing(r: random.Random, image: Callable[[], str], odd: Callable[[], str], more: list[str]) -> list[str]:
    """On what, which probes, how."""
    asked = [r.choice(PAIR_PROBES).name if r.random() < 0.9 else odd() for _ in range(r.choice((0, 1, 1, 1, 2)))]
    reference = r.choice(((), (image(),), (image(), image()), (table(r, "images"),)))
    count, batch = r.choice(("2", "3", "5", *NUMBERS[:6])), r.choice(("1", "2", "32", *NUMBERS))
    rest = [*("-p", r.choice(("a red circle", *ODD)))] if r.random() < 0.7 else []
    rest += ["--option", r.choice(("quality=3", "a.b.c", "=", *ODD))] if r.random() < 0.1 else []
    rest += ["--seed", r.choice(NUMBERS)] if r.random() < 0.2 else []
    rest += ["--batch-size", batch] if r.random() < 0.3 else []
    pairs = [("-i", image) for image in reference] + [("--only", name) for name in asked]
    given = [part for pair in pairs for part in pair]
    return [*given, "--count", count, *rest, *more]


def _sampling(
    r: random.Random, judge: Callable[[], str], odd: Callable[[], str], image: Callable[[], str]
) -> list[str]:
    """The options of `sample`: most of them fit, at most two of them are odd."""
    given = {"--steps": r.choice(("1", "2")), "--seeds": r.choice(("0", "0,1", "0-1", "3"))}
    drawn = {
        "-r": judge,
        "--best-of": lambda: r.choice(("2", "1", "0", "-1", "nan")),
        "--steer": lambda: r.choice(("0", "1", "0,1", *NUMBERS)),
        "--search": lambda: r.choice(("zero_order", "paths", odd())),
        "--search-option": lambda: r.choice(("rounds=1", "branches=2", "start=1", "radius=0", "=", odd())),
        "--strength": lambda: r.choice(("1", "10", *NUMBERS)),
        "--batch-size": lambda: r.choice(("1", "2", *NUMBERS)),
        "--dtype": lambda: r.choice(("float32", "bfloat16", "float16", odd())),
        "--option": lambda: r.choice(
            ("guidance=4.5", "guidance=0", "image_size=32", "image_size=9", "no=1", "=", odd())
        ),
    }
    given |= {name: draw() for name, draw in drawn.items() if r.random() < 0.2}
    broken = {
        "--model": lambda: r.choice((odd(), "shapes-clip", "tasks-qwen3", image())),
        "--seeds": lambda: r.choice((odd(), "0-x", "5-2", "0,0", "-1", "1e3")),
        "--steps": lambda: r.choice(NUMBERS[:7]),
        "--lora": image,
        "--device": lambda: r.choice((odd(), "cuda", "meta")),
    }
    for name in r.sample(sorted(broken), r.choice((0, 0, 1, 2))):
        given[name] = broken[name]()
    return [part for pair in given.items() for part in pair]


TRAINED = {
    "text_grpo": ("rollout.prompts_per_iteration=2", "rollout.group_size=2", "rollout.max_new_tokens=8"),
    "text_sft": ("data.batch=4",),
    "text_sample": ("data.tasks=[add]", "data.size=4", "rollout.samples=2", "rollout.max_new_tokens=8"),
    "shapes_hp": ("data.size=16", "data.heldout_size=8", "optimizer.updates_per_iteration=2"),
    "shapes_hpsv3": ("data.size=16", "data.heldout_size=8", "optimizer.updates_per_iteration=2"),
    "shapes_quickstart": (
        *("rollout.prompts_per_iteration=2", "rollout.group_size=3", "rollout.batch_size=6"),
        *("data.heldout=few.jsonl", "evaluation.seeds=[0]", "evaluation.steps=2"),
    ),
}
"""Configuration -> what makes a training of it small."""
CHANGES = (
    *("seed", "run.iterations", "optimizer.lr", "model.path", "data.train", "rollout.group_size"),
    *("objective.algorithm", "run.checkpoint_every", "optimizer.micro_batch", "optimizer.ema_decay"),
    *("evaluation.every", "evaluation.seeds", "run.device", "rollout.temperature", "run.threads"),
    *("optimizer.grad_clip", "data.size", "rollout.max_new_tokens", "model.lora", "run.max_seconds"),
)


PLANNED = (
    "sd35_flow_grpo", "qwen_image_flow_grpo", "wan_flow_grpo", "shapes_ddpo", "text_ppo", "own.py", "file",
)  # fmt: skip


def _changes(r: random.Random) -> list[str]:
    """Up to two settings that may be odd."""
    return [f"{r.choice((*CHANGES, 'no.such', ''))}={r.choice((*NUMBERS, *ODD))}" for _ in range(r.choice((0, 1, 2)))]


def _reward_training(r: random.Random, more: list[str]) -> list[str]:
    """A judge's training on a table of the user's, now and then for one iteration."""
    name = r.choice(("shapes_hp", "shapes_hpsv3", "shapes_ict", "shapes_visual_quality", "shapes_vision_reward"))
    given = [name, *_changes(r), "data.size=16", "data.heldout_size=8", "run.threads=1", "run.iterations=1"]
    given.append("optimizer.updates_per_iteration=1")
    for key in ("data.train", "data.heldout"):
        if r.random() < 0.6:
            given.append(f"{key}={table(r, r.choice(('pairs', 'pairs', 'images')))}")
    given += some(
        r,
        ("--map", lambda: r.choice(("mos=score", "label=winner", "x", "=", "a=b"))),
        ("--labels", lambda: r.choice(("share", "margin", "1=left,2=right,0=tie", "left", *ODD))),
    )
    return [*given, *more, *(["--dry-run"] if r.random() < 0.6 else [])]


def _training(r: random.Random, more: list[str]) -> list[str]:
    """A plan, or now and then one iteration of a small run, whose settings, rewards and data may be odd."""
    odds = _changes(r)
    if r.random() > TRAININGS:
        name = r.choice((*TRAINED, "text_sample", "no_such", "own.py", "file", table(r, "images")))
        return [name, *odds, *more, "--dry-run"]
    name = r.choice((*TRAINED,))
    Path("few.jsonl").write_text(json.dumps(heldout_prompts()[0]) + "\n", encoding="utf-8")
    small = [*TRAINED[name], "run.threads=1"]
    if name != "text_sample":
        small.append("run.iterations=1")
    if name in ("text_grpo", "text_sft"):
        small += ["data.tasks=[add]", "data.size=8", "data.heldout_per_task=2", "evaluation.seeds=[0]"]
    if name == "shapes_quickstart" and r.random() < 0.5:
        small.append(f"rewards.terms={{own: {{name: '{r.choice(REWARDS)}'}}}}")
    return [name, *odds[:1], *small, *more]


class TooLong(BaseException):
    """A command that did not end in time."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises `TooLong` in the block."""

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(number: int, seconds: int) -> Case:
    """Run command `number` in a folder of its own."""
    here, r, case = Path.cwd(), random.Random(number), Case(number=number, arguments=["none"])
    place = tempfile.mkdtemp(prefix="fuzz")
    try:
        os.chdir(place)
        case.arguments = arguments(r)
        with warnings.catch_warnings(), time_limit(seconds):
            warnings.simplefilter("ignore")
            result = CliRunner().invoke(app, case.arguments)
        case.code, case.said = result.exit_code, result.output
        error = result.exception
        if error is not None and not isinstance(error, SystemExit):
            case.fault = "".join(traceback.format_exception(error)[-4:])
        elif result.exit_code not in CODES:
            case.fault = f"it ended with {result.exit_code}"
        elif result.exit_code == 0 and {"--json", "json"} & {*case.arguments} and "-o" not in case.arguments:
            with suppress(json.JSONDecodeError):
                json.loads(result.stdout)
                return case
            case.fault = "what it printed is no JSON"
    except TooLong:
        case.fault = f"it took longer than {seconds} s"
    except (SystemExit, GeneratorExit) as error:  # what even the runner does not hold
        case.fault = f"it let {error!r} out"
    finally:
        os.chdir(here)
        shutil.rmtree(place, ignore_errors=True)
    return case


def main() -> int:
    """Run them; the number of faults, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--only", type=int, nargs="+")
    given = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    numbers = given.only or [given.seed * 1_000_000 + n for n in range(given.count)]
    codes: Counter[tuple[str, int | None]] = Counter()
    faults = 0
    for number in numbers:
        case = run(number, given.seconds)
        codes[case.arguments[0], case.code] += 1
        if case.fault is not None or given.only:
            faults += case.fault is not None
            print(f"{number}: {case.arguments!a} -> {case.code}: {case.fault or 'no fault'}", flush=True)
            if given.only:
                print(ascii(case.said)[:2000])
        if number % 50 == 0:
            gc.collect()
    for (command, code), count in sorted(codes.items(), key=str):
        print(f"{command}: {count} ended with {code}")
    print(f"{len(numbers)} commands, {faults} faults")
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())

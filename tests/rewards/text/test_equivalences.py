# SPDX-License-Identifier: Apache-2.0
"""Answers that are equal, and answers that only look so: a table made by hand."""

from __future__ import annotations

import os
import threading
import time

import pytest

from visalign.rewards.catalogue import load_text_reward
from visalign.rewards.text import symbolic, verifiable

PLAIN = [
    *[(r"\frac{1}{2}", "0.5"), ("1,000", "1000"), (r"10\%", "0.1"), ("60%", "60"), ("2^{10}", "1024"), ("−5", "-5")],
    *[(r"1\frac{3}{4}", "7/4"), ("x = 5", "5"), (r"\$18.90", "18.9"), (r"1.5\times 10^3", "1500")],
    *[("(1, 2)", r"\left(1,2\right)"), ("[0,1)", r"\left[0,1\right)"), (r"(-\infty, 3]", r"(-\infty,3]")],
    *[(r"\textbf{C}", "C"), (r"\text{No solution}", r"\text{no solution}"), (r"3\ 1/2", "7/2"), (r"1\ 000", "1000")],
    *[(r"5\ \text{cm}", "5~cm"), (r"18\text{ dollars}.", "18"), (r"5\,\mathrm{cm}^2", "5"), ("1\u202f234", "1234")],
    *[(r"5\text{ cups}", r"5\text{ cup}"), (r"5\text{ cm}^{2}", r"5\text{ cm}^2")],
    (r"\begin{pmatrix} 1 \\ 2 \\[4pt] x y \end{pmatrix}", r"\begin{pmatrix}1\\2\\x y\end{pmatrix}"),
]
"""Equal without math-verify."""
MATHS = [
    *[(r"90^\circ", "90"), ("90°", "90"), ("(x, y) = (1, 2)", "(1, 2)")],
    *[(r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), (r"\sqrt{8}", r"2\sqrt{2}")],
    *[(r"\frac{\pi}{2}", r"0.5\pi"), (r"\log_2 8", "3"), (r"\sin(\pi/6)", r"\frac12"), ("5!", "120")],
    *[(r"\binom{5}{2}", "10"), ("(x+1)^2", "x^2+2x+1"), (r"\frac{x^2-1}{x-1}", "x+1"), ("y=2x+1", "2x+1")],
    *[(r"\cos^2 x", r"1-\sin^2 x"), (r"\{1,2\}", r"\{2,1\}"), (r"x\in[0,1]", "[0,1]")],
    *[(r"(0,1)\cup(2,3)", r"(2,3)\cup(0,1)"), ("1, 2", "2, 1"), (r"\pm 2", "2,-2"), (r"\emptyset", r"\{\}")],
    *[(r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"), ("3+4i", "4i+3")],
    *[(r"\text{(A)}", "A"), ("x>2", "2<x"), (r"2\pi r", r"2r\pi")],
    *[(r"x=3\text{ or }x=-3", r"x=-3\text{ or }x=3"), (r"5\text{ m}", r"5\text{ meters}")],
    *[(r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"), ("101_2", "101_{2}"), ("x_2+x_1", "x_1+x_2")],
]
"""Equal where math-verify is installed."""
DIFFERENT = [
    *[(r"\frac{1}{2006!}", r"\frac{1}{2004!}"), (r"\frac{x}{40!}", r"\frac{3x}{40!}")],
    *[(r"(0,\frac{1}{40!})", r"(0,\frac{3}{40!})"), (r"2^{-100}\pi", r"2^{-101}\pi")],
    *[(r"\sqrt{10^{60}+1}", "10^{30}"), (r"5\text{ m}", r"5\text{ km}")],
    *[(r"5\text{ hours}", r"5\text{ minutes}"), ("0.333", r"\frac{1}{3}"), ("0.5%", "0.5"), ("[0,1)", "(0,1)")],
    *[("(1,2)", "(2,1)"), ("(1,2)", r"\{1,2\}"), ("x", "X"), (r"\{1,2\}", r"\{1,2,3\}"), ("1, 2", "1")],
    *[("12", "1,2"), ("(x+1)^2", "x^2+1"), (r"2\sqrt{3}", "3"), ("x>2", "x<2"), (r"x\ge2", "x>2")],
    *[("5 or 6", "6"), (r"\text{yes}", r"\text{no}"), ("12345678901234567890", "12345678901234567891")],
    *[("10^{20}+1", "10^{20}"), (r"\infty", r"-\infty"), (r"\pm 2", "2"), ("", "4"), ("x=1", "y=1")],
    *[("3+4i", "3-4i"), (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}2&1\end{pmatrix}")],
    *[("100 cm", "1"), ("1 2", "12"), ("1e999", "1e998"), (r"\sqrt{2}", "1.41421356237"), ("4, 5", "(4,5)")],
    *[(r"3\ 4", "34"), ("3~4", "34"), (r"\leftarrow", r"\rightarrow"), ("4", "4t"), (r"(\pi,3)", r"[\pi,3]")],
    *[("2516_9", "2516_8"), ("101_{2}", "101_3"), ("11_2", "11_{10}"), ("1A_{16}", r"1A_{12}")],
    *[(r"10\text{ million}", "10"), (r"2\mathrm{e}", "2"), (r"5\text{ cm}^2", r"5\text{ cm}"), ("1, 1", "1")],
    *[
        (r"5\text{ or 6}", "5"),
        (r"5\text{ tenths}", "5"),
        (r"5\text{ ms}", r"5\text{ m}"),
        ("5%", r"\$5"),
        ("ab", "AB"),
    ],
    *[(r"5\text{ miles}", r"5\text{ minutes}"), ("1, 1, 2", "1, 2, 2")],
]


def right(answer: str, truth: str) -> bool:
    reward = load_text_reward("boxed_answer")
    scores = reward.score([rf"so \boxed{{{answer}}}"], ["?"], [{"answer": truth}])
    assert scores.valid.all(), scores.reason
    return bool(scores.value.item())


@pytest.fixture
def uninstalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiable, "is_installed", lambda: False)


@pytest.fixture
def installed() -> None:
    pytest.importorskip("math_verify")


@pytest.mark.parametrize("pair", [*PLAIN, *DIFFERENT])
def test_equal_or_different_by_our_own_reading(pair: tuple[str, str], uninstalled: None) -> None:
    assert right(*pair) == (pair in PLAIN)
    assert pair in DIFFERENT or right(*pair[::-1])


@pytest.mark.parametrize("pair", [*PLAIN, *MATHS, *DIFFERENT])
def test_equal_or_different_as_mathematics(pair: tuple[str, str], installed: None) -> None:
    assert right(*pair) == (pair not in DIFFERENT)


def test_a_comparison_that_never_ends_is_ended(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert right("x+1", "1+x")
    monkeypatch.setattr(symbolic, "SECONDS", 1.0)
    begun = time.monotonic()
    assert not right(r"\int_0^1 x^{x^x}dx+y", r"y+\int_0^1 x^{x^{x+1}}dx")
    assert time.monotonic() - begun < 30
    monkeypatch.undo()
    assert right("x+2", "2+x")


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}", "2^2^2^2", "((9!)!)!", "100000!", "2^{99999999}", r"\binom{100000}{50000}", "(x+y+z)^{999}",
        "1+" * 80 + "1", "(" * 20 + "1" + ")" * 20, r"\sqrt{" * 20 + "2" + "}" * 20, "the quick brown fox " * 6,
        "score",
    ],
)  # fmt: skip
def test_what_sympy_reads_slowly_is_kept_from_it(
    answer: str, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symbolic, "_worker", None)
    assert not right(answer, "4")


def test_comparisons_in_threads_and_after_the_process_was_killed(installed: None) -> None:
    result: list[bool] = []
    threads = [threading.Thread(target=lambda: result.append(right("a+b", "b+a"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert result == [True] * 4
    process = symbolic._worker(os.getpid())._process
    assert process is not None
    process.kill()
    process.wait()
    assert right("a+c", "c+a") and not right("a+c", "c-a")


@pytest.mark.parametrize(
    "text",
    ["(" * 900, r"\frac" * 150, "\x00", "$", "$$1$$ $2$", r"\boxed{}", "__import__('os').system('ls')", "{" * 99],
)
def test_what_is_no_mathematics_is_never_an_error(text: str, installed: None) -> None:
    assert not symbolic.symbolically_equal(text, "1")
    assert right("a+c", "c+a")

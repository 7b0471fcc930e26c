# SPDX-License-Identifier: Apache-2.0
"""Time and work memory of log-probs from hidden states, forward and backward, ours against others.

    OMP_NUM_THREADS=1 python tests/benchmarks/text/fused_head.py

    python -m pip install --no-deps --target PEERS "trl==1.16.*" "liger-kernel==0.8.5"
    PYTHONPATH=PEERS OMP_NUM_THREADS=1 python tests/benchmarks/text/fused_head.py

Each variant runs in a process of its own, in turns; medians are printed. Work memory is the peak (VmHWM) above what
was there before and above the gradients that every variant returns. The loss is the policy gradient −Σ_n A_n r_n / N
at ratio r = 1 over N = 4·T tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import argument_parser, ask_child, process_memory
from visalign.core.tokens.fused_head import fused_log_prob_entropy

INSTALL = 'pip install "trl==1.16.*" "liger-kernel==0.8.5"'
SEQUENCES = 4
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def surrogate(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """Policy gradient at ratio 1: −Σ A r / N."""
    return -((log_prob - log_prob.detach()).exp() * advantage).sum() / advantage.numel()


def naive(hidden: Tensor, head: Tensor, target: Tensor, advantage: Tensor) -> Tensor:
    """log_softmax of all logits, gathered."""
    log_p = (hidden @ head.T).float().log_softmax(-1)
    return surrogate(log_p.gather(1, target[:, None])[:, 0], advantage)


def naive_entropy(hidden: Tensor, head: Tensor, target: Tensor, advantage: Tensor) -> Tensor:
    """The same, and the entropy as a number to log."""
    log_p = (hidden @ head.T).float().log_softmax(-1)
    with torch.no_grad():
        (log_p.exp() * log_p).sum(-1).neg()
    return surrogate(log_p.gather(1, target[:, None])[:, 0], advantage)


def ours(hidden: Tensor, head: Tensor, target: Tensor, advantage: Tensor) -> Tensor:
    """`fused_log_prob_entropy`."""
    return surrogate(fused_log_prob_entropy(hidden, head, target).log_prob, advantage)


def load_trl() -> Loss:
    from trl.kernels import ChunkedLogProbFunction  # pyright: ignore[reportMissingImports]
    from trl.trainer import utils  # pyright: ignore[reportMissingImports]

    chunk = utils._CHUNKED_LOGPROB_CHUNK_SIZE

    def trl(hidden: Tensor, head: Tensor, target: Tensor, advantage: Tensor) -> Tensor:
        outputs = ChunkedLogProbFunction.apply(hidden, head, None, target, 1.0, chunk, None, 1.0, ("entropy",))
        return surrogate(outputs[0], advantage)

    return trl


def load_liger() -> Loss:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # pyright: ignore[reportMissingImports]

    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="dapo")

    def liger(hidden: Tensor, head: Tensor, target: Tensor, advantage: Tensor) -> Tensor:
        rows = (SEQUENCES, -1)
        per_sequence = advantage.view(rows)[:, 0]
        mask = torch.ones_like(target).view(rows).float()
        states = hidden.view(*rows, hidden.shape[1])
        return loss(states, head, target.view(rows), mask, per_sequence)[0]

    return liger


VARIANTS: dict[str, tuple[str, Callable[[], Loss]]] = {
    "naive": ("log_softmax + gather", lambda: naive),
    "naive_entropy": ("log_softmax + gather, entropy value", lambda: naive_entropy),
    "ours": ("visalign (entropy included)", lambda: ours),
    "ours_sparse": ("visalign, 80 % of rows without gradient", lambda: ours),
    "trl": ("TRL ChunkedLogProbFunction (entropy included)", load_trl),
    "liger": ("Liger LigerFusedLinearGRPOLoss (no entropy)", load_liger),
}


def problem(options: argparse.Namespace, vocab: int, tokens: int, sparse: bool) -> tuple[Tensor, ...]:
    """Hidden states, head, ids, advantages; logits of standard deviation about 2."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, options.dtype)
    hidden = torch.randn(tokens, options.hidden, generator=generator)
    head = torch.randn(vocab, options.hidden, generator=generator).mul_(2 * options.hidden**-0.5)
    target = torch.randint(vocab, (tokens,), generator=generator)
    advantage = torch.linspace(-1, 1, SEQUENCES).repeat_interleave(tokens // SEQUENCES)
    if sparse:
        advantage = advantage * (torch.arange(tokens) % 5 == 0)
    hidden, head = (x.to(dtype).requires_grad_() for x in (hidden, head))
    return hidden, head, target, advantage


def child(options: argparse.Namespace) -> None:
    """Serve rounds: a line in, the measurement of one forward and backward pass out."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    try:
        loss = VARIANTS[options.child][1]()
    except ImportError as error:
        print(json.dumps({"error": f"{error}; to install: {INSTALL}"}), flush=True)
        return
    sparse = options.child == "ours_sparse"
    loss(*problem(options, 100, 4 * SEQUENCES, sparse)).backward()  # what is loaded once is no work memory
    data = problem(options, options.vocab[0], options.tokens, sparse)
    leaves = [x for x in data if x.requires_grad]
    gradients = sum(x.numel() * x.element_size() for x in leaves)
    before = process_memory("VmRSS")
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        begun = (time.perf_counter(), time.process_time())
        loss(*data).backward()
        ended = (time.perf_counter(), time.process_time())
        work = process_memory("VmHWM") - before - gradients
        for leaf in leaves:
            leaf.grad = None
        print(json.dumps({"wall": ended[0] - begun[0], "cpu": ended[1] - begun[1], "work": work}), flush=True)


def start(options: argparse.Namespace, variant: str, vocab: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", variant, "--vocab", str(vocab)]
    for name in ("tokens", "hidden", "threads", "dtype"):
        command += [f"--{name}", str(getattr(options, name))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def measure(options: argparse.Namespace, vocab: int) -> dict[str, dict[str, float]]:
    """Per variant the medians of time and the largest work memory."""
    running: dict[str, subprocess.Popen[str]] = {}
    for variant in options.variants:
        process = start(options, variant, vocab)
        answer = ask_child(process, go=False)
        if "error" in answer:
            print(f"left out: {VARIANTS[variant][0]}: {answer['error']}")
        else:
            running[variant] = process
    rounds: dict[str, list[dict[str, float]]] = {variant: [] for variant in running}
    for _ in range(options.repeats):
        for variant, process in running.items():
            rounds[variant].append(ask_child(process, go=True))
            print(f"{variant}: {rounds[variant][-1]}", file=sys.stderr)
    for process in running.values():
        process.communicate()
    return {
        variant: {
            "wall": statistics.median(r["wall"] for r in rows),
            "cpu": statistics.median(r["cpu"] for r in rows),
            "work": max(r["work"] for r in rows),
        }
        for variant, rows in rounds.items()
    }


def show(options: argparse.Namespace, vocab: int, rows: dict[str, dict[str, float]]) -> None:
    base = rows.get("naive")
    print(
        f"\nN = {options.tokens}, H = {options.hidden}, V = {vocab}, {options.dtype}, "
        f"{options.threads} thread(s), torch {torch.__version__}, median of {options.repeats}"
    )
    print(f"{'':48}{'work MB':>9}{'naive /':>9}{'wall s':>9}{'/ naive':>9}{'cpu s':>9}{'/ naive':>9}")
    for variant, row in rows.items():
        memory_ratio, wall_ratio, cpu_ratio = (
            ("", "", "")
            if base is None
            else (f"{base['work'] / row['work']:.1f}", *(f"{row[k] / base[k]:.2f}" for k in ("wall", "cpu")))
        )
        print(
            f"{VARIANTS[variant][0]:48}{row['work'] / 1e6:9.0f}{memory_ratio:>9}{row['wall']:9.3f}"
            f"{wall_ratio:>9}{row['cpu']:9.3f}{cpu_ratio:>9}"
        )
    if {"ours", "ours_sparse"} <= set(rows):
        wall, cpu = (rows["ours_sparse"][key] / rows["ours"][key] for key in ("wall", "cpu"))
        print(f"80 % of rows without gradient: {wall:.2f} of the full wall time, {cpu:.2f} of its cpu time")


def show_error(options: argparse.Namespace, vocab: int) -> None:
    """Relative to the largest element, against float64 on the same operands, of the first 128 rows."""
    for dtype in ("float32", "bfloat16"):
        options.dtype = dtype
        hidden, head, target, _ = problem(options, vocab, 128, False)
        exact = [x.detach().double().requires_grad_() for x in (hidden, head)]
        log_p = (exact[0] @ exact[1].T).log_softmax(-1)
        theirs = [log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)]
        fused = fused_log_prob_entropy(hidden, head, target)
        mine = [fused.log_prob, fused.entropy]
        mine += torch.autograd.grad(fused.log_prob.sum() + fused.entropy.sum(), (hidden, head))
        theirs += torch.autograd.grad(theirs[0].sum() + theirs[1].sum(), exact)
        print(f"\nagainst float64, {dtype} operands, V = {vocab}:")
        for name, a, b in zip(("log-prob", "entropy", "∂ hidden", "∂ head"), mine, theirs, strict=True):
            worst = (a.double() - b).abs().max()
            print(f"  {name:10} absolute {worst:.1e}   relative {worst / b.abs().max():.1e}")


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32768, 131072], help="vocabulary sizes V")
    parser.add_argument("--tokens", type=int, default=2048, help=f"N, a multiple of {SEQUENCES}")
    parser.add_argument("--hidden", type=int, default=512, help="H")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--child", choices=list(VARIANTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    for vocab in options.vocab:
        show(options, vocab, measure(options, vocab))
    show_error(options, options.vocab[0])


if __name__ == "__main__":
    main()

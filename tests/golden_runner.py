# SPDX-License-Identifier: Apache-2.0
"""Run frozen golden numbers through visalign's public functions: `python tests/golden_runner.py DIR`.

Plug-in contract: each `tests/golden_families/<file>.py` is loaded by its path and imports nothing from here. It has

    FAMILIES = {"E_sde_steps": sde_steps, ...}       # family name of the JSON file -> function
    TOLERANCES = {"E_sde_steps": tolerance, ...}     # optional

* `sde_steps(case) -> dict[str, Any] | None`: our outputs (tensors, numbers, lists, flat or nested lists of them)
  under the names of the case's expected outputs; `None` when the family does not know this variant or when an input or
  a parameter value is outside what we offer (it is then listed as unknown, which is no failure).
  Names beyond the expected ones are ignored; expected ones left out are reported as "not compared".
  An exception makes the case FAIL with its message: return None for what is not ours, never guess.
  Gradients (`grad_<input>`) are returned like any other output: make the leaf with `case.tensor(name).requires_grad_()`.
* `tolerance(case, key) -> tuple[float, float, str] | None`: (rtol, atol, of) for the output `key`; `of` is "element"
  (|ours - theirs| <= atol + rtol |theirs|) or "largest" (<= atol + rtol max|theirs|). None or no entry: (1e-6, 1e-8,
  "element").
* Several files may name one family: they are asked in the order of their file names until one knows the case.

What a `case` offers (read it, change nothing):
    case.family, case.name      "E_sde_steps", "flow_sde_i0_s0"
    case.variant                the name without its `_s<seed>` ending: "flow_sde_i0"
    case.params                 dict, as in the file
    case.inputs                 dict of plain Python values ("NaN" and "Infinity" already floats), numpy arrays from .npz
    case.expected               dict: `outputs_paper` if there, else `outputs`, else empty
    case.record                 the whole JSON record (`outputs_peer`, `notes`, ...)
    case.tensor(name, dtype=torch.float64)   the input `name` as a fresh tensor
"""

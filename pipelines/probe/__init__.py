# SPDX-License-Identifier: Apache-2.0
"""`visalign probe-reward`: irrelevant changes that shift a reward's scores; `evaluation.probes` has the changes."""
